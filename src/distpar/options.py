"""What a user can ask for: one frozen record, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distpar.errors import UsageError

SPACES = ("full", "alpa")
"""Parts of the space by name: all of it, or without ops that read a Partial value (Alpa's)."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to search and run.

    Attributes:
        beta: weight of communication seconds against compute seconds; 1.0 is physical.
        memory_limit: peak bytes per rank, as a number or "16GiB"; None takes the cluster's memory.
        solver: "auto", "exact", "brute", "random:SEED" or a callable `Problem -> Assignment`.
        space: the part of the space to search: "full" or a named scheme.
        time_limit: seconds that the solver may take.
        gap: the solver may stop when it is proved to be this near to the optimum (a fraction).
        overlap: start collectives early and await them late.
        rng: "global": random numbers are a function of seed and global index, the same under any
            plan; "torch": exactly what one-device PyTorch draws (each rank draws the whole tensor).
        results: "plain": results are whole tensors, the same on every rank; "sharded": DTensors.
        keep_gradients: leave `.grad` on the parameters after a step that has an optimizer.
        compile: run the local program through torch.compile.
        timeout: seconds after which a rank that waits for another gives up.
    """

    beta: float = 1.0
    memory_limit: int | str | None = None
    solver: str | Callable[[Any], Any] = "auto"
    space: str = "full"
    time_limit: float = 60.0
    gap: float = 1e-6
    overlap: bool = True
    rng: str = "global"
    results: str = "plain"
    keep_gradients: bool = False
    compile: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise _wrong("beta", self.beta, "a weight is 0 or more", "beta=1.0")
        for name in ("time_limit", "timeout"):
            if not getattr(self, name) > 0:
                raise _wrong(name, getattr(self, name), "seconds are more than 0", f"{name}=60")
        if not self.gap >= 0:
            raise _wrong("gap", self.gap, "a gap is a fraction, 0 or more", "gap=0.01")
        _one_of("space", self.space, SPACES)
        _one_of("rng", self.rng, ("global", "torch"))
        _one_of("results", self.results, ("plain", "sharded"))
        if isinstance(self.solver, str) and not re.fullmatch(r"auto|exact|brute|random:\d+", self.solver):
            raise _wrong(
                "solver", self.solver, "no solver has this name",
                'one of "auto", "exact", "brute", "random:SEED", or a callable',
            )  # fmt: skip
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)


def parse_bytes(text: int | str) -> int:
    """`"16GiB"` -> 17179869184. Units: B, KB, MB, GB, TB and KiB, MiB, GiB, TiB."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text))
    if match and match[2] in _UNITS and float(match[1]) > 0:
        return int(float(match[1]) * _UNITS[match[2]])
    raise _wrong("memory_limit", text, "it is not a number of bytes", 'for example "16GiB"')


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        raise _wrong(name, value, f"{name} is one of {listed}", f'{name}="{choices[0]}"')


def _wrong(name: str, value: object, why: str, fix: str) -> UsageError:
    return UsageError(f"option {name}={value!r} cannot be used", why=why, fix=f"write {fix}")
