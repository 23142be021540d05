"""The exact solver equals brute force; folding keeps what equal choices cost."""

from __future__ import annotations

import numpy as np
import pytest

from distpar.search import Exact, Random, brute, solve
from distpar.search.fold import fold
from distpar.search.problem import Choice, Consumer, Fan, Problem, cost_of, peak_memory

MIB = 2**20


def problem(seed: int, limit: int | None) -> Problem:
    draw = np.random.default_rng(seed)
    choices = []
    for _ in range(5):
        start = int(draw.integers(0, 4))
        choices.append(Choice(draw.random(3), draw.integers(0, 5, 3) * MIB, start, start + 3))
    fans = []
    for producer in range(4):
        readers = sorted(set(draw.integers(producer + 1, 5, 2).tolist()))
        consumers = tuple(Consumer(int(node), draw.integers(0, 3, 3)) for node in readers)
        costs, memory = draw.random((2, 3)), draw.integers(0, 3, (2, 3)) * MIB
        fans.append(Fan(producer, draw.integers(0, 2, 3), consumers, costs, memory, producer, producer + 2))
    return Problem(tuple(choices), tuple(fans), limit)


@pytest.mark.parametrize("limit", [None, 14 * MIB, 10 * MIB, 6 * MIB])
def test_exact_equals_brute(limit: int | None) -> None:
    seen = set()
    for seed in range(40):
        posed = problem(seed, limit)
        found, best = Exact()(posed), brute(posed)
        seen.add(best.status)
        assert found.status == best.status
        if best.status == "infeasible":
            assert found.smallest_memory == best.smallest_memory
            continue
        assert found.cost == pytest.approx(best.cost, abs=1e-9)
        assert found.bound <= best.cost + 1e-9
        assert found.cost == pytest.approx(cost_of(posed, found.strategies))
        assert limit is None or peak_memory(posed, found.strategies) <= limit
    assert "optimal" in seen


def test_more_memory_never_makes_the_optimum_worse() -> None:
    for seed in range(20):
        costs = [brute(problem(seed, limit * MIB)).cost for limit in (8, 10, 12, 16)]
        assert costs == sorted(costs, reverse=True)


def test_folding_costs_what_equal_choices_cost() -> None:
    for seed in range(20):
        posed = problem(seed, None)
        classes = [0, 1, 0, 1, 2]
        folded, unfold = fold(posed, classes)
        best = brute(folded)
        strategies = unfold(best.strategies)
        assert strategies[0] == strategies[2] and strategies[1] == strategies[3]
        assert cost_of(posed, strategies) == pytest.approx(best.cost)


def test_random_gives_the_same_legal_assignment_for_a_seed() -> None:
    posed = problem(3, None)
    assert Random(5)(posed) == Random(5)(posed)
    assert np.isfinite(solve(posed, "random:5", time_limit=1, gap=0).cost)
