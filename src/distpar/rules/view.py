"""Ops that only look at a tensor in another way, or copy regions of it.

A dim of the input and a dim of the output go together when as many elements lie outside of them; they may be
cut together when, on every rank, the input's block is the output's block (`_lines_up`): 8 rows of 256 over 4
ranks are 4 blocks of 2048 / 4, but 6 rows are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from distpar.graph import OpSpec
from distpar.layout import interval, local_shape
from distpar.mesh import Mesh
from distpar.rules.rule import Rule, argument, dims_row, linear, moved, numbers, plain, shape, tensor
from distpar.rules.spec import LocalCall, Row, Signature


def _pairs(spec: OpSpec) -> list[tuple[int, int]]:
    """(input dim, output dim) with the same number of elements outside of them, both of size over 1."""
    source, target = shape(spec.operands[0]), shape(spec.outputs[0])
    outer = {math.prod(target[:dim]): dim for dim, size in enumerate(target) if size > 1}
    found = [(dim, outer.get(math.prod(source[:dim]))) for dim, size in enumerate(source) if size > 1]
    return [(dim, other) for dim, other in found if other is not None]


def _view_rows(spec: OpSpec) -> Iterable[Row]:
    if tensor(spec.outputs[0]).numel:
        yield from (dims_row([source], [target]) for source, target in _pairs(spec))
    yield from moved(spec)


def _lines_up(spec: OpSpec, signature: Signature, mesh: Mesh) -> bool:
    source, target = shape(spec.operands[0]), shape(spec.outputs[0])
    before, after = signature.operands[0], signature.outputs[0]
    if not tensor(spec.outputs[0]).numel:
        return True
    for dim, other in _pairs(spec):
        if not before.dims[dim] and not after.dims[other]:
            continue
        inner, outer = math.prod(source[dim + 1 :]), math.prod(target[other + 1 :])
        for rank in range(mesh.num_ranks):
            start, stop = interval(source[dim], before.dims[dim], mesh, rank)
            low, high = interval(target[other], after.dims[other], mesh, rank)
            if (start * inner, stop * inner) != (low * outer, high * outer) and (start, low) != (stop, high):
                return False
            if (stop - start) * inner != (high - low) * outer:
                return False
    return True


def _local_view(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    local = local_shape(signature.outputs[0], shape(spec.outputs[0]), mesh, rank)
    return LocalCall("aten.reshape.default", (spec.args[0], local))


def permuted(order: str) -> Rule:
    """Dims in another order: t, transpose, permute."""

    def rows(spec: OpSpec) -> Iterable[Row]:
        ndim = len(shape(spec.operands[0]))
        dims = list(range(ndim))
        if order == "t":
            dims = dims[::-1]
        elif order == "transpose":
            first, second = (int(spec.args[i]) % ndim for i in (1, 2))  # type: ignore[arg-type]
            dims[first], dims[second] = dims[second], dims[first]
        else:
            dims = list(numbers(spec.args[1], ndim))
        for target, source in enumerate(dims):
            yield dims_row([source], [target])
        yield from moved(spec)

    return Rule(rows, free=True)


def _squeezed_rows(spec: OpSpec) -> Iterable[Row]:
    """unsqueeze and squeeze: dims of size 1 come and go, the others keep their order."""
    source, target = shape(spec.operands[0]), shape(spec.outputs[0])
    keep_source = [dim for dim, size in enumerate(source) if size != 1]
    keep_target = [dim for dim, size in enumerate(target) if size != 1]
    for first, second in zip(keep_source, keep_target, strict=True):
        yield dims_row([first], [second])
    yield from moved(spec)


def _expand_rows(spec: OpSpec) -> Iterable[Row]:
    source, target = shape(spec.operands[0]), shape(spec.outputs[0])
    for dim, size in enumerate(target):
        own = dim - (len(target) - len(source))
        kept = own >= 0 and source[own] == size
        if size > 1:
            yield dims_row([own if kept else None], [dim])
    yield from moved(spec)


def _local_expand(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    local = local_shape(signature.outputs[0], shape(spec.outputs[0]), mesh, rank)
    return LocalCall(spec.op, (spec.args[0], local))


def _slice_rows(spec: OpSpec) -> Iterable[Row]:
    source, target = shape(spec.operands[0]), shape(spec.outputs[0])
    ndim = len(source)
    dim = int(argument(spec, 1, "dim", 0)) % ndim  # type: ignore[call-overload]
    step = argument(spec, 4, "step", 1)
    for own in range(ndim):
        if own != dim or (source[own] == target[own] and step == 1):
            yield dims_row([own], [own])
    yield from moved(spec)


def _local_slice(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    dim = int(argument(spec, 1, "dim", 0)) % len(shape(spec.operands[0]))  # type: ignore[call-overload]
    if signature.operands[0].dims[dim]:
        return LocalCall("aten.alias.default", (spec.args[0],))
    return plain(spec)


def _select_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.operands[0]))
    dim = int(spec.args[1]) % ndim  # type: ignore[arg-type]
    for own in range(ndim):
        if own != dim:
            yield dims_row([own], [own - (own > dim)])
    yield from moved(spec)


def _cat_rows(spec: OpSpec) -> Iterable[Row]:
    shapes = [shape(type_) for type_ in spec.operands]
    ndim = len(shape(spec.outputs[0]))
    dim = int(argument(spec, 1, "dim", 0)) % ndim  # type: ignore[call-overload]
    if all(len(local) == ndim for local in shapes):
        for own in range(ndim):
            if own != dim:
                yield dims_row([own] * len(shapes), [own])
        yield from moved(spec)


def _stack_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.outputs[0]))
    dim = int(argument(spec, 1, "dim", 0)) % ndim  # type: ignore[call-overload]
    for own in range(ndim - 1):
        yield dims_row([own] * len(spec.operands), [own + (own >= dim)])
    yield from moved(spec)


def _split_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.operands[0]))
    dim = int(argument(spec, 2, "dim", 0)) % ndim  # type: ignore[call-overload]
    for own in range(ndim):
        if own != dim:
            yield dims_row([own], [own] * len(spec.outputs))
    yield from moved(spec)


def _unbind_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.operands[0]))
    dim = int(argument(spec, 1, "dim", 0)) % ndim  # type: ignore[call-overload]
    for own in range(ndim):
        if own != dim:
            yield dims_row([own], [own - (own > dim)] * len(spec.outputs))
    yield from moved(spec)


def _pad_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.operands[0]))
    pads = spec.args[1]
    assert isinstance(pads, tuple), "bug: pads are a list"
    padded = {ndim - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    for own in range(ndim):
        if own not in padded:
            yield dims_row([own], [own])
    if not argument(spec, 2, "value", 0):
        yield linear(spec, 0)


def _same_rows(spec: OpSpec) -> Iterable[Row]:
    """slice_scatter, select_scatter, tril, flip and the like: dims that are not touched."""
    ndim = len(shape(spec.outputs[0]))
    touched = _touched(spec, ndim)
    for own in range(ndim):
        if own not in touched:
            operands = [_where(spec, i, own) for i in range(len(spec.operands))]
            yield dims_row(operands, [own])
    yield from [linear(spec, *range(len(spec.operands)))]


def _touched(spec: OpSpec, ndim: int) -> set[int]:
    match spec.op.split(".")[1]:
        case "tril" | "triu":
            return {ndim - 2, ndim - 1}
        case "slice_scatter" | "select_scatter":
            return {int(argument(spec, 2, "dim", 0)) % ndim}  # type: ignore[call-overload]
        case _:
            return set(numbers(argument(spec, 1, "dims"), ndim))


def _where(spec: OpSpec, operand: int, dim: int) -> int:
    if spec.op.startswith("aten.select_scatter") and operand == 1:
        gone = int(argument(spec, 2, "dim", 0)) % len(shape(spec.outputs[0]))  # type: ignore[call-overload]
        return dim - (dim > gone)
    return dim


_VIEW = Rule(_view_rows, _local_view, _lines_up, free=True)

RULES = {
    "aten.view.default": _VIEW,
    "aten._unsafe_view.default": _VIEW,
    "aten.reshape.default": _VIEW,
    "aten.t.default": permuted("t"),
    "aten.transpose.int": permuted("transpose"),
    "aten.permute.default": permuted("permute"),
    "aten.unsqueeze.default": Rule(_squeezed_rows, free=True),
    "aten.squeeze.dim": Rule(_squeezed_rows, free=True),
    "aten.squeeze.dims": Rule(_squeezed_rows, free=True),
    "aten.squeeze.default": Rule(_squeezed_rows, _local_view, free=True),
    "aten.expand.default": Rule(_expand_rows, _local_expand, free=True),
    "aten.slice.Tensor": Rule(_slice_rows, _local_slice, free=True),
    "aten.select.int": Rule(_select_rows, free=True),
    "aten.cat.default": Rule(_cat_rows),
    "aten.stack.default": Rule(_stack_rows),
    "aten.split.Tensor": Rule(_split_rows, free=True),
    "aten.split_with_sizes.default": Rule(_split_rows, free=True),
    "aten.unbind.int": Rule(_unbind_rows, free=True),
    "aten.constant_pad_nd.default": Rule(_pad_rows),
    "aten.slice_scatter.default": Rule(_same_rows),
    "aten.select_scatter.default": Rule(_same_rows),
    "aten.tril.default": Rule(_same_rows),
    "aten.triu.default": Rule(_same_rows),
    "aten.flip.default": Rule(_same_rows),
}
