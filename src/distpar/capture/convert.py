"""FX graph -> Graph: clean, torch-free, every node with the user's line.

Dropped: closing copies (they become writes), detach and alias, profiler records, asserts on
sizes, copies to the same dtype, and what nobody reads.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

from distpar.capture.fake import ConstantBinding, FakeInput
from distpar.capture.trace import Trace
from distpar.errors import CaptureError
from distpar.graph import (
    Arg,
    Graph,
    Input,
    InputKind,
    Node,
    NumberType,
    Ref,
    TensorType,
    ValueType,
    Where,
    Word,
    substitute,
)

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip

_SAME = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift.default"}
_COPIES = {"aten._to_copy.default", "aten.to.dtype"}
_DROPPED = ("_assert", "profiler", "sym_constrain", "_record_function")
_ALIASES = {"distpar.uniform.default": "distpar.uniform"}


class _Converter:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        self.env: dict[torch.fx.Node, Arg] = {}
        self.parts: dict[torch.fx.Node, int] = {}
        self.bindings: list[Any] = []
        self.writes: dict[int, Ref] = {}
        self.seed: Arg = None

    def run(self) -> tuple[Graph, tuple[Any, ...]]:
        fx = self.trace.module.graph
        placeholders = [node for node in fx.nodes if node.op == "placeholder"]
        for node, item in zip(placeholders, self.trace.inputs, strict=True):
            self.env[node] = self.add_input(item)
        self.seed = self.env[placeholders[-1]]
        results: list[Any] = []
        for node in fx.nodes:
            if node.op == "get_attr":
                self.env[node] = self.add_constant(node)
            elif node.op == "call_function":
                self.call(node)
            elif node.op == "output":
                results = list(node.args[0])
        leaves, gradients = results[: self.trace.num_results], results[self.trace.num_results :]
        return self.finish(leaves, gradients)

    def add_input(self, item: FakeInput) -> Ref:
        number = item.kind is InputKind.NUMBER
        type_: ValueType = NumberType("float") if number else tensor_type(item.fake)
        index = len(self.nodes)
        self.nodes.append(Node(index, item.name, "input", (), (), (type_,), input=Input(item.name, item.kind)))
        self.bindings.append(item.binding)
        return Ref(index)

    def add_constant(self, node: torch.fx.Node) -> Ref:
        value = getattr(self.trace.module, str(node.target))
        fake = FakeInput(node.name, InputKind.CONSTANT, ConstantBinding(value), value)
        return self.add_input(fake)

    def call(self, node: torch.fx.Node) -> None:
        op = op_name(node.target)
        if any(part in op for part in _DROPPED):
            return
        if op == "operator.getitem" and node.args[0] in self.parts:
            source = self.env[node.args[0]]  # type: ignore[index]
            assert isinstance(source, Ref), "bug: getitem of a constant"
            self.env[node] = Ref(source.node, int(node.args[1]))  # type: ignore[arg-type]
            return
        if op == "aten.copy_.default":
            self.write(node)
            return
        args = self.arg(node.args)
        kwargs = tuple((key, self.arg(value)) for key, value in node.kwargs.items() if key not in _DEVICE)
        assert isinstance(args, tuple), "bug: args are a tuple"
        if op == "aten._local_scalar_dense.default" and self.is_number(args[0]):
            self.env[node] = args[0]
            return
        if op in _SAME or (op in _COPIES and self.keeps(node)):
            self.env[node] = args[0]
            return
        outputs, many = value_types(node, self)
        if op in _COPIES or op == "aten.clone.default":
            kwargs = tuple((k, v) for k, v in kwargs if k not in ("memory_format", "layout"))
        if op == "distpar.uniform":
            args = (self.seed, *args)
        index = len(self.nodes)
        self.nodes.append(Node(index, node.name, op, args, kwargs, outputs, where_of(node)))
        self.env[node] = Ref(index)
        if many:
            self.parts[node] = len(outputs)

    def is_number(self, arg: Arg) -> bool:
        return isinstance(arg, Ref) and isinstance(self.nodes[arg.node].outputs[arg.output], NumberType)

    def keeps(self, node: torch.fx.Node) -> bool:
        return tensor_type(node.meta["val"]) == tensor_type(node.args[0].meta["val"])  # type: ignore[union-attr]

    def write(self, node: torch.fx.Node) -> None:
        target, value = self.env[node.args[0]], self.env[node.args[1]]  # type: ignore[index]
        assert isinstance(target, Ref) and isinstance(value, Ref), "bug: a write of a constant"
        if self.nodes[target.node].input is None:
            raise CaptureError(
                "a write into a view of an input is left over",
                where=where_of(node).line,
                why="the in-place write could not be turned into a value",
                fix="write the whole tensor, or use an out-of-place op",
            )
        self.writes[target.node] = value
        self.env[node] = value

    def arg(self, value: Any) -> Arg:
        match value:
            case torch.fx.Node():
                return self.env[value]
            case list() | tuple():
                return tuple(self.arg(item) for item in value)
            case torch.dtype() | torch.memory_format() | torch.layout():
                return Word(str(value))
            case torch.device() | None:
                return None
            case bool() | int() | float() | complex() | str():
                return value
            case _:
                raise CaptureError(
                    f"an argument of kind {type(value).__name__} cannot be captured",
                    why="a graph holds tensors, numbers, strings, dtypes and nestings of them",
                    fix="pass it to the step in another form",
                )

    def finish(self, leaves: list[Any], gradients: list[Any]) -> tuple[Graph, tuple[Any, ...]]:
        parameters = [i for i, node in enumerate(self.nodes) if node.input and node.input.kind is InputKind.PARAMETER]
        pairs = [
            (index, self.arg(value)) for index, value in zip(parameters, gradients, strict=True) if value is not None
        ]
        kept = {i for i, ref in self.writes.items() if ref != Ref(i)}
        graph = Graph(
            tuple(self.nodes),
            tuple(self.arg(leaf) for leaf in leaves),
            tuple((i, self.writes[i]) for i in sorted(kept)),
            tuple((i, ref) for i, ref in pairs if isinstance(ref, Ref)),
        )
        return _renumbered(graph, tuple(self.bindings))


_DEVICE = ("device", "pin_memory")


def convert(trace: Trace) -> tuple[Graph, tuple[Any, ...]]:
    """The graph of a trace and the binding of each of its inputs, in order."""
    return _Converter(trace).run()


def _renumbered(graph: Graph, bindings: tuple[Any, ...]) -> tuple[Graph, tuple[Any, ...]]:
    """Inputs first, dead nodes dropped; every input of the user's stays, read or not."""
    live: set[int] = set()
    roots = [r for r in graph.results if isinstance(r, Ref)]
    roots += [ref for _, ref in graph.writes] + [ref for _, ref in graph.gradients]
    todo = [ref.node for ref in roots]
    while todo:
        index = todo.pop()
        if index not in live:
            live.add(index)
            todo += [ref.node for ref in graph.nodes[index].refs]
    inputs = [node for node in graph.nodes if node.input is not None]
    order = inputs + [n for n in graph.nodes if n.input is None and n.index in live]
    new = {node.index: index for index, node in enumerate(order)}

    def moved(ref: Ref) -> Ref:
        return Ref(new[ref.node], ref.output)

    nodes = []
    for node in order:
        args = substitute(node.args, moved)
        kwargs = tuple((key, substitute(value, moved)) for key, value in node.kwargs)
        assert isinstance(args, tuple), "bug: args are a tuple"
        nodes.append(Node(new[node.index], node.name, node.op, args, kwargs, node.outputs, node.where, node.input))
    return (
        Graph(
            tuple(nodes),
            tuple(substitute(result, moved) for result in graph.results),
            tuple((new[i], moved(ref)) for i, ref in graph.writes),
            tuple((new[i], moved(ref)) for i, ref in graph.gradients),
        ),
        bindings,
    )


def tensor_type(value: Any) -> TensorType:
    """The dtype and global shape of a tensor.

    Raises:
        CaptureError: its shape depends on values, or its dtype has no name here.
    """
    if value.dtype not in DTYPES:
        raise CaptureError(
            f"a tensor of dtype {value.dtype} cannot be captured",
            why=f"known dtypes are {', '.join(DTYPES.values())}",
            fix="convert it to one of these before the step",
        )
    return TensorType(DTYPES[value.dtype], tuple(int(size) for size in value.shape))


def value_types(node: torch.fx.Node, converter: _Converter) -> tuple[tuple[ValueType, ...], bool]:
    """The types of a call's outputs, and whether there are several."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return tuple(_value_type(item, node) for item in value), True
    return (_value_type(value, node),), False


def _value_type(value: Any, node: torch.fx.Node) -> ValueType:
    if isinstance(value, torch.Tensor):
        if any(not isinstance(size, int) for size in value.shape):
            raise CaptureError(
                f"cannot run {op_name(node.target)!r} in any layout",
                where=where_of(node).line,
                why="its output's size depends on the values, so no plan can place it",
                fix="use torch.where(mask, x, 0), or keep this function outside of the step",
            )
        return tensor_type(value)
    if value is None:
        return TensorType("f32", (0,))
    if isinstance(value, (bool, torch.SymBool)):
        return NumberType("bool")
    return NumberType("int" if isinstance(value, (int, torch.SymInt)) else "float")


def op_name(target: Any) -> str:
    """`torch.ops.aten.mm.default` -> "aten.mm.default"; `operator.mul` -> "operator.mul"."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return _ALIASES.get(name, name)
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    if module == "_operator" or module == "operator":
        return f"operator.{name}"
    if target is operator.getitem:
        return "operator.getitem"
    return f"{module}.{name}"


def where_of(node: torch.fx.Node) -> Where:
    """The module, the user's line and the phase of a node."""
    line = _line(node.meta.get("stack_trace") or "")
    marks = node.meta.get("custom") or {}
    return Where(marks.get("module", ""), line, marks.get("phase") or "forward")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _line(stack: str) -> str:
    frames = _FRAME.findall(stack)
    mine = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0] and "/distpar/" not in f[0]]
    for path, number in reversed(mine or frames):
        if "/torch/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{number}"
    return ""
