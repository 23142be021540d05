"""One rank's program as an FX graph module: straight-line code, collectives started early and awaited late.

The generated code drops each value after its last use. Where an op's first operand dies with the op and nothing
else looks at its memory, the op runs in place: parameters and optimizer state are then updated where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distpar import rules
from distpar.graph import Operand, TensorType, fill
from distpar.lower import reads, results
from distpar.program import Bucket, Call, Convert, Free, Instruction, Program, Slot, Wait
from distpar.reshard import AllReduce
from distpar.runtime.kernels import materialize, resolve
from distpar.runtime.moves import Move, prepare

Groups = Mapping[tuple[str, ...], str]
"""Axes (in mesh order) -> name of the process group of this rank's peers along them."""

_REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "prod": "product"}


class Executor:
    """The program of one rank, ready to run: `executor(inputs)` with local tensors and numbers."""

    def __init__(self, program: Program, rank: int, groups: Groups, *, donate: bool = True) -> None:
        self.program = program
        builder = _Builder(program, rank, groups, donate)
        self.module = builder.module()
        self.forward: Callable[..., Any] = self.module.forward

    def compile(self) -> None:
        """Run the module through torch.compile from now on."""
        self.forward = torch.compile(self.module)

    def __call__(self, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
        """Results (local), writes and gradients by input node."""
        program = self.program
        with torch.no_grad():
            out = self.forward(*inputs)
        first, second = len(program.results), len(program.results) + len(program.writes)
        writes = {node: value for (node, _), value in zip(program.writes, out[first:second], strict=True)}
        gradients = {node: value for (node, _, _), value in zip(program.gradients, out[second:], strict=True)}
        return list(out[:first]), writes, gradients


class _Builder:
    def __init__(self, program: Program, rank: int, groups: Groups, donate: bool) -> None:
        self.program, self.rank, self.groups = program, rank, groups
        self.graph = torch.fx.Graph()
        self.values: dict[int, Any] = {}
        self.pending: dict[int, Callable[[], torch.fx.Node]] = {}
        self.donors = _donors(program) if donate else set()

    def module(self) -> torch.fx.GraphModule:
        program = self.program
        for item in program.inputs:
            self.values[item.slot] = self.graph.placeholder(f"input_{item.slot}")
        for instruction in program.instructions:
            match instruction:
                case Call():
                    self.call(instruction)
                case Convert():
                    self.convert(instruction)
                case Bucket():
                    self.bucket(instruction)
                case Wait(slot):
                    self.values[slot] = self.pending.pop(slot)()
                case Free():
                    pass
        outputs: list[Any] = [self.values[r.index] if isinstance(r, Slot) else r for r in program.results]
        outputs += [self.values[slot] for _, slot in program.writes]
        outputs += [self.values[slot] for _, slot, _ in program.gradients]
        self.graph.output(tuple(outputs))
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def call(self, call: Call) -> None:
        local = rules.localize(call.spec, call.signature, self.program.mesh, self.rank)
        operands = tuple(self.values[slot] for slot in call.operands)
        args = tuple(materialize(fill(arg, operands)) for arg in local.args)
        kwargs = {key: materialize(fill(value, operands)) for key, value in local.kwargs}
        function = resolve(local.op)
        if id(call) in self.donors and local.args[:1] == (Operand(0),):
            function = _in_place(local.op) or function
        node = self.graph.call_function(_callable(function), args, kwargs)
        if isinstance(call.spec.outputs, tuple) and len(call.results) > 1:
            for output, slot in enumerate(call.results):
                self.values[slot] = self.graph.call_function(_getitem, (node, output))
        elif call.spec.op in _LISTS:
            self.values[call.results[0]] = self.graph.call_function(_getitem, (node, 0))
        else:
            self.values[call.results[0]] = node

    def convert(self, convert: Convert) -> None:
        move = self.move(convert)
        source = self.values[convert.source]
        if not move.collective:
            self.values[convert.result] = self.graph.call_function(_named(move.local, "local"), (source,))
            return
        started = self.graph.call_function(
            _named(_starter(move, self.group(move)), f"start_{move.collective}"), (source,)
        )

        def finish() -> torch.fx.Node:
            return self.graph.call_function(_named(_finisher(move), f"finish_{move.collective}"), (started,))

        self.pending[convert.result] = finish

    def bucket(self, bucket: Bucket) -> None:
        moves = [self.move(part) for part in bucket.parts]
        sources = tuple(self.values[part.source] for part in bucket.parts)
        start = _named(_bucket_starter(moves[0], self.group(moves[0])), "start_bucket")
        started = self.graph.call_function(start, sources)
        waited: list[torch.fx.Node] = []
        offset = 0

        def finisher(first: int, move: Move) -> Callable[[], torch.fx.Node]:
            def finish() -> torch.fx.Node:
                if not waited:
                    waited.append(self.graph.call_function(_named(_wait, "finish_bucket"), (started,)))
                return self.graph.call_function(_part, (waited[0], first, move.shape))

            return finish

        for part, move in zip(bucket.parts, moves, strict=True):
            self.pending[part.result] = finisher(offset, move)
            offset += torch.Size(move.shape).numel()

    def move(self, convert: Convert) -> Move:
        return prepare(convert.step, convert.type, convert.before, convert.after, self.program.mesh, self.rank)

    def group(self, move: Move) -> str:
        return self.groups[move.axes]


_LISTS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int")


def _getitem(values: Any, index: int) -> Any:
    return values[index]


def _part(flat: torch.Tensor, first: int, shape: tuple[int, ...]) -> torch.Tensor:
    return flat.narrow(0, first, torch.Size(shape).numel()).reshape(shape)


def _wait(pending: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return done


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """FX needs a name and a module to write a call down."""
    if isinstance(function, torch._ops.OpOverload) or hasattr(function, "__name__"):
        return function
    return _named(function, "kernel")


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    run.__module__ = __name__
    return run


def _starter(move: Move, group: str) -> Callable[[torch.Tensor], torch.Tensor]:
    ops = torch.ops._c10d_functional
    match move.collective:
        case "all_reduce":
            assert isinstance(move.step, AllReduce), "bug: only AllReduce reduces"
            reduction = _REDUCTIONS[move.step.reduction.value]
            return lambda local: ops.all_reduce(move.pack(local), reduction, group)
        case "all_gather":
            return lambda local: ops.all_gather_into_tensor(move.pack(local), len(move.peers), group)
        case _:
            sends, receives = list(move.send_sizes), list(move.receive_sizes)
            return lambda local: ops.all_to_all_single(move.pack(local), receives, sends, group)


def _bucket_starter(move: Move, group: str) -> Callable[..., torch.Tensor]:
    assert isinstance(move.step, AllReduce), "bug: only all-reduces share a call"
    reduction = _REDUCTIONS[move.step.reduction.value]

    def start(*locals_: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([local.reshape(-1) for local in locals_])
        started: torch.Tensor = torch.ops._c10d_functional.all_reduce(flat, reduction, group)
        return started

    return start


def _finisher(move: Move) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda pending: move.unpack(_wait(pending))


def _in_place(op: str) -> Callable[..., Any] | None:
    """ "aten.add.Tensor" -> add_.Tensor, where it exists."""
    space, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    if space != "aten" or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    return getattr(packet, overload, None) if packet is not None else None


_ELEMENTWISE = frozenset(rules.pointwise.RULES) - {
    f"aten.{name}.{overload}"
    for name in ("where", "clone", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like", "copy")
    for overload in ("default", "self", "Tensor", "ScalarSelf", "ScalarOther", "Scalar")
}


def _donors(program: Program) -> set[int]:
    """The calls (by id) that may run in place: their first operand's memory is read by nobody afterwards."""
    last: dict[int, int] = {}
    base: dict[int, int] = {}
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        for slot in reads(instruction):
            last[slot] = place
        if _may_alias(instruction):
            for result in results(instruction):
                for slot in reads(instruction)[:1]:
                    base[result] = base.get(slot, slot)
    written = {node for node, _ in program.writes}
    end = len(program.instructions)
    kept = {r.index for r in program.results if isinstance(r, Slot)}
    kept |= {slot for _, slot in program.writes} | {slot for _, slot, _ in program.gradients}
    kept |= {item.slot for item in program.inputs if item.node not in written}
    family_last: dict[int, int] = {}
    for slot in {*last, *kept, *base}:
        root = base.get(slot, slot)
        until = end if slot in kept else last.get(slot, -1)
        family_last[root] = max(family_last.get(root, -1), until)
    found = set()
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Call) and _may_donate(instruction):
            slot = instruction.operands[0]
            root = base.get(slot, slot)
            alone = instruction.operands.count(slot) == 1
            if root == slot and alone and family_last[root] == place and root not in base:
                found.add(id(instruction))
                # The result now lies in the donor's memory; nobody else reads that any more.
    return found


def _may_alias(instruction: Instruction) -> bool:
    """Whether what an instruction gives may lie in the memory of the first thing that it reads."""
    match instruction:
        case Call(spec=spec):
            copies = spec.op in _ELEMENTWISE or spec.op.startswith("aten.clone")
            known = copies or (rules.is_supported(spec.op) and not rules.is_view(spec))
            return not known or spec.op.startswith("aten._to_copy")
        case Convert() | Bucket():
            return True
        case Wait() | Free():
            return False


def _may_donate(call: Call) -> bool:
    spec, signature = call.spec, call.signature
    first = spec.operands[0] if spec.operands else None
    return (
        spec.op in _ELEMENTWISE
        and spec.args[:1] == (Operand(0),)
        and isinstance(first, TensorType)
        and first == spec.outputs[0]
        and signature.operands[0].dims == signature.outputs[0].dims
    )
