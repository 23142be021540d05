"""Reductions over dims: a kept dim is cut, a reduced one leaves the reduction's Partial.

A block may be empty: amax and amin then give the identity, which plain torch refuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from distpar.graph import OpSpec
from distpar.layout import Partial, Shard
from distpar.mesh import Mesh
from distpar.rules.rule import MAX, MIN, SUM, Rule, argument, dims_row, numbers, shape, tensor
from distpar.rules.spec import LocalCall, Row, Signature


def reduction(partial: Partial, kernel: str = "") -> Rule:
    """The rule of a reduction over the dims in argument 1 (keepdim in argument 2)."""

    def rows(spec: OpSpec) -> Iterable[Row]:
        ndim = len(shape(spec.operands[0]))
        dims = numbers(argument(spec, 1, "dim"), ndim)
        kept = len(shape(spec.outputs[0])) == ndim and ndim > 0
        for dim in range(ndim):
            if dim in dims:
                yield Row((Shard(dim),), (partial,))
            else:
                place = dim if kept else dim - sum(d < dim for d in dims)
                yield dims_row([dim], [place])
        if tensor(spec.operands[0]).dtype != "bool":
            yield Row((partial,), (partial,))

    def local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
        dims = argument(spec, 1, "dim") or ()
        keepdim = bool(argument(spec, 2, "keepdim", False))
        dims = (dims,) if isinstance(dims, int) else dims
        return LocalCall("distpar.extreme", (spec.args[0], dims, keepdim, partial is MAX))  # type: ignore[arg-type]

    return Rule(rows, local=local if kernel else None)


def along(*, linear_too: bool = False, outputs: int = 1) -> Rule:
    """An op that works along the dim in argument 1 and leaves the others alone (cumsum, argmax)."""

    def rows(spec: OpSpec) -> Iterable[Row]:
        ndim = len(shape(spec.operands[0]))
        dims = numbers(argument(spec, 1, "dim"), ndim)
        for dim in range(ndim):
            if dim not in dims:
                kept = len(shape(spec.outputs[0])) == ndim
                place = dim if kept else dim - sum(d < dim for d in dims)
                yield dims_row([dim], [place] * len(spec.outputs))
        if linear_too:
            yield Row((SUM,), (SUM,))

    return Rule(rows)


def _any(partial: Partial) -> Rule:
    base = reduction(partial)

    def rows(spec: OpSpec) -> Iterable[Row]:
        # Only a Partial of truth values is one of the result.
        return [row for row in base.rows(spec) if row.operands != (partial,)]

    return Rule(rows)


RULES = {
    "aten.sum.dim_IntList": reduction(SUM),
    "aten.amax.default": reduction(MAX, "extreme"),
    "aten.amin.default": reduction(MIN, "extreme"),
    "aten.any.default": _any(MAX),
    "aten.any.dim": _any(MAX),
    "aten.any.dims": _any(MAX),
    "aten.all.default": _any(MIN),
    "aten.all.dim": _any(MIN),
    "aten.all.dims": _any(MIN),
    "aten.cumsum.default": along(linear_too=True),
    "aten.argmax.default": along(),
    "aten.argmin.default": along(),
    "aten.max.dim": along(),
    "aten.min.dim": along(),
    "aten.sort.default": along(),
    "aten._softmax.default": along(),
    "aten._log_softmax.default": along(),
}
