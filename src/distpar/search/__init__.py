"""Solvers by name. Each is a leaf: `Problem -> Assignment`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distpar.errors import UsageError
from distpar.search.exact import Exact
from distpar.search.problem import Assignment, Problem, Solver, cost_of
from distpar.search.simple import Random, brute


def solve(
    problem: Problem,
    solver: str | Callable[[Problem], Assignment],
    *,
    time_limit: float,
    gap: float,
    starts: Sequence[tuple[int, ...]] = (),
) -> Assignment:
    """Solve a problem by a solver's name ("auto", "exact", "brute", "random:SEED") or by a callable.

    Raises:
        UsageError: a callable's answer is not an assignment of this problem.
    """
    answer = _solver(solver, time_limit, gap, tuple(starts))(problem)
    sizes = [choice.num_strategies for choice in problem.choices]
    fits = len(answer.strategies) == len(sizes) and all(
        0 <= strategy < size for strategy, size in zip(answer.strategies, sizes, strict=False)
    )
    if answer.status not in ("infeasible", "none in time") and not fits:
        raise UsageError(
            "the solver's answer is not an assignment",
            why=f"it must name one strategy for each of the {len(sizes)} nodes",
            fix="return Assignment(strategies, cost, bound, status) with valid numbers",
        )
    return answer


def _solver(
    solver: str | Callable[[Problem], Assignment],
    time_limit: float,
    gap: float,
    starts: tuple[tuple[int, ...], ...],
) -> Solver:
    if not isinstance(solver, str):
        return solver
    name, _, seed = solver.partition(":")
    match name:
        case "auto" | "exact":
            return Exact(time_limit, gap, starts)
        case "brute":
            return brute
        case "random":
            return Random(int(seed))
        case _:
            raise AssertionError(f"bug: options let the solver {solver!r} pass")


__all__ = ["Assignment", "Exact", "Problem", "Random", "Solver", "brute", "cost_of", "solve"]
