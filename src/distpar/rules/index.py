"""Ops that look values up by index.

A table that is cut along the looked-up dim gives a Partial(sum): each rank fills in what lies in its block
and zeros elsewhere. Indices of one lookup dim may be cut as the output is.
"""

from __future__ import annotations

from collections.abc import Iterable

from distpar.graph import OpSpec
from distpar.layout import Replicate, Shard, interval
from distpar.mesh import Mesh
from distpar.rules.rule import SUM, Rule, argument, dims_row, linear, plain, shape
from distpar.rules.spec import LocalCall, Row, Signature


def _embedding_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.operands[1]))
    for dim in range(ndim):
        yield dims_row([None, dim], [dim])
    yield dims_row([1, None], [ndim])
    yield Row((Shard(0), Replicate()), (SUM,))
    yield linear(spec, 0)


def _embedding_local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    cut = signature.operands[0].dims[0]
    start, stop = interval(shape(spec.operands[0])[0], cut, mesh, rank)
    if not cut:
        return LocalCall("aten.embedding.default", spec.args[:2])
    return LocalCall("distpar.embedding_block", (*spec.args[:2], start, stop))


def _embedding_backward_rows(spec: OpSpec) -> Iterable[Row]:
    if argument(spec, 4, "scale_grad_by_freq", False):
        return
    ndim = len(shape(spec.operands[1]))
    for dim in range(ndim):
        yield Row((Shard(dim), Shard(dim)), (SUM,))
    yield dims_row([ndim, None], [1])
    yield dims_row([None, None], [0])
    yield linear(spec, 0)


def _embedding_backward_local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    if argument(spec, 4, "scale_grad_by_freq", False):
        return plain(spec)
    start, stop = interval(shape(spec.outputs[0])[0], signature.outputs[0].dims[0], mesh, rank)
    padding = argument(spec, 3, "padding_idx", -1)
    args = (*spec.args[:2], start, stop, padding, False)
    return LocalCall("distpar.embedding_backward_block", args)  # type: ignore[arg-type]


def _gather_rows(spec: OpSpec) -> Iterable[Row]:
    table, index = shape(spec.operands[0]), shape(spec.operands[1])
    if not table:
        return
    dim = int(spec.args[1]) % len(table)  # type: ignore[arg-type]
    for own, size in enumerate(index):
        if own != dim and table[own] == size:
            yield dims_row([own, own], [own])
    yield dims_row([None, dim], [dim])
    yield Row((Shard(dim), Replicate()), (SUM,))
    yield linear(spec, 0)


def _gather_local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    table = shape(spec.operands[0])
    dim = int(spec.args[1]) % max(1, len(table))  # type: ignore[arg-type]
    if not table or not signature.operands[0].dims[dim]:
        return plain(spec)
    start, stop = interval(table[dim], signature.operands[0].dims[dim], mesh, rank)
    return LocalCall("distpar.gather_block", (spec.args[0], dim, spec.args[2], start, stop))


def _scatter_rows(spec: OpSpec) -> Iterable[Row]:
    """Dims other than the scattered one, where all operands have the same size."""
    ndim = len(shape(spec.outputs[0]))
    if not ndim:
        return
    dim = int(spec.args[1]) % ndim  # type: ignore[arg-type]
    for own in range(ndim):
        sizes = {shape(type_)[own] for type_ in spec.operands}
        if own != dim and len(sizes) == 1:
            yield dims_row([own] * len(spec.operands), [own])


def _index_select_rows(spec: OpSpec) -> Iterable[Row]:
    table = shape(spec.operands[0])
    if not table:
        return
    dim = int(spec.args[1]) % len(table)  # type: ignore[arg-type]
    for own in range(len(table)):
        if own != dim:
            yield dims_row([own, None], [own])
    yield dims_row([None, 0], [dim])
    yield linear(spec, 0)


RULES = {
    "aten.embedding.default": Rule(_embedding_rows, _embedding_local),
    "aten.embedding_dense_backward.default": Rule(_embedding_backward_rows, _embedding_backward_local),
    "aten.gather.default": Rule(_gather_rows, _gather_local),
    "aten.scatter.value": Rule(_scatter_rows),
    "aten.scatter.src": Rule(_scatter_rows),
    "aten.scatter_add.default": Rule(_scatter_rows),
    "aten.index_select.default": Rule(_index_select_rows),
}
