"""How one tensor lives on the mesh.

A *layout* says, for each tensor dim, which mesh axes cut it and in what order, and over which axes
the value is still waiting for a reduction:

    f32[8/dp, 128, 512/tp] +sum(pp)

An axis that is not mentioned replicates. Seen from one axis, the tensor is therefore exactly one of

    Shard(dim)          each rank holds a block of the dim
    Replicate()         each rank holds the same
    Partial(reduction)  the value is the reduction of what the ranks hold

Blocks follow torch.chunk: ceil(size / ranks) each, then a smaller one, then empty ones; `8/dp/tp` cuts
by dp first and then each block by tp. One layout waits for one kind of reduction only: sums of
maxima and maxima of sums differ, so a mixture would have no meaning without an order.

Nothing here moves data and nothing here imports torch: a layout is a value, like a shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from distpar.mesh import Mesh


class Reduction(StrEnum):
    """What a Partial value is waiting for. Its identity element is what padding is made of."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis holds one block of the dim."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of the axis holds the same value."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction of what the ranks of the axis hold."""

    reduction: Reduction = Reduction.SUM


Placement = Shard | Replicate | Partial
Box = tuple[tuple[int, int], ...]
"""A region of a tensor: [start, stop) for each dim."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor lives on a whole mesh.

    Attributes:
        dims: for each tensor dim the axes that cut it, outermost first.
        partial: the axes over which the value waits for `reduction`, sorted by name.
        reduction: the one reduction of all partial axes; None when there are none.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        used = [*itertools.chain(*self.dims), *self.partial]
        assert len(used) == len(set(used)), f"bug: an axis is used twice in {self}"
        assert bool(self.partial) == (self.reduction is not None), f"bug: half a Partial in {self}"
        assert list(self.partial) == sorted(self.partial), f"bug: unsorted partial axes in {self}"

    @staticmethod
    def replicate(ndim: int) -> Layout:
        return Layout(((),) * ndim)

    @staticmethod
    def of(ndim: int, placements: Mapping[str, Placement] | Iterable[tuple[str, Placement]]) -> Layout:
        """The layout with the given placement on each axis; axes that cut one dim do so in the order given."""
        layout = Layout.replicate(ndim)
        pairs = placements.items() if isinstance(placements, Mapping) else placements
        for axis, placement in pairs:
            layout = layout.place(axis, placement)
        return layout

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which the ranks hold different things."""
        return frozenset(itertools.chain(*self.dims, self.partial))

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def placement(self, axis: str) -> Placement:
        """The layout seen from one axis."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return Shard(dim)
        if axis in self.partial:
            assert self.reduction is not None, "bug: half a Partial"
            return Partial(self.reduction)
        return Replicate()

    def place(self, axis: str, placement: Placement) -> Layout:
        """The same layout with another placement on one axis; a Shard is cut innermost."""
        bare = self.without(axis)
        match placement:
            case Replicate():
                return bare
            case Shard(dim):
                dims = list(bare.dims)
                dims[dim] = (*dims[dim], axis)
                return replace(bare, dims=tuple(dims))
            case Partial(reduction):
                assert bare.reduction in (None, reduction), f"bug: mixed reductions in {self}"
                return replace(bare, partial=tuple(sorted((*bare.partial, axis))), reduction=reduction)

    def without(self, *axes: str) -> Layout:
        """The same layout, replicated over the given axes."""
        dims = tuple(tuple(a for a in cut if a not in axes) for cut in self.dims)
        partial = tuple(a for a in self.partial if a not in axes)
        return Layout(dims, partial, self.reduction if partial else None)

    def cut(self, dim: int, axes: tuple[str, ...]) -> Layout:
        """The same layout with exactly these axes cutting the dim."""
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))


def block(size: int, num_ranks: int, index: int) -> tuple[int, int]:
    """[start, stop) of block `index` when `size` is cut for `num_ranks`: torch.chunk, with empty blocks at the end."""
    length = -(-size // num_ranks)
    return min(size, index * length), min(size, (index + 1) * length)


@cache
def interval(size: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> tuple[int, int]:
    """[start, stop) of what a rank holds of a dim that the axes cut, outermost first."""
    start, stop = 0, size
    for axis in axes:
        low, high = block(stop - start, mesh.size(axis), mesh.coordinate(rank, axis))
        start, stop = start + low, start + high
    return start, stop


def box(layout: Layout, global_shape: tuple[int, ...], mesh: Mesh, rank: int) -> Box:
    """The region of the global tensor that a rank holds."""
    assert layout.ndim == len(global_shape), f"bug: {layout} does not fit shape {global_shape}"
    return tuple(interval(size, axes, mesh, rank) for size, axes in zip(global_shape, layout.dims, strict=True))


def local_shape(layout: Layout, global_shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of what a rank holds. Rank 0 always holds the largest block."""
    return tuple(stop - start for start, stop in box(layout, global_shape, mesh, rank))


@cache
def largest_shape(layout: Layout, global_shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest block over all ranks: what costs and memory are counted on."""
    return local_shape(layout, global_shape, mesh, 0)
