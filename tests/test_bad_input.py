"""Bad input gets one clear error of three lines before the first step, and nothing of the user's is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distpar
from distpar.errors import CaptureError, DistParError, Infeasible, LayoutError, UsageError
from models import mlp


def refused(step: Any, *args: Any, **options: Any) -> DistParError:
    with pytest.raises(DistParError) as caught:
        distpar.plan(step, *args, **options)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[1].startswith("  why: ") and lines[2].startswith("  fix: ")
    return caught.value


def test_control_flow_on_a_value_names_the_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            return x
        return -x

    error = refused(step, torch.ones(3))
    assert isinstance(error, CaptureError) and "test_bad_input.py:" in error.where and "torch.where" in error.fix


def test_a_shape_that_depends_on_values_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()

    assert isinstance(refused(step, torch.ones(3)), CaptureError)


def test_a_model_that_is_not_passed_is_refused() -> None:
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    assert "argument" in refused(step, torch.ones(2, 3)).fix
    assert model.weight.grad is None


def test_a_scheduler_inside_of_the_step_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: nn.Module, optimizer: Any, scheduler: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    assert "scheduler" in refused(step, model, optimizer, scheduler, torch.ones(2, 3)).why
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_pin_that_names_no_tensor_shows_what_is_near() -> None:
    step, args = mlp(6)
    error = refused(step, *args, pins={"model.up.wait": "[*/ranks, *]"})
    assert isinstance(error, UsageError) and "model.up.weight" in error.why


@pytest.mark.parametrize("pin", ["[*/ranks]", "[*/tp, *]", "[*, *] +sum(ranks)"])
def test_a_pin_that_does_not_fit_is_refused(pin: str) -> None:
    step, args = mlp(6)
    assert "does not fit" in refused(step, *args, pins={"model.up.weight": pin}).what


def test_an_uneven_pin_is_honoured() -> None:
    step, args = mlp(6)
    plan = distpar.plan(step, *args, mesh=distpar.Mesh(ranks=8), pins={"model.up.weight": "[*/ranks, *]"})
    assert plan.stored()["model.up.weight"].dims == (("ranks",), ())


def test_a_memory_limit_that_no_plan_meets_says_what_would_do() -> None:
    step, args = mlp(6)
    error = refused(step, *args, options=distpar.Options(memory_limit=1000))
    assert isinstance(error, Infeasible) and "MiB" in error.why


def test_a_mesh_that_does_not_fit_the_ranks_is_refused() -> None:
    step, args = mlp(6)
    with pytest.raises(LayoutError, match="does not fit 1 ranks"):
        distpar.parallelize(step, mesh=distpar.Mesh(dp=4))(*args)


@pytest.mark.parametrize(
    "bad",
    [{"beta": -1.0}, {"solver": "best"}, {"space": "all"}, {"memory_limit": "16 bananas"}, {"time_limit": 0}],
    ids=str,
)
def test_a_wrong_option_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        distpar.Options(**bad)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match="no cluster preset"):
        distpar.Cluster.preset("dgx-x100")


def test_a_plan_of_another_step_is_refused() -> None:
    step, args = mlp(6)
    plan = distpar.plan(step, *args)
    other_step, other_args = mlp(5)
    with pytest.raises(UsageError, match="another step"):
        distpar.simulate(other_step, *other_args, plan=plan)


def test_float_arguments_are_inputs_not_constants() -> None:
    def step(x: torch.Tensor, factor: float) -> torch.Tensor:
        return F.relu(x * factor)

    parallel = distpar.parallelize(step)
    x = torch.arange(4.0)
    for factor in (1.0, 2.0, 3.0):
        assert torch.equal(parallel(x, factor), x * factor)
    assert len(parallel._ready) == 1


def test_a_plan_survives_saving(tmp_path: Any) -> None:
    step, args = mlp(7)
    plan = distpar.plan(step, *args, mesh=distpar.Mesh(ranks=3))
    plan.save(tmp_path / "plan.json")
    loaded = distpar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.hash == plan.hash and str(loaded) == str(plan)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot read the plan"):
        distpar.Plan.load(tmp_path / "bad.json")
