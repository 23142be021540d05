"""The whole call traced once: two passes of make_fx over fake tensors.

    user's function on fakes --make_fx--> ATen with in-place writes --functionalize, decompose--> pure ATen

The first pass attaches to the fakes by identity: the traced function ignores its arguments and calls the
user's function on the fake copies. The second pass turns writes into values; what is written to an input is
a closing `copy_`, which becomes an entry of `Graph.writes`.
"""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from distpar.capture import decompose
from distpar.capture.fake import HYPER, FakeInput, Fakes, HyperBinding, SeedBinding, make_fakes, new_states
from distpar.capture.objects import flatten
from distpar.capture.ops import uniform
from distpar.errors import CaptureError
from distpar.graph import InputKind

aten = torch.ops.aten
_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))


@dataclass(slots=True)
class Trace:
    """The functional FX graph of a call. Its outputs: results, then gradients; writes are closing copies.

    `leaves[i]` is the number of result leaf i among the outputs, or a constant that stands for itself.
    """

    module: torch.fx.GraphModule
    inputs: list[FakeInput]
    num_results: int
    gradients: list[FakeInput]
    rebuild: Callable[[list[Any]], Any]


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rng: str) -> Trace:
    """Trace one call of the user's function.

    Raises:
        CaptureError: the step cannot be captured.
    """
    fakes = make_fakes(fn, args, kwargs)
    named = {id(item.fake): item.name for item in fakes.inputs}
    parameters = [item for item in fakes.inputs if item.kind is InputKind.PARAMETER]
    before = {id(item.fake): item.fake.grad for item in parameters}
    if fakes.optimizers:
        with _explained(fn), fakes.mode:
            fn(*fakes.args, **fakes.kwargs)
        fakes.mode.shape_env.pending_fresh_unbacked_symbols.clear()  # type: ignore[union-attr]
        for item in parameters:
            item.fake.grad = before[id(item.fake)]
        fakes.inputs += list(new_states(fakes, named, set(named)))
    numbers = fakes.floats + list(_hypers(fakes))
    with fakes.mode:
        seed = FakeInput("seed", InputKind.SEED, SeedBinding(), torch.empty((), dtype=torch.int64))
    inputs = [*fakes.inputs, *numbers, seed]
    built: list[Any] = []

    def run(*_: Any) -> Any:
        with _phases(fakes), _modules(fakes):
            out = _call(fn, fakes, numbers)
        leaves, rebuild = flatten(out)
        built.append((leaves, rebuild))
        return [*leaves, *(item.fake.grad for item in parameters)]

    flat = [item.fake for item in inputs]
    with _explained(fn), fakes.mode, fx_traceback.preserve_node_meta():
        first = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True, record_stack_traces=True)(*flat)
    _check_closed(first, fn)
    leaves, rebuild = built[-1]
    _check_untouched(fakes, fn)
    second = _functional(first, flat, fakes, rng)
    gradients = [item for item in parameters if item.fake.grad is not None]
    for item in parameters:
        item.fake.grad = before[id(item.fake)]
    return Trace(second, inputs, len(leaves), gradients, rebuild)


def _check_closed(module: torch.fx.GraphModule, fn: Callable[..., Any]) -> None:
    """A tensor that the step finds elsewhere than in its arguments is a constant: a trained one must not be."""
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            if isinstance(value.grad, FakeTensor):
                value.grad = None
            raise CaptureError(
                f"the step trains a tensor of shape {tuple(value.shape)} that is not among its arguments",
                why="what a step finds in a global or a closure cannot be placed on the ranks",
                fix="pass every module, optimizer and tensor that the step trains as an argument",
            )


def _hypers(fakes: Fakes) -> Iterator[FakeInput]:
    for index, leaf in fakes.optimizers:
        for number, group in enumerate(leaf.value.param_groups):
            for key in HYPER:
                if isinstance(group.get(key), (int, float)):
                    with fakes.mode:
                        fake = torch.empty((), dtype=torch.float64)
                    name = f"{leaf.name}.param_groups[{number}].{key}"
                    yield FakeInput(name, InputKind.NUMBER, HyperBinding(index, number, key), fake)


def _call(fn: Callable[..., Any], fakes: Fakes, numbers: list[FakeInput]) -> Any:
    """The user's function, with numbers that vary read from the graph's inputs."""
    optimizers = dict(fakes.optimizers)
    args, kwargs = fakes.args, fakes.kwargs
    flat, _ = flatten((args, kwargs))
    for item in numbers:
        if isinstance(item.binding, HyperBinding):
            groups = optimizers[item.binding.leaf].value.param_groups
            place = item.binding
            given = fakes.given[place.leaf, place.group, place.key] = item.fake.item()
            groups[place.group][place.key] = given
        else:
            flat[item.binding.leaf] = item.fake.item()  # type: ignore[union-attr]
    args, kwargs = fakes.rebuild(flat)
    return fn(*args, **kwargs)


def _check_untouched(fakes: Fakes, fn: Callable[..., Any]) -> None:
    optimizers = dict(fakes.optimizers)
    for (leaf, group, key), given in fakes.given.items():
        if optimizers[leaf].value.param_groups[group].get(key) is not given:
            raise CaptureError(
                f"the step changes {optimizers[leaf].name}'s {key} itself",
                why="a scheduler stepped inside of the step would be captured as a constant",
                fix="call scheduler.step() after the step, outside of the function",
            )


def _mark(**marks: str) -> dict[str, str]:
    """Set marks that the nodes made from now on carry; returns the marks that were replaced."""
    old = fx_traceback.current_meta.get("custom") or {}
    fx_traceback.current_meta["custom"] = old | marks
    return {key: old.get(key, "") for key in marks}


@contextmanager
def _phases(fakes: Fakes) -> Iterator[None]:
    """Marks nodes of backward and of the optimizers by the phase they are made in."""

    def marked(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            old = _mark(phase=phase)
            try:
                return function(*args, **kwargs)
            finally:
                _mark(**old)

        return run

    with ExitStack() as stack:
        for owner, name in ((torch.autograd, "backward"), (torch.autograd, "grad")):
            wrapped = marked("backward", getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        for _, leaf in fakes.optimizers:
            wrapped = marked("optimizer", leaf.value.step)
            stack.enter_context(mock.patch.object(leaf.value, "step", wrapped))
        yield


@contextmanager
def _modules(fakes: Fakes) -> Iterator[None]:
    """Marks nodes of forward by the path of the module that makes them."""
    handles = []
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            stack.append(path)
            _mark(module=path)

        return hook

    def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
        if stack:
            stack.pop()
        _mark(module=stack[-1] if stack else "")

    for leaf in fakes.modules:
        for path, module in leaf.value.named_modules():
            name = f"{leaf.name}.{path}" if path else leaf.name
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        fx_traceback.current_meta.pop("custom", None)


def _functional(first: torch.fx.GraphModule, flat: list[Any], fakes: Fakes, rng: str) -> torch.fx.GraphModule:
    count = iter(range(10**9))

    def draw(like: torch.Tensor) -> torch.Tensor:
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return uniform(next(count), list(like.shape), dtype)

    def bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
        return (draw(x) < p).to(x.dtype)

    def dropout(x: torch.Tensor, p: float, train: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not train or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = draw(x) >= p
        return x * kept * (1.0 / (1.0 - p)), kept

    def rand_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return draw(x)

    def uniform_(x: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return draw(x) * (high - low) + low

    table = decompose.table()
    if rng == "global":
        table |= {
            aten.bernoulli.p: bernoulli,
            aten.native_dropout.default: dropout,
            aten.rand_like.default: rand_like,
            aten.uniform.default: uniform_,
        }

    def run(*args: Any) -> Any:
        return torch.fx.Interpreter(first).run(*args)

    # Parameters enter the second pass as plain tensors: nothing is differentiated again.
    plain = [value.detach() if isinstance(value, torch.Tensor) else value for value in flat]
    with fakes.mode, torch.no_grad(), fx_traceback.preserve_node_meta():
        return make_fx(
            torch.func.functionalize(run, remove="mutations"),
            tracing_mode="real",
            decomposition_table=table,
            _allow_non_fake_inputs=True,
        )(*plain)


@contextmanager
def _explained(fn: Callable[..., Any]) -> Iterator[None]:
    """Turns torch's errors about values and shapes into one clear error at the user's line."""
    try:
        with warnings.catch_warnings():
            # Schedulers warn about optimizers that are not stepped for real: these are fakes.
            warnings.filterwarnings("ignore", message=".*optimizer.step.*")
            yield
    except GuardOnDataDependentSymNode as error:
        raise CaptureError(
            "the step depends on a tensor's value",
            where=user_line(traceback.extract_tb(error.__traceback__)),
            why="a branch, a size or a loop reads a number that is known only when the step runs",
            fix="use torch.where for a choice of values, or move the branch out of the step",
        ) from error
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"the step cannot be captured: {type(error).__name__}",
            where=user_line(traceback.extract_tb(error.__traceback__)),
            why=text[:300],
            fix=_advice(text),
        ) from error


def _advice(text: str) -> str:
    if re.search(r"numpy|\.data_ptr|storage|unsupported format|__format__", text):
        return "keep numbers as tensors inside the step; print or convert what the step returns"
    if re.search(r"fake|Fake|meta|proxy", text):
        return "pass every module, optimizer and tensor that the step uses as an argument"
    return "run the step once without distpar; if it works there, simplify the line that is named"


def user_line(frames: Any) -> str:
    """The deepest frame outside of torch and of this package, as `train.py:41`."""
    for frame in reversed(list(frames)):
        name = frame.filename
        if not name.startswith((_TORCH, _HERE, "<")) and "site-packages" not in name and "/lib/python" not in name:
            return f"{os.path.basename(name)}:{frame.lineno}"
    return ""
