"""What each rank of the demo runs: one device, then all ranks, then DistributedDataParallel in turns."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

import distpar
from distpar.api import step_seed
from distpar.baselines import ddp
from distpar.demo.jobs import Job, face, lm
from distpar.pace import SentBytes, in_turns, ratio
from distpar.plans import duration, size
from distpar.runtime.groups import start
from distpar.runtime.random import global_rng

_ROUNDING = torch.finfo(torch.float32).eps


def rank(names: tuple[str, ...], identities: int, steps: int, rounds: int) -> None:
    """Both jobs on this rank. Rank 0 speaks."""
    # The library runs optimizers' updates in its own program, so schedulers see no call of optimizer.step.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    start(timeout=120)
    console = Console(quiet=dist.get_rank() != 0, highlight=False, soft_wrap=True)
    for name in names:
        job = face(identities, steps) if name == "face" else lm(steps)
        _train(job, console, steps, rounds)
    dist.barrier()
    dist.destroy_process_group()


def _train(job: Job, console: Console, steps: int, rounds: int) -> None:
    console.rule(f"[bold]{job.title}")
    alone = _alone(job, console, steps, "one device")
    nudged = _alone(job, console, steps, "one device, weights moved by a rounding", _ROUNDING)
    model, optimizer, schedule = job.make()
    console.print(f"before training  {_score(job, model)}")
    step = distpar.parallelize(job.step)
    began = time.perf_counter()
    step.prepare(model, optimizer, *job.batch(0))
    console.print(f"captured, planned and placed in {time.perf_counter() - began:.1f} s\n")
    console.print(str(step.plan) + "\n", markup=False)
    losses, seconds = [], []
    for number in _bar(console, f"{dist.get_world_size()} ranks", steps):
        data = job.batch(number)
        began = time.perf_counter()
        losses.append(float(step(model, optimizer, *data)))
        seconds.append(time.perf_counter() - began)
        if schedule is not None:
            schedule.step()
    trained = _whole(job, model)
    console.print(f"after training   {_score(job, trained)}\n")
    _losses(console, alone, nudged, losses)
    _predicted(job, console, step, model, optimizer, statistics.median(seconds[2:] or seconds))
    _against_ddp(job, console, step, model, optimizer, rounds)


def _alone(job: Job, console: Console, steps: int, text: str, nudge: float = 0.0) -> list[float]:
    """The losses of one device: plain eager PyTorch on rank 0 while the others wait.

    `nudge` moves half of the starting weights (chosen at random) by that fraction:
    how far rounding alone drives this training apart.
    """
    held: list[Any] = [None]
    if dist.get_rank() == 0:
        held = [_plain(job, nudge, _bar(console, text, steps))]
    dist.broadcast_object_list(held, src=0)
    found: list[float] = held[0]
    return found


def _plain(job: Job, nudge: float, numbers: Iterable[int]) -> list[float]:
    losses = []
    model, optimizer, schedule = job.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + nudge * torch.rand_like(parameter).round())
    for number in numbers:
        with global_rng(step_seed(torch.initial_seed(), number + 1)):
            losses.append(float(job.step(model, optimizer, *job.batch(number)).detach()))
        if schedule is not None:
            schedule.step()
    return losses


def _bar(console: Console, text: str, steps: int) -> Iterator[int]:
    yield from track(range(steps), description=f"training, {text}", console=console, disable=console.quiet)


def _score(job: Job, model: nn.Module) -> str:
    return job.score(model) if dist.get_rank() == 0 else ""


def _whole(job: Job, model: nn.Module) -> nn.Module:
    """A plain model with the trained values; every rank takes part in gathering them."""
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    plain = job.make()[0]
    plain.load_state_dict(state)
    return plain


def _losses(console: Console, alone: list[float], nudged: list[float], losses: list[float]) -> None:
    console.print("step   one device   ranks        difference")
    gaps = [abs(a - b) for a, b in zip(alone, losses, strict=True)]
    shown = sorted({*range(0, len(losses), max(1, len(losses) // 8)), len(losses) - 1})
    for number in shown:
        console.print(f"{number:>4}   {alone[number]:<12.6f} {losses[number]:<12.6f} {gaps[number]:.2g}")
    own = max(abs(a - b) for a, b in zip(alone, nudged, strict=True))
    console.print(f"largest difference of all {len(losses)} losses: {max(gaps):.2g} (float32)")
    console.print(f"one device differs from itself by {own:.2g} when its first weights are moved by one rounding\n")


def _predicted(job: Job, console: Console, step: Any, model: Any, optimizer: Any, seconds: float) -> None:
    sent = SentBytes()
    with sent:
        step(model, optimizer, *job.batch(0))
    predicted = step.plan.prediction
    console.print(f"step time   predicted {duration(predicted.seconds)}, measured {duration(seconds)} (median)")
    console.print(
        f"bytes sent  predicted {size(sum(t.num_bytes for t in predicted.traffic))} (busiest rank), "
        f"counted {size(sent.total)} (rank 0)\n"
    )


def _against_ddp(job: Job, console: Console, step: Any, model: Any, optimizer: Any, rounds: int) -> None:
    data = job.batch(0)
    fresh, their_optimizer, _ = job.make()
    their_step, theirs = ddp(job.step, (fresh, their_optimizer, *data))
    contenders = {"DistPar": lambda: step(model, optimizer, *data), "DDP": lambda: their_step(*theirs)}
    for contender in contenders.values():
        contender()
    console.print(f"beside DistributedDataParallel, in turns, a batch of {job.size} in all")
    paces = in_turns(contenders, job.size, rounds, steps=4)
    for pace in paces:
        console.print(f"  {pace}")
    console.print(f"  DistPar is {ratio(*paces)}\n")
