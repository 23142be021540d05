"""What the families build on: a rule, and the rows that follow from saying which dims go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distpar.graph import NumberType, Operand, OpSpec, TensorType, ValueType
from distpar.layout import Layout, Partial, Placement, Reduction, Replicate, Shard
from distpar.mesh import Mesh
from distpar.rules.spec import LocalCall, Row, Signature

Shapes = tuple[tuple[int, ...], ...]
SUM, MAX, MIN, PROD = (
    Partial(Reduction.SUM), Partial(Reduction.MAX), Partial(Reduction.MIN), Partial(Reduction.PROD),
)  # fmt: skip
WHOLE = Replicate()


@dataclass(frozen=True, slots=True)
class Rule:
    """What one op can do.

    Attributes:
        rows: its one-axis rows, without the all-Replicate one, which every op has.
        local: how a rank calls it, when that is not simply the op on its blocks.
        legal: whether a signature's blocks line up; None: always.
        free: it moves nothing (a view).
        flops: of a call, from local operand and output shapes; None: bound by memory.
        whole: why it has no rows, when it has none.
    """

    rows: Callable[[OpSpec], Iterable[Row]]
    local: Callable[[OpSpec, Signature, Mesh, int], LocalCall] | None = None
    legal: Callable[[OpSpec, Signature, Mesh], bool] | None = None
    free: bool = False
    flops: Callable[[OpSpec, Shapes, Shapes], float] | None = None
    whole: str = ""


def dims_row(operands: Sequence[int | None], outputs: Sequence[int | None]) -> Row:
    """The row that cuts the given dim of each value; None replicates it."""
    return Row(tuple(map(_at, operands)), tuple(map(_at, outputs)))


def _at(dim: int | None) -> Placement:
    return WHOLE if dim is None else Shard(dim)


def linear(spec: OpSpec, *positions: int, outputs: Sequence[bool] | None = None) -> Row:
    """Partial(sum) in the given operands goes through to the outputs."""
    operands = tuple(SUM if i in positions else WHOLE for i in range(len(spec.operands)))
    marks = outputs or [True] * len(spec.outputs)
    return Row(operands, tuple(SUM if mark else WHOLE for mark in marks))


def moved(spec: OpSpec) -> list[Row]:
    """A pure movement of data lets every Partial through, if all tensor operands have it."""
    tensors = [isinstance(type_, TensorType) for type_ in spec.operands]
    return [
        Row(
            tuple(partial if is_tensor else WHOLE for is_tensor in tensors),
            (partial,) * len(spec.outputs),
        )
        for partial in (SUM, MAX, MIN)
        # Truth values have no sum.
        if any(tensors) and (partial is not SUM or tensor(spec.outputs[0]).dtype != "bool")
    ]


def tensor(type_: ValueType) -> TensorType:
    assert isinstance(type_, TensorType), f"bug: {type_} is not a tensor"
    return type_


def shape(type_: ValueType) -> tuple[int, ...]:
    return () if isinstance(type_, NumberType) else type_.shape


def argument(spec: OpSpec, position: int, name: str = "", default: object = None) -> object:
    """A constant argument by position or by keyword."""
    if position < len(spec.args):
        return spec.args[position]
    return dict(spec.kwargs).get(name, default)


def numbers(arg: object, ndim: int) -> tuple[int, ...]:
    """A dims argument as non-negative numbers; none or empty means all."""
    if isinstance(arg, int):
        arg = (arg,)
    if not arg:
        return tuple(range(ndim))
    assert isinstance(arg, tuple), f"bug: {arg} is not a list of dims"
    return tuple(int(dim) % max(1, ndim) for dim in arg if isinstance(dim, int))


def plain(spec: OpSpec) -> LocalCall:
    return LocalCall(spec.op, spec.args, spec.kwargs)


def replaced(spec: OpSpec, position: int, value: object) -> LocalCall:
    """The plain call with one positional argument replaced."""
    args = (*spec.args[:position], value, *spec.args[position + 1 :])
    return LocalCall(spec.op, args, spec.kwargs)  # type: ignore[arg-type]


def operand_count(spec: OpSpec) -> int:
    return len(spec.operands)


def position_of(spec: OpSpec, arg_position: int) -> int | None:
    """The operand number of a positional argument, or None for a constant."""
    if arg_position < len(spec.args):
        arg = spec.args[arg_position]
        return arg.index if isinstance(arg, Operand) else None
    return None


def replicated(spec: OpSpec) -> Row:
    return Row((WHOLE,) * len(spec.operands), (WHOLE,) * len(spec.outputs))


def layout_cut(layout: Layout, dim: int) -> bool:
    return bool(layout.dims[dim])
