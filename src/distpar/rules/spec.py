"""The words of the rules: what one op can do with local blocks alone, on one axis and on the whole mesh.

A `Row` speaks of one mesh axis: the placement of each tensor operand and of each output with which the op,
run by every rank on its own blocks, gives the right blocks. A `Signature` is the same for the whole mesh.
A `LocalCall` is how one rank then calls the op: other shapes, another offset, or a helper kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from distpar.graph import Arg
from distpar.layout import Layout, Placement


@dataclass(frozen=True, slots=True)
class Row:
    """One axis: a placement for each operand of the `OpSpec` (numbers are always Replicate) and each output."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The whole mesh: operand layouts -> output layouts that the op can run with locally."""

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What one rank calls: an op's name ("aten.view.default", "distpar.embedding_block") and its local arguments.

    `Operand(i)` stands for the local block of the i-th operand.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
