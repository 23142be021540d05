"""Named machines, from public figures. A measurement of your own machine is always better.

| preset   | compute, memory                                  | inside a host            | between hosts         |
|----------|--------------------------------------------------|--------------------------|-----------------------|
| dgx-v100 | NVIDIA V100 data sheet: 125 TF f16, 15.7 TF f32,  | NVLink 2: 150 GB/s a way | 4 x 100 Gbit/s a host |
|          | 900 GB/s, 32 GB                                  |                          |                       |
| dgx-a100 | A100 data sheet: 312 TF bf16, 19.5 TF f32 (156    | NVLink 3: 300 GB/s a way | 8 x 200 Gbit/s a host |
|          | TF32), 2039 GB/s, 80 GB                          |                          |                       |
| dgx-h100 | H100 SXM data sheet: 989 TF bf16, 67 TF f32,      | NVLink 4: 450 GB/s a way | 8 x 400 Gbit/s a host |
|          | 3350 GB/s, 80 GB                                 |                          |                       |
| cpu      | one host, gloo over loopback, one thread a rank; measured on two shared cores                             |

Peaks are not reached: a matmul gets about 70 % of the data sheet, a link about 80 %.
"""

from __future__ import annotations

from distpar.cost.cluster import Cluster, Points, Speed, parse_name
from distpar.errors import UsageError

_MATMUL_SHARE = 0.7
_LINK_SHARE = 0.8
_GPU_FLOOR = 4e-6
"""Launch of one small kernel."""
_INTRA_START, _INTER_START = 12e-6, 25e-6
"""A tiny NCCL collective on 8 GPUs of one host, and across hosts (nccl-tests' published runs)."""
_GPU_MEMORY_SHARE = 0.92
"""What is left of a GPU's memory beside context and communicators."""

_GPUS = {
    #            f16/bf16  f32      bytes/s  memory     intra    inter (each way, a GPU)
    "dgx-v100": (125e12, 15.7e12, 900e9, 32 * 2**30, 150e9, 6.25e9),
    "dgx-a100": (312e12, 19.5e12, 2039e9, 80 * 2**30, 300e9, 25e9),
    "dgx-h100": (989e12, 67e12, 3350e9, 80 * 2**30, 450e9, 50e9),
}


def preset(name: str) -> Cluster:
    """The cluster of this name.

    Raises:
        UsageError: there is no such preset.
    """
    base, hosts = parse_name(name)
    if base == "cpu" and hosts == 1:
        return _cpu()
    if base not in _GPUS or hosts < 1:
        raise UsageError(
            f"there is no cluster preset {name!r}",
            why=f"presets are cpu, {', '.join(_GPUS)}, and the latter with xN for N hosts",
            fix="name one of these, give a file, or run `distpar measure -o cluster.json`",
        )
    half, single, bandwidth, memory, intra, inter = _GPUS[base]
    speeds = tuple(
        Speed("matmul", dtype, _MATMUL_SHARE * peak)
        for dtype, peak in (("f16", half), ("bf16", half), ("f32", single), ("f64", single / 2))
    )
    network = tuple(
        _line(kind, link, size, start, rate)
        for kind in ("all_reduce", "all_gather", "all_to_all")
        for link, start, rate in (("intra", _INTRA_START, intra), ("inter", _INTER_START, inter))
        for size in (2, 8)
    )
    usable = int(memory * _GPU_MEMORY_SHARE)
    return Cluster(name, 8, usable, 0.8 * bandwidth, _GPU_FLOOR, speeds, network)


def _line(kind: str, link: str, num_ranks: int, start: float, rate: float) -> Points:
    large = 1e9
    return Points(kind, link, num_ranks, (0.0, large), (start, start + large / (rate * _LINK_SHARE)))


def _cpu() -> Cluster:
    speeds = (
        Speed("matmul", "f32", 60e9),
        Speed("matmul", "f64", 30e9),
        Speed("matmul", "bf16", 30e9),
        Speed("convolution", "f32", 40e9),
        Speed("convolution", "f64", 15e9),
        Speed("attention", "f32", 30e9),
        Speed("attention", "f64", 15e9),
    )
    network = (
        # seconds of a tiny call, and bytes sent a second, by ranks that share two cores
        *_measured("all_reduce", {2: (3e-4, 1.0e9), 4: (1.5e-3, 0.65e9)}),
        *_measured("all_gather", {2: (3e-4, 0.6e9), 4: (1.5e-3, 0.35e9)}),
        *_measured("all_to_all", {2: (3e-4, 0.65e9), 4: (1.5e-3, 0.55e9)}),
    )
    return Cluster("cpu", 64, 8 * 2**30, 6e9, 5e-6, speeds, network)


def _measured(kind: str, figures: dict[int, tuple[float, float]]) -> tuple[Points, ...]:
    large = 64e6
    return tuple(
        Points(kind, "intra", size, (0.0, large), (start, start + large / rate))
        for size, (start, rate) in figures.items()
    )
