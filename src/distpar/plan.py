"""A plan: the chosen signature of every op, so the layout of every tensor, with what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

from distpar.graph import Ref
from distpar.layout import Layout
from distpar.mesh import Mesh
from distpar.reshard import Step
from distpar.rules.spec import Signature


@dataclass(frozen=True, slots=True)
class Conversion:
    """One value converted to one layout, once, for all its readers that want it there.

    `seconds` is the predicted duration; `steps` is empty when nothing has to be done.
    """

    ref: Ref
    target: Layout
    steps: tuple[Step, ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Layouts for a whole step on a mesh.

    Attributes:
        signatures: one a node of the graph; an input node's has no operands and one output.
        conversions: every (value, wanted layout) whose wanted layout differs from the one it is made in.
        results: the layout in which each flat result is wanted; None for a constant or a number.
        gradients: the layout in which each entry of `Graph.gradients` is wanted.
        A write is wanted in the layout of the input that it is stored into.
    """

    mesh: Mesh
    signatures: tuple[Signature, ...]
    conversions: tuple[Conversion, ...]
    results: tuple[Layout | None, ...]
    gradients: tuple[Layout, ...]

    def layout_of(self, ref: Ref) -> Layout:
        """The layout in which a value is made."""
        return self.signatures[ref.node].outputs[ref.output]
