"""`verify` on real gloo ranks: equal where the numbers are equal, one error on all ranks where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distpar import Mesh, Options
from distpar.errors import NumbersDiffer
from distpar.launch import run_ranks
from distpar.verification import verify, verify_on_ranks

JOB = """
import torch
from torch import nn

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return {"loss": loss}

def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)).double()
    optimizer = torch.optim.Adam(model.parameters())
    return step, (model, optimizer, torch.randn(7, 5).double(), torch.randint(3, (7,)))
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(JOB)
    return f"{tmp_path / 'train.py'}:job"


@pytest.mark.parametrize("solver", ["auto", "random:3"])
def test_real_ranks_equal_one_device(job: str, solver: str) -> None:
    report = verify_on_ranks(job, Mesh(a=2), Options(solver=solver), 3, timeout=100)
    assert report.real and report.plan.mesh == Mesh(a=2)
    assert 0 < report.largest <= 1e-9


def test_one_rank_with_wrong_numbers_is_an_error_on_all(job: str) -> None:
    assert run_ranks(tampered, 2, (job,), timeout=100) == ["rank 0", "rank 1"]


def tampered(job: str) -> str:
    """Rank 1 gets another loss: both ranks must say so."""
    from distpar.launch import load_job
    from distpar.runtime.executor import Executor

    step, args = load_job(job)
    run = Executor.__call__

    def wrong(self: Executor, inputs: object) -> object:
        results, writes, gradients = run(self, inputs)  # type: ignore[arg-type]
        return [results[0] + torch.distributed.get_rank(), *results[1:]], writes, gradients

    Executor.__call__ = wrong  # type: ignore[assignment, method-assign]
    with pytest.raises(NumbersDiffer, match="results 0 differs from one device by 1"):
        verify(step, *args)
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return f"rank {rank}"
