"""How one conversion step moves data: the same block arithmetic for simulated and for real ranks.

A step is prepared once for a rank (`prepare`): what it sends to which peer, what it gets, in which shapes. Then

    sent = move.pack(local)             one flat buffer, or the local block itself
    got  = <the collective>             all_reduce, all_gather or all_to_all; simulated ranks copy instead
    new  = move.unpack(got)             the rank's new block, contiguous

| step                    | collective  | packed                       | unpacked                              |
|-------------------------|-------------|------------------------------|---------------------------------------|
| AllReduce               | all_reduce  | the block                    | as it comes                           |
| AllGather               | all_gather  | the block, padded to largest | each peer's region, cut and placed    |
| ReduceScatter           | all_to_all  | every peer's future block    | reduced in the order of the peers     |
| AllToAll, Reorder       | all_to_all  | what each peer will need     | each peer's region placed             |
| Slice, MakePartial, ... | none        |                              | a region, or identity around a region |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distpar.graph import TensorType
from distpar.layout import Box, Layout, Reduction, box, largest_shape, local_shape
from distpar.mesh import Mesh
from distpar.reshard import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Reorder,
    ShardToPartial,
    Slice,
    Step,
    intersections,
)
from distpar.runtime.kernels import identity


@dataclass(frozen=True, slots=True)
class Move:
    """One step of one tensor on one rank, with everything computed ahead.

    Attributes:
        collective: "all_reduce", "all_gather", "all_to_all" or "" (local).
        peers: the ranks that take part, in order; `index` is this rank's place among them.
        send_sizes, receive_sizes: elements to and from each peer (all_to_all); padded length (all_gather).
    """

    step: Step
    collective: str
    axes: tuple[str, ...]
    peers: tuple[int, ...]
    index: int
    own: Box
    new: Box
    shape: tuple[int, ...]
    send_boxes: tuple[Box, ...]
    receive_boxes: tuple[Box, ...]
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    direct: bool

    def pack(self, local: torch.Tensor) -> torch.Tensor:
        """What goes into the collective."""
        match self.step:
            case AllReduce():
                return local.contiguous()
            case AllGather():
                flat = local.contiguous().reshape(-1)
                missing = self.receive_sizes[0] - flat.numel()
                return flat if not missing else torch.nn.functional.pad(flat, (0, missing))
            case _:
                parts = [_region(local, self.own, piece).reshape(-1) for piece in self.send_boxes]
                return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, got: torch.Tensor) -> torch.Tensor:
        """The new block from what the collective gave."""
        match self.step:
            case AllReduce():
                return got
            case ReduceScatter(_, _, reduction):
                parts = got.reshape(len(self.peers), *self.shape).unbind(0)
                return reduce_in_order(parts, reduction)
            case _:
                if self.direct:
                    return got.reshape(self.shape)
                return self._placed(got)

    def _placed(self, got: torch.Tensor) -> torch.Tensor:
        out = got.new_empty(self.shape)
        start = 0
        for piece, size in zip(self.receive_boxes, self.receive_sizes, strict=True):
            shape = tuple(high - low for low, high in piece)
            count = math.prod(shape)
            if count:
                _region(out, self.new, piece).copy_(got[start : start + count].reshape(shape))
            start += size
        return out

    def local(self, block: torch.Tensor) -> torch.Tensor:
        """A step without communication."""
        match self.step:
            case Slice():
                return _region(block, self.own, self.new).contiguous()
            case MakePartial(_, reduction):
                if self.index == 0:
                    return block
                return torch.full_like(block, identity(reduction, block.dtype))
            case ShardToPartial(_, _, reduction):
                out = block.new_full(self.shape, identity(reduction, block.dtype))
                _region(out, self.new, self.own).copy_(block)
                return out
            case _:
                raise AssertionError(f"bug: {self.step} is a collective")


def prepare(step: Step, type_: TensorType, before: Layout, after: Layout, mesh: Mesh, rank: int) -> Move:
    """Everything about a step on one rank that does not depend on the data."""
    # In mesh order peers ascend, as process groups list them; regions say what goes where, whatever the order.
    axes = tuple(sorted(step.axes, key=mesh.position))
    peers = mesh.peers(rank, axes)
    own, new = box(before, type_.shape, mesh, rank), box(after, type_.shape, mesh, rank)
    shape = local_shape(after, type_.shape, mesh, rank)
    sends: tuple[Box, ...] = ()
    receives: tuple[Box, ...] = ()
    collective, direct = "", False
    send_sizes: tuple[int, ...] = ()
    receive_sizes: tuple[int, ...] = ()
    match step:
        case AllReduce():
            collective = "all_reduce"
        case AllGather():
            collective = "all_gather"
            receives = tuple(box(before, type_.shape, mesh, peer) for peer in peers)
            padded = math.prod(largest_shape(before, type_.shape, mesh))
            receive_sizes = (padded,) * len(peers)
            direct = _stacked(receives, new, padded)
        case ReduceScatter():
            collective = "all_to_all"
            sends = intersections(before, after, type_.shape, mesh, axes, rank)
            send_sizes = tuple(map(_count, sends))
            receive_sizes = (math.prod(shape),) * len(peers)
        case AllToAll() | Reorder():
            collective = "all_to_all"
            sends = intersections(before, after, type_.shape, mesh, axes, rank)
            receives = tuple(
                intersections(before, after, type_.shape, mesh, axes, peer)[peers.index(rank)] for peer in peers
            )
            send_sizes, receive_sizes = tuple(map(_count, sends)), tuple(map(_count, receives))
            direct = _stacked(receives, new, None)
    return Move(
        step, collective, axes, peers, peers.index(rank), own, new, shape, sends, receives,
        send_sizes, receive_sizes, direct,
    )  # fmt: skip


def _stacked(pieces: Sequence[Box], whole: Box, padded: int | None) -> bool:
    """Whether the pieces, one after the other, are the whole in memory: they cut its first dim, in order."""
    if padded is not None and any(_count(piece) != padded for piece in pieces):
        return False
    position = whole[0][0] if whole else 0
    for piece in pieces:
        if not piece or piece[1:] != whole[1:] or piece[0][0] != position:
            return False
        position = piece[0][1]
    return bool(whole) and position == whole[0][1]


def _count(piece: Box) -> int:
    return math.prod(stop - start for start, stop in piece)


def _region(block: torch.Tensor, own: Box, piece: Box) -> torch.Tensor:
    """The part of a block (which covers the box `own`) that covers the box `piece`."""
    for dim, ((start, _), (low, high)) in enumerate(zip(own, piece, strict=True)):
        if high - low != block.shape[dim]:
            block = block.narrow(dim, low - start if high > low else 0, high - low)
    return block


def reduce_in_order(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction of the parts, always in the same order: the same bits on every run."""
    out = parts[0].clone()
    for part in parts[1:]:
        match reduction:
            case Reduction.SUM:
                out = out.logical_or_(part) if out.dtype == torch.bool else out.add_(part)
            case Reduction.MAX:
                out = torch.maximum(out, part)
            case Reduction.MIN:
                out = torch.minimum(out, part)
            case Reduction.PROD:
                out = out.mul_(part)
    return out


def simulate(
    step: Step, type_: TensorType, before: Layout, after: Layout, mesh: Mesh, moves: Sequence[Move],
    locals_: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """One step on all ranks in this process."""
    if not moves[0].collective:
        return [move.local(local) for move, local in zip(moves, locals_, strict=True)]
    sent = [move.pack(local) for move, local in zip(moves, locals_, strict=True)]
    out = []
    for move in moves:
        parts = [sent[peer] for peer in move.peers]
        match move.collective:
            case "all_reduce":
                assert isinstance(step, AllReduce), "bug: only AllReduce reduces"
                got = reduce_in_order(parts, step.reduction)
            case "all_gather":
                got = torch.cat(parts)
            case _:
                pairs = zip(parts, move.peers, strict=True)
                got = torch.cat([_sent_to(part, moves[peer], move.index) for part, peer in pairs])
        out.append(move.unpack(got))
    return out


def _sent_to(buffer: torch.Tensor, sender: Move, index: int) -> torch.Tensor:
    start = sum(sender.send_sizes[:index])
    return buffer[start : start + sender.send_sizes[index]]
