"""Fake copies of the user's objects, and how each input is found again in the real ones.

The arguments are deep-copied with a memo that maps every real tensor to its fake, so ties and the
optimizer's references survive and the user's objects stay as they are. An input is bound by where it lies
(argument, module path, optimizer key), never by identity: parameters are later replaced by DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from distpar.capture.objects import Leaf, Objects, find, flatten
from distpar.errors import CaptureError
from distpar.graph import InputKind


@dataclass(frozen=True, slots=True)
class ModuleBinding:
    """A parameter or buffer: the leaf that holds the module, and every attribute path (ties have several)."""

    leaf: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GradientBinding:
    """The `.grad` of the parameter at the same place."""

    leaf: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateBinding:
    """One entry of an optimizer's state. `initial` fills it where the optimizer has not made it yet."""

    leaf: int
    group: int
    position: int
    key: str
    initial: float


@dataclass(frozen=True, slots=True)
class HyperBinding:
    """A number of a parameter group that varies between calls (lr)."""

    leaf: int
    group: int
    key: str


@dataclass(frozen=True, slots=True)
class DataBinding:
    """A tensor or a float among the arguments."""

    leaf: int


@dataclass(frozen=True, slots=True)
class SeedBinding:
    """The seed of the step."""


@dataclass(frozen=True, slots=True)
class ConstantBinding:
    """A tensor that the step makes from nothing but Python values."""

    value: torch.Tensor


Binding = ModuleBinding | GradientBinding | StateBinding | HyperBinding | DataBinding | SeedBinding | ConstantBinding

_STARTS_AT_ZERO = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Adadelta,
    torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam,
)  # fmt: skip
_INITIAL = {"mu_product": 1.0}
HYPER = ("lr",)


@dataclass(slots=True)
class FakeInput:
    """One input: its fake tensor and where its real value lies."""

    name: str
    kind: InputKind
    binding: Binding
    fake: Any


@dataclass(slots=True)
class Fakes:
    """The fake world of one call."""

    mode: FakeTensorMode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[FakeInput]
    modules: list[Leaf]
    optimizers: list[tuple[int, Leaf]]
    floats: list[FakeInput]
    rebuild: Callable[[list[Any]], Any]
    given: dict[tuple[int, int, str], Any]
    """The symbolic number that stands in each hyper-parameter's place while the step is traced."""


def make_fakes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fakes:
    """Deep-copy a call's arguments into fakes and list every input."""
    objects = find(fn, args, kwargs)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True, static_shapes=True)
    memo: dict[int, Any] = {}
    inputs: list[FakeInput] = []

    def add(name: str, kind: InputKind, binding: Binding, value: torch.Tensor) -> None:
        if id(value) not in memo:
            memo[id(value)] = fake_of(mode, value)
            inputs.append(FakeInput(name, kind, binding, memo[id(value)]))

    for index, leaf in enumerate(objects.leaves):
        if isinstance(leaf.value, torch.nn.Module):
            for kind, paths, value in stored(leaf.value):
                add(f"{leaf.name}.{paths[0]}", kind, ModuleBinding(index, paths), value)
    for index, leaf in enumerate(objects.leaves):
        if isinstance(leaf.value, torch.optim.Optimizer):
            _add_states(index, leaf, memo, inputs, add)
    for index, leaf in enumerate(objects.leaves):
        if isinstance(leaf.value, torch.Tensor):
            add(leaf.name, InputKind.DATA, DataBinding(index), leaf.value)
    _add_gradients(objects, mode, memo, inputs)
    flat, rebuild = flatten((args, kwargs))
    with mode:
        copied = copy.deepcopy(flat, memo)
    for real, fake in zip(flat, copied, strict=True):
        if isinstance(real, torch.optim.Optimizer):
            fake.__dict__.pop("step", None)
            for group in fake.param_groups:
                for key in ("foreach", "fused"):
                    if key in group:
                        group[key] = False
    floats = [
        FakeInput(leaf.name, InputKind.NUMBER, DataBinding(i), _number(mode))
        for i, leaf in enumerate(objects.leaves)
        if isinstance(leaf.value, float)
    ]
    new_args, new_kwargs = rebuild(copied)
    modules = [
        Leaf(leaf.name, copied[i]) for i, leaf in enumerate(objects.leaves) if isinstance(leaf.value, torch.nn.Module)
    ]
    optimizers = [
        (i, Leaf(leaf.name, copied[i]))
        for i, leaf in enumerate(objects.leaves)
        if isinstance(leaf.value, torch.optim.Optimizer)
    ]
    return Fakes(mode, new_args, new_kwargs, inputs, modules, optimizers, floats, rebuild, {})


def stored(module: torch.nn.Module) -> Iterator[tuple[InputKind, tuple[str, ...], torch.Tensor]]:
    """Every parameter and buffer of a module, once, with all the paths that lead to it."""
    for kind, pairs in (
        (InputKind.PARAMETER, module.named_parameters(remove_duplicate=False)),
        (InputKind.BUFFER, module.named_buffers(remove_duplicate=False)),
    ):
        paths: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for path, tensor in pairs:
            paths.setdefault(id(tensor), (tensor, []))[1].append(path)
        for tensor, found in paths.values():
            yield kind, tuple(found), tensor


def fake_of(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """A fake of the same global shape, on a device that can compute (a meta tensor's fake is on the CPU)."""
    device = "cpu" if value.device.type == "meta" else value.device
    with mode:
        fake = torch.empty_strided(tuple(value.shape), _strides(value), dtype=value.dtype, device=device)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=value.requires_grad)
        return fake.requires_grad_(value.requires_grad)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    if type(value).__name__ == "DTensor" or not value.is_contiguous():
        return tuple(torch.empty(value.shape, device="meta").stride())
    return tuple(value.stride())


def _number(mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty((), dtype=torch.float64, device="cpu")


def _add_states(
    index: int,
    leaf: Leaf,
    memo: dict[int, Any],
    inputs: list[FakeInput],
    add: Callable[[str, InputKind, Binding, torch.Tensor], None],
) -> None:
    named = {id(item.fake): item.name for item in inputs}
    for number, group in enumerate(leaf.value.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in memo:
                raise CaptureError(
                    f"{leaf.name} trains a parameter that no argument of the step holds",
                    why=f"parameter {position} of its group {number} belongs to none of the modules passed",
                    fix="pass the module that owns it to the step as well",
                )
            name = named[id(memo[id(parameter)])]
            for key, value in leaf.value.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    add(
                        f"{leaf.name}.state[{name}].{key}", InputKind.STATE,
                        StateBinding(index, number, position, key, 0.0), value,
                    )  # fmt: skip


def _add_gradients(objects: Objects, mode: FakeTensorMode, memo: dict[int, Any], inputs: list[FakeInput]) -> None:
    for index, leaf in enumerate(objects.leaves):
        if isinstance(leaf.value, torch.nn.Module):
            for kind, paths, value in stored(leaf.value):
                if kind is InputKind.PARAMETER and value.grad is not None and value.grad.device.type != "meta":
                    fake = memo[id(value)]
                    if fake.grad is None:
                        fake.grad = fake_of(mode, value.grad.detach())
                        inputs.append(
                            FakeInput(
                                f"{leaf.name}.{paths[0]}.grad", InputKind.GRADIENT,
                                GradientBinding(index, paths), fake.grad,
                            )
                        )  # fmt: skip


def new_states(fakes: Fakes, names: dict[int, str], known: set[int]) -> Iterator[FakeInput]:
    """The optimizer states that a first (fake) step has made, with the value that they start from.

    Raises:
        CaptureError: it is not known from which values this optimizer's state starts.
    """
    for index, leaf in fakes.optimizers:
        optimizer = leaf.value
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, torch.Tensor) or id(value) in known:
                        continue
                    _check_initial(optimizer, group)
                    value.constant = None  # type: ignore[attr-defined]
                    yield FakeInput(
                        f"{leaf.name}.state[{names[id(parameter)]}].{key}", InputKind.STATE,
                        StateBinding(index, number, position, key, _INITIAL.get(key, 0.0)),
                        value,
                    )  # fmt: skip


def _check_initial(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    known = isinstance(optimizer, _STARTS_AT_ZERO)
    if known and not (isinstance(optimizer, torch.optim.SGD) and group["dampening"]):
        return
    raise CaptureError(
        f"the state of {type(optimizer).__name__} does not exist yet and its first values are not known",
        why="only optimizers of torch.optim whose state starts at a constant can be started here",
        fix="take one ordinary step with this optimizer first, then parallelize",
    )
