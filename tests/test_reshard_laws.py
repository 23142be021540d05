"""Conversions: every pair of layouts, ragged and empty, is the identity on the global tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from distpar.graph import TensorType
from distpar.layout import Layout, Partial, Placement, Reduction, Replicate, Shard, local_shape
from distpar.mesh import Mesh
from distpar.reshard import AllGather, Slice, Step, after, path, volume
from distpar.runtime.kernels import identity
from distpar.runtime.moves import prepare, simulate
from distpar.simulator import assemble, split

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2)]
SHAPES = [(6, 5), (5, 3), (1, 7), (3, 1, 4), ()]
DTYPES = {"f64": torch.float64, "bf16": torch.bfloat16, "i64": torch.int64, "bool": torch.bool}


def layouts(ndim: int, mesh: Mesh, reduction: Reduction) -> list[Layout]:
    """Every layout with one reduction, axes in every order."""
    placements: list[Placement] = [Replicate(), Partial(reduction), *map(Shard, range(ndim))]
    found = [
        Layout.of(ndim, [(axis, row[mesh.position(axis)]) for axis in order])
        for row in itertools.product(placements, repeat=len(mesh.names))
        for order in itertools.permutations(mesh.names)
    ]
    return list(dict.fromkeys(found))


def price_on(mesh: Mesh):  # type: ignore[no-untyped-def]
    def price(step: Step, type_: TensorType, layout: Layout) -> float:
        return 1e-5 + 1e-9 * volume(step, type_, layout, mesh)

    return price


def sample(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    value = torch.randint(-9, 10, shape, generator=generator)
    return (value > 0) if dtype == "bool" else value.to(DTYPES[dtype])


def blocks_of(value: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Blocks whose assembly is the value; the addends of a Partial differ between ranks."""
    plain = split(value, layout.without(*layout.partial), mesh)
    if layout.reduction is None:
        return plain
    out = []
    for rank, block in enumerate(plain):
        place = mesh.peers(rank, layout.partial).index(rank)
        neutral = torch.full_like(block, identity(layout.reduction, block.dtype))
        if layout.reduction is Reduction.SUM and block.dtype != torch.bool:
            out.append(block - (len(mesh.peers(rank, layout.partial)) - 1) if place == 0 else neutral + 1)
        else:
            out.append(block if place == len(mesh.peers(rank, layout.partial)) - 1 else neutral)
    return out


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reshard_then_assemble_is_identity(mesh: Mesh, shape: tuple[int, ...]) -> None:
    reductions = [("f64", Reduction.SUM), ("f64", Reduction.MAX), ("bf16", Reduction.MIN), ("i64", Reduction.SUM)]
    for dtype, reduction in [*reductions, ("bool", Reduction.MAX)]:
        value, type_ = sample(shape, dtype), TensorType(dtype, shape)
        options = layouts(len(shape), mesh, reduction)
        for before, target in itertools.product(options, repeat=2):
            blocks, layout = blocks_of(value, before, mesh), before
            for step in path(before, target, type_, mesh, price_on(mesh)).steps:
                reached = after(step, layout)
                moves = [prepare(step, type_, layout, reached, mesh, r) for r in range(mesh.num_ranks)]
                blocks, layout = simulate(step, type_, layout, reached, mesh, moves, blocks), reached
            assert layout == target
            for rank, block in enumerate(blocks):
                assert tuple(block.shape) == local_shape(target, shape, mesh, rank)
                assert block.is_contiguous()
            whole, spread = assemble(blocks, target, mesh)
            assert torch.equal(whole, value) and spread == 0, f"{before} -> {target}"


@pytest.mark.parametrize("mesh", [Mesh(a=3), Mesh(a=2, b=2)], ids=str)
def test_path_never_costs_more_than_gather_then_slice(mesh: Mesh) -> None:
    type_, price = TensorType("f32", (6, 5)), price_on(mesh)
    whole = Layout.replicate(2)
    for before, target in itertools.product(layouts(2, mesh, Reduction.SUM), repeat=2):
        if before.partial or target.partial:
            continue
        steps: list[Step] = [AllGather(dim, cut) for dim, cut in enumerate(before.dims) if cut]
        steps += [Slice(dim, cut) for dim, cut in enumerate(target.dims) if cut]
        total, layout = 0.0, before
        for step in steps:
            total, layout = total + price(step, type_, layout), after(step, layout)
        assert layout == target and whole.is_replicated
        assert path(before, target, type_, mesh, price).seconds <= total + 1e-12


def test_a_larger_block_is_never_sent_in_fewer_bytes() -> None:
    mesh, layout = Mesh(a=3), Layout.of(2, {"a": Shard(0)})
    sizes = [volume(AllGather(0, ("a",)), TensorType("f32", (n, 4)), layout, mesh) for n in range(1, 20)]
    assert sizes == sorted(sizes) and sizes[0] == 2 * 16
