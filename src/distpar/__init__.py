"""DistPar: a training step written for one device, run on many, partitioned in the fastest way."""

__version__ = "0.1.0"
