"""The promise: outputs, gradients, parameters, buffers and optimizer state, after three steps, under any plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import distpar
from distpar import Mesh, Options
from models import MODELS

MESHES = [Mesh(r=1), Mesh(r=2), Mesh(r=3), Mesh(r=4), Mesh(a=2, b=2), Mesh(a=4, b=1)]
BATCHES = [8, 7, 6, 5]
Record = Callable[[str, object], None]


def largest(name: str, batch: int, mesh: Mesh, solver: str) -> float:
    step, args = MODELS[name](batch)
    # A joint search of two axes on a large graph stops at its limit with the best plan so far.
    options = Options(solver=solver, time_limit=4, gap=0.05)
    return distpar.verify(step, *args, mesh=mesh, options=options, steps=3).largest


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_searched_plan_equals_one_device(name: str, mesh: Mesh, record_property: Record) -> None:
    batch = BATCHES[(len(name) + mesh.num_ranks) % len(BATCHES)]
    worst = largest(name, batch, mesh, "auto")
    record_property(f"difference:{name}", worst)
    assert worst <= 1e-9


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("name", MODELS)
def test_any_random_plan_equals_one_device(name: str, part: int, record_property: Record) -> None:
    for seed in range(4 * part, 4 * part + 4):
        mesh, batch = MESHES[1:][seed % 5], BATCHES[(seed + seed // 4) % 4]
        worst = largest(name, batch, mesh, f"random:{seed}")
        record_property(f"difference:{name}", worst)
        assert worst <= 1e-9, f"seed {seed} on {mesh} with batch {batch}"


@pytest.mark.parametrize("name", ["mlp", "tied", "arcface", "resnet"])
def test_empty_ranks_equal_one_device(name: str, record_property: Record) -> None:
    for seed in range(100, 106):
        worst = largest(name, 2 + seed % 2, Mesh(r=4), f"random:{seed}")
        record_property(f"difference:{name}", worst)
        assert worst <= 1e-9, f"seed {seed}"
