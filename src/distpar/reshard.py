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

from dataclasses import dataclass, replace
from typing import assert_never

from distpar.layout import Layout, Reduction


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
