"""What the user passes to the step: modules and optimizers by type, all else is data.

A tree of arguments is flattened into leaves with the names that a user would write (`batch["x"]`). Tuples, lists,
dicts and what torch's pytree knows are containers, and so are dataclasses.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the arguments: its name as the user would write it, and its value."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Objects:
    """The leaves of a call's arguments, sorted by what they are."""

    leaves: tuple[Leaf, ...]

    @property
    def modules(self) -> Iterator[Leaf]:
        return (leaf for leaf in self.leaves if isinstance(leaf.value, torch.nn.Module))

    @property
    def optimizers(self) -> Iterator[Leaf]:
        return (leaf for leaf in self.leaves if isinstance(leaf.value, torch.optim.Optimizer))


def find(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Objects:
    """All leaves of a call, named by the function's own parameters."""
    names = _parameter_names(fn, len(args))
    leaves: list[Leaf] = []
    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        leaves += (Leaf(name + path, leaf) for path, leaf in _walk(value))
    return Objects(tuple(leaves))


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        known = [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    pairs, _ = pytree.tree_flatten_with_path(value)
    for path, leaf in pairs:
        name = pytree.keystr(path)
        if _is_record(leaf):
            for field in dataclasses.fields(leaf):
                for below, inner in _walk(getattr(leaf, field.name)):
                    yield f"{name}.{field.name}{below}", inner
        else:
            yield name, leaf


def _is_record(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, (torch.nn.Module, torch.Tensor))
    )


def flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a value and the function that builds it again from other leaves."""
    leaves, spec = pytree.tree_flatten(value)
    flat: list[Any] = []
    parts: list[tuple[Any, int, Callable[[list[Any]], Any] | None]] = []
    for leaf in leaves:
        if _is_record(leaf):
            names = [field.name for field in dataclasses.fields(leaf)]
            inner, build = flatten([getattr(leaf, name) for name in names])
            parts.append(((leaf, names), len(inner), build))
            flat += inner
        else:
            parts.append((None, 1, None))
            flat.append(leaf)

    def rebuild(new: list[Any]) -> Any:
        items, rest = [], list(new)
        for record, count, build in parts:
            taken, rest = rest[:count], rest[count:]
            if build is None:
                items.append(taken[0])
            else:
                values = dict(zip(record[1], build(taken), strict=True))
                items.append(dataclasses.replace(record[0], **values))
        return pytree.tree_unflatten(items, spec)

    return flat, rebuild
