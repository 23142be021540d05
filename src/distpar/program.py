"""What one rank runs: a straight line of local calls and explicit conversion steps.

Every rank of a mesh runs the same instructions in the same order (so collectives always meet); only the
local arguments differ, and `rules.localize` gives them from the signature and the rank. Slots are
numbered values, written once. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from distpar.graph import Arg, OpSpec, TensorType, Where
from distpar.layout import Layout
from distpar.mesh import Mesh
from distpar.reshard import Step
from distpar.rules.spec import Signature


@dataclass(frozen=True, slots=True)
class Call:
    """Run one op on local blocks. `operands[i]` is the slot of the spec's i-th operand."""

    node: int
    spec: OpSpec
    signature: Signature
    operands: tuple[int, ...]
    results: tuple[int, ...]
    where: Where


@dataclass(frozen=True, slots=True)
class Convert:
    """One conversion step of one tensor. A collective only *starts* here; `Wait` ends it."""

    step: Step
    type: TensorType
    before: Layout
    after: Layout
    source: int
    result: int
    node: int
    """The node whose value is converted (for messages and traces)."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Several collectives of the same kind, axes and dtype in one call."""

    parts: tuple[Convert, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective that fills this slot must have ended before the next instruction."""

    slot: int


@dataclass(frozen=True, slots=True)
class Free:
    """The slots are not read again."""

    slots: tuple[int, ...]


Instruction = Call | Convert | Bucket | Wait | Free


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input node of the graph, the layout that it arrives in, and its slot."""

    node: int
    layout: Layout
    slot: int


@dataclass(frozen=True, slots=True)
class Program:
    """The step for every rank of a mesh.

    Attributes:
        results: the flat results; a slot is wrapped in `Slot`, anything else is a constant.
        writes: (input node, slot): stored back into the input, whose layout the slot has.
        gradients: (parameter's input node, slot, layout).
    """

    mesh: Mesh
    inputs: tuple[ProgramInput, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[Slot | Arg, ...]
    result_layouts: tuple[Layout | None, ...]
    writes: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, int, Layout], ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A result that is a value of the program, not a constant."""

    index: int
