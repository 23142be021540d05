"""The mesh: named axes with sizes, over ranks in row-major order.

    Mesh(dp=2, tp=4)      rank 5 is dp=1, tp=1; its tp-neighbours are ranks 4..7

A mesh is a value. It knows nothing of machines: which links an axis crosses is the cluster's business.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cache

from distpar.errors import LayoutError, UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Named axes over ranks in row-major order: the last axis varies fastest.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.num_ranks, mesh.coordinates(5), mesh.peers(5, ("tp",))
    (8, (1, 1), (4, 5, 6, 7))
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(
                    f"mesh axis {name}={size!r} is not a number of ranks",
                    why="an axis has a whole number of ranks, 1 or more",
                    fix=f"write for example Mesh({name}=2)",
                )
        object.__setattr__(self, "axes", tuple(axes.items()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """`"dp=2,tp=4"` -> `Mesh(dp=2, tp=4)`.

        Raises:
            UsageError: the text is not a list of NAME=SIZE.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not _NAME.fullmatch(name) or not size.isdecimal() or name in axes:
                raise UsageError(
                    f"cannot read the mesh {text!r}",
                    why=f"{part.strip()!r} is not NAME=SIZE with a name used once",
                    fix="write the axes as NAME=SIZE, separated by commas: dp=2,tp=4",
                )
            axes[name] = int(size)
        return Mesh(**axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """The number of ranks along the given axes together (1 for none)."""
        return math.prod(self.sizes[self.position(axis)] for axis in axes)

    def position(self, axis: str) -> int:
        for position, (name, _) in enumerate(self.axes):
            if name == axis:
                return position
        raise LayoutError(
            f"the mesh has no axis {axis!r}",
            why=f"its axes are {', '.join(self.names) or 'none'}",
            fix="name one of these axes, or add the axis to the mesh",
        )

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The position of a rank on every axis, in mesh order."""
        return _coordinates(self, rank)

    def coordinate(self, rank: int, axis: str) -> int:
        return _coordinates(self, rank)[self.position(axis)]

    def peers(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, row-major in the order of `axes` as given."""
        return _peers(self, rank, axes)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of peers along `axes`, each once, by their first rank."""
        return tuple(dict.fromkeys(_peers(self, rank, axes) for rank in range(self.num_ranks)))

    def __str__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={size}" for name, size in self.axes) + ")"

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.axes,)


def _rebuild(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(**dict(axes))


@cache
def _coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    assert 0 <= rank < mesh.num_ranks, f"bug: rank {rank} is outside of {mesh}"
    found = []
    for size in reversed(mesh.sizes):
        rank, coordinate = divmod(rank, size)
        found.append(coordinate)
    return tuple(reversed(found))


@cache
def _peers(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    strides = {name: math.prod(mesh.sizes[position + 1 :]) for position, name in enumerate(mesh.names)}
    base = rank - sum(mesh.coordinate(rank, axis) * strides[axis] for axis in axes)
    ranges = [range(mesh.size(axis)) for axis in axes]
    return tuple(
        base + sum(index * strides[axis] for index, axis in zip(point, axes, strict=True))
        for point in itertools.product(*ranges)
    )
