"""Units as types: a number of seconds is not a number of bytes."""

from __future__ import annotations

from typing import NewType

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)
Flops = NewType("Flops", float)
