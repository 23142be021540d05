"""Ranks that are given different things, and ranks that fail, end all ranks with one clear message."""

from __future__ import annotations

import time
from typing import Any

import torch

import distpar
from distpar.errors import DistParError
from distpar.launch import run_ranks
from models import mlp


def outcome(work: Any) -> tuple[str, str, float]:
    """(kind, text, seconds) of the error that a piece of work raises."""
    begun = time.monotonic()
    try:
        work()
    except (DistParError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing", "", time.monotonic() - begun


def different(rank_of: str) -> Any:
    import os

    rank = int(os.environ["RANK"])
    step, args = mlp(6)
    model, optimizer, x, y = args
    if rank_of == "shapes" and rank:
        x, y = x[:4], y[:4]
    if rank_of == "data" and rank:
        x = x + 1
    if rank_of == "parameters" and rank:
        with torch.no_grad():
            model.up.weight.add_(1)
    found = outcome(lambda: distpar.parallelize(step)(model, optimizer, x, y))
    untouched = type(model.up.weight).__name__ == "Parameter" and not hasattr(model.up.weight, "_local_tensor")
    return (*found, untouched)


def later_shape() -> Any:
    import os

    step, (model, optimizer, x, y) = mlp(6)
    parallel = distpar.parallelize(step)
    parallel(model, optimizer, x, y)
    rows = 6 if os.environ["RANK"] == "0" else 5
    return outcome(lambda: parallel(model, optimizer, x[:rows], y[:rows]))


def one_raises() -> Any:
    import os

    step, args = mlp(6)
    parallel = distpar.parallelize(step, options=distpar.Options(solver="random:3"))
    parallel(*args)
    if os.environ["RANK"] == "1":

        def broken(*_: Any) -> Any:
            raise ValueError("the disk is full")

        parallel._last.executor.forward = broken
    found = outcome(lambda: parallel(*args))
    if os.environ["RANK"] == "1":
        # A process that ends takes its connections with it; that is how the others notice at once.
        torch.distributed.destroy_process_group()
    return found


def test_ranks_that_differ_are_told_before_the_first_step() -> None:
    for what, named in (("shapes", "kind of x"), ("data", "data x"), ("parameters", "model.up.weight")):
        for kind, text, _, untouched in run_ranks(different, 2, (what,), timeout=100):
            assert kind == "RanksDiffer" and named in text and untouched, text
            assert [line[:7] for line in text.splitlines()[1:]] == ["  why: ", "  fix: "]


def test_a_later_shape_that_differs_is_told_on_all_ranks() -> None:
    for kind, text, _ in run_ranks(later_shape, 2, (), timeout=100):
        assert kind == "RanksDiffer" and "kind of x" in text


def test_a_rank_that_raises_in_a_step_ends_all_with_its_message() -> None:
    first, second = run_ranks(one_raises, 2, (), timeout=100)
    assert second[0] == "ValueError" and "disk is full" in second[1]
    assert first[0] == "RankFailed" and "the disk is full" in first[1] and first[2] < 30
