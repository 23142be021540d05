"""Local ranks for one command: started over gloo on this host, ended together, within a time limit.

Also how a job is named on the command line: `file.py:function`, a function that returns `(step, args)`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distpar.errors import DistParError, RankFailed, UsageError

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def load_job(text: str) -> Job:
    """`"train.py:job"` -> what `job()` in `train.py` returns.

    Raises:
        UsageError: no such file, no such function, or it returns something else.
    """
    path, _, name = text.rpartition(":")
    if not path or not Path(path).is_file():
        raise UsageError(
            f"cannot find the job {text!r}",
            why=f"there is no file {path!r}" if path else "a job is a file and a function, file.py:function",
            fix="write it as file.py:function, with the path as seen from here",
        )
    if Path(path).suffix != ".py":
        raise UsageError(
            f"cannot load the job {text!r}",
            why=f"{path!r} is not a Python file, its name does not end in .py",
            fix="write it as file.py:function",
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "bug: a file without a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(
            f"cannot find the job {text!r}",
            why=f"{path} has no function {name!r}",
            fix="name a function that returns (step, args)",
        )
    _takes_no_arguments(text, function)
    job = function()
    if not (isinstance(job, tuple) and len(job) == 2 and callable(job[0]) and isinstance(job[1], tuple)):
        raise UsageError(
            f"{text} is not a job",
            why=f"it returned {type(job).__name__}, not (step, args) with args a tuple",
            fix="return (step, args): a function, and the tuple of its arguments",
        )
    return job


def _takes_no_arguments(text: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(
            f"{text} is not a job",
            why=f"it needs arguments: {error}",
            fix="give them defaults: a job is called without arguments",
        ) from error


def run_ranks(work: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], *, timeout: float = 600.0) -> list[Any]:
    """Run `work(*args)` on local gloo ranks, one process each; what each returned, by rank.

    Raises:
        RankFailed: a rank raised or died, or the time is over. All the others are ended.
        DistParError: what a rank raised, when it is one of ours.
    """
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    port, answers = _free_port(), context.Queue()
    processes = [
        context.Process(target=_rank, args=(work, rank, num_ranks, port, args, answers), daemon=True)
        for rank in range(num_ranks)
    ]
    with _without_main(work):
        for process in processes:
            process.start()
    try:
        found = _collect(processes, answers, time.monotonic() + timeout, timeout)
        for process in processes:
            process.join(10)
        return found
    finally:
        answers.close()
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def _without_main(work: Callable[..., Any]) -> Iterator[None]:
    """Ranks do not run the caller's script again (it may have no `__main__` guard), unless the work lives there."""
    main = sys.modules["__main__"]
    if work.__module__ == "__main__":
        yield
        return
    kept: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _collect(processes: list[Any], answers: Any, until: float, timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    dead_since: float | None = None
    while len(found) < len(processes):
        try:
            rank, value, error = answers.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in found]
            # A rank that has just ended may still have its answer on the way.
            if dead and dead_since is None:
                dead_since = time.monotonic()
            if dead and dead_since is not None and time.monotonic() - dead_since > 3:
                raise _failed(f"rank {dead[0]} died", f"exit code {processes[dead[0]].exitcode}") from None
            if time.monotonic() > until:
                raise _failed("the ranks did not end", f"more than {timeout:.0f} seconds went by") from None
            continue
        if isinstance(error, DistParError):
            raise error
        if error is not None:
            raise _failed(f"rank {rank} raised an error", error)
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _failed(what: str, why: str) -> RankFailed:
    return RankFailed(what, why=why, fix="mend what the reason says; the other ranks were ended")


def _rank(work: Callable[..., Any], rank: int, num_ranks: int, port: int, args: tuple[Any, ...], answers: Any) -> None:
    import torch

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        answers.put((rank, work(*args), None))
    except DistParError as error:
        answers.put((rank, None, error))
    except BaseException as error:  # The parent has to hear of any end, whatever ended it.
        answers.put((rank, None, f"{type(error).__name__}: {error}"))
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
