"""Two solvers for tests: every assignment, and any assignment."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np

from distpar.errors import UsageError
from distpar.search.problem import Assignment, Problem, cost_of, peak_memory

_MOST = 2_000_000


def brute(problem: Problem) -> Assignment:
    """Try everything.

    Raises:
        UsageError: there are more than two million assignments.
    """
    total = math.prod(choice.num_strategies for choice in problem.choices)
    if total > _MOST:
        raise UsageError(
            "the brute solver cannot try every plan of this step",
            why=f"there are {total:.3g} plans, it tries at most {_MOST}",
            fix='use solver="exact"',
        )
    best: tuple[float, tuple[int, ...]] | None = None
    smallest: int | None = None
    for strategies in itertools.product(*(range(c.num_strategies) for c in problem.choices)):
        cost = cost_of(problem, strategies)
        if math.isinf(cost):
            continue
        peak = peak_memory(problem, strategies)
        smallest = peak if smallest is None else min(smallest, peak)
        fits = problem.memory_limit is None or peak <= problem.memory_limit
        if fits and (best is None or cost < best[0]):
            best = cost, strategies
    if best is None:
        return Assignment((), math.inf, math.inf, "infeasible", smallest)
    return Assignment(best[1], best[0], best[0], "optimal")


@dataclass(frozen=True, slots=True)
class Random:
    """Any assignment of finite node costs, from a seed; the memory limit is not looked at."""

    seed: int

    def __call__(self, problem: Problem) -> Assignment:
        generator = random.Random(self.seed)
        strategies = tuple(
            generator.choice([int(s) for s in np.flatnonzero(np.isfinite(choice.costs))]) for choice in problem.choices
        )
        return Assignment(strategies, cost_of(problem, strategies), 0.0, "feasible")
