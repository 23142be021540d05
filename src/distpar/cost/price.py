"""Seconds of one op and of one conversion: the only prices there are.

op           max(flops / peak, bytes / memory bandwidth) + floor, on the largest block; a view is free
collective   the cluster's measured points at the bytes that the busiest rank sends, plus packing
free step    the bytes that it writes / memory bandwidth
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from distpar import rules
from distpar.cost.cluster import Cluster
from distpar.graph import OpSpec, TensorType, ValueType
from distpar.layout import Layout, largest_shape
from distpar.mesh import Mesh
from distpar.reshard import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    Path,
    ReduceScatter,
    Reorder,
    ShardToPartial,
    Slice,
    Step,
    after,
    path,
    volume,
)
from distpar.rules.spec import Signature

_PACK = 2
"""How often a block is read and written around an exchange: packed before it, unpacked after it."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices on one cluster and mesh. Seconds are physical: beta is the search's business."""

    cluster: Cluster
    mesh: Mesh

    def call(self, spec: OpSpec, signature: Signature) -> float:
        """Seconds of one op on the largest block."""
        return _call(self.cluster, self.mesh, spec, signature)

    def step(self, step: Step, type_: TensorType, before: Layout) -> float:
        """Seconds of one conversion step."""
        return _step(self.cluster, self.mesh, step, type_, before)

    def path(self, before: Layout, target: Layout, type_: TensorType) -> Path:
        """The cheapest conversion."""
        return _path(self, before, target, type_)


@cache
def _path(prices: Prices, before: Layout, target: Layout, type_: TensorType) -> Path:
    return path(before, target, type_, prices.mesh, prices.step)


@cache
def _call(cluster: Cluster, mesh: Mesh, spec: OpSpec, signature: Signature) -> float:
    if rules.is_free(spec):
        return 0.0
    operands = _blocks(spec.operands, signature.operands, mesh)
    outputs = _blocks(spec.outputs, signature.outputs, mesh)
    work = rules.flops(spec, tuple(t.shape for t in operands), tuple(t.shape for t in outputs))
    traffic = sum(block.num_bytes for block in (*operands, *outputs)) / cluster.bandwidth
    dtype = next((t.dtype for t in (*outputs, *operands)), "f32")
    compute = work / cluster.flops(_family(spec.op), dtype) if work else 0.0
    return max(compute, traffic) + cluster.floor


def _blocks(types: tuple[ValueType, ...], layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[TensorType, ...]:
    return tuple(
        TensorType(type_.dtype, largest_shape(layout, type_.shape, mesh))
        for type_, layout in zip(types, layouts, strict=True)
        if isinstance(type_, TensorType)
    )


def _family(op: str) -> str:
    if "conv" in op:
        return "convolution"
    return "attention" if "attention" in op else "matmul"


@cache
def _step(cluster: Cluster, mesh: Mesh, step: Step, type_: TensorType, before: Layout) -> float:
    block = TensorType(type_.dtype, largest_shape(before, type_.shape, mesh)).num_bytes
    reached = TensorType(type_.dtype, largest_shape(after(step, before), type_.shape, mesh)).num_bytes
    sent = volume(step, type_, before, mesh)
    ranks = mesh.peers(0, step.axes)
    match step:
        case Slice() | MakePartial() | ShardToPartial():
            return cluster.floor + 2 * reached / cluster.bandwidth
        case AllReduce():
            return cluster.collective("all_reduce", sent, ranks) + cluster.floor
        case AllGather(dim, _):
            unpacked = 0 if dim == 0 else 2 * reached
            return cluster.collective("all_gather", sent, ranks) + unpacked / cluster.bandwidth
        case ReduceScatter() | AllToAll() | Reorder():
            packing = _PACK * (block + reached) / cluster.bandwidth
            return cluster.collective("all_to_all", sent, ranks) + packing + cluster.floor
