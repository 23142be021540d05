"""Ops that hide several reductions are taken apart before rules are asked.

mean -> sum / count; softmax -> max, sum of exponentials; cross-entropy -> a masked gather and two sums; its
gradient -> a comparison with the class index; norms -> sums; dropout -> numbers that depend on the global
index. So class-cut heads and statistics over the global batch need no code of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
Decomposition = Callable[..., Any]


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    dims = list(range(x.dim())) if dim is None or dim == [] else [d % x.dim() for d in _listed(dim)]
    count = math.prod(x.shape[d] for d in dims)
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / count if count else total * math.nan


def _mean_all(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
    return _mean(x, None, False, dtype=dtype)


def _sum_all(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
    return aten.sum.dim_IntList(x, list(range(x.dim())), False, dtype=dtype)


def _listed(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)


def _var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> torch.Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim())) if not dim and dim != 0 else [d % x.dim() for d in _listed(dim)]
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.sum.dim_IntList(x, dims, True) / count
    centred = x - mean
    squares = aten.sum.dim_IntList(centred * centred, dims, keepdim)
    free = max(0, count - (1 if correction is None else correction))
    variance = squares / free if free else squares * math.nan
    return variance, mean if keepdim else aten.squeeze.dims(mean, dims)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = x.float() if half_to_float or x.dtype in (torch.bfloat16, torch.float16) else x
    shifted = torch.exp(wide - aten.amax(wide, [dim], True)) if x.dim() else torch.exp(wide - wide)
    out = shifted / aten.sum.dim_IntList(shifted, [dim] if x.dim() else [], True)
    return out if half_to_float else out.to(x.dtype)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """A row that is masked out everywhere gives zeros."""
    top = aten.amax(x, [dim], True)
    gone = top == -math.inf
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    shifted = torch.where(gone, zero, torch.exp(x - torch.where(gone, zero, top)))
    total = aten.sum.dim_IntList(shifted, [dim], True)
    return torch.where(gone, zero, shifted / total)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = x.float() if half_to_float or x.dtype in (torch.bfloat16, torch.float16) else x
    shifted = wide - aten.amax(wide, [dim], True)
    out = shifted - torch.log(aten.sum.dim_IntList(torch.exp(shifted), [dim], True))
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
    product = grad * out
    return (product - out * aten.sum.dim_IntList(product, [dim], True)).to(dtype)


def _log_softmax_backward(grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
    return (grad - torch.exp(out) * aten.sum.dim_IntList(grad, [dim], True)).to(dtype)


def _weights(
    picked: torch.Tensor, weight: torch.Tensor | None, index: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    if weight is None:
        return kept.to(picked.dtype)
    flat = aten.index_select(weight, 0, index.reshape(-1)).reshape(index.shape)
    return torch.where(kept, flat, torch.zeros((), dtype=picked.dtype, device=picked.device))


def _nll_forward(
    log_probs: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = 1 if log_probs.dim() > 1 else 0
    kept = target != ignore_index
    index = torch.where(kept, target, torch.zeros((), dtype=target.dtype, device=target.device))
    picked = aten.gather(log_probs, dim, index.unsqueeze(dim)).squeeze(dim)
    weights = _weights(picked, weight, index, kept)
    losses = torch.where(kept, -picked * weights, torch.zeros_like(picked))
    if reduction == 0:
        return losses, picked.new_zeros(())
    total = aten.sum.dim_IntList(weights, list(range(weights.dim())))
    loss = aten.sum.dim_IntList(losses, list(range(losses.dim())))
    return (loss / total if reduction == 1 else loss), total


def _nll_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    dim = 1 if log_probs.dim() > 1 else 0
    kept = target != ignore_index
    index = torch.where(kept, target, torch.zeros((), dtype=target.dtype, device=target.device))
    if reduction == 1:
        grad = grad / total_weight
    scale = -grad * _weights(grad, weight, index, kept)
    classes = torch.arange(log_probs.shape[dim], device=log_probs.device, dtype=target.dtype)
    shape = [1] * log_probs.dim()
    shape[dim] = -1
    hit = classes.view(shape) == target.unsqueeze(dim)
    # An ignored row is cut off by a choice, not by a product: 0 / 0 weights give NaN only where one device does.
    scale = torch.where(kept, scale, torch.zeros_like(scale))
    return torch.where(hit, scale.unsqueeze(dim), torch.zeros((), dtype=log_probs.dtype, device=log_probs.device))


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    dims = list(range(x.dim())) if dim is None else _listed(dim)
    x = x if dtype is None else x.to(dtype)
    if ord == 2:
        return torch.sqrt(aten.sum.dim_IntList(x * x, dims, keepdim))
    if ord == math.inf:
        return aten.amax(torch.abs(x), dims, keepdim)
    if ord == -math.inf:
        return aten.amin(torch.abs(x), dims, keepdim)
    if ord == 0:
        return aten.sum.dim_IntList((x != 0).to(x.dtype), dims, keepdim)
    if ord == 1:
        return aten.sum.dim_IntList(torch.abs(x), dims, keepdim)
    return torch.pow(aten.sum.dim_IntList(torch.pow(torch.abs(x), ord), dims, keepdim), 1.0 / ord)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    product = aten.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    product = aten.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _addmv(y: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    product = aten.mm(a, x.unsqueeze(1)).squeeze(1) * alpha
    return product + y * beta


def _mv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return aten.mm(a, x.unsqueeze(1)).squeeze(1)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return aten.sum.dim_IntList(a * b, [0])


def _max_all(x: torch.Tensor) -> torch.Tensor:
    return aten.amax(x, list(range(x.dim())))


def _min_all(x: torch.Tensor) -> torch.Tensor:
    return aten.amin(x, list(range(x.dim())))


def _foreach(name: str, overload: str) -> Decomposition | None:
    """`_foreach_mul.Scalar` -> a loop over `mul` of one tensor."""
    if name == "_foreach_norm":
        return lambda xs, ord=2, dtype=None: [_vector_norm(x, ord, dtype=dtype) for x in xs]
    single = getattr(torch, name.removeprefix("_foreach_"), None)
    if single is None or name.endswith("_"):
        return None

    def run(xs: Any, *args: Any, **kwargs: Any) -> Any:
        columns = [a if isinstance(a, (list, tuple)) else itertools.repeat(a, len(xs)) for a in args]
        if name in ("_foreach_addcmul", "_foreach_addcdiv") and len(args) == 3:
            rows = zip(*columns, strict=True)
            return [single(x, a, b, value=v) for x, (a, b, v) in zip(xs, rows, strict=True)]
        if not columns:
            return [single(x, **kwargs) for x in xs]
        return [single(x, *row, **kwargs) for x, row in zip(xs, zip(*columns, strict=True), strict=True)]

    return run


OWN: dict[Any, Decomposition] = {
    aten.mean.default: _mean_all,
    aten.mean.dim: _mean,
    aten.sum.default: _sum_all,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss2d_forward.default: _nll_forward,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.addmv.default: _addmv,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.max.default: _max_all,
    aten.min.default: _min_all,
}

_TORCHS_OWN: list[Any] = [
    aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten._native_batch_norm_legit_functional,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward,
    aten.native_group_norm, aten.native_group_norm_backward,
    aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.std.correction, aten.std_mean.correction,
    aten.select_backward, aten.slice_backward, aten.unbind, aten.logsumexp, aten.norm,
    aten.linalg_cross, aten.new_full, aten._unsafe_view, aten.masked_fill, aten.unsafe_split, aten.unsafe_chunk,
    aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu_backward, aten.elu_backward, aten.std, aten.var,
    aten.rsub, aten.floor_divide, aten._prelu_kernel, aten.log_sigmoid_forward, aten.log_sigmoid_backward,
]  # fmt: skip


def table() -> dict[Any, Decomposition]:
    """Op overload -> decomposition, for make_fx."""
    found: dict[Any, Decomposition] = dict(get_decompositions(_TORCHS_OWN))
    for name in dir(aten):
        if name.startswith("_foreach_"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                loop = _foreach(name, overload)
                if loop is not None:
                    found[getattr(packet, overload)] = loop
    return found | OWN
