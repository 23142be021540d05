"""Repeated layers are folded: nodes of one class share one choice, costs are added up.

Fans of the folded problem are the distinct fans between classes; equal ones are merged, their costs added. Each
folded fan keeps a conversion's cost exactly, since under shared choices every copy costs the same. Memory
is kept as intervals: a folded node stays one choice, and the members' bytes are counted over the union of their
lives when they overlap, which is exact for stored tensors (all live through the whole step) and never too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distpar.search.problem import Choice, Consumer, Fan, Problem

Unfold = Callable[[Sequence[int]], tuple[int, ...]]


def fold(problem: Problem, classes: Sequence[int]) -> tuple[Problem, Unfold]:
    """The problem in which all nodes of a class take the same strategy, and how its answer is unfolded."""
    numbers = {c: i for i, c in enumerate(dict.fromkeys(classes))}
    of = [numbers[c] for c in classes]
    members: list[list[int]] = [[] for _ in numbers]
    for node, number in enumerate(of):
        members[number].append(node)
    choices = tuple(_merged([problem.choices[n] for n in group]) for group in members)
    fans: dict[object, Fan] = {}
    for fan in problem.fans:
        key = _key(fan, of)
        folded = _moved(fan, of)
        fans[key] = _added(fans[key], folded) if key in fans else folded

    def unfold(strategies: Sequence[int]) -> tuple[int, ...]:
        return tuple(strategies[number] for number in of)

    return Problem(choices, tuple(fans.values()), problem.memory_limit, problem.fixed_memory), unfold


def _merged(group: list[Choice]) -> Choice:
    first = group[0]
    if len(group) == 1:
        return first
    alive = _most_alive([(choice.start, choice.stop) for choice in group])
    return Choice(
        np.sum([choice.costs for choice in group], axis=0),
        first.memory * alive,
        min(choice.start for choice in group),
        max(choice.stop for choice in group),
        f"{first.name} (x{len(group)})",
    )


def _most_alive(spans: list[tuple[int, int]]) -> int:
    """How many of the spans overlap at most."""
    events = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    alive = most = 0
    for _, change in events:
        alive += change
        most = max(most, alive)
    return most


def _key(fan: Fan, of: list[int]) -> object:
    readers = dict.fromkeys((of[r.node], r.targets.tobytes()) for r in fan.consumers)
    return of[fan.producer], fan.sources.tobytes(), tuple(sorted(readers)), fan.costs.shape


def _moved(fan: Fan, of: list[int]) -> Fan:
    readers = {(of[r.node], r.targets.tobytes()): Consumer(of[r.node], r.targets) for r in fan.consumers}
    ordered = tuple(readers[key] for key in sorted(readers))
    return Fan(of[fan.producer], fan.sources, ordered, fan.costs, fan.memory, fan.start, fan.stop)


def _added(first: Fan, second: Fan) -> Fan:
    overlap = first.start < second.stop and second.start < first.stop
    memory = first.memory
    if memory is not None and second.memory is not None:
        memory = memory + second.memory if overlap else np.maximum(memory, second.memory)
    return Fan(
        first.producer, first.sources, first.consumers, first.costs + second.costs, memory,
        min(first.start, second.start), max(first.stop, second.stop),
    )  # fmt: skip
