"""One way to write a tensor and its layout down, everywhere.

    f32[8/dp, 128, 512/tp] +sum(pp)      8/dp/tp = cut by dp first, then by tp
    [*/tp, *]                            a pin: * stands for the dim's size

`format_layout` and `parse` are each other's inverse.
"""

from __future__ import annotations

import re

from distpar.errors import UsageError
from distpar.graph import ITEM_SIZE, TensorType
from distpar.layout import Layout, Reduction

_TEXT = re.compile(r"\s*(?P<dtype>\w*)\[(?P<dims>[^\]]*)\]\s*(?:\+(?P<reduction>\w+)\((?P<axes>[^)]*)\))?\s*")
_DIM = re.compile(r"\s*(?P<size>\d+|\*)(?P<cut>(?:/[A-Za-z_]\w*)*)\s*")


def format_layout(type_: TensorType, layout: Layout) -> str:
    """`TensorType("f32", (8, 4))` cut over dp on dim 0 -> `"f32[8/dp, 4]"`."""
    dims = ", ".join("/".join((str(size), *axes)) for size, axes in zip(type_.shape, layout.dims, strict=True))
    partial = f" +{layout.reduction.value}({', '.join(layout.partial)})" if layout.reduction else ""
    return f"{type_.dtype}[{dims}]{partial}"


def parse(text: str) -> tuple[TensorType, Layout]:
    """The inverse of `format_layout`.

    Raises:
        UsageError: the text is not in the notation.
    """
    dtype, sizes, layout = _read(text)
    if dtype not in ITEM_SIZE:
        raise _wrong(text, f"{dtype!r} is not a dtype; there are {', '.join(ITEM_SIZE)}")
    if "*" in sizes:
        raise _wrong(text, "a tensor's sizes are numbers; only a pin has *")
    return TensorType(dtype, tuple(map(int, sizes))), layout


def parse_pin(text: str) -> Layout:
    """`"[*/tp, *]"` -> the layout. Sizes may be * or numbers; a dtype may be left out.

    Raises:
        UsageError: the text is not in the notation.
    """
    return _read(text)[2]


def _read(text: str) -> tuple[str, list[str], Layout]:
    whole = _TEXT.fullmatch(text)
    if whole is None:
        raise _wrong(text, "it is not DTYPE[DIM, ...] with an optional +REDUCTION(AXIS, ...)")
    sizes, cuts = [], []
    for part in filter(str.strip, whole["dims"].split(",")) if whole["dims"].strip() else ():
        dim = _DIM.fullmatch(part)
        if dim is None:
            raise _wrong(text, f"{part.strip()!r} is not SIZE or SIZE/AXIS")
        sizes.append(dim["size"])
        cuts.append(tuple(filter(None, dim["cut"].split("/"))))
    partial = tuple(sorted(a.strip() for a in (whole["axes"] or "").split(",") if a.strip()))
    used = [axis for cut in (*cuts, partial) for axis in cut]
    if len(used) != len(set(used)):
        raise _wrong(text, "an axis is used twice")
    reduction = None
    if whole["reduction"] is not None:
        if whole["reduction"] not in set(Reduction) or not partial:
            raise _wrong(text, f"+{whole['reduction']}(...) is not one of sum, max, min, prod with an axis")
        reduction = Reduction(whole["reduction"])
    return whole["dtype"], sizes, Layout(tuple(cuts), partial, reduction)


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(
        f"cannot read the layout {text!r}",
        why=why,
        fix="write for example f32[8/dp, 128, 512/tp] +sum(pp), or a pin such as [*/tp, *]",
    )
