"""Printing and parsing layouts are each other's inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distpar.errors import UsageError
from distpar.graph import TensorType
from distpar.layout import Layout, Partial, Reduction, Replicate, Shard, block
from distpar.mesh import Mesh
from distpar.notation import format_layout, parse, parse_pin

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def typed(draw: st.DrawFn) -> tuple[TensorType, Layout]:
    shape = draw(shapes)
    reduction = draw(st.sampled_from(list(Reduction)))
    options = [Replicate(), Partial(reduction), *map(Shard, range(len(shape)))]
    axes = draw(st.permutations(["dp", "tp", "pp"]))
    rows = [(axis, draw(st.sampled_from(options))) for axis in axes]
    return TensorType(draw(st.sampled_from(["f32", "bf16", "i64"])), shape), Layout.of(len(shape), rows)


@given(typed())
def test_parse_is_the_inverse_of_format(pair: tuple[TensorType, Layout]) -> None:
    assert parse(format_layout(*pair)) == pair


@given(st.integers(0, 40), st.integers(1, 9))
def test_blocks_cover_a_dim_once_in_order(size: int, num_ranks: int) -> None:
    ends = [block(size, num_ranks, index) for index in range(num_ranks)]
    assert ends[0][0] == 0 and ends[-1][1] == size
    assert all(left[1] == right[0] for left, right in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("text", ["f32[8", "f32[8/dp/dp]", "x9[3]", "f32[*]", "f32[3] +sum()", "f32[3] +avg(dp)"])
def test_bad_notation_is_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the layout"):
        parse(text)


def test_a_pin_needs_no_sizes() -> None:
    assert parse_pin("[*/tp, *]") == Layout((("tp",), ()))


def test_mesh_text_is_read_or_refused() -> None:
    assert Mesh.parse("dp=2,tp=4") == Mesh(dp=2, tp=4)
    for text in ("dp", "dp=0", "dp=2,dp=2", "=3", "dp=x"):
        with pytest.raises(UsageError):
            Mesh.parse(text)
