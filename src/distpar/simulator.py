"""All ranks in this one process, in lockstep, for real: the same blocks, kernels and steps as on a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distpar import rules
from distpar.graph import OpSpec, TensorType, fill
from distpar.layout import Layout, Reduction, box
from distpar.mesh import Mesh
from distpar.program import Bucket, Call, Convert, Free, Instruction, Program, Slot, Wait
from distpar.rules.spec import Signature
from distpar.runtime.kernels import materialize, resolve
from distpar.runtime.moves import Move, prepare, reduce_in_order, simulate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated step gives: whole tensors; writes and gradients by input node.

    `replica_difference` is the largest difference between ranks that should hold the same.
    """

    results: list[Any]
    writes: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]
    replica_difference: float


Watch = Callable[[int, int, torch.Tensor], None]
"""Called with (node, output, whole tensor) after every call."""


class BoundCall:
    """One call of one rank, resolved once: `run(operands)` gives the outputs."""

    def __init__(self, spec: OpSpec, signature: Signature, mesh: Mesh, rank: int) -> None:
        call = rules.localize(spec, signature, mesh, rank)
        self.function = resolve(call.op)
        self.args = call.args
        self.kwargs = call.kwargs

    def run(self, operands: tuple[Any, ...]) -> list[Any]:
        args = [materialize(fill(arg, operands)) for arg in self.args]
        kwargs = {key: materialize(fill(value, operands)) for key, value in self.kwargs}
        out = self.function(*args, **kwargs)
        return list(out) if isinstance(out, (tuple, list)) else [out]


class Simulator:
    """A program prepared for all ranks; `run` may be called many times."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = range(program.mesh.num_ranks)
        self.bound: dict[int, list[BoundCall]] = {}
        self.moves: dict[int, list[Move]] = {}
        for instruction in program.instructions:
            self._prepare(instruction)

    def _prepare(self, instruction: Instruction) -> None:
        mesh = self.program.mesh
        match instruction:
            case Call(spec=spec, signature=signature):
                self.bound[id(instruction)] = [BoundCall(spec, signature, mesh, r) for r in self.ranks]
            case Convert(step=step, type=type_, before=before, after=after):
                self.moves[id(instruction)] = [prepare(step, type_, before, after, mesh, rank) for rank in self.ranks]
            case Bucket(parts):
                for part in parts:
                    self._prepare(part)
            case Wait() | Free():
                pass

    def run(self, inputs: Sequence[Any], *, watch: Watch | None = None) -> Outcome:
        """Run one step.

        Args:
            inputs: whole tensors and numbers, in the order of the program's inputs.
        """
        program, mesh = self.program, self.program.mesh
        slots: dict[int, list[Any]] = {}
        for item, value in zip(program.inputs, inputs, strict=True):
            slots[item.slot] = split(value, item.layout, mesh)
        with torch.no_grad():
            for instruction in program.instructions:
                self._step(instruction, slots, watch)
        worst = 0.0

        def whole(slot: int, layout: Layout | None) -> Any:
            nonlocal worst
            blocks = slots[slot]
            if layout is None or not isinstance(blocks[0], torch.Tensor):
                return blocks[0]
            value, difference = assemble(blocks, layout, mesh)
            worst = max(worst, difference)
            return value

        layouts = {item.node: item.layout for item in program.inputs}
        return Outcome(
            [
                whole(r.index, layout) if isinstance(r, Slot) else r
                for r, layout in zip(program.results, program.result_layouts, strict=True)
            ],
            {node: whole(slot, layouts[node]) for node, slot in program.writes},
            {node: whole(slot, layout) for node, slot, layout in program.gradients},
            worst,
        )

    def _step(self, instruction: Instruction, slots: dict[int, list[Any]], watch: Watch | None) -> None:
        match instruction:
            case Call(operands=operands, results=results):
                outs = [
                    self.bound[id(instruction)][rank].run(tuple(slots[s][rank] for s in operands))
                    for rank in self.ranks
                ]
                for output, slot in enumerate(results):
                    slots[slot] = [out[output] for out in outs]
                if watch is not None:
                    self._watch(instruction, slots, watch)
            case Convert(step, type_, before, after, source, result, _):
                slots[result] = simulate(
                    step, type_, before, after, self.program.mesh, self.moves[id(instruction)], slots[source]
                )
            case Bucket(parts):
                for part in parts:
                    self._step(part, slots, None)
            case Free(freed):
                for slot in freed:
                    del slots[slot]
            case Wait():
                pass

    def _watch(self, call: Call, slots: dict[int, list[Any]], watch: Watch) -> None:
        outputs = zip(call.spec.outputs, call.signature.outputs, call.results, strict=True)
        for output, (type_, layout, slot) in enumerate(outputs):
            if isinstance(type_, TensorType) and slots[slot][0] is not None:
                watch(call.node, output, assemble(slots[slot], layout, self.program.mesh)[0])


def split(value: Any, layout: Layout, mesh: Mesh) -> list[Any]:
    """Every rank's block of a whole tensor (layouts of inputs are never Partial); a number is everybody's."""
    if not isinstance(value, torch.Tensor):
        return [value] * mesh.num_ranks
    out = []
    for rank in range(mesh.num_ranks):
        block = value.detach()
        for dim, (start, stop) in enumerate(box(layout, tuple(value.shape), mesh, rank)):
            block = block.narrow(dim, start, stop - start) if stop - start != block.shape[dim] else block
        out.append(block.clone())
    return out


def assemble(blocks: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> tuple[torch.Tensor, float]:
    """The whole tensor from every rank's block, and the largest difference between replicas."""
    if layout.partial:
        done = layout.without(*layout.partial)
        assert isinstance(layout.reduction, Reduction), "bug: half a Partial"
        blocks = [
            reduce_in_order([blocks[peer] for peer in mesh.peers(rank, layout.partial)], layout.reduction)
            for rank in range(mesh.num_ranks)
        ]
        layout = done
    shape = _global_shape(blocks, layout, mesh)
    whole = blocks[0].new_zeros(shape)
    filled = torch.zeros(shape, dtype=torch.bool)
    worst = 0.0
    for rank, block in enumerate(blocks):
        region, marks = whole, filled
        for dim, (start, stop) in enumerate(box(layout, shape, mesh, rank)):
            region, marks = region.narrow(dim, start, stop - start), marks.narrow(dim, start, stop - start)
        assert region.shape == block.shape, f"bug: rank {rank} holds {tuple(block.shape)}, not {tuple(region.shape)}"
        if block.numel() and bool(marks.all()):
            worst = max(worst, difference(region, block))
        else:
            region.copy_(block)
            marks.fill_(True)
    return whole, worst


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape; equal NaNs and infinities are equal."""
    if not first.numel():
        return 0.0
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = first.detach().to(wide), second.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return float(torch.where(gap.isnan(), torch.inf, gap).max())


def _global_shape(blocks: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Sizes add up along the ranks that cut a dim."""
    shape = []
    for dim, axes in enumerate(layout.dims):
        points = itertools.product(*(range(mesh.size(axis)) for axis in axes))
        peers = mesh.peers(0, axes)
        shape.append(sum(blocks[peer].shape[dim] for peer, _ in zip(peers, points, strict=True)))
    return tuple(shape)
