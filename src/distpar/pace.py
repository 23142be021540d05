"""Measured, not predicted: the seconds of steps in turns, and the bytes that collectives send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends in functional collectives, by kind.

    The algorithms' nominal volumes, n ranks: all-reduce 2 (n-1)/n of the tensor, all-gather (n-1) blocks,
    reduce-scatter (n-1)/n of the tensor, all-to-all what goes to other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional":
            self._count(func._schema.name.split("::")[1].removesuffix("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: tuple[Any, ...]) -> None:
        if kind == "wait_tensor":
            return
        tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        n, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        match kind:
            case "all_reduce" | "all_reduce_coalesced":
                sent = 2 * (n - 1) * num_bytes // n
            case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
                sent = (n - 1) * num_bytes
            case "reduce_scatter_tensor" | "reduce_scatter_tensor_coalesced":
                sent = (n - 1) * num_bytes // n
            case "all_to_all_single":
                rows = sum(args[2])
                sent = num_bytes * (rows - args[2][rank]) // rows if rows else 0
            case _:
                raise AssertionError(f"bug: no volume for {kind}")
        self.by_kind[kind] = self.by_kind.get(kind, 0) + sent


@dataclass(frozen=True)
class Pace:
    """Samples a second of one contender, a number for each round."""

    name: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def __str__(self) -> str:
        low, high = min(self.rounds), max(self.rounds)
        return f"{self.name:<10} {self.median:8.1f} samples/s  (of {len(self.rounds)} rounds: {low:.1f} to {high:.1f})"


def in_turns(contenders: dict[str, Callable[[], Any]], size: int, rounds: int, steps: int) -> list[Pace]:
    """Every contender `steps` steps, then again, `rounds` times; the order turns around each time."""
    paces: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                contenders[name]()
            torch.distributed.barrier()
            paces[name].append(size * steps / (time.perf_counter() - start))
    return [Pace(name, tuple(values)) for name, values in paces.items()]


def ratio(first: Pace, second: Pace) -> str:
    """The median of the rounds' ratios, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(first.rounds, second.rounds, strict=True)]
    return f"{statistics.median(ratios):.2f}x {second.name} (rounds: {min(ratios):.2f} to {max(ratios):.2f})"
