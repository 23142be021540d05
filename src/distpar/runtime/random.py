"""Random numbers as a function of (seed, call number, global element index), so of no layout.

Two rounds of a 32-bit integer mix (the constants are those of Chris Wellons's `lowbias32`, found by search for
least avalanche bias) over the element's index and the call's key, held in int64 to avoid overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from distpar.layout import Box

Words = NDArray[np.uint32]

_MASK = 0xFFFFFFFF
_FIRST, _SECOND, _BETWEEN = 0x7FEB352D, 0x846CA68B, 0x632BE5AB
_CHUNK = 1 << 14
"""Numbers mixed at a time on the CPU: they stay in the nearest cache."""
aten = torch.ops.aten


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x.bitwise_xor_(x >> 16).mul_(_FIRST).bitwise_and_(_MASK)
    x = x.bitwise_xor_(x >> 15).mul_(_SECOND).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def _mix_in_place(x: Words, spare: Words) -> None:
    """`_mix` in NumPy's own 32-bit arithmetic, which wraps around: three times as fast on a CPU."""
    for shift, factor in ((16, _FIRST), (15, _SECOND), (16, None)):
        np.right_shift(x, shift, out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor is not None:
            np.multiply(x, np.uint32(factor), out=x)


def _mix_number(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK
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
    key = _mix_number(_mix_number(int(seed)) ^ (int(seed) >> 32) ^ _mix_number(number * 0x9E3779B9 + 1))
    fast = torch.device(device).type == "cpu" and math.prod(global_shape) <= _MASK
    if fast and dtype in (torch.float32, torch.float64):
        return _uniform_on_cpu(key, global_shape, box, dtype)
    return _uniform_on_any(key, global_shape, box, dtype, device)


def _uniform_on_any(
    key: int, global_shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    bits = 24 if dtype != torch.float64 else 32
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(global_shape[dim + 1 :])
        steps = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + steps
    # The high half of the index has a round of its own, so that tensors of over 2**32 elements do not repeat.
    mixed = _mix((index & _MASK) ^ key)
    if math.prod(global_shape) > _MASK:
        mixed = _mix(mixed ^ (index >> 32))
    mixed = _mix((mixed + _mix_number(key + _BETWEEN)) & _MASK)
    return (mixed >> (32 - bits)).to(dtype).div_(2.0**bits)


def _uniform_on_cpu(key: int, global_shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> torch.Tensor:
    bits = 24 if dtype != torch.float64 else 32
    index = np.zeros((), np.uint32)
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(global_shape[dim + 1 :])
        index = index[..., None] + np.arange(start, stop, dtype=np.uint32) * np.uint32(stride & _MASK)
    out = torch.empty(index.shape, dtype=dtype)
    words, numbers = index.reshape(-1), out.view(-1).numpy()
    spare = np.empty(min(_CHUNK, len(words)), np.uint32)
    first, second = np.uint32(key), np.uint32(_mix_number(key + _BETWEEN))
    scale = numbers.dtype.type(2.0**-bits)
    for start in range(0, len(words), _CHUNK):
        x = words[start : start + _CHUNK]
        np.bitwise_xor(x, first, out=x)
        _mix_in_place(x, spare[: len(x)])
        np.add(x, second, out=x)
        _mix_in_place(x, spare[: len(x)])
        np.right_shift(x, 32 - bits, out=x)
        np.multiply(x, scale, out=numbers[start : start + _CHUNK], dtype=numbers.dtype, casting="unsafe")
    return out


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
