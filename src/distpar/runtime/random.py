"""Random numbers as a function of (seed, call number, global element index), so of no layout.

Two rounds of a 32-bit integer mix (the constants are those of Chris Wellons's `lowbias32`, found by search for
least avalanche bias) over the element's index and the call's key, held in int64 to avoid overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distpar.layout import Box

_MASK = 0xFFFFFFFF
aten = torch.ops.aten


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def _mix_number(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform_block(
    seed: int,
    number: int,
    global_shape: tuple[int, ...],
    box: Box,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Uniform numbers in [0, 1) for one box of a global tensor.

    Args:
        seed: the step's seed.
        number: which random call of the step this is.
        global_shape, box: the whole tensor's shape and the region to fill.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(global_shape[dim + 1 :])
        steps = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + steps
    key = _mix_number(_mix_number(int(seed)) ^ (int(seed) >> 32) ^ _mix_number(number * 0x9E3779B9 + 1))
    # The high half of the index has a round of its own, so that tensors of over 2**32 elements do not repeat.
    mixed = _mix((index & _MASK) ^ key)
    if math.prod(global_shape) > _MASK:
        mixed = _mix(mixed ^ (index >> 32))
    mixed = _mix(mixed + _mix_number(key + 0x632BE5AB))
    bits = 24 if dtype != torch.float64 else 32
    return (mixed >> (32 - bits)).to(dtype).div_(2.0**bits)


@contextmanager
def global_rng(seed: int) -> Iterator[None]:
    """Plain PyTorch inside draws the numbers that a step with this seed draws, in the order of its calls."""
    with _GlobalRng(seed):
        yield


class _GlobalRng(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.number = seed, 0

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        box = tuple((0, size) for size in like.shape)
        dtype = like.dtype if like.is_floating_point() else torch.float32
        self.number += 1
        return uniform_block(self.seed, self.number - 1, tuple(like.shape), box, dtype, like.device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.native_dropout.default,):
            value, p, train = args
            if not train or p == 0:
                return func(*args, **kwargs)
            kept = self.draw(value) >= p
            return value * kept * (1.0 / (1.0 - p)), kept
        if func is aten.bernoulli_.float:
            value, p = args[0], args[1] if len(args) > 1 else 0.5
            return value.copy_(self.draw(value) < p)
        if func is aten.bernoulli.p:
            return (self.draw(args[0]) < args[1]).to(args[0].dtype)
        if func in (aten.rand.default, aten.rand_like.default, aten.uniform_.default):
            out = func(*args, **kwargs)
            low, high = (args[1], args[2]) if func is aten.uniform_.default and len(args) > 2 else (0.0, 1.0)
            return out.copy_(self.draw(out) * (high - low) + low)
        return func(*args, **kwargs)
