"""One device against many: the same step run plainly, and run by a plan on simulated ranks.

One device is plain eager PyTorch on copies of the arguments, drawing random numbers by global index. Compared
after every step: results, gradients, parameters, buffers and optimizer state. When something differs, the step is
run once more node by node, and the first op whose value differs is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distpar.api import Pins, as_cluster, step_seed
from distpar.capture import Captured, capture, interpret
from distpar.capture.objects import find, flatten
from distpar.cost.cluster import Cluster
from distpar.errors import NumbersDiffer
from distpar.graph import Ref, TensorType
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
KINDS = ("results", "gradients", "parameters", "buffers", "state", "replicas")


@dataclass
class Verification:
    """The largest difference from one device, by what was compared; `print` shows a small table."""

    mesh: Mesh
    plan: Plan
    steps: int
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    @property
    def largest(self) -> float:
        return max(self.worst.values())

    def __str__(self) -> str:
        head = f"equal to one device on {self.mesh} over {self.steps} steps; largest difference"
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
    """Compare one device with all ranks of a plan, simulated in this process. The arguments are not changed.

    Raises:
        NumbersDiffer: something differs by more than its dtype's tolerance; names the first op that does.
    """
    options = options or Options()
    plain_args, plain_kwargs = copy.deepcopy((args, kwargs))
    our_args, our_kwargs = copy.deepcopy((args, kwargs))
    captured = capture(fn, our_args, our_kwargs, rng=options.rng)
    mesh = plan.mesh if plan else mesh or Mesh(ranks=2)
    chosen = plan or make_plan(captured.graph, mesh, as_cluster(cluster), options, pins or {})
    simulator = Simulator(lower(captured.graph, chosen, overlap=options.overlap))
    report = Verification(mesh, chosen, steps)
    least = _narrowest(captured)
    for number in range(1, steps + 1):
        seed = step_seed(torch.initial_seed(), number)
        before = captured.read(our_args, our_kwargs, seed)
        before = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in before]
        outcome = simulator.run(before)
        captured.write(our_args, our_kwargs, outcome.writes)
        captured.set_gradients(our_args, our_kwargs, outcome.gradients)
        with global_rng(seed):
            expected = fn(*plain_args, **plain_kwargs)
        pairs = _pairs(captured, expected, outcome.results, (plain_args, plain_kwargs), (our_args, our_kwargs))
        for kind, name, one, many in [*pairs, ("replicas", "", outcome.replica_difference, None)]:
            gap, allowed = _gap(one, many, least)
            report.worst[kind] = max(report.worst[kind], gap)
            if gap > allowed:
                raise _differs(captured, chosen, simulator, before, f"{kind} {name}".strip(), number, gap, allowed)
    return report


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
    captured: Captured,
    plan: Plan,
    simulator: Simulator,
    inputs: list[Any],
    what: str,
    step: int,
    gap: float,
    allowed: float,
) -> NumbersDiffer:
    """The error, with the first op whose value differs when the step is run again node by node."""
    right: dict[int, list[Any]] = {}
    interpret(captured.graph, inputs, watch=lambda node, values: right.update({node: values}))
    first: list[tuple[int, int, float]] = []

    def watch(node: int, output: int, value: torch.Tensor) -> None:
        expected = right[node][output]
        if isinstance(expected, torch.Tensor) and expected.shape == value.shape:
            off, fine = _gap(expected, value)
            if off > fine:
                first.append((node, output, off))

    simulator.run(inputs, watch=watch)
    if not first:
        return NumbersDiffer(
            f"{what} differs from one device by {gap:.3g} in step {step}",
            why=f"at most {allowed:.3g} is allowed; every op agrees with the captured graph, which differs from eager",
            fix="report this step: its capture is wrong",
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
