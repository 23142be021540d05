"""A job by DistPar beside what PyTorch ships, on the same local ranks, in turns.

Speed is the median of per-round ratios: the machine's own ups and downs hit all contenders of a round alike. Memory
is measured apart, each contender in processes of its own, since a process cannot give its peak back.
"""

from __future__ import annotations

import copy
import json as json_text
import resource
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

from distpar.errors import UsageError
from distpar.launch import load_job, run_ranks
from distpar.pace import Pace, in_turns

OURS = "distpar"
_WARM_UP = 2
_CHECKED = 3
"""Steps whose losses are compared with one device."""


@dataclass(frozen=True)
class Row:
    """One contender: samples/s a round, speed of DistPar relative to it a round, memory, losses.

    `failed` says why a contender could not run; then the numbers are absent.
    """

    name: str
    rounds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    peak_bytes: int = 0
    loss_difference: float | None = None
    failed: str = ""


def run(
    job: str, *, ranks: int = 2, against: tuple[str, ...] = ("ddp", "fsdp2"), rounds: int = 5, steps: int = 4,
    json: bool = False, timeout: float = 900.0,
) -> list[Row]:  # fmt: skip
    """Measure a job, `file.py:function`, on local gloo ranks; prints a table, or JSON.

    Raises:
        UsageError: no such job, an unknown contender, a number that makes no sense.
    """
    _check(ranks, against, rounds, steps)
    load_job(job)
    rows: list[Row] = run_ranks(_rank, ranks, (job, against, rounds, steps), timeout=timeout)[0]
    rows = [replace(row, peak_bytes=_peak(job, row, ranks, timeout)) for row in rows]
    if json:
        print(json_text.dumps({"job": job, "ranks": ranks, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        Console().print(_table(job, ranks, rows))
    return rows


def _check(ranks: int, against: tuple[str, ...], rounds: int, steps: int) -> None:
    from distpar.baselines import BASELINES

    for name in against:
        if name not in BASELINES:
            raise UsageError(
                f"cannot compare with {name!r}",
                why=f"the baselines are {', '.join(BASELINES)}",
                fix="write --against ddp,fsdp2",
            )
    for name, value in (("ranks", ranks), ("rounds", rounds), ("steps", steps)):
        if value < 1:
            raise UsageError(f"cannot measure with {name}={value}", why=f"{name} is 1 or more", fix=f"write --{name} 2")


def _rank(job: str, against: tuple[str, ...], rounds: int, steps: int) -> list[Row]:
    """What each rank runs: first the losses, then the turns."""
    from distpar.runtime.groups import start

    start(timeout=300)
    step, args = load_job(job)
    size = next((leaf.shape[0] for leaf in pytree.tree_leaves(args) if _is_data(leaf)), 1)
    alone = _alone(step, copy.deepcopy(args))
    rows: dict[str, Row] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name in (OURS, *against):
        reason = ""
        try:
            ready[name] = _contender(name, step, copy.deepcopy(args))
            losses = [_mean_loss(ready[name]()) for _ in range(_CHECKED)]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if name == OURS:
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ready.pop(name, None)
        gap = None if reason or None in alone else max(
            abs(a - b) for a, b in zip(alone, losses, strict=True) if a is not None and b is not None
        )  # fmt: skip
        rows[name] = Row(name, loss_difference=gap, failed=reason)
    for _ in range(_WARM_UP):
        for contender in ready.values():
            contender()
    paces = {pace.name: pace for pace in in_turns(ready, size, rounds, steps)}
    found = [_timed(row, paces) for row in rows.values()]
    dist.barrier()
    dist.destroy_process_group()
    return found


def _timed(row: Row, paces: dict[str, Pace]) -> Row:
    if row.failed:
        return row
    ours, theirs = paces[OURS].rounds, paces[row.name].rounds
    return replace(row, rounds=theirs, ratios=tuple(a / b for a, b in zip(ours, theirs, strict=True)))


def _contender(name: str, step: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    from distpar.api import parallelize
    from distpar.baselines import BASELINES

    if name == OURS:
        step = parallelize(step)
    else:
        step, args = BASELINES[name](step, args)
    return lambda: step(*args)


def _alone(step: Callable[..., Any], args: tuple[Any, ...]) -> list[float | None]:
    """The losses of one device, with DistPar's random numbers. Every rank runs it alike."""
    from distpar.api import step_seed
    from distpar.runtime.random import global_rng

    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    losses = []
    for number in range(_CHECKED):
        with global_rng(step_seed(seed[0], number + 1)):
            losses.append(_loss(step(*args)))
    return losses


def _loss(result: Any) -> float | None:
    """The first 0-dim floating tensor of what a step returns."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and not leaf.dim() and leaf.is_floating_point():
            return float(leaf.detach())
    return None


def _mean_loss(result: Any) -> float | None:
    """The loss averaged over ranks: the baselines see their own rows only."""
    mine = _loss(result)
    if mine is None:
        return None
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _peak(job: str, row: Row, ranks: int, timeout: float) -> int:
    return 0 if row.failed else max(run_ranks(_memory, ranks, (job, row.name), timeout=timeout))


def _memory(job: str, name: str) -> int:
    """Bytes by which the process's peak grows over two steps beyond what it held before the model was wrapped."""
    from distpar.runtime.groups import start

    start(timeout=300)
    step, args = load_job(job)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender = _contender(name, step, args)
    contender()
    contender()
    dist.barrier()
    dist.destroy_process_group()
    # Linux counts in KiB.
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _table(job: str, ranks: int, rows: list[Row]) -> Table:
    from distpar.plans import size

    table = Table(title=f"{job}, {ranks} ranks, in turns", caption=_CAPTION)
    for name in ("", "samples/s (median)", "DistPar is faster by", "peak growth a rank", "losses from one device"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        if row.failed:
            table.add_row(row.name, "cannot run", row.failed, "", "")
            continue
        spread = f"{min(row.rounds):.1f} to {max(row.rounds):.1f}"
        ratios = f"{statistics.median(row.ratios):.2f}x ({min(row.ratios):.2f} to {max(row.ratios):.2f})"
        gap = "no loss returned" if row.loss_difference is None else f"{row.loss_difference:.2g}"
        table.add_row(
            row.name, f"{statistics.median(row.rounds):.1f} ({spread})", "" if row.name == OURS else ratios,
            size(row.peak_bytes), gap,
        )  # fmt: skip
    return table


_CAPTION = "Peak growth counts DistPar's planner too. Baselines average over ranks: dropout and batch norm differ."
