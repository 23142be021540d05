"""The callables behind op names, and local kernels that no single ATen op provides.

A kernel named "distpar.x" is what one rank runs where the plain op on a block would be wrong: an index that
lies in another rank's block, a reduction over an empty block, a random tensor's region.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from distpar.graph import Word
from distpar.runtime.random import uniform_block

aten = torch.ops.aten


@cache
def resolve(name: str) -> Callable[..., Any]:
    """ "aten.mm.default", "operator.mul", "math.sqrt", "distpar.uniform" -> the callable."""
    space, _, rest = name.partition(".")
    match space:
        case "aten" if rest in ("view.default", "_unsafe_view.default"):
            # Blocks and values made by other kernels may lie in memory in another order.
            return aten.reshape.default  # type: ignore[no-any-return]
        case "aten" | "prims":
            packet, _, overload = rest.rpartition(".")
            found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), packet), overload)
            return found
        case "operator":
            return getattr(operator, rest)  # type: ignore[no-any-return]
        case "math":
            return getattr(math, rest)  # type: ignore[no-any-return]
        case "distpar":
            return KERNELS[rest]
        case "torch":
            return _number_function(name.rsplit(".", 1)[-1])
        case _:
            raise AssertionError(f"bug: no callable for {name}")


def _number_function(name: str) -> Callable[..., Any]:
    """torch's functions on symbolic numbers ("torch.sym_float", "..._sym_sqrt") on plain ones."""
    plain = name.removeprefix("_").removeprefix("sym_")
    table: dict[str, Callable[..., Any]] = {
        "float": float, "int": int, "max": max, "min": min, "not": operator.not_, "abs": abs,
    }  # fmt: skip
    return table.get(plain) or getattr(math, plain)


_WORDS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout))
}


def materialize(arg: Any) -> Any:
    """Words become torch constants, tuples lists (as ATen's schemas have them)."""
    match arg:
        case Word(text):
            return _WORDS[text]
        case tuple():
            return [materialize(item) for item in arg]
        case _:
            return arg


def _whole_uniform(seed: Any, number: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    box = tuple((0, size) for size in shape)
    return uniform_block(int(seed), number, tuple(shape), box, dtype)


def _uniform_block(seed: Any, number: int, shape: list[int], box: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    region = tuple((start, stop) for start, stop in box)
    return uniform_block(int(seed), number, tuple(shape), region, dtype)


def _embedding_block(weight: torch.Tensor, index: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of `index` that lie in [start, stop) of the table; zeros elsewhere."""
    inside = (index >= start) & (index < stop)
    if weight.shape[0] == 0:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    rows = aten.embedding(weight, torch.where(inside, index - start, 0))
    return rows.mul_(inside.unsqueeze(-1))


def _embedding_backward_block(
    grad: torch.Tensor, index: torch.Tensor, start: int, stop: int, padding_idx: int, scale: bool
) -> torch.Tensor:
    """The table's gradient for rows [start, stop)."""
    inside = (index >= start) & (index < stop) & (index != padding_idx)
    flat = grad.flatten(0, -2) * inside.flatten().unsqueeze(1)
    out = grad.new_zeros((stop - start, grad.shape[-1]))
    if stop > start:
        out.index_add_(0, torch.where(inside, index - start, 0).reshape(-1), flat)
    return out


def _gather_block(x: torch.Tensor, dim: int, index: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements whose index along `dim` lies in [start, stop); zeros elsewhere."""
    inside = (index >= start) & (index < stop)
    if x.shape[dim] == 0:
        return x.new_zeros(index.shape)
    found = aten.gather(x, dim, torch.where(inside, index - start, 0))
    return torch.where(inside, found, torch.zeros((), dtype=x.dtype))


def _extreme(x: torch.Tensor, dims: list[int], keepdim: bool, largest: bool) -> torch.Tensor:
    """amax or amin whose value over an empty block is the identity."""
    dims = [d % x.dim() for d in dims] if dims else list(range(x.dim()))
    if all(x.shape[d] for d in dims):
        return aten.amax(x, dims, keepdim) if largest else aten.amin(x, dims, keepdim)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_full(shape, identity("max" if largest else "min", x.dtype))


def identity(reduction: str, dtype: torch.dtype) -> Any:
    """The element that a reduction ignores."""
    if reduction in ("sum", "prod"):
        return 0 if reduction == "sum" else 1
    low = reduction == "max"
    if dtype == torch.bool:
        return not low
    if dtype.is_floating_point:
        return -math.inf if low else math.inf
    info = torch.iinfo(dtype)
    return info.min if low else info.max


def _select_block(x: torch.Tensor, dim: int, index: int, start: int, stop: int) -> torch.Tensor:
    """Slice `index` of a cut dim on the rank that has it; zeros elsewhere."""
    if start <= index < stop:
        return aten.select(x, dim, index - start).contiguous()
    shape = [size for d, size in enumerate(x.shape) if d != dim]
    return x.new_zeros(shape)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    if x.numel() and weight.numel():
        return aten.convolution(x, weight, *rest)
    # An empty batch, no channels out, or no channels in (a sum of nothing): the shape is all that is missing.
    wide = [torch.empty([max(1, size) for size in t.shape], device="meta") for t in (x, weight)]
    shape = aten.convolution(*wide, None, *rest[1:]).shape
    return x.new_zeros((x.shape[0], weight.shape[0], *shape[2:]))


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> Any:
    if grad.numel() and x.numel() and weight.numel():
        return aten.convolution_backward(grad, x, weight, bias, *rest)
    mask = rest[-1]
    return (
        torch.zeros_like(x) if mask[0] else None,
        torch.zeros_like(weight) if mask[1] else None,
        # Without channels in, the bias still has its gradient.
        grad.sum(dim=[d for d in range(grad.dim()) if d != 1]) if mask[2] else None,
    )


def _empty_guard(op: Any) -> Callable[..., Any]:
    """The op, or right-shaped empty outputs where its first operand is empty (shapes by the meta device)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if args[0].numel():
            return op(*args, **kwargs)
        wide = [_widened(a) for a in args]
        outs = op(*wide, **{key: _widened(value) for key, value in kwargs.items()})
        many = isinstance(outs, (tuple, list))
        cut = [_narrowed(o, args[0]) for o in (outs if many else (outs,))]
        return tuple(cut) if many else cut[0]

    return run


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_zeros([max(1, size) for size in value.shape])


def _narrowed(value: Any, like: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    for dim in range(min(value.dim(), like.dim())):
        if like.shape[dim] == 0:
            value = value.narrow(dim, 0, 0)
    return value.contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    "uniform": _whole_uniform,
    "uniform_block": _uniform_block,
    "embedding_block": _embedding_block,
    "embedding_backward_block": _embedding_backward_block,
    "gather_block": _gather_block,
    "extreme": _extreme,
    "select_block": _select_block,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool": _empty_guard(aten.max_pool2d_with_indices.default),
    "max_pool_backward": _empty_guard(aten.max_pool2d_with_indices_backward.default),
    "avg_pool": _empty_guard(aten.avg_pool2d.default),
    "avg_pool_backward": _empty_guard(aten.avg_pool2d_backward.default),
    "attention": _empty_guard(aten._scaled_dot_product_flash_attention_for_cpu.default),
    "attention_backward": _empty_guard(aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
}
