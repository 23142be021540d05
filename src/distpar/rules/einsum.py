"""Products: an equation says which dims go together, and the rest follows.

A factor that an output has is cut there; one that is summed over leaves a Partial(sum); and a product is
linear in each operand, so a Partial(sum) of one passes when the others are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from distpar.graph import OpSpec
from distpar.rules.rule import SUM, Rule, Shapes, dims_row, linear
from distpar.rules.spec import Row


def einsum(equation: str) -> Rule:
    """`einsum("mk,kn->mn")`: the rule of a product."""
    left, right = equation.split("->")
    operands = left.split(",")
    factors = list(dict.fromkeys(equation.replace(",", "").replace("->", "")))

    def rows(spec: OpSpec) -> Iterable[Row]:
        for factor in factors:
            places = [term.index(factor) if factor in term else None for term in operands]
            if factor in right:
                yield dims_row(places, [right.index(factor)])
            else:
                yield Row(dims_row(places, []).operands, (SUM,))
        for position in range(len(operands)):
            yield linear(spec, position)

    def flops(spec: OpSpec, shapes: Shapes, outputs: Shapes) -> float:
        sizes = {
            factor: size
            for term, local in zip(operands, shapes, strict=True)
            for factor, size in zip(term, local, strict=True)
        }
        return 2.0 * math.prod(sizes.values())

    return Rule(rows, flops=flops)


RULES = {
    "aten.mm.default": einsum("mk,kn->mn"),
    "aten.bmm.default": einsum("bmk,bkn->bmn"),
}
