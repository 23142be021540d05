"""The search as a plain labelling problem: no ops, no tensors, no torch.

Choose one strategy for each node so that the sum of node costs and fan costs is least and, at every
time, the memory in use stays within the limit. A *fan* is one value that several nodes read: the
producer's strategy makes it in some *source* state, each consumer's strategy wants it in some *target*
state, and each target that anybody wants is converted once:

    cost = sum over distinct wanted targets t of  fan.costs[source, t]

An edge of pairwise costs is a fan with one consumer. Costs are floats in seconds (weighted by beta);
`inf` forbids. Memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """One node: a cost and the bytes in use for each strategy, over the times [start, stop)."""

    costs: Floats
    memory: Ints
    start: int = 0
    stop: int = 0
    name: str = ""

    @property
    def num_strategies(self) -> int:
        return len(self.costs)


@dataclass(frozen=True, eq=False, slots=True)
class Consumer:
    """A reader of a fan: the target state that each of the node's strategies wants."""

    node: int
    targets: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Fan:
    """One value and its readers.

    `costs[source, target]` and `memory[source, target]`: seconds, and bytes of the converted copy, which lives
    over [start, stop). A fan whose consumer is its own producer is allowed (a folded loop).
    `weight` counts how many equal fans of the unfolded graph this one stands for (already in `costs`).
    """

    producer: int
    sources: Ints
    consumers: tuple[Consumer, ...]
    costs: Floats
    memory: Ints | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """Nodes, fans and a memory limit in bytes (None: no limit). `fixed_memory[t]` is in use whatever is chosen."""

    choices: tuple[Choice, ...]
    fans: tuple[Fan, ...]
    memory_limit: int | None = None
    fixed_memory: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A strategy for each node, its cost by the problem's own count, and a proved lower bound of the optimum.

    `status`: "optimal" (bound == cost within tolerance), "feasible", or "infeasible" (then `strategies` is
    empty and `smallest_memory` says what limit would do, when known), or "none in time" (no assignment was found,
    though there may be some).
    """

    strategies: tuple[int, ...]
    cost: float
    bound: float
    status: str
    smallest_memory: int | None = None


Solver = Callable[[Problem], Assignment]
Progress = Callable[[str, float, float], Any]
"""Called with (phase, best cost, bound)."""


def cost_of(problem: Problem, strategies: tuple[int, ...]) -> float:
    """Total cost of an assignment: the one definition that every solver is compared with."""
    total = sum(float(choice.costs[strategy]) for choice, strategy in zip(problem.choices, strategies, strict=True))
    for fan in problem.fans:
        source = fan.sources[strategies[fan.producer]]
        wanted = {int(reader.targets[strategies[reader.node]]) for reader in fan.consumers}
        total += sum(float(fan.costs[source, target]) for target in sorted(wanted))
    return total


def peak_memory(problem: Problem, strategies: tuple[int, ...]) -> int:
    """The most bytes in use at any time under an assignment."""
    return max((used for _, used in memory_profile(problem, strategies)), default=problem.fixed_memory)


def memory_profile(problem: Problem, strategies: tuple[int, ...]) -> list[tuple[int, int]]:
    """(time, bytes in use from then on) at every time at which the bytes change."""
    changes: dict[int, int] = {}

    def occupy(start: int, stop: int, num_bytes: int) -> None:
        if num_bytes and stop > start:
            changes[start] = changes.get(start, 0) + num_bytes
            changes[stop] = changes.get(stop, 0) - num_bytes

    for choice, strategy in zip(problem.choices, strategies, strict=True):
        occupy(choice.start, choice.stop, int(choice.memory[strategy]))
    for fan in problem.fans:
        if fan.memory is None:
            continue
        source = fan.sources[strategies[fan.producer]]
        wanted = {int(reader.targets[strategies[reader.node]]) for reader in fan.consumers}
        occupy(fan.start, fan.stop, sum(int(fan.memory[source, target]) for target in wanted))
    used, profile = problem.fixed_memory, []
    for time in sorted(changes):
        used += changes[time]
        profile.append((time, used))
    return profile
