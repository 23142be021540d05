"""A captured step: its graph, and how inputs are read from and written to the user's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from distpar.capture.convert import convert
from distpar.capture.fake import (
    HYPER,
    Binding,
    ConstantBinding,
    DataBinding,
    GradientBinding,
    HyperBinding,
    ModuleBinding,
    SeedBinding,
    StateBinding,
    stored,
)
from distpar.capture.objects import Leaf, find
from distpar.capture.trace import trace
from distpar.graph import Graph


@dataclass(frozen=True)
class Captured:
    """One captured call.

    Attributes:
        graph: the functional graph.
        bindings: where each input lies, in the order of `graph.inputs`.
        unflatten: flat results -> what the user's function returns.
    """

    fn: Callable[..., Any]
    graph: Graph
    bindings: tuple[Binding, ...]
    unflatten: Callable[[list[Any]], Any]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> list[Any]:
        """The current value of every input: tensors, and floats for numbers."""
        leaves = find(self.fn, args, kwargs).leaves
        return [
            _read(binding, leaves, seed, node.outputs[0])
            for node, binding in zip(self.graph.inputs, self.bindings, strict=True)
        ]

    def write(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, torch.Tensor]) -> None:
        """Store written values back, in place, by input node; optimizer state that is missing is made."""
        leaves = find(self.fn, args, kwargs).leaves
        with torch.no_grad():
            for node, binding in zip(self.graph.inputs, self.bindings, strict=True):
                if node.index in values:
                    _target(binding, leaves, node.outputs[0]).copy_(values[node.index])

    def set_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[int, torch.Tensor]) -> None:
        """Set `.grad` of every parameter to what it is after the step (None where it has none)."""
        leaves = find(self.fn, args, kwargs).leaves
        for node, binding in zip(self.graph.inputs, self.bindings, strict=True):
            if isinstance(binding, ModuleBinding):
                target = _target(binding, leaves, node.outputs[0])
                if isinstance(target, torch.nn.Parameter):
                    target.grad = values.get(node.index)


def capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, rng: str = "global") -> Captured:
    """Capture one call of the user's function; nothing of the user's is changed.

    Raises:
        CaptureError: the step cannot be captured as one graph.
    """
    traced = trace(fn, args, kwargs, rng)
    graph, bindings = convert(traced)
    return Captured(fn, graph, bindings, traced.rebuild)


def signature_key(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, rng: str = "global"
) -> tuple[Any, ...]:
    """What a captured graph depends on: equal keys may share a program."""
    return (rng, *(_key(leaf) for leaf in find(fn, args, kwargs).leaves))


def _key(leaf: Leaf) -> tuple[Any, ...]:
    match leaf.value:
        case torch.nn.Module():
            return (leaf.name, *_module_key(leaf.value))
        case torch.optim.Optimizer():
            return (leaf.name, type(leaf.value).__name__, *map(_group_key, leaf.value.param_groups))
        case torch.Tensor():
            value = leaf.value
            return (leaf.name, tuple(value.shape), value.dtype, value.requires_grad)
        case float():
            return (leaf.name, "float")
        case _:
            return (leaf.name, type(leaf.value).__name__, repr(leaf.value))


def _module_key(module: torch.nn.Module) -> tuple[Any, ...]:
    flags = tuple(part.training for part in module.modules())
    tensors = tuple(
        (tuple(value.shape), value.dtype, value.requires_grad, value.grad is not None) for _, _, value in stored(module)
    )
    return flags, tensors


def _group_key(group: dict[str, Any]) -> tuple[Any, ...]:
    constants = sorted(
        (key, repr(value)) for key, value in group.items() if key not in ("params", *HYPER) and _plain(value)
    )
    return len(group["params"]), tuple(constants)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


def _read(binding: Binding, leaves: tuple[Leaf, ...], seed: int, type_: Any) -> Any:
    match binding:
        case DataBinding(leaf):
            return leaves[leaf].value
        case HyperBinding(leaf, group, key):
            value = leaves[leaf].value.param_groups[group][key]
            return float(value)
        case SeedBinding():
            return torch.tensor(seed, dtype=torch.int64)
        case ConstantBinding(value):
            return value
        case _:
            return _target(binding, leaves, type_)


def _target(binding: Binding, leaves: tuple[Leaf, ...], type_: Any) -> Any:
    match binding:
        case ModuleBinding(leaf, paths):
            return attrgetter(paths[0])(leaves[leaf].value)
        case GradientBinding(leaf, paths):
            return attrgetter(paths[0])(leaves[leaf].value).grad
        case StateBinding():
            return state_of(binding, leaves[binding.leaf].value)
        case DataBinding(leaf):
            return leaves[leaf].value
        case _:
            raise AssertionError(f"bug: {binding} is not stored anywhere")


def state_of(binding: StateBinding, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """An optimizer's state tensor; made with its first value where it is missing."""
    parameter = optimizer.param_groups[binding.group]["params"][binding.position]
    state = optimizer.state[parameter]
    if not isinstance(state.get(binding.key), torch.Tensor):
        if binding.key in ("step", "mu_product"):
            state[binding.key] = torch.tensor(binding.initial, dtype=torch.get_default_dtype())
        else:
            state[binding.key] = torch.full_like(parameter.detach(), binding.initial)
    value = state[binding.key]
    assert isinstance(value, torch.Tensor), "bug: a state is a tensor"
    return value
