"""The demo: two models trained on local ranks, compared with one device and with DistributedDataParallel."""

from __future__ import annotations

from distpar.demo.train import rank
from distpar.errors import UsageError
from distpar.launch import run_ranks

JOBS = ("face", "lm")
FACES = 100
"""Identities with a photograph: there must be at least so many classes."""


def run(
    *, identities: int = 50_000, ranks: int = 2, steps: int = 40, rounds: int = 5, only: str | None = None,
    timeout: float = 600.0,
) -> None:  # fmt: skip
    """Train both jobs (or only "face" or "lm") on local gloo ranks and print what came out.

    Raises:
        UsageError: a number that makes no sense, or an unknown job.
        RankFailed: a rank raised, died or did not end within `timeout` seconds.
    """
    for name, value, least in (
        ("identities", identities, FACES), ("ranks", ranks, 1), ("steps", steps, 1), ("rounds", rounds, 1)
    ):  # fmt: skip
        if value < least:
            raise UsageError(
                f"cannot run the demo with {name}={value}",
                why=f"{name} is {least} or more",
                fix=f"write --{name} {least} or more",
            )
    if only is not None and only not in JOBS:
        raise UsageError(
            f"the demo has no job {only!r}", why=f"its jobs are {' and '.join(JOBS)}", fix="write --only face"
        )
    run_ranks(rank, ranks, ((only,) if only else JOBS, identities, steps, rounds), timeout=timeout)
