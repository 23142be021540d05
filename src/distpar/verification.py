"""One device against many: the same step run plainly, and run by a plan on simulated or on real ranks.

One device is plain eager PyTorch on copies of the arguments, drawing random numbers by global index. Compared
after every step: results, gradients, parameters, buffers and optimizer state. When something differs, the step is
run once more node by node, and the first op whose value differs is named.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distpar.api import Pins, as_cluster, parallelize, step_seed
from distpar.capture import Captured, capture, interpret
from distpar.capture.objects import find, flatten
from distpar.cost.cluster import Cluster
from distpar.errors import NumbersDiffer
from distpar.graph import Ref, TensorType
from distpar.launch import load_job, run_ranks
from distpar.lower import lower
from distpar.mesh import Mesh
from distpar.notation import format_layout
from distpar.options import Options
from distpar.plans import Plan
from distpar.pose import make_plan
from distpar.runtime.random import global_rng
from distpar.simulator import Simulator, difference

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest difference allowed, relative to the largest element (or 1 if that is smaller)."""
_NARROW = {"f32": 1e-4, "bf16": 2e-2, "f16": 2e-2}
"""A model that computes a part of itself in a narrower dtype has that dtype's rounding everywhere after it."""
_Gap = tuple[str, str, float, float]
"""What was compared: its kind, its name, how much it differs, how much is allowed."""
KINDS = ("results", "gradients", "parameters", "buffers", "state", "replicas")


@dataclass
class Verification:
    """The largest difference from one device, by what was compared; `print` shows a small table."""

    mesh: Mesh
    plan: Plan
    steps: int
    real: bool = False
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    @property
    def largest(self) -> float:
        return max(self.worst.values())

    def __str__(self) -> str:
        ranks = "real" if self.real else "simulated"
        head = f"equal to one device on {self.mesh}, {ranks} ranks, over {self.steps} steps; largest difference"
        return "\n".join([head, *(f"  {kind:<11} {value:.3g}" for kind, value in self.worst.items())])


def verify(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    cluster: Cluster | str | Path | None = None,
    options: Options | None = None,
    pins: Pins | None = None,
    steps: int = 3,
    **kwargs: Any,
) -> Verification:
    """Compare one device with all ranks of a plan. The arguments are not changed.

    The ranks are simulated in this process; under torchrun they are the real ones, and every rank compares.

    Raises:
        NumbersDiffer: something differs by more than its dtype's tolerance; names the first op that does.
    """
    options = options or Options()
    real = int(os.environ.get("WORLD_SIZE", "1")) > 1
    many = _Real if real else _Simulated
    plain_args, plain_kwargs = copy.deepcopy((args, kwargs))
    ranks = many(fn, *copy.deepcopy((args, kwargs)), mesh, plan, as_cluster(cluster), options, pins or {})
    report = Verification(ranks.plan.mesh, ranks.plan, steps, real=real)
    least = _narrowest(ranks.captured)
    for number in range(1, steps + 1):
        seed = step_seed(ranks.seed, number)
        before = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in ranks.inputs(seed)]
        results = ranks.run(before)
        with global_rng(seed):
            expected = fn(*plain_args, **plain_kwargs)
        pairs = _pairs(ranks.captured, expected, results, (plain_args, plain_kwargs), (ranks.args, ranks.kwargs))
        gaps = [(kind, name, *_gap(one, _whole(other), least)) for kind, name, one, other in pairs]
        gaps.append(("replicas", "", *_gap(ranks.replica_difference, None, least)))
        for kind, name, gap, allowed in ranks.agreed(gaps):
            report.worst[kind] = max(report.worst[kind], gap)
            if gap > allowed:
                raise _differs(ranks, before, f"{kind} {name}".strip(), number, gap, allowed)
    return report


class _Simulated:
    """All ranks of a plan, simulated in this process."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        mesh: Mesh | None, plan: Plan | None, cluster: Cluster, options: Options, pins: Pins,
    ) -> None:  # fmt: skip
        self.args, self.kwargs, self.seed = args, kwargs, torch.initial_seed()
        self.captured = capture(fn, args, kwargs, rng=options.rng)
        mesh = plan.mesh if plan else mesh or Mesh(ranks=2)
        self.plan = plan or make_plan(self.captured.graph, mesh, cluster, options, pins)
        self.simulator = Simulator(lower(self.captured.graph, self.plan, overlap=options.overlap))
        self.replica_difference = 0.0

    def inputs(self, seed: int) -> list[Any]:
        return self.captured.read(self.args, self.kwargs, seed)

    def run(self, inputs: list[Any]) -> list[Any]:
        outcome = self.simulator.run(inputs)
        self.captured.write(self.args, self.kwargs, outcome.writes)
        self.captured.set_gradients(self.args, self.kwargs, outcome.gradients)
        self.replica_difference = outcome.replica_difference
        return outcome.results

    def agreed(self, gaps: list[_Gap]) -> list[_Gap]:
        return gaps


class _Real:
    """The ranks that run, each of which compares the whole tensors with one device."""

    replica_difference = 0.0

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        mesh: Mesh | None, plan: Plan | None, cluster: Cluster, options: Options, pins: Pins,
    ) -> None:  # fmt: skip
        self.args, self.kwargs = args, kwargs
        # As on one device: also what the caller's generator draws is then the same on all ranks.
        self.captured = capture(fn, *copy.deepcopy((args, kwargs)), rng=options.rng)
        self.step = parallelize(
            fn, mesh=mesh, plan=plan, cluster=cluster, options=replace(options, keep_gradients=True), pins=pins
        ).prepare(*args, **kwargs)
        self.plan, self.seed = self.step.plan, self.step.seed

    def inputs(self, seed: int) -> list[Any]:
        return [_whole(value) for value in self.captured.read(self.args, self.kwargs, seed)]

    def run(self, inputs: list[Any]) -> list[Any]:
        return [_whole(value) for value in flatten(self.step(*self.args, **self.kwargs))[0]]

    @property
    def simulator(self) -> Simulator:
        return Simulator(lower(self.captured.graph, self.plan))

    def agreed(self, gaps: list[_Gap]) -> list[_Gap]:
        """Every rank's worst: all then say the same."""
        import torch.distributed as dist

        found: list[list[_Gap]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, gaps)
        return [max(column, key=lambda gap: gap[2]) for column in zip(*found, strict=True)]


def _whole(value: Any) -> Any:
    """A DTensor as the whole plain tensor; all ranks call this alike."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _narrowest(captured: Captured) -> float:
    """The tolerance of the narrowest floating dtype that any op of the step computes in."""
    dtypes = {
        type_.dtype
        for node in captured.graph.nodes
        for type_ in node.outputs
        if node.input is None and isinstance(type_, TensorType) and type_.numel > 1
    }
    return max((_NARROW.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _gap(one: Any, many: Any, least: float = 0.0) -> tuple[float, float]:
    """The difference of two values, and what is allowed."""
    if isinstance(one, torch.Tensor) != isinstance(many, torch.Tensor) and many is not None:
        one, many = torch.as_tensor(one), torch.as_tensor(many)
    if isinstance(one, torch.Tensor) and isinstance(many, torch.Tensor):
        if one.shape != many.shape or one.dtype != many.dtype:
            return float("inf"), 0.0
        tolerance = _TOLERANCE.get(one.dtype, 0.0)
        tolerance = max(tolerance, least) if tolerance else 0.0
        finite = one.detach()[one.detach().isfinite()] if one.numel() else one
        scale = max(1.0, float(finite.abs().max())) if finite.numel() and tolerance else 1.0
        return difference(one, many), tolerance * scale
    if isinstance(one, float):
        return (one if many is None else abs(one - many)), max(1e-9, least)
    return (0.0 if one == many or many is None else float("inf")), 0.0


def _pairs(
    captured: Captured, expected: Any, results: list[Any], plain: Any, ours: Any
) -> list[tuple[str, str, Any, Any]]:
    pairs: list[tuple[str, str, Any, Any]] = [
        ("results", str(i), one, many) for i, (one, many) in enumerate(zip(flatten(expected)[0], results, strict=True))
    ]
    ones = find(captured.fn, *plain).leaves
    manys = find(captured.fn, *ours).leaves
    for one, many in zip(ones, manys, strict=True):
        if isinstance(one.value, torch.nn.Module):
            pairs += _module_pairs(one.name, one.value, many.value)
        if isinstance(one.value, torch.optim.Optimizer):
            pairs += _state_pairs(one.name, one.value, many.value)
    return pairs


def _module_pairs(name: str, one: torch.nn.Module, many: torch.nn.Module) -> list[tuple[str, str, Any, Any]]:
    pairs: list[tuple[str, str, Any, Any]] = []
    ours = dict(many.named_parameters())
    for path, value in one.named_parameters():
        pairs.append(("parameters", f"{name}.{path}", value, ours[path]))
        mine = ours[path].grad
        if (value.grad is None) != (mine is None):
            pairs.append(("gradients", f"{name}.{path}", "a gradient", "none"))
        elif value.grad is not None:
            pairs.append(("gradients", f"{name}.{path}", value.grad, mine))
    buffers = dict(many.named_buffers())
    pairs += [("buffers", f"{name}.{path}", value, buffers[path]) for path, value in one.named_buffers()]
    return pairs


def _state_pairs(name: str, one: torch.optim.Optimizer, many: torch.optim.Optimizer) -> list[tuple[str, str, Any, Any]]:
    pairs: list[tuple[str, str, Any, Any]] = []
    for group, other in zip(one.param_groups, many.param_groups, strict=True):
        for number, (p, q) in enumerate(zip(group["params"], other["params"], strict=True)):
            for key, value in one.state.get(p, {}).items():
                pairs.append(("state", f"{name}[{number}].{key}", value, many.state.get(q, {}).get(key, "nothing")))
    return pairs


def _differs(
    ranks: _Simulated | _Real, inputs: list[Any], what: str, step: int, gap: float, allowed: float
) -> NumbersDiffer:
    """The error, with the first op whose value differs when the step is run again node by node, simulated."""
    captured, plan = ranks.captured, ranks.plan
    right: dict[int, list[Any]] = {}
    interpret(captured.graph, inputs, watch=lambda node, values: right.update({node: values}))
    first: list[tuple[int, int, float]] = []

    def watch(node: int, output: int, value: torch.Tensor) -> None:
        expected = right[node][output]
        if isinstance(expected, torch.Tensor) and expected.shape == value.shape:
            off, fine = _gap(expected, value)
            if off > fine:
                first.append((node, output, off))

    ranks.simulator.run(inputs, watch=watch)
    if not first:
        return NumbersDiffer(
            f"{what} differs from one device by {gap:.3g} in step {step}",
            why=f"at most {allowed:.3g} is allowed; on simulated ranks every op agrees with the captured graph",
            fix="report this step: its capture, or the runtime of real ranks, is wrong",
        )
    index, output, off = first[0]
    node, type_ = captured.graph.nodes[index], captured.graph.type_of(Ref(index, output))
    layout = plan.layout_of(Ref(index, output))
    shown = format_layout(type_, layout) if isinstance(type_, TensorType) else ""
    return NumbersDiffer(
        f"{what} differs from one device by {gap:.3g} in step {step}",
        where=str(node.where),
        why=f"the first op that differs is {node.op} ({node.name}: {shown}), by {off:.3g}; allowed is {allowed:.3g}",
        fix="report this op and its layouts, and pin a tensor near it to another layout meanwhile",
    )


def verify_on_ranks(job: str, mesh: Mesh, options: Options, steps: int, *, timeout: float = 900.0) -> Verification:
    """`verify` of a job, `file.py:function`, on real gloo ranks of this host, which are started and ended here."""
    return run_ranks(_on_rank, mesh.num_ranks, (job, mesh, options, steps), timeout=timeout)[0]  # type: ignore[no-any-return]


def _on_rank(job: str, mesh: Mesh, options: Options, steps: int) -> Verification:
    step, args = load_job(job)
    return verify(step, *args, mesh=mesh, options=options, steps=steps)
