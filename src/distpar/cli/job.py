"""The job on the command line is the user's code: what goes wrong in it is shown as the user's line, not ours.

    with code_of("train.py:job"):
        step, args = load_job("train.py:job")
        ...                             an error that `train.py` raises in here is three lines as well

An error of DistPar's own code is none of the job's and goes through as it is.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from distpar.errors import DistParError, UsageError

_OURS = Path(__file__).parent.parent


@contextlib.contextmanager
def code_of(job: str) -> Iterator[None]:
    """The block loads `file.py:function` and runs what it returns.

    Raises:
        UsageError: the file is not Python, or its code raised an error or ended the program; it names the line.
    """
    path = Path(job.rpartition(":")[0])
    # As `python train.py` does: modules beside the file can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    # Torch logs, with a traceback of many lines, what a CaptureError says in three.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True
    try:
        yield
    except DistParError:
        raise
    except (Exception, SystemExit) as error:  # The user's code can raise anything; the rest is raised again.
        line = _line_in(path, error)
        if not line:
            raise
        raise _told(job, line, error) from error
    finally:
        log.disabled = False


def _told(job: str, line: str, error: BaseException) -> UsageError:
    if isinstance(error, SystemExit):
        return UsageError(
            f"the job {job} ended the program with {error.code!r}",
            where=line,
            why="its file is imported, and nothing in it may exit",
            fix='put what is to run only by `python FILE.py` under `if __name__ == "__main__":`',
        )
    return UsageError(
        f"the job {job} raised {type(error).__name__}",
        where=line,
        why=_first_line(error),
        fix="mend this line; with --debug the whole traceback is shown",
    )


def _line_in(path: Path, error: BaseException) -> str:
    """The last line of the job's file that led to the error; "" when DistPar's own code raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    last = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename).resolve()
        if file == path.resolve():
            last = f"{path}:{frame.lineno}, in {frame.name}"
        elif file.is_relative_to(_OURS):
            last = ""
    return last


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _first_line(error: BaseException) -> str:
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), "it gives no reason")
