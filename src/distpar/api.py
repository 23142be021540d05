"""The front door. The pipeline is what it says:

graph = capture(step, args) -> plan = make_plan(graph, mesh, cluster) -> program = lower(graph, plan) -> ranks
"""

from __future__ import annotations

import atexit
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distpar.capture import Captured, capture, signature_key
from distpar.capture.fake import DataBinding, GradientBinding, HyperBinding, ModuleBinding, StateBinding
from distpar.capture.objects import find
from distpar.cost.cluster import Cluster
from distpar.errors import RanksDiffer, UsageError
from distpar.graph import Ref
from distpar.layout import Layout
from distpar.lower import lower
from distpar.mesh import Mesh
from distpar.options import Options
from distpar.plans import Plan
from distpar.pose import graph_hash, make_plan
from distpar.program import Program
from distpar.runtime import groups as process_groups
from distpar.runtime.executor import Executor
from distpar.runtime.failure import Watch, agree, compare
from distpar.runtime.store import Store, local
from distpar.simulator import Simulator

Pins = Mapping[str, str | Layout]


def parallelize(
    fn: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    cluster: Cluster | str | Path | None = None,
    options: Options | None = None,
    pins: Pins | None = None,
    plan: Plan | None = None,
) -> ParallelStep:
    """A training step for one device, made to run on all ranks with the same numbers.

    Under torchrun every rank calls this alike; without it the step runs on this one rank. Nothing happens
    until the first call, which captures, plans and lowers.

    Args:
        fn: ordinary PyTorch for one device. Modules and optimizers are passed as arguments.
        mesh: named axes over the ranks; by default one axis, `ranks`.
        cluster: a preset's name, a file's path or a Cluster; by default "cpu", or "dgx-h100" on GPUs.
        pins: layouts that are given: `{"model.head.weight": "[*/ranks, *]"}`.
        plan: a plan that was made before, for the same step.
    """
    return ParallelStep(fn, mesh, as_cluster(cluster), options or Options(), dict(pins or {}), plan)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    cluster: Cluster | str | Path | None = None,
    options: Options | None = None,
    pins: Pins | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan of a step, without running it; no devices are needed and models may be on `meta`."""
    options = options or Options()
    captured = capture(fn, args, kwargs, rng=options.rng)
    return make_plan(captured.graph, mesh or Mesh(ranks=2), as_cluster(cluster), options, pins or {})


def simulate(
    fn: Callable[..., Any],
    *args: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    options: Options | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Any:
    """Run one step on all ranks of a plan in this process.

    Returns what `fn` returns; parameters, buffers and optimizer state in the arguments are updated.
    """
    options = options or Options()
    captured = capture(fn, args, kwargs, rng=options.rng)
    chosen = plan or make_plan(captured.graph, mesh or Mesh(ranks=2), as_cluster(None), options, {})
    check_plan(chosen, captured)
    outcome = Simulator(lower(captured.graph, chosen)).run(captured.read(args, kwargs, seed))
    captured.write(args, kwargs, outcome.writes)
    captured.set_gradients(args, kwargs, outcome.gradients)
    return captured.unflatten(outcome.results)


def check_plan(plan: Plan, captured: Captured) -> None:
    """Raises UsageError when a plan was made for another step."""
    found = graph_hash(captured.graph)
    if plan.graph_hash and plan.graph_hash != found:
        raise UsageError(
            "the plan was made for another step",
            why=f"its graph is {plan.graph_hash}, this step's is {found}",
            fix="plan this step again, with the same shapes, options and optimizer",
        )


def as_cluster(cluster: Cluster | str | Path | None) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return Cluster.preset("dgx-h100" if torch.cuda.is_available() else "cpu")
    is_file = isinstance(cluster, Path) or cluster.endswith(".json")
    return Cluster.load(cluster) if is_file else Cluster.preset(str(cluster))


@dataclass
class _Ready:
    """A captured call with its plan, ready to run on this rank."""

    captured: Captured
    plan: Plan
    program: Program
    executor: Executor


class ParallelStep:
    """Called like the user's function. The first call (for each shape of arguments) captures, plans and lowers."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh | None,
        cluster: Cluster,
        options: Options,
        pins: dict[str, str | Layout],
        plan: Plan | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.cluster, self.options = fn, cluster, options
        self._mesh, self._pins, self._given = mesh, pins, plan
        self._ready: dict[Any, _Ready] = {}
        self._numbers: dict[Any, int] = {}
        self._control: Any = None
        self._last: _Ready | None = None
        self._rank, self._num_ranks = 0, 0
        self._steps = 0
        self._seed = 0
        self._store: Store | None = None
        self._groups: process_groups.Groups | None = None
        self._watch: Watch | None = None

    @property
    def seed(self) -> int:
        """The seed that the steps' own seeds are made from: rank 0's `torch.initial_seed()` at the first call."""
        return self._seed

    @property
    def plan(self) -> Plan:
        """The plan of the last call (or of `prepare`)."""
        return self._require().plan

    @property
    def program(self) -> Program:
        """The program of the last call (or of `prepare`)."""
        return self._require().program

    def _require(self) -> _Ready:
        if self._last is None:
            raise UsageError(
                "the step has no plan yet",
                why="a plan needs the shapes of the arguments",
                fix="call the step, or step.prepare(*args), first",
            )
        return self._last

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelStep:
        """Capture, plan, lower and place the parameters, without running the step."""
        self._guarded(self._prepared, args, kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(self._run, args, kwargs)

    def _guarded(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any error on this rank is told to the others; another rank's error is told here."""
        try:
            if self._watch is not None:
                self._watch.calls += 1
            return work(args, kwargs)
        except BaseException as error:
            # What all ranks find out together they raise together.
            if self._watch is None or isinstance(error, RanksDiffer):
                raise
            told = self._watch.explain(error)
            if told is error:
                self._watch.post(error)
                raise
            raise told from error
        finally:
            if self._watch is not None and self._watch.calls % 2:
                self._watch.calls += 1

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready:
        self._start()
        key = signature_key(self.fn, args, kwargs, rng=self.options.rng)
        if self._num_ranks > 1:
            # All ranks must run the same program, or their collectives would not meet.
            if key not in self._numbers:
                self._numbers[key] = int(hashlib.sha256(repr(key).encode()).hexdigest()[:15], 16)
            if not agree(self._numbers[key], self._control):
                facts = {f"the shape or kind of {leaf[0]}": repr(leaf[1:]) for leaf in key[1:]}
                compare(facts, self._num_ranks, self._control)
        if key not in self._ready:
            self._ready[key] = self._make(args, kwargs)
        self._last = self._ready[key]
        return self._last

    def _start(self) -> None:
        if self._num_ranks:
            return
        self._rank, self._num_ranks = process_groups.start(self.options.timeout)
        given = self._given.mesh if self._given else None
        self.mesh = self._mesh or given or Mesh(ranks=self._num_ranks)
        process_groups.check(self.mesh, self._num_ranks)
        self._seed = torch.initial_seed()
        if self._num_ranks > 1:
            self._watch = Watch(self._rank)
            self._control = process_groups.control(self.options.timeout)
            self._groups = process_groups.Groups(self.mesh, self._rank)
            self._store = Store(self.mesh, self._rank, "cuda" if torch.cuda.is_available() else "cpu")
            self._seed = self._from_first(self._seed)
            atexit.register(self._end)

    def _end(self) -> None:
        """Leave the process group in order when the program ends."""
        import torch.distributed as dist

        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _from_first(self, value: Any) -> Any:
        import torch.distributed as dist

        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready:
        captured = capture(self.fn, args, kwargs, rng=self.options.rng)
        if self._num_ranks > 1:
            compare(self._facts(captured, args, kwargs), self._num_ranks, self._control)
        chosen = self._choose(captured)
        program = lower(captured.graph, chosen, overlap=self.options.overlap)
        if self._groups is not None and self._store is not None:
            self._groups.need(program)
            layouts = {n.index: chosen.layout_of(Ref(n.index)) for n in captured.graph.inputs}
            self._store.settle(captured, find(self.fn, args, kwargs).leaves, layouts)
        for leaf in find(self.fn, args, kwargs).optimizers:
            # A scheduler warns when nobody has called `optimizer.step`; the program has its updates inside.
            leaf.value._opt_called = True
        names = self._groups.names if self._groups else {}
        apart = no_shared_memory(captured.read(args, kwargs, 0))
        executor = Executor(program, self._rank, names, donate=apart)
        if self.options.compile:
            executor.compile()
        return _Ready(captured, chosen, program, executor)

    def _choose(self, captured: Captured) -> Plan:
        """Rank 0's plan, for all; a later shape keeps the layouts of what is stored."""
        if self._given is not None and not self._ready:
            check_plan(self._given, captured)
            return self._given
        pins: dict[str, str | Layout] = dict(self._pins)
        options = self.options
        if self._ready:
            first = next(iter(self._ready.values()))
            names = {n.input.name for n in captured.graph.inputs if n.input is not None}
            pins = {k: v for k, v in first.plan.stored().items() if k in names}
            options = replace(options, solver="auto") if _is_random(options) else options
        if self._rank:
            found = self._from_first(None)
        else:
            found = self._planned(captured, options, pins)
            if self._num_ranks > 1:
                self._from_first(found)
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Plan), "bug: rank 0 sent no plan"
        return found

    def _planned(self, captured: Captured, options: Options, pins: Pins) -> Plan | BaseException:
        """The plan, or the error that all ranks shall raise."""
        from distpar.errors import DistParError

        try:
            return make_plan(captured.graph, self.mesh, self.cluster, options, pins)
        except DistParError as error:
            return error

    def _facts(self, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        facts = {"the captured step": graph_hash(captured.graph), "the version of torch": torch.__version__}
        values = captured.read(args, kwargs, 0)
        for node, binding, value in zip(captured.graph.inputs, captured.bindings, values, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(binding, DataBinding):
                facts[f"data {node.name}"] = digest(value)
            if isinstance(binding, (ModuleBinding, StateBinding)) and not self._ready:
                facts[f"parameter {node.name}"] = digest(local(value))
        return facts

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ready = self._prepared(args, kwargs)
        self._steps += 1
        captured = ready.captured
        values = captured.read(args, kwargs, step_seed(self._seed, self._steps))
        blocks = [local(value) for value in values]
        results, writes, gradients = ready.executor(blocks)
        by_node = {node.index: block for node, block in zip(captured.graph.inputs, blocks, strict=True)}
        with torch.no_grad():
            for index, value in writes.items():
                if value is not by_node[index]:
                    by_node[index].copy_(value)
        self._keep_gradients(ready, args, kwargs, gradients)
        return captured.unflatten([self._result(r, layout, t) for r, layout, t in self._typed(ready, results)])

    def _typed(self, ready: _Ready, results: list[Any]) -> Any:
        graph = ready.captured.graph
        types = [graph.type_of(r) if isinstance(r, Ref) else None for r in graph.results]
        return zip(results, ready.program.result_layouts, types, strict=True)

    def _result(self, value: Any, layout: Layout | None, type_: Any) -> Any:
        if layout is None or layout.is_replicated or self._store is None:
            return value.detach() if isinstance(value, torch.Tensor) else value
        return self._store.wrap(value, layout, type_.shape)

    def _keep_gradients(
        self, ready: _Ready, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: dict[int, Any]
    ) -> None:
        """`.grad` is kept where it was asked for, where the step has no optimizer, or where calls accumulate."""
        captured = ready.captured
        trains = any(isinstance(b, HyperBinding) for b in captured.bindings)
        reads = any(isinstance(b, GradientBinding) for b in captured.bindings)
        if trains and not reads and not self.options.keep_gradients:
            captured.set_gradients(args, kwargs, {})
            return
        layouts = {node: layout for node, _, layout in ready.program.gradients}
        graph = captured.graph
        kept = {}
        for node, value in gradients.items():
            type_: Any = graph.type_of(Ref(node))
            whole = self._store is None or layouts[node].is_replicated
            kept[node] = value if whole else self._store.wrap(value, layouts[node], type_.shape)  # type: ignore[union-attr]
        captured.set_gradients(args, kwargs, kept)


def no_shared_memory(values: list[Any]) -> bool:
    """Whether no two inputs lie in one storage: only then may an update run in place before the step's end."""
    storages = [
        block.untyped_storage().data_ptr()
        for block in map(local, values)
        if isinstance(block, torch.Tensor) and block.numel() and block.device.type != "meta"
    ]
    return len(storages) == len(set(storages))


def _is_random(options: Options) -> bool:
    return isinstance(options.solver, str) and options.solver.startswith("random")


def digest(value: torch.Tensor) -> str:
    """A short digest of a tensor's bytes."""
    if value.device.type == "meta":
        return "meta"
    plain = value.detach().contiguous().cpu().view(-1)
    raw = plain.view(torch.uint8) if plain.numel() else plain.to(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:12]


def step_seed(seed: int, step: int) -> int:
    """The seed of one step: its own, the same on every rank."""
    mixed = hashlib.sha256(f"{seed}:{step}".encode()).digest()
    return int.from_bytes(mixed[:7], "big")
