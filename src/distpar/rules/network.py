"""Convolution, pooling and attention: whole ops, cut over batch, channels or heads.

| op             | batch             | channels out     | channels in                |
|----------------|-------------------|------------------|----------------------------|
| convolution    | x0 -> out0        | w0, b0 -> out1   | x1, w1 -> Partial(sum)     |
| its backward   | g0, x0 -> x0, P, P| g1, w0 -> P, 0, 0| x1, w1 -> x1, w1, whole    |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from distpar.graph import Operand, OpSpec, TensorType
from distpar.layout import Placement, Replicate, Shard
from distpar.mesh import Mesh
from distpar.rules.rule import SUM, WHOLE, Rule, Shapes, dims_row, linear, shape
from distpar.rules.spec import LocalCall, Row, Signature


def _renamed(name: str) -> Callable[[OpSpec, Signature, Mesh, int], LocalCall]:
    def local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
        return LocalCall(name, spec.args, spec.kwargs)

    return local


def _convolution_rows(spec: OpSpec) -> Iterable[Row]:
    biased = len(spec.operands) == 3
    transposed, groups = spec.args[6], spec.args[8]
    yield dims_row([0, None, None][: len(spec.operands)], [0])
    if not transposed and groups == 1:
        yield dims_row([None, 0, 0][: len(spec.operands)], [1])
        if not biased:
            yield Row((Shard(1), Shard(1)), (SUM,))
    if not biased:
        yield linear(spec, 0)
        yield linear(spec, 1)


def _convolution_flops(spec: OpSpec, operands: Shapes, outputs: Shapes) -> float:
    weight = operands[1]
    return 2.0 * math.prod(outputs[0]) * math.prod(weight) / max(1, weight[0])


def _convolution_backward_rows(spec: OpSpec) -> Iterable[Row]:
    mask = spec.args[10]
    assert isinstance(mask, tuple), "bug: the output mask is a list"

    def row(operands: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> Row:
        return Row(operands, tuple(o if kept else WHOLE for o, kept in zip(outputs, mask, strict=True)))

    yield row((Shard(0), Shard(0), Replicate()), (Shard(0), SUM, SUM))
    if not spec.args[7] and spec.args[9] == 1:
        yield row((Shard(1), Replicate(), Shard(0)), (SUM, Shard(0), Shard(0)))
        yield row((Replicate(), Shard(1), Shard(1)), (Shard(1), Shard(1), WHOLE))
    yield row((SUM, Replicate(), Replicate()), (SUM, SUM, SUM))


def _convolution_backward_flops(spec: OpSpec, operands: Shapes, outputs: Shapes) -> float:
    grad, weight = operands[0], operands[2]
    return 4.0 * math.prod(grad) * math.prod(weight) / max(1, weight[0])


def _pool_rows(spec: OpSpec) -> Iterable[Row]:
    ndim = len(shape(spec.outputs[0]))
    for dim in range(ndim - 2):
        yield dims_row([dim] * len(spec.operands), [dim] * len(spec.outputs))
    if "max" not in spec.op:
        yield linear(spec, 0)


def _attention_rows(spec: OpSpec) -> Iterable[Row]:
    """q, k, v (and what backward needs) of (batch, heads, sequence, width); a mask is cut where it is not broadcast."""
    mask = _mask_position(spec)
    heads = {shape(type_)[1] for i, type_ in enumerate(spec.operands) if i != mask and _is_bhsd(type_)}
    for dim in (0, 1):
        if dim == 1 and len(heads) > 1:
            continue
        size = shape(spec.operands[0])[dim]
        operands = [
            (dim if _mask_has(shape(type_), dim, size) else None) if i == mask else dim
            for i, type_ in enumerate(spec.operands)
        ]
        row = _mask_row(operands, spec, mask, dim)
        yield dims_row(row, [dim] * len(spec.outputs))


def _mask_row(operands: list[int | None], spec: OpSpec, mask: int | None, dim: int) -> list[int | None]:
    if mask is None:
        return operands
    missing = 4 - len(shape(spec.operands[mask]))
    own = operands[mask]
    return [*operands[:mask], None if own is None else own - missing, *operands[mask + 1 :]]


def _mask_has(mask: tuple[int, ...], dim: int, size: int) -> bool:
    own = dim - (4 - len(mask))
    return own >= 0 and mask[own] == size and size > 1


def _mask_position(spec: OpSpec) -> int | None:
    found = dict(spec.kwargs).get("attn_mask")
    return found.index if isinstance(found, Operand) else None


def _is_bhsd(type_: object) -> bool:
    return isinstance(type_, TensorType) and type_.ndim == 4


def _attention_flops(spec: OpSpec, operands: Shapes, outputs: Shapes) -> float:
    backward = "backward" in spec.op
    query, key = (operands[1], operands[2]) if backward else (operands[0], operands[1])
    return (10.0 if backward else 4.0) * math.prod(query) * key[2]


RULES = {
    "aten.convolution.default": Rule(_convolution_rows, _renamed("distpar.convolution"), flops=_convolution_flops),
    "aten.convolution_backward.default": Rule(
        _convolution_backward_rows,
        _renamed("distpar.convolution_backward"),
        flops=_convolution_backward_flops,
    ),
    "aten.max_pool2d_with_indices.default": Rule(_pool_rows, _renamed("distpar.max_pool")),
    "aten.max_pool2d_with_indices_backward.default": Rule(_pool_rows, _renamed("distpar.max_pool_backward")),
    "aten.avg_pool2d.default": Rule(_pool_rows, _renamed("distpar.avg_pool")),
    "aten.avg_pool2d_backward.default": Rule(_pool_rows, _renamed("distpar.avg_pool_backward")),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Rule(
        _attention_rows, _renamed("distpar.attention"), flops=_attention_flops
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": Rule(
        _attention_rows, _renamed("distpar.attention_backward"), flops=_attention_flops
    ),
}
