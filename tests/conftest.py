"""Shared set-up: one thread a process, and the largest differences seen, printed at the end."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden plans anew")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The largest difference from one device of each model, over all tests that measured one."""
    found: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for key, value in report.user_properties:
            if key.startswith("difference:"):
                name = key.removeprefix("difference:")
                found[name] = max(found.get(name, 0.0), value)
    if found:
        terminalreporter.section("largest difference from one device")
        for name, value in sorted(found.items()):
            terminalreporter.line(f"{name:<16} {value:.3g}")
