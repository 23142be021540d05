"""A random number depends on seed, call and global index alone: any box holds what the whole tensor holds there."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distpar.layout import Box
from distpar.runtime.random import _uniform_on_any, uniform_block

DTYPES = st.sampled_from([torch.float32, torch.float64])


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    cuts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, tuple((low, high) for low, high in cuts)


@settings(max_examples=150, deadline=None)
@given(shapes_and_boxes(), st.integers(0, 2**56), st.integers(0, 1000), DTYPES)
def test_a_box_holds_what_the_whole_tensor_holds_there(
    case: tuple[tuple[int, ...], Box], seed: int, number: int, dtype: torch.dtype
) -> None:
    shape, box = case
    whole = uniform_block(seed, number, shape, tuple((0, size) for size in shape), dtype)
    there = whole[tuple(slice(low, high) for low, high in box)]
    assert torch.equal(uniform_block(seed, number, shape, box, dtype), there)
    assert bool(((whole >= 0) & (whole < 1)).all())


@settings(max_examples=100, deadline=None)
@given(shapes_and_boxes(), st.integers(0, 2**32 - 1), DTYPES)
def test_the_fast_way_on_a_cpu_gives_the_numbers_of_every_device(
    case: tuple[tuple[int, ...], Box], key: int, dtype: torch.dtype
) -> None:
    from distpar.runtime.random import _uniform_on_cpu

    shape, box = case
    assert torch.equal(_uniform_on_cpu(key, shape, box, dtype), _uniform_on_any(key, shape, box, dtype, "cpu"))


def test_numbers_are_spread_evenly_and_calls_differ() -> None:
    first, second = (uniform_block(1, call, (200_000,), ((0, 200_000),), torch.float64) for call in (0, 1))
    for numbers in (first, second):
        # Ten standard deviations of a mean and of a share.
        assert abs(float(numbers.mean()) - 0.5) < 0.0065
        assert all(abs(float((numbers < share).double().mean()) - share) < 0.011 for share in (0.1, 0.5, 0.9))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.025
