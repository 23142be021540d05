"""What each op can do with local blocks alone: the index of what is supported.

    einsum      mm, bmm                        creation   zeros, full, arange, uniform
    pointwise   exp, add, where, zeros_like    network    convolution, pooling, attention
    reduction   sum, amax, any, cumsum         index      embedding, gather, scatter
    view        view, permute, cat, slice

An op that is not here runs replicated, and `is_supported` says so. Rows speak of one axis; `signatures` lifts
them to the whole mesh: one row an axis, layouts composed in mesh order, mixtures of reductions and blocks that do
not line up left out.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

from distpar.graph import NumberType, OpSpec, ValueType
from distpar.layout import Layout, Partial, Placement
from distpar.mesh import Mesh
from distpar.rules import creation, einsum, index, network, pointwise, reduction, view
from distpar.rules.rule import Rule, Shapes, plain, replicated
from distpar.rules.spec import LocalCall, Row, Signature

RULES: dict[str, Rule] = {
    **einsum.RULES,
    **pointwise.RULES,
    **reduction.RULES,
    **view.RULES,
    **index.RULES,
    **creation.RULES,
    **network.RULES,
}

_NUMBER_OPS = ("aten._local_scalar_dense.default", "operator.", "math.", "torch.")


def is_supported(op: str) -> bool:
    """Whether an op has a rule (or works on numbers only, which need none)."""
    return op in RULES or op.startswith(_NUMBER_OPS)


@cache
def rows(spec: OpSpec) -> tuple[Row, ...]:
    """What one axis can do, the all-Replicate row first."""
    rule = RULES.get(spec.op)
    whole = replicated(spec)
    if rule is None or isinstance(spec.outputs[0], NumberType):
        return (whole,)
    return tuple(dict.fromkeys((whole, *rule.rows(spec))))


@cache
def signatures(spec: OpSpec, mesh: Mesh) -> tuple[Signature, ...]:
    """What the whole mesh can do; axes of one rank replicate."""
    axes = [name for name, size in mesh.axes if size > 1]
    found: dict[Signature, None] = {}
    for choice in itertools.product(rows(spec), repeat=len(axes)):
        signature = _lift(spec, axes, choice)
        if signature is not None and is_legal(spec, signature, mesh):
            found[signature] = None
    return tuple(found)


def is_legal(spec: OpSpec, signature: Signature, mesh: Mesh) -> bool:
    """Whether the blocks of a composed signature line up on every rank."""
    rule = RULES.get(spec.op)
    return rule is None or rule.legal is None or rule.legal(spec, signature, mesh)


def _lift(spec: OpSpec, axes: list[str], choice: tuple[Row, ...]) -> Signature | None:
    operands = []
    for position, type_ in enumerate(spec.operands):
        layout = _compose(type_, axes, [row.operands[position] for row in choice])
        if layout is None:
            return None
        operands.append(layout)
    outputs = []
    for position, type_ in enumerate(spec.outputs):
        layout = _compose(type_, axes, [row.outputs[position] for row in choice])
        if layout is None:
            return None
        outputs.append(layout)
    return Signature(tuple(operands), tuple(outputs))


def _compose(type_: ValueType, axes: list[str], placements: list[Placement]) -> Layout | None:
    if len({p.reduction for p in placements if isinstance(p, Partial)}) > 1:
        return None
    ndim = 0 if isinstance(type_, NumberType) else type_.ndim
    return Layout.of(ndim, zip(axes, placements, strict=True))


@cache
def localize(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    """How a rank calls the op on its blocks."""
    rule = RULES.get(spec.op)
    return plain(spec) if rule is None or rule.local is None else rule.local(spec, signature, mesh, rank)


def flops(spec: OpSpec, operands: Shapes, outputs: Shapes) -> float:
    """Floating-point operations of a local call; 0 where memory traffic is what it costs."""
    rule = RULES.get(spec.op)
    if rule is None or rule.flops is None or not all(map(math.prod, outputs)):
        return 0.0
    return rule.flops(spec, operands, outputs)


def is_view(spec: OpSpec) -> bool:
    """Whether the op's outputs share its first operand's memory."""
    rule = RULES.get(spec.op)
    return rule is not None and rule.free


def is_free(spec: OpSpec) -> bool:
    """Whether the op costs nothing worth counting: a view, or arithmetic on numbers."""
    return is_view(spec) or all(isinstance(type_, NumberType) for type_ in spec.outputs)
