"""The integer program, proved by HiGHS.

    x[n, s]          node n takes strategy s                         binary, one a node
    y[f, a, b]       fan f, made in state a, is converted to b       0..1
    r[f, c, a, b]    consumer c's own share of y                     row sums: made in a; column sums: c wants b

With one consumer y is r, and the row and column sums make the relaxation tight; with several, y >= r of each,
so a conversion is paid once. Only x has to be binary. Memory rows are added where an answer breaks the limit.
Strategies that the states of their tensors cannot tell apart are merged first (the cheapest stays).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from distpar.search.problem import Assignment, Choice, Floats, Problem, cost_of, memory_profile, peak_memory

_SCALE = 1e6
"""Costs are given to HiGHS in microseconds: its tolerances are absolute."""
_MIB = float(2**20)


@dataclass(frozen=True, slots=True)
class Exact:
    """Solve to a proved optimum, or to the best found within the limits with a proved bound."""

    time_limit: float = 60.0
    gap: float = 1e-6
    starts: tuple[tuple[int, ...], ...] = ()

    def __call__(self, problem: Problem) -> Assignment:
        kept = _undominated(problem)
        start = self._best_start(problem)
        found, bound, impossible = self._within_memory(problem, kept, start)
        if found is None and start is None and not impossible:
            start = self._cheapest(problem, kept)
        if start is not None and (found is None or cost_of(problem, start) < cost_of(problem, found)):
            found, bound = start, min(bound, cost_of(problem, start))
        if found is None and impossible:
            return Assignment((), math.inf, math.inf, "infeasible", self._smallest(problem, kept))
        if found is None:
            return Assignment((), math.inf, bound, "none in time")
        cost = cost_of(problem, found)
        bound = min(bound, cost)
        bound = max(bound, 0.0) if np.isfinite(bound) else 0.0
        proved = cost - bound <= max(self.gap, 1e-6) * max(cost, 1e-12)
        return Assignment(found, cost, bound, "optimal" if proved else "feasible")

    def _within_memory(
        self, problem: Problem, kept: list[list[int]], start: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...] | None, float, bool]:
        """Solve with memory rows only where an answer has broken the limit, until none does.

        Few of the thousands of possible rows ever bind; a program with fewer rows is a relaxation, so its bound
        and its proof of impossibility hold.
        """
        until = time.monotonic() + self.time_limit
        times: set[int] = set()
        bound = 0.0
        while True:
            model = _Model(problem, kept, times)
            left = max(1.0, until - time.monotonic())
            found, lower, impossible = model.solve(left, self.gap, start)
            bound = max(bound, lower)
            if found is None:
                return None, bound, impossible
            over = _over(problem, found)
            if not over:
                return found, bound, False
            if time.monotonic() > until:
                return None, bound, False
            times |= over

    def _smallest(self, problem: Problem, kept: list[list[int]]) -> int | None:
        """The smallest peak of any assignment, when it is found in time."""
        until = time.monotonic() + self.time_limit
        times: set[int] = set()
        while time.monotonic() < until:
            model = _Model(problem, kept, times, minimise_memory=True)
            found, _, _ = model.solve(max(1.0, until - time.monotonic()), 1e-6)
            if found is None:
                return None
            profile = memory_profile(problem, found)
            peak = max((used for _, used in profile), default=problem.fixed_memory)
            worst = {moment for moment, used in profile if used == peak}
            if worst <= times or not worst:
                return peak
            times |= worst
        return None

    def _cheapest(self, problem: Problem, kept: list[list[int]]) -> tuple[int, ...] | None:
        """Each node's cheapest strategy by itself, or its first: an answer when time is too short for any other."""
        alone = tuple(
            min(strategies, key=lambda s: (choice.costs[s], s))
            for choice, strategies in zip(problem.choices, kept, strict=True)
        )
        firsts = tuple(strategies[0] for strategies in kept)
        limit = problem.memory_limit
        fitting = [s for s in (alone, firsts) if limit is None or peak_memory(problem, s) <= limit]
        finite = [s for s in fitting if math.isfinite(cost_of(problem, s))]
        return min(finite, key=lambda s: cost_of(problem, s), default=None)

    def _best_start(self, problem: Problem) -> tuple[int, ...] | None:
        """The cheapest of the given assignments that fits into memory."""
        limit = problem.memory_limit
        fitting = [s for s in self.starts if limit is None or peak_memory(problem, s) <= limit]
        return min(fitting, key=lambda s: cost_of(problem, s), default=None)


def _undominated(problem: Problem) -> list[list[int]]:
    """For each node the strategies worth keeping: per combination of fan states, the cheapest in time and memory."""
    states: list[list[Iterable[int]]] = [[] for _ in problem.choices]
    for fan in problem.fans:
        states[fan.producer].append(fan.sources)
        for reader in fan.consumers:
            states[reader.node].append(reader.targets)
    return [_best(choice, columns) for choice, columns in zip(problem.choices, states, strict=True)]


def _best(choice: Choice, columns: list[Iterable[int]]) -> list[int]:
    groups: dict[tuple[int, ...], list[int]] = {}
    listed = [list(column) for column in columns]
    for strategy in range(choice.num_strategies):
        if np.isfinite(choice.costs[strategy]):
            groups.setdefault(tuple(int(c[strategy]) for c in listed), []).append(strategy)
    kept = []
    for group in groups.values():
        group.sort(key=lambda s: (choice.costs[s], choice.memory[s], s))
        least = math.inf
        for strategy in group:
            if choice.memory[strategy] < least:
                kept.append(strategy)
                least = choice.memory[strategy]
    return sorted(kept)


class _Model:
    """The program in HiGHS's column and row arrays, built once, solved once."""

    def __init__(
        self, problem: Problem, kept: list[list[int]], times: Iterable[int] = (), minimise_memory: bool = False
    ) -> None:
        self.problem, self.kept, self.minimise_memory = problem, kept, minimise_memory
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.binary: list[bool] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.memory: list[tuple[int, int, int, float]] = []
        self.first = [self.node(choice, strategies) for choice, strategies in zip(problem.choices, kept, strict=True)]
        for fan_number in range(len(problem.fans)):
            self.fan(fan_number)
        self.limit(times)

    def column(self, cost: float, *, binary: bool = False, upper: float = 1.0) -> int:
        self.costs.append(0.0 if self.minimise_memory else cost * _SCALE)
        self.upper.append(upper)
        self.binary.append(binary)
        return len(self.costs) - 1

    def row(self, low: float, high: float, entries: Iterable[tuple[int, float]]) -> None:
        for column, value in entries:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)

    def node(self, choice: Choice, strategies: list[int]) -> int:
        first = len(self.costs)
        for strategy in strategies:
            column = self.column(float(choice.costs[strategy]), binary=len(strategies) > 1)
            self.memory.append((choice.start, choice.stop, column, float(choice.memory[strategy])))
        self.row(1.0, 1.0, [(first + i, 1.0) for i in range(len(strategies))])
        return first

    def indicator(self, node: int, states: Iterable[int], state: int) -> list[tuple[int, float]]:
        """The columns of a node's strategies that are in a state."""
        listed = list(states)
        return [(self.first[node] + i, 1.0) for i, strategy in enumerate(self.kept[node]) if listed[strategy] == state]

    def fan(self, number: int) -> None:
        fan = self.problem.fans[number]
        sources = sorted({int(fan.sources[s]) for s in self.kept[fan.producer]})
        wanted = [sorted({int(reader.targets[s]) for s in self.kept[reader.node]}) for reader in fan.consumers]
        targets = sorted(set().union(*wanted))
        table: Floats = fan.costs
        paid = {
            (a, b): self.column(
                float(table[a, b]) if np.isfinite(table[a, b]) else 0.0,
                upper=1.0 if np.isfinite(table[a, b]) else 0.0,
            )
            for a in sources
            for b in targets
        }
        if fan.memory is not None:
            self.memory += [(fan.start, fan.stop, column, float(fan.memory[key])) for key, column in paid.items()]
        alone = len(fan.consumers) == 1
        for reader, states in zip(fan.consumers, wanted, strict=True):
            own = paid if alone else {
                (a, b): self.column(0.0) for a in sources for b in states
            }  # fmt: skip
            for a in sources:
                made = [(c, -v) for c, v in self.indicator(fan.producer, fan.sources, a)]
                self.row(0.0, 0.0, [*((own[a, b], 1.0) for b in states), *made])
            for b in states:
                asked = [(c, -v) for c, v in self.indicator(reader.node, reader.targets, b)]
                self.row(0.0, 0.0, [*((own[a, b], 1.0) for a in sources), *asked])
            if not alone:
                for key, column in own.items():
                    self.row(0.0, math.inf, [(paid[key], 1.0), (column, -1.0)])

    def limit(self, times: Iterable[int]) -> None:
        """A row for each of the times: the bytes of what is alive, in MiB, are within the limit."""
        limit = self.problem.memory_limit
        if limit is None:
            return
        peak = self.column(1.0 / _SCALE, upper=math.inf) if self.minimise_memory else None
        if peak is not None:
            self.costs[peak] = 1.0
        room = (limit - self.problem.fixed_memory) / _MIB
        for moment in sorted(times):
            live = [(c, size / _MIB) for start, stop, c, size in self.memory if start <= moment < stop and size]
            if peak is None:
                self.row(-math.inf, room, live)
            else:
                self.row(-math.inf, 0.0, [*live, (peak, -1.0)])

    def solve(
        self, time_limit: float, gap: float, start: tuple[int, ...] | None = None
    ) -> tuple[tuple[int, ...] | None, float, bool]:
        """(strategies or None, lower bound in seconds, whether it is proved that there are none)."""
        import highspy

        with _quiet():
            solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("time_limit", float(time_limit))
        solver.setOptionValue("mip_rel_gap", float(gap))
        solver.setOptionValue("mip_abs_gap", 1e-9)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.passModel(self.lp(highspy))
        if start is not None:
            self.give(solver, highspy, start)
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != 2:
            status = solver.getModelStatus()
            none = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
            return None, 0.0, status in none
        values = np.array(solver.getSolution().col_value)
        found = tuple(
            strategies[int(np.argmax(values[first : first + len(strategies)]))]
            for first, strategies in zip(self.first, self.kept, strict=True)
        )
        integral = any(self.binary)
        bound = info.mip_dual_bound if integral else info.objective_function_value
        return found, bound / _SCALE, False

    def give(self, solver, highspy, start: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
        """Start from an assignment: its nodes' columns are given, HiGHS completes the rest by a linear program."""
        columns, values = [], []
        for first, strategies, chosen, fan_states in zip(self.first, self.kept, start, self.states(), strict=True):
            same = [i for i, s in enumerate(strategies) if fan_states[s] == fan_states[chosen]]
            taken = strategies.index(chosen) if chosen in strategies else same[0]
            for i in range(len(strategies)):
                columns.append(first + i)
                values.append(1.0 if i == taken else 0.0)
        solver.setSolution(len(columns), np.array(columns, dtype=np.int32), np.array(values))

    def states(self) -> list[list[tuple[int, ...]]]:
        """For each node and strategy its states in all fans."""
        columns: list[list[list[int]]] = [[] for _ in self.problem.choices]
        for fan in self.problem.fans:
            columns[fan.producer].append([int(s) for s in fan.sources])
            for reader in fan.consumers:
                columns[reader.node].append([int(t) for t in reader.targets])
        return [
            [tuple(column[s] for column in found) for s in range(choice.num_strategies)]
            for choice, found in zip(self.problem.choices, columns, strict=True)
        ]

    def lp(self, highspy):  # type: ignore[no-untyped-def]
        order = np.lexsort((self.columns, self.rows))
        starts = np.zeros(len(self.low) + 1, dtype=np.int32)
        np.add.at(starts, np.array(self.rows, dtype=np.int64) + 1, 1)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.low)
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_ = np.zeros(len(self.costs))
        lp.col_upper_ = np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self.low), np.array(self.high)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum(starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)[order]
        lp.a_matrix_.value_ = np.array(self.values)[order]
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[b] for b in self.binary]
        return lp


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints its banner from C++ when it is made, before any option can be set."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _over(problem: Problem, strategies: tuple[int, ...]) -> set[int]:
    """Times at which an assignment breaks the memory limit: the worst of them, spread over the step."""
    limit = problem.memory_limit
    if limit is None:
        return set()
    broken = [(used, moment) for moment, used in memory_profile(problem, strategies) if used > limit]
    return {moment for _, moment in sorted(broken, reverse=True)[: max(1, min(8, len(broken)))]} | {
        moment for _, moment in broken[:: max(1, len(broken) // 8)]
    }
