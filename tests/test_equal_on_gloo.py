"""The promise on real ranks over gloo: one spawn runs several models, each rank compares with one device itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import distpar
from distpar import Mesh, Options
from distpar.api import step_seed
from distpar.launch import run_ranks
from distpar.runtime.random import global_rng
from models import MODELS

Case = tuple[str, int, Mesh, str]

TWO: list[Case] = [
    ("mlp", 7, Mesh(r=2), "auto"),
    ("arcface", 5, Mesh(r=2), "auto"),
    ("tied", 6, Mesh(r=2), "random:1"),
    ("gpt2", 5, Mesh(r=2), "auto"),
    ("llama", 7, Mesh(r=2), "random:2"),
]
FOUR: list[Case] = [
    ("mlp", 3, Mesh(r=4), "random:3"),
    ("arcface", 7, Mesh(a=2, b=2), "random:4"),
    ("tied", 3, Mesh(a=2, b=2), "random:5"),
    ("tied", 5, Mesh(r=4), "auto"),
]


@pytest.mark.timeout(230)
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_real_ranks_equal_one_device(
    num_ranks: int, cases: list[Case], record_property: Callable[[str, object], None]
) -> None:
    for found in run_ranks(compare_all, num_ranks, (cases,), timeout=210):
        for (name, *_), (what, worst) in zip(cases, found, strict=True):
            record_property(f"difference:{name} on gloo", worst)
            assert worst <= 1e-9, f"{name}: {what}"


def compare_all(cases: list[Case]) -> list[tuple[str, float]]:
    """On each rank: of every case, what differs most from one device after any of three steps, and by how much."""
    found = [compare(*case) for case in cases]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def compare(name: str, batch: int, mesh: Mesh, solver: str) -> tuple[str, float]:
    fn, args = MODELS[name](batch)
    plain = copy.deepcopy(args)
    options = Options(solver=solver, keep_gradients=True, time_limit=15, gap=0.05, timeout=60)
    step = distpar.parallelize(fn, mesh=mesh, options=options)
    seed, worst = torch.initial_seed(), ("nothing", 0.0)
    for number in range(1, 4):
        ours = step(*args)
        with global_rng(step_seed(seed, number)):
            expected = fn(*plain)
        pairs = list(named(expected, plain))
        others = dict(named(ours, args))
        assert [key for key, _ in pairs] == list(others)
        for key, value in pairs:
            gap = difference(value, others[key])
            worst = max(worst, (f"{key} in step {number}", gap), key=lambda item: item[1])
    return worst


def named(results: Any, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Everything that a step leaves behind, by name: results, parameters, gradients, buffers, optimizer state."""
    model, optimizer = args[0], args[1]
    found = [(f"result {i}", leaf) for i, leaf in enumerate(pytree.tree_leaves(results))]
    for key, value in model.named_parameters():
        found += [(key, value), (f"gradient of {key}", value.grad)]
    found += [(f"buffer {key}", value) for key, value in model.named_buffers()]
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        found += [(f"state {number} {key}", value) for key, value in sorted(state.items())]
    return found


def difference(one: Any, many: Any) -> float:
    if one is None or many is None:
        return 0.0 if one is many else float("inf")
    whole = many.full_tensor() if hasattr(many, "full_tensor") else torch.as_tensor(many)
    one = torch.as_tensor(one)
    if one.shape != whole.shape or one.dtype != whole.dtype:
        return float("inf")
    return float((one.detach().double() - whole.detach().double()).abs().max()) if one.numel() else 0.0
