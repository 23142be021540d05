"""From the user's function to a graph: what comes in is PyTorch, what goes out is plain values."""

from distpar.capture.captured import Captured, capture, signature_key
from distpar.capture.interpret import interpret

__all__ = ["Captured", "capture", "interpret", "signature_key"]
