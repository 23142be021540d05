"""The captured step: one flat, functional graph of values, without torch.

A graph is a list of nodes in the order of execution. A node is an *input* (a parameter, a buffer, an
optimizer state, data, a number, a seed) or a call of one op. Ops are named as torch names them
("aten.mm.default"); arguments are plain Python values in which a `Ref` stands for another node's output.
Nothing is written in place: what the step writes is listed in `writes` and stored back at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

ITEM_SIZE = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1,
    "u8": 1, "bool": 1, "c64": 8, "c128": 16, "f8e4m3": 1, "f8e5m2": 1, "u16": 2, "u32": 4, "u64": 8,
}  # fmt: skip
"""Bytes of one element of each dtype that a graph can hold."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and global shape of a tensor value: `f32[8, 128]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class NumberType:
    """A Python number that is known only when the step runs (a learning rate, a step counter)."""

    kind: str
    """"float", "int" or "bool"."""

    def __str__(self) -> str:
        return self.kind


ValueType = TensorType | NumberType


@dataclass(frozen=True, slots=True)
class Ref:
    """Output number `output` of node number `node`."""

    node: int
    output: int = 0

    def __str__(self) -> str:
        return f"%{self.node}" if self.output == 0 else f"%{self.node}.{self.output}"


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for the i-th tensor or number operand in the arguments of an `OpSpec`."""

    index: int


@dataclass(frozen=True, slots=True)
class Word:
    """A torch constant in the arguments: a dtype ("torch.float32"), a memory format, a layout."""

    text: str


Constant = None | bool | int | float | complex | str | Word
Arg = Constant | Ref | Operand | tuple["Arg", ...]


class InputKind(StrEnum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "state"
    DATA = "data"
    NUMBER = "number"
    SEED = "seed"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Input:
    """What an input node is: its name as the user would write it (`model.head.weight`) and its kind."""

    name: str
    kind: InputKind


@dataclass(frozen=True, slots=True)
class Where:
    """Where a node comes from: the module path, the user's file and line, and the phase of the step."""

    module: str = ""
    line: str = ""
    phase: str = "forward"
    """"forward", "backward", "optimizer" (everything under an optimizer's step) or "other"."""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.line, self.module) if part)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """A call of an op without its surroundings: hashable, so that equal calls are treated once.

    `args` and `kwargs` hold `Operand(i)` where the i-th entry of `operands` goes (in the order in which
    they occur, args first; the same value used twice is two operands). Shapes are global.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One input or one call. `op` is "input" for an input, whose details are in `input`."""

    index: int
    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[ValueType, ...]
    where: Where = field(default_factory=Where)
    input: Input | None = None

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The operands, in the order in which they occur in args and then kwargs."""
        return tuple(_walk((self.args, tuple(value for _, value in self.kwargs))))


@dataclass(frozen=True)
class Graph:
    """A whole step. Frozen; nodes in the order of execution, `nodes[i].index == i`.

    Attributes:
        nodes: inputs first, then calls.
        results: the flat leaves of what the user's function returns, in order; a constant stands for itself.
        writes: (input node, value) pairs: the value is stored back into the input at the end of the step.
        gradients: (parameter's input node, value): what `.grad` holds after the step, for those that have one.
    """

    nodes: tuple[Node, ...]
    results: tuple[Arg, ...]
    writes: tuple[tuple[int, Ref], ...]
    gradients: tuple[tuple[int, Ref], ...] = ()

    @cached_property
    def specs(self) -> tuple[OpSpec, ...]:
        """The `OpSpec` of every node, by index."""
        return tuple(self._spec(node) for node in self.nodes)

    @cached_property
    def users(self) -> dict[Ref, tuple[tuple[int, int], ...]]:
        """For each value the (node, operand number) pairs that read it."""
        found: dict[Ref, list[tuple[int, int]]] = {}
        for node in self.nodes:
            for position, ref in enumerate(node.refs):
                found.setdefault(ref, []).append((node.index, position))
        return {ref: tuple(users) for ref, users in found.items()}

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.input is not None)

    def type_of(self, ref: Ref) -> ValueType:
        return self.nodes[ref.node].outputs[ref.output]

    def _spec(self, node: Node) -> OpSpec:
        count = iter(range(len(node.refs)))

        def number(_: Ref) -> Operand:
            return Operand(next(count))

        args = substitute(node.args, number)
        kwargs = tuple((key, substitute(value, number)) for key, value in node.kwargs)
        assert isinstance(args, tuple), "bug: args are a tuple"
        return OpSpec(node.op, args, kwargs, tuple(self.type_of(ref) for ref in node.refs), node.outputs)

    def __str__(self) -> str:
        lines = []
        for node in self.nodes:
            outputs = ", ".join(map(str, node.outputs))
            what = node.input.kind.value if node.input else node.op.removeprefix("aten.")
            inputs = " ".join(map(str, node.refs))
            lines.append(f"%{node.index:<6}{outputs:<28}{what} {inputs}  {node.name}".rstrip())
        return "\n".join(lines)


def substitute(arg: Arg, replace_ref: Callable[[Ref], Arg]) -> Arg:
    """The same nested argument with every `Ref` replaced, in order of occurrence."""
    match arg:
        case Ref():
            return replace_ref(arg)
        case tuple():
            return tuple(substitute(item, replace_ref) for item in arg)
        case _:
            return arg


def fill(arg: Arg, operands: tuple[object, ...]) -> object:
    """The same nested argument with `Operand(i)` replaced by `operands[i]`."""
    match arg:
        case Operand(index):
            return operands[index]
        case tuple():
            return tuple(fill(item, operands) for item in arg)
        case _:
            return arg


def _walk(arg: Arg) -> Iterator[Ref]:
    match arg:
        case Ref():
            yield arg
        case tuple():
            for item in arg:
                yield from _walk(item)
        case _:
            return
