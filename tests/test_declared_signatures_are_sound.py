"""Every declared signature, run by every rank on its own blocks, gives the right tensor.

Ops and shapes are those that the test models' own graphs contain, besides a table of small ragged samples.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from distpar import rules
from distpar.capture import capture
from distpar.graph import NumberType, Operand, OpSpec, TensorType, Word, fill
from distpar.layout import Layout, Reduction, box
from distpar.mesh import Mesh
from distpar.rules.spec import Signature
from distpar.runtime.kernels import materialize, resolve
from distpar.simulator import BoundCall, assemble, difference
from models import MODELS

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2)]
DTYPES = {"f64": torch.float64, "f32": torch.float32, "i64": torch.int64, "bool": torch.bool}


def value_for(spec: OpSpec, position: int, generator: torch.Generator) -> Any:
    """A random operand; indices stay inside of what they index."""
    type_ = spec.operands[position]
    if isinstance(type_, NumberType):
        return 0.75 if type_.kind == "float" else 2
    if type_.dtype == "bool":
        return torch.rand(type_.shape, generator=generator) < 0.5
    if type_.dtype == "i64":
        return torch.randint(0, index_limit(spec), type_.shape, generator=generator)
    value = torch.randn(type_.shape, generator=generator, dtype=torch.float64)
    # Square roots and logarithms stay where they are defined.
    value = value.abs() + 0.5 if spec.op.split(".")[1] in ("sqrt", "rsqrt", "log", "pow", "reciprocal") else value
    return value.to(DTYPES[type_.dtype])


def index_limit(spec: OpSpec) -> int:
    match spec.op.split(".")[1]:
        case "embedding":
            return shape(spec, 0)[0]
        case "embedding_dense_backward":
            return int(spec.args[2])  # type: ignore[arg-type]
        case "gather" | "index_select":
            return shape(spec, 0)[int(spec.args[1])]  # type: ignore[arg-type]
        case "max_pool2d_with_indices_backward":
            return shape(spec, 1)[-1] * shape(spec, 1)[-2]
        case _:
            return 3


def shape(spec: OpSpec, position: int) -> tuple[int, ...]:
    type_ = spec.operands[position]
    assert isinstance(type_, TensorType)
    return type_.shape


def cut(value: Any, layout: Layout, mesh: Mesh, rank: int, generator: torch.Generator) -> Any:
    """A rank's block; a Partial's addends are random and differ between ranks."""
    if not isinstance(value, torch.Tensor):
        return value
    for dim, (start, stop) in enumerate(box(layout, tuple(value.shape), mesh, rank)):
        value = value.narrow(dim, start, stop - start)
    if layout.reduction is None:
        return value.clone()
    peers = mesh.peers(rank, layout.partial)
    if layout.reduction is Reduction.SUM:
        noise = torch.Generator().manual_seed(7)
        shares = [torch.randint(-5, 6, value.shape, generator=noise).to(value.dtype) for _ in peers[1:]]
        place = peers.index(rank)
        return shares[place - 1] if place else value - sum(shares)
    if value.dtype == torch.bool:
        low = torch.zeros_like(value) if layout.reduction is Reduction.MAX else torch.ones_like(value)
        return value.clone() if peers.index(rank) == len(peers) - 1 else low
    low = value - 1 if layout.reduction is Reduction.MAX else value + 1
    return value.clone() if peers.index(rank) == len(peers) - 1 else low


def check(spec: OpSpec, mesh: Mesh, signatures: list[Signature]) -> None:
    generator = torch.Generator().manual_seed(0)
    operands = tuple(value_for(spec, i, generator) for i in range(len(spec.operands)))
    args = [materialize(fill(arg, operands)) for arg in spec.args]
    kwargs = {key: materialize(fill(arg, operands)) for key, arg in spec.kwargs}
    expected = resolve(spec.op)(*args, **kwargs)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    for signature in signatures:
        outs = []
        for rank in range(mesh.num_ranks):
            pairs = zip(operands, signature.operands, strict=True)
            blocks = tuple(cut(value, layout, mesh, rank, generator) for value, layout in pairs)
            outs.append(BoundCall(spec, signature, mesh, rank).run(blocks))
        for output, layout in enumerate(signature.outputs):
            right = expected[output]
            if not isinstance(right, torch.Tensor):
                continue
            whole, spread = assemble([out[output] for out in outs], layout, mesh)
            scale = max(1.0, float(right.abs().max()) if right.is_floating_point() and right.numel() else 1.0)
            narrow = any(isinstance(t, TensorType) and t.dtype == "f32" for t in (*spec.operands, *spec.outputs))
            limit = (1e-4 if narrow else 1e-9) * scale
            assert whole.shape == right.shape, f"{spec.op} {signature}"
            assert max(difference(whole, right), spread) <= limit, f"{spec.op} {spec} {signature}"


UNCHECKED = ("input", "distpar.uniform", "aten.empty", "aten.new_empty", "aten.empty_like")


@pytest.mark.parametrize("name", MODELS)
def test_every_op_of_the_models_is_right_in_every_signature(name: str) -> None:
    step, args = MODELS[name](5)
    graph = capture(step, args, {}).graph
    missing = {n.op for n in graph.nodes if n.input is None and not rules.is_supported(n.op)}
    assert not missing, f"ops without a rule: {sorted(missing)}"
    picked = random.Random(0)
    for spec in dict.fromkeys(graph.specs):
        if spec.op.startswith(UNCHECKED) or isinstance(spec.outputs[0], NumberType) or not known(spec):
            continue
        for mesh in MESHES:
            found = list(rules.signatures(spec, mesh))
            check(spec, mesh, found if len(found) <= 8 else picked.sample(found, 8))


def known(spec: OpSpec) -> bool:
    """Backward of attention needs the forward's own outputs, which random operands are not."""
    return "attention" not in spec.op and all(
        not isinstance(t, TensorType) or t.dtype in DTYPES for t in (*spec.operands, *spec.outputs)
    )


def f(*sizes: int) -> TensorType:
    return TensorType("f64", sizes)


def i(*sizes: int) -> TensorType:
    return TensorType("i64", sizes)


def op(name: str, operands: list[TensorType], output: TensorType, *args: Any, **kwargs: Any) -> OpSpec:
    return OpSpec(name, args, tuple(kwargs.items()), tuple(operands), (output,))


O = Operand  # noqa: E741

SAMPLES = [
    op("aten.mm.default", [f(5, 3), f(3, 7)], f(5, 7), O(0), O(1)),
    op("aten.bmm.default", [f(3, 5, 2), f(3, 2, 1)], f(3, 5, 1), O(0), O(1)),
    op("aten.add.Tensor", [f(5, 3), f(3)], f(5, 3), O(0), O(1), alpha=2),
    op("aten.add.Tensor", [f(5, 3)], f(5, 3), O(0), 10),
    op("aten.mul.Tensor", [f(5, 1), f(1, 3)], f(5, 3), O(0), O(1)),
    op("aten.div.Tensor", [f(5, 3), f(5, 1)], f(5, 3), O(0), O(1)),
    op("aten.sum.dim_IntList", [f(5, 3, 2)], f(5, 2), O(0), (1,)),
    op("aten.sum.dim_IntList", [f(5, 3)], f(5, 1), O(0), (-1,), True),
    op("aten.amax.default", [f(3, 5)], f(5), O(0), (0,)),
    op("aten.amin.default", [f(1, 5)], f(1, 1), O(0), (1,), True),
    op("aten.view.default", [f(6, 4)], f(24), O(0), (24,)),
    op("aten.view.default", [f(8, 6)], f(8, 2, 3), O(0), (8, 2, 3)),
    op("aten.view.default", [f(1, 8)], f(8), O(0), (8,)),
    op("aten.view.default", [f(6, 4)], f(2, 3, 4), O(0), (2, 3, 4)),
    op("aten.expand.default", [f(1, 5)], f(3, 5), O(0), (3, 5)),
    op("aten.permute.default", [f(2, 5, 3)], f(3, 2, 5), O(0), (2, 0, 1)),
    op("aten.cat.default", [f(5, 2), f(5, 3)], f(5, 5), (O(0), O(1)), 1),
    op("aten.stack.default", [f(5, 2), f(5, 2)], f(5, 2, 2), (O(0), O(1)), 1),
    op("aten.slice.Tensor", [f(5, 4)], f(5, 2), O(0), 1, 1, 3),
    op("aten.select.int", [f(5, 4)], f(4), O(0), 0, 3),
    op("aten.constant_pad_nd.default", [f(5, 4)], f(5, 6), O(0), (1, 1)),
    op("aten.embedding.default", [f(10, 3), i(2, 5)], f(2, 5, 3), O(0), O(1)),
    op("aten.embedding_dense_backward.default", [f(2, 5, 3), i(2, 5)], f(10, 3), O(0), O(1), 10, 4, False),
    op("aten.gather.default", [f(5, 7), i(5, 1)], f(5, 1), O(0), 1, O(1)),
    op("aten.gather.default", [f(5, 7), i(3, 7)], f(3, 7), O(0), 0, O(1)),
    op("aten.index_select.default", [f(5, 7), i(3)], f(3, 7), O(0), 0, O(1)),
    op("aten.scatter_add.default", [f(5, 7), i(5, 2), f(5, 2)], f(5, 7), O(0), 1, O(1), O(2)),
    op("aten.cumsum.default", [f(5, 7)], f(5, 7), O(0), 1),
    op("aten.tril.default", [f(3, 5, 5)], f(3, 5, 5), O(0)),
    op("aten.arange.start_step", [], i(7), 2, 16, 2),
    op("aten.full.default", [], f(5, 3), (5, 3), 1.5),
    op("aten.zeros_like.default", [f(5, 3)], f(5, 3), O(0)),
    op("aten._to_copy.default", [f(5, 3)], TensorType("f32", (5, 3)), O(0), dtype=Word("torch.float32")),
    op(
        "aten.convolution.default", [f(3, 4, 5, 5), f(6, 4, 3, 3)], f(3, 6, 3, 3),
        O(0), O(1), None, (2, 2), (1, 1), (1, 1), False, (0, 0), 1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", SAMPLES, ids=lambda spec: spec.op)
def test_every_signature_of_ragged_samples_is_right(spec: OpSpec) -> None:
    for mesh in MESHES:
        check(spec, mesh, list(rules.signatures(spec, mesh)))


def test_linear_facts_are_not_claimed_where_they_do_not_hold() -> None:
    """x + 10 is not linear; relu of a sum is not a sum of relus."""
    for name in ("aten.add.Tensor", "aten.relu.default", "aten.exp.default"):
        args = (O(0), 10) if "add" in name else (O(0),)
        rows = rules.rows(op(name, [f(5, 3)], f(5, 3), *args))
        assert all(getattr(p, "reduction", None) is None for row in rows for p in row.operands)


def test_a_view_is_cut_only_where_blocks_line_up() -> None:
    ragged = rules.signatures(op("aten.view.default", [f(6, 4)], f(24), O(0), (24,)), Mesh(a=4))
    even = rules.signatures(op("aten.view.default", [f(8, 4)], f(32), O(0), (32,)), Mesh(a=4))
    assert not any(s.operands[0].dims[0] for s in ragged) and any(s.operands[0].dims[0] for s in even)
