"""From a graph and its plan to the program of every rank.

Node by node in the graph's order. A value is converted as soon as it is made (with overlap) or right before its
first reader; the wait stands before the first reader. What is not read again is freed. Small reductions
that are started with nothing but conversions between them share one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distpar.graph import Graph, Ref, TensorType
from distpar.layout import Layout
from distpar.plans import Plan
from distpar.program import Bucket, Call, Convert, Free, Instruction, Program, ProgramInput, Slot, Wait
from distpar.reshard import AllReduce, MakePartial, ShardToPartial, Slice, after

_FREE = (Slice, MakePartial, ShardToPartial)
_SMALL = 1 << 16
"""Bytes up to which all-reduces of a step share one call: latency, not bandwidth, is what they cost."""


def lower(graph: Graph, plan: Plan, *, overlap: bool = True) -> Program:
    """The program of a plan."""
    return _Lowering(graph, plan, overlap).run()


class _Lowering:
    def __init__(self, graph: Graph, plan: Plan, overlap: bool) -> None:
        self.graph, self.plan, self.overlap = graph, plan, overlap
        self.slots: dict[tuple[Ref, Layout], int] = {}
        self.count = 0
        self.out: list[Instruction] = []
        self.paths = {(c.ref, c.target): c.steps for c in plan.conversions}
        self.targets: dict[Ref, list[Layout]] = {}
        for conversion in plan.conversions:
            self.targets.setdefault(conversion.ref, []).append(conversion.target)

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def run(self) -> Program:
        graph, plan = self.graph, self.plan
        inputs = []
        for node in graph.inputs:
            layout = plan.signatures[node.index].outputs[0]
            slot = self.slots[Ref(node.index), layout] = self.new()
            inputs.append(ProgramInput(node.index, layout, slot))
        # Conversions of inputs wait for their first reader: gathered parameters should not pile up.
        for node in graph.nodes:
            if node.input is not None:
                continue
            signature = plan.signatures[node.index]
            operands = tuple(self.get(ref, layout) for ref, layout in zip(node.refs, signature.operands, strict=True))
            results = tuple(self.new() for _ in node.outputs)
            spec = graph.specs[node.index]
            self.out.append(Call(node.index, spec, signature, operands, results, node.where))
            for output, (slot, layout) in enumerate(zip(results, signature.outputs, strict=True)):
                ref = Ref(node.index, output)
                self.slots[ref, layout] = slot
                if self.overlap:
                    for target in self.targets.get(ref, ()):
                        self.get(ref, target)
        results_ = tuple(
            Slot(self.get(r, layout or self.made(r))) if isinstance(r, Ref) else r
            for r, layout in zip(graph.results, plan.results, strict=True)
        )
        writes = tuple((i, self.get(ref, plan.signatures[i].outputs[0])) for i, ref in graph.writes)
        gradients = tuple(
            (i, self.get(ref, layout), layout) for (i, ref), layout in zip(graph.gradients, plan.gradients, strict=True)
        )
        kept = {r.index for r in results_ if isinstance(r, Slot)}
        kept |= {slot for _, slot in writes} | {slot for _, slot, _ in gradients}
        kept |= {item.slot for item in inputs}
        instructions = tuple(_with_frees(_with_waits(_bucketed(self.out)), kept))
        return Program(plan.mesh, tuple(inputs), instructions, results_, plan.results, writes, gradients, self.count)

    def made(self, ref: Ref) -> Layout:
        return self.plan.layout_of(ref)

    def get(self, ref: Ref, layout: Layout) -> int:
        """The slot of a value in a layout; converted on first demand."""
        if (ref, layout) in self.slots:
            return self.slots[ref, layout]
        type_ = self.graph.type_of(ref)
        assert isinstance(type_, TensorType), f"bug: a number {ref} is never converted"
        before = self.made(ref)
        slot = self.slots[ref, before]
        for step in self.paths[ref, layout]:
            reached = after(step, before)
            if (ref, reached) not in self.slots:
                result = self.new()
                self.out.append(Convert(step, type_, before, reached, slot, result, ref.node))
                self.slots[ref, reached] = result
            slot, before = self.slots[ref, reached], reached
        return slot


def reads(instruction: Instruction) -> tuple[int, ...]:
    """The slots that an instruction reads."""
    match instruction:
        case Call():
            return instruction.operands
        case Convert():
            return (instruction.source,)
        case Bucket(parts):
            return tuple(part.source for part in parts)
        case Wait(slot):
            return (slot,)
        case Free():
            return ()


def results(instruction: Instruction) -> tuple[int, ...]:
    """The slots that an instruction fills."""
    match instruction:
        case Call():
            return instruction.results
        case Convert():
            return (instruction.result,)
        case Bucket(parts):
            return tuple(part.result for part in parts)
        case Wait() | Free():
            return ()


def _bucketed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Small all-reduces of one kind wait for each other until the first of them is read."""
    out: list[Instruction] = []
    open_: dict[object, list[Convert]] = {}

    def close(key: object) -> None:
        parts = open_.pop(key)
        out.append(parts[0] if len(parts) == 1 else Bucket(tuple(parts)))

    for instruction in instructions:
        read = set(reads(instruction))
        for key in [k for k, parts in open_.items() if read & {p.result for p in parts}]:
            close(key)
        if isinstance(instruction, Convert) and _is_small(instruction):
            step = instruction.step
            open_.setdefault((step, instruction.type.dtype), []).append(instruction)
        else:
            out.append(instruction)
    for key in list(open_):
        close(key)
    return out


def _is_small(convert: Convert) -> bool:
    return isinstance(convert.step, AllReduce) and convert.type.num_bytes <= _SMALL


def _with_waits(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """A wait before the first reader of what a collective fills; what is only kept is awaited at the end."""
    pending: set[int] = set()
    for instruction in instructions:
        for slot in dict.fromkeys(reads(instruction)):
            if slot in pending:
                pending.discard(slot)
                yield Wait(slot)
        yield instruction
        match instruction:
            case Convert(step=step) if not isinstance(step, _FREE):
                pending.add(instruction.result)
            case Bucket(parts):
                pending |= {part.result for part in parts}
            case _:
                pass
    for slot in sorted(pending):
        yield Wait(slot)


def _with_frees(instructions: Iterator[Instruction], kept: set[int]) -> Iterator[Instruction]:
    listed = list(instructions)
    last: dict[int, int] = {}
    for place, instruction in enumerate(listed):
        for slot in (*reads(instruction), *results(instruction)):
            last[slot] = place
    dying: dict[int, list[int]] = {}
    for slot, place in last.items():
        if slot not in kept:
            dying.setdefault(place, []).append(slot)
    for place, instruction in enumerate(listed):
        yield instruction
        if place in dying:
            yield Free(tuple(sorted(dying[place])))
