"""This machine, measured: what a cluster file holds, by local ranks that all work at the same time.

    compute    flops a second by family and dtype, memory bandwidth, the floor of a tiny op
    network    seconds of each collective at sizes from nothing to 32 MiB, by group size, all groups at once
    memory     what the machine has left, shared by the ranks

Every figure is the median over repetitions; the ranks share the machine while they measure, as they will
while they train.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from distpar.cost.cluster import KINDS, Cluster, Points, Speed
from distpar.errors import UsageError
from distpar.launch import run_ranks

SIZES = (0, 2**14, 2**17, 2**20, 2**23, 2**25)
"""Bytes that a rank sends."""
_SECONDS = 0.25
"""How long one figure may take, beside the first three repetitions."""


def measure(num_ranks: int = 2, *, timeout: float = 300.0) -> Cluster:
    """This machine's cluster, from `num_ranks` local ranks; they take well under a minute.

    Raises:
        UsageError: fewer than two ranks, which have no links to measure.
        RankFailed: a rank died, or the time is over.
    """
    if num_ranks < 2:
        raise UsageError(
            f"cannot measure with {num_ranks} ranks",
            why="a link needs two ranks or more",
            fix="measure with as many ranks as will train on this machine: --ranks 2",
        )
    found = run_ranks(_rank, num_ranks, (num_ranks,), timeout=timeout)
    speeds, bandwidth, floor, network, memory = zip(*found, strict=True)
    return Cluster(
        name="measured",
        ranks_per_host=num_ranks,
        memory=min(memory) // num_ranks,
        bandwidth=min(bandwidth),
        floor=max(floor),
        # The slowest rank decides: the others wait for it.
        speeds=tuple(Speed(family, dtype, min(r[family, dtype] for r in speeds)) for family, dtype in speeds[0]),
        network=tuple(
            Points(kind, "intra", size, tuple(map(float, SIZES)), _rising([rank[kind, size] for rank in network]))
            for kind, size in network[0]
        ),
    )


def _rising(ranks: list[list[float]]) -> tuple[float, ...]:
    """The slowest rank's seconds; more bytes never take less."""
    seconds, highest = [], 0.0
    for column in zip(*ranks, strict=True):
        highest = max(highest, *column)
        seconds.append(highest)
    return tuple(seconds)


def _rank(num_ranks: int) -> tuple[Any, ...]:
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        memory = _free_memory()
        dist.barrier()
        return _speeds(), _bandwidth(), _floor(), _network(num_ranks), memory
    finally:
        dist.destroy_process_group()


def seconds(work: Callable[[], Any], repeat: Callable[[float], int]) -> float:
    """Median seconds of `work()` over what `repeat` makes of the first three runs."""
    times = [_once(work) for _ in range(3)]
    times += [_once(work) for _ in range(repeat(min(times)))]
    return statistics.median(times)


def _once(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _alone(first: float) -> int:
    return max(2, min(200, int(_SECONDS / max(first, 1e-6))))


def _speeds() -> dict[tuple[str, str], float]:
    """Operations a second by (family, dtype), at sizes that keep one core busy for milliseconds."""
    import torch

    found = {}
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        for name, dtype in (("f32", torch.float32), ("f64", torch.float64), ("bf16", torch.bfloat16)):
            a, b = torch.randn(384, 512).to(dtype), torch.randn(512, 384).to(dtype)
            found["matmul", name] = 2 * 384 * 512 * 384 / seconds(lambda a=a, b=b: a @ b, _alone)  # type: ignore[misc]
        for name, dtype in (("f32", torch.float32), ("f64", torch.float64)):
            image, weight = torch.randn(8, 32, 16, 16).to(dtype), torch.randn(32, 32, 3, 3).to(dtype)
            work = 2 * 8 * 32 * 16 * 16 * 32 * 9
            found["convolution", name] = work / seconds(
                lambda i=image, w=weight: torch.conv2d(i, w, padding=1),  # type: ignore[misc]
                _alone,
            )
            q = torch.randn(2, 4, 128, 64).to(dtype)
            found["attention", name] = 4 * 2 * 4 * 128 * 128 * 64 / seconds(
                lambda q=q: attend(q, q, q),  # type: ignore[misc]
                _alone,
            )
    return found


def _bandwidth() -> float:
    """Bytes read and written a second by an addition that no cache holds, into new memory as ops do."""
    import torch

    a = torch.ones(2**22)
    return 3 * a.nbytes / seconds(lambda: a + a, _alone)


def _floor() -> float:
    """Seconds of one op on eight numbers."""
    import torch

    a, add = torch.ones(8), torch.ops.aten.add.Tensor

    def many() -> None:
        for _ in range(500):
            add(a, a)

    return seconds(many, _alone) / 500


def _network(num_ranks: int) -> dict[tuple[str, int], list[float]]:
    """(kind, group size) -> seconds at each of SIZES. Groups of one size are consecutive ranks and run at once."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), {}
    for size in [n for n in (2, 4, 8, 16, 32, 64) if n < num_ranks and num_ranks % n == 0] + [num_ranks]:
        group = dist.group.WORLD
        if size < num_ranks:
            starts = range(0, num_ranks, size)
            groups = [dist.new_group(list(range(first, first + size))) for first in starts]
            group = groups[rank // size]
        assert group is not None, "bug: the default group exists"
        for kind in KINDS:
            found[kind, size] = [_collective(kind, sent, size, group.group_name) for sent in SIZES]
    return found


def _collective(kind: str, sent: int, size: int, group: str) -> float:
    """Seconds of the call that the runtime makes, when each rank sends so many bytes."""
    import torch
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    match kind:
        case "all_reduce":
            # Both halves of an all-reduce send (n-1)/n of the tensor.
            value = torch.ones(max(1, sent // 4 * size // (2 * (size - 1))))
            call = lambda: ops.all_reduce(value, "sum", group)  # noqa: E731
        case "all_gather":
            value = torch.ones(max(1, sent // 4 // (size - 1)))
            call = lambda: ops.all_gather_into_tensor(value, size, group)  # noqa: E731
        case _:
            each = max(1, sent // 4 // (size - 1))
            value = torch.ones(each * size)
            call = lambda: ops.all_to_all_single(value, [each] * size, [each] * size, group)  # noqa: E731

    def together(first: float) -> int:
        # Ranks have to make the same number of calls.
        count = torch.tensor(_alone(first))
        dist.all_reduce(count, dist.ReduceOp.MIN)
        return int(count)

    dist.barrier()
    return seconds(lambda: ops.wait_tensor(call()), together)


def _free_memory() -> int:
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
