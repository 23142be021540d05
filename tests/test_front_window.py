"""What `import distpar` shows, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import distpar


def test_the_public_names_are_these() -> None:
    assert distpar.__all__ == [
        "Cluster", "DistParError", "Mesh", "Options", "ParallelStep", "Plan", "Verification",
        "parallelize", "plan", "simulate", "verify",
    ]  # fmt: skip
    assert all(hasattr(distpar, name) for name in distpar.__all__)


def test_importing_loads_neither_torch_nor_a_solver() -> None:
    code = "import distpar, sys; print([m for m in ('torch', 'highspy', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
