"""Every error that DistPar raises on purpose: what is wrong, why, and how to mend it.

The constructor takes the three parts, so none can be left out. `where` is the user's own line
(`train.py:41, model.encoder.mask`) when there is one. Nothing here knows about tensors.
"""

from __future__ import annotations


class DistParError(Exception):
    """An error with three lines: what, why, fix.

    Args:
        what: one line that says what cannot be done, naming the user's own object.
        why: the reason, with the values that decided it.
        fix: what to write or run instead.
        where: the user's source line and module path, when known.
    """

    def __init__(self, what: str, *, why: str, fix: str, where: str = "") -> None:
        self.what, self.why, self.fix, self.where = what, why, fix, where
        head = f"{what}    {where}" if where else what
        super().__init__(f"{head}\n  why: {why}\n  fix: {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fix, self.where)


def _rebuild(kind: type[DistParError], what: str, why: str, fix: str, where: str) -> DistParError:
    return kind(what, why=why, fix=fix, where=where)


class UsageError(DistParError):
    """A wrong argument, flag, notation, file or environment: nothing was run."""


class CaptureError(DistParError):
    """The step cannot be captured as one graph (its control flow or a shape depends on values)."""


class LayoutError(DistParError):
    """A layout, pin or mesh that does not fit the tensor or the machine."""


class Infeasible(DistParError):  # noqa: N818 - the field's word for "no solution exists"
    """No plan meets the memory limit and the pins."""


class NumbersDiffer(DistParError):  # noqa: N818 - reads as the sentence that it is
    """The partitioned step does not give what one device gives."""


class RanksDiffer(DistParError):  # noqa: N818 - reads as the sentence that it is
    """Ranks were given different plans, input shapes or parameters."""


class RankFailed(DistParError):  # noqa: N818 - reads as the sentence that it is
    """Another rank raised or died in the middle of a step."""
