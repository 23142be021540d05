"""DistPar: a training step written for one device, run on many, partitioned in the fastest way.

    step = distpar.parallelize(train_step)

Everything is imported when it is first asked for: `import distpar` itself loads neither torch nor a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distpar.api import ParallelStep, parallelize, plan, simulate
    from distpar.cost.cluster import Cluster
    from distpar.errors import DistParError
    from distpar.mesh import Mesh
    from distpar.options import Options
    from distpar.plans import Plan
    from distpar.verification import Verification, verify

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "distpar.cost.cluster",
    "DistParError": "distpar.errors",
    "Mesh": "distpar.mesh",
    "Options": "distpar.options",
    "ParallelStep": "distpar.api",
    "Plan": "distpar.plans",
    "Verification": "distpar.verification",
    "parallelize": "distpar.api",
    "plan": "distpar.api",
    "simulate": "distpar.api",
    "verify": "distpar.verification",
}

__all__ = [
    "Cluster", "DistParError", "Mesh", "Options", "ParallelStep", "Plan", "Verification",
    "parallelize", "plan", "simulate", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distpar' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
