"""What one rank does when another fails: it ends too, with the other's message, within a time limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from distpar.errors import RankFailed, RanksDiffer

_KEY = "distpar/failure"
_POLL = 1.0
"""Seconds between two looks at whether another rank has failed."""
_GRACE = 8.0
"""Seconds that a rank has to notice by itself before it is ended."""


class Watch:
    """Posts this rank's failure where all can read it, and ends this rank when another has posted."""

    def __init__(self, rank: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        store = dist.distributed_c10d._get_default_store()
        self.store = store.clone() if hasattr(store, "clone") else store
        self.ended = threading.Event()
        self.calls = 0
        """Odd while a step is under way, even between steps."""
        self.thread = threading.Thread(target=self._watch, daemon=True, name="distpar-watch")
        self.thread.start()

    def stop(self) -> None:
        """End the watching thread."""
        self.ended.set()
        self.thread.join(timeout=5)

    def post(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        if not self.posted():
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            self.store.set(_KEY, text)

    def posted(self) -> str:
        """The message of the rank that failed first, or nothing."""
        try:
            found: Any = self.store.check([_KEY]) and self.store.get(_KEY).decode()
        except (RuntimeError, OSError):
            return ""
        return found or ""

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise here: another rank's message when it failed first."""
        if not _is_connection(error):
            return error
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            message = self.posted()
            if message and not message.startswith(f"rank {self.rank}:"):
                return failed(message)
            time.sleep(0.1)
        return failed(f"a rank ended without a word ({error})")

    def _watch(self) -> None:
        while not self.ended.wait(_POLL):
            message = self.posted()
            call = self.calls
            waits = message and not message.startswith(f"rank {self.rank}:") and call % 2
            # A rank that is still in the same step after a while waits for one that will not come.
            if waits and not self.ended.wait(_GRACE) and self.calls == call:
                print(failed(message), file=sys.stderr, flush=True)
                os._exit(1)


def failed(message: str) -> RankFailed:
    return RankFailed(
        f"another rank failed: {message}",
        why="a step needs all ranks, so all of them end",
        fix="mend what that rank reports, and start again",
    )


def _is_connection(error: BaseException) -> bool:
    text = str(error).lower()
    words = ("connection", "peer", "timed out", "timeout", "socket", "gloo", "nccl", "broken pipe")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def agree(number: int, group: Any) -> bool:
    """Whether all ranks gave the same number: one tiny reduction."""
    import torch
    import torch.distributed as dist

    ends = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return int(ends[0]) == -int(ends[1])


def compare(what: dict[str, str], num_ranks: int, group: Any) -> None:
    """Every rank must say the same of each thing in `what`.

    Raises:
        RanksDiffer: they do not; on all ranks, with the first thing that differs.
    """
    import torch.distributed as dist

    said: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(said, what, group=group)
    for key in what:
        values = [answers.get(key, "nothing") for answers in said]
        odd = [i for i, value in enumerate(values) if value != values[0]]
        if odd:
            raise RanksDiffer(
                f"the ranks do not agree on {key}",
                why=f"rank 0 has {values[0]}, rank {odd[0]} has {values[odd[0]]}",
                fix=_FIXES.get(key.split(" ")[0], "give every rank the same"),
            )


_FIXES = {
    "the": "give every rank the same global batch, model and options",
    "data": "give every rank the same global batch (not its own rows): distpar cuts it",
    "parameter": "seed every rank alike before the model is made, or load the same checkpoint",
}
