"""Ops that make a tensor from nothing: any cut, with the block's own shape and offset."""

from __future__ import annotations

from collections.abc import Iterable

from distpar.graph import OpSpec, Word
from distpar.layout import Shard, box, local_shape
from distpar.mesh import Mesh
from distpar.rules.rule import SUM, Rule, replicated, shape, tensor
from distpar.rules.spec import LocalCall, Row, Signature

_TORCH = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def _rows(spec: OpSpec) -> Iterable[Row]:
    whole = replicated(spec)
    for dim, size in enumerate(shape(spec.outputs[0])):
        if size > 1:
            yield Row(whole.operands, (Shard(dim),))
    if "zeros" in spec.op:
        yield Row(whole.operands, (SUM,))


def _shaped(position: int) -> Rule:
    """The shape is the argument at this position."""

    def local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
        own = local_shape(signature.outputs[0], shape(spec.outputs[0]), mesh, rank)
        args = (*spec.args[:position], own, *spec.args[position + 1 :])
        return LocalCall(spec.op, args, spec.kwargs)

    return Rule(_rows, local)


def _arange_local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    first, step = 0, 1
    if spec.op != "aten.arange.default":
        first = spec.args[0]  # type: ignore[assignment]
    if spec.op == "aten.arange.start_step" and len(spec.args) > 2:
        step = spec.args[2]  # type: ignore[assignment]
    out = tensor(spec.outputs[0])
    ((start, stop),) = box(signature.outputs[0], out.shape, mesh, rank)
    # Counted from the block's own offset; the count is kept exact by giving the end as start + n steps.
    args = (first + start * step, first + stop * step, step)
    return LocalCall("aten.arange.start_step", args, (("dtype", Word(f"torch.{_TORCH[out.dtype]}")),))


def _uniform_local(spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> LocalCall:
    own = box(signature.outputs[0], shape(spec.outputs[0]), mesh, rank)
    seed, number, whole, dtype = spec.args
    return LocalCall("distpar.uniform_block", (seed, number, whole, own, dtype))


RULES = {
    "aten.zeros.default": _shaped(0),
    "aten.ones.default": _shaped(0),
    "aten.empty.memory_format": _shaped(0),
    "aten.full.default": _shaped(0),
    "aten.new_zeros.default": _shaped(1),
    "aten.new_ones.default": _shaped(1),
    "aten.new_empty.default": _shaped(1),
    "aten.scalar_tensor.default": Rule(_rows),
    "aten.arange.default": Rule(_rows, _arange_local),
    "aten.arange.start": Rule(_rows, _arange_local),
    "aten.arange.start_step": Rule(_rows, _arange_local),
    "distpar.uniform": Rule(_rows, _uniform_local),
}
