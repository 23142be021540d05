"""The one op of ours that appears in a trace: uniform numbers by global index; the graph adds the seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("distpar", "DEF")
_LIBRARY.define("uniform(int number, int[] shape, ScalarType dtype) -> Tensor")


def _fake(number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


torch.library.register_fake("distpar::uniform", _fake, lib=_LIBRARY)
uniform = torch.ops.distpar.uniform.default
