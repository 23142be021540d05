"""Conversions: from any layout to any layout on one mesh, as a path of steps.

| from \\ to  | Replicate      | Shard(j)                         | Partial                                |
|------------|----------------|----------------------------------|----------------------------------------|
| Shard(i)   | AllGather      | i=j: nothing; else AllToAll      | ShardToPartial (free)                  |
| Replicate  | nothing        | Slice (free)                     | MakePartial (free)                     |
| Partial    | AllReduce      | ReduceScatter                    | same reduction: nothing; else by a reduction |

A step may work over several axes at once (fused into one collective over their product). `Reorder` changes
the order in which axes cut one dim. Nothing here moves data: a step says what must move.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import assert_never

from distpar.graph import ITEM_SIZE, TensorType
from distpar.layout import Box, Layout, Reduction, box, largest_shape
from distpar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class AllGather:
    """The innermost `axes` that cut `dim` are gathered (in the order in which they cut it)."""

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Replicated `axes` cut `dim`, innermost, in this order. No communication."""

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The innermost `axes` that cut dim `source` cut dim `target` instead, innermost there."""

    source: int
    target: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reorder:
    """The axes that cut `dim` cut it in the order `axes`: one permutation of blocks."""

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The reduction over partial `axes` is done; every rank has the whole."""

    axes: tuple[str, ...]
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """The reduction over partial `axes` is done; they cut `dim`, innermost, in this order."""

    dim: int
    axes: tuple[str, ...]
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class MakePartial:
    """Replicated `axes` become partial: the first rank keeps the value, the others hold the identity. Free."""

    axes: tuple[str, ...]
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class ShardToPartial:
    """The innermost `axes` that cut `dim` become partial: own block in place, identity elsewhere. Free."""

    dim: int
    axes: tuple[str, ...]
    reduction: Reduction


Step = AllGather | Slice | AllToAll | Reorder | AllReduce | ReduceScatter | MakePartial | ShardToPartial


def after(step: Step, layout: Layout) -> Layout:
    """The layout after a step."""
    match step:
        case AllGather(dim, axes):
            return layout.cut(dim, _drop(layout.dims[dim], axes))
        case Slice(dim, axes):
            return layout.cut(dim, (*layout.dims[dim], *axes))
        case AllToAll(source, target, axes):
            gathered = layout.cut(source, _drop(layout.dims[source], axes))
            return gathered.cut(target, (*gathered.dims[target], *axes))
        case Reorder(dim, axes):
            assert sorted(axes) == sorted(layout.dims[dim]), f"bug: {step} does not fit {layout}"
            return layout.cut(dim, axes)
        case AllReduce(axes, _):
            return layout.without(*axes)
        case ReduceScatter(dim, axes, _):
            reduced = layout.without(*axes)
            return reduced.cut(dim, (*reduced.dims[dim], *axes))
        case MakePartial(axes, reduction):
            partial = tuple(sorted((*layout.partial, *axes)))
            return replace(layout, partial=partial, reduction=reduction)
        case ShardToPartial(dim, axes, reduction):
            gathered = layout.cut(dim, _drop(layout.dims[dim], axes))
            partial = tuple(sorted((*layout.partial, *axes)))
            return replace(gathered, partial=partial, reduction=reduction)
        case _:
            assert_never(step)


def _drop(cut: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    assert axes and cut[-len(axes) :] == axes, f"bug: {axes} are not the innermost of {cut}"
    return cut[: -len(axes)]


@dataclass(frozen=True, slots=True)
class Path:
    """The steps from one layout to another and their predicted seconds together."""

    steps: tuple[Step, ...]
    seconds: float


Price = Callable[[Step, TensorType, Layout], float]
"""Seconds of a step that starts in a layout."""


def path(before: Layout, target: Layout, type_: TensorType, mesh: Mesh, price: Price) -> Path:
    """The cheapest path between two layouts in the modelled space.

    A shortest-path search over layouts: on each axis a tensor passes only through the placements that it
    has at the two ends, or replication. "Gather everything, then slice" is one of the paths, so the found
    one is never dearer. Axes of one rank are treated as any other (their steps cost nothing much).
    """
    best: dict[Layout, float] = {before: 0.0}
    came: dict[Layout, tuple[Layout, Step]] = {}
    count = itertools.count()
    heap = [(0.0, next(count), before)]
    done: set[Layout] = set()
    while heap:
        seconds, _, layout = heapq.heappop(heap)
        if layout in done:
            continue
        done.add(layout)
        if layout == target:
            return Path(_back(came, before, target), seconds)
        for step in _moves(layout, target):
            reached = after(step, layout)
            total = seconds + price(step, type_, layout)
            if reached not in done and total < best.get(reached, math.inf):
                best[reached] = total
                came[reached] = (layout, step)
                heapq.heappush(heap, (total, next(count), reached))
    raise AssertionError(f"bug: no path from {before} to {target}")


def _back(came: dict[Layout, tuple[Layout, Step]], before: Layout, target: Layout) -> tuple[Step, ...]:
    steps: list[Step] = []
    while target != before:
        target, step = came[target]
        steps.append(step)
    return tuple(reversed(steps))


def _moves(layout: Layout, target: Layout) -> Iterator[Step]:
    """Every step from a layout that may lie on a cheapest path, in a fixed order."""
    wanted = [axis for cut in target.dims for axis in cut]
    for axes in _runs(layout.partial):
        yield from _reductions(layout, axes, target)
    for dim, cut in enumerate(layout.dims):
        for start in range(len(cut)):
            inner = cut[start:]
            yield AllGather(dim, inner)
            for other in range(layout.ndim):
                if other != dim and _fits(layout.dims[other] + inner, target.dims[other]):
                    yield AllToAll(dim, other, inner)
            if _may_wait(layout, inner, target):
                assert target.reduction is not None, "bug: half a Partial"
                yield ShardToPartial(dim, inner, target.reduction)
        if sorted(cut) == sorted(target.dims[dim]) and cut != target.dims[dim]:
            yield Reorder(dim, target.dims[dim])
    for dim, cut in enumerate(target.dims):
        missing = cut[len(layout.dims[dim]) :]
        if missing and cut[: len(layout.dims[dim])] == layout.dims[dim]:
            free = _leading(missing, layout)
            for stop in range(1, len(free) + 1):
                yield Slice(dim, free[:stop])
    waiting = tuple(a for a in target.partial if a not in layout.axes and a not in wanted)
    if waiting and layout.reduction in (None, target.reduction):
        assert target.reduction is not None, "bug: half a Partial"
        yield MakePartial(waiting, target.reduction)


def _reductions(layout: Layout, axes: tuple[str, ...], target: Layout) -> Iterator[Step]:
    assert layout.reduction is not None, "bug: half a Partial"
    yield AllReduce(axes, layout.reduction)
    for dim in range(layout.ndim):
        for order in itertools.permutations(axes):
            if _fits(layout.dims[dim] + order, target.dims[dim]):
                yield ReduceScatter(dim, order, layout.reduction)


def _runs(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every non-empty subset, in a fixed order."""
    for length in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, length)


def _fits(cut: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether a cut may still become the wanted one by further slicing or by reordering."""
    return cut == wanted[: len(cut)] or sorted(cut) == sorted(wanted)


def _may_wait(layout: Layout, axes: tuple[str, ...], target: Layout) -> bool:
    return all(axis in target.partial for axis in axes) and layout.reduction in (None, target.reduction)


def _leading(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    return tuple(itertools.takewhile(lambda axis: axis not in layout.axes, axes))


def volume(step: Step, type_: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Bytes that the busiest rank sends in a step, as the runtime does it.

    n = ranks of the step's axes, B = bytes of the largest block before the step:

    | step                              | bytes                                                            |
    |-----------------------------------|------------------------------------------------------------------|
    | AllReduce                         | 2 (n-1)/n B, rounded up (ring: Patarasuk and Yuan 2009)          |
    | AllGather                         | (n-1) B (ring; ragged blocks are padded to the largest)          |
    | ReduceScatter                     | B less the smallest own block (blocks go straight to their rank) |
    | AllToAll, Reorder                 | own block less what stays, exactly                               |
    | Slice, MakePartial, ShardToPartial| 0                                                                |
    """
    match step:
        case Slice() | MakePartial() | ShardToPartial():
            return 0
        case _:
            return _volume(step, type_, layout, mesh)


@cache
def _volume(step: Step, type_: TensorType, layout: Layout, mesh: Mesh) -> int:
    num_ranks = mesh.size(*step.axes)
    local = TensorType(type_.dtype, largest_shape(layout, type_.shape, mesh)).num_bytes
    match step:
        case AllReduce():
            return -(-2 * (num_ranks - 1) * local // num_ranks)
        case AllGather():
            return (num_ranks - 1) * local
        case _:
            item = ITEM_SIZE[type_.dtype]
            return max(_leaving(step, type_, layout, mesh, rank) * item for rank in range(mesh.num_ranks))


def _leaving(step: Step, type_: TensorType, layout: Layout, mesh: Mesh, rank: int) -> int:
    """Elements that a rank sends to others."""
    pieces = intersections(layout, after(step, layout), type_.shape, mesh, step.axes, rank)
    peers = mesh.peers(rank, step.axes)
    return sum(
        math.prod(stop - start for start, stop in piece)
        for peer, piece in zip(peers, pieces, strict=True)
        if peer != rank
    )


def intersections(
    before: Layout,
    target: Layout,
    global_shape: tuple[int, ...],
    mesh: Mesh,
    axes: tuple[str, ...],
    rank: int,
) -> tuple[Box, ...]:
    """What a rank has before that each of its peers along `axes` wants after, as global boxes (maybe empty)."""
    own = box(before, global_shape, mesh, rank)
    return tuple(_common(own, box(target, global_shape, mesh, peer)) for peer in mesh.peers(rank, axes))


def _common(first: Box, second: Box) -> Box:
    both = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return tuple((start, max(start, stop)) for start, stop in both)
