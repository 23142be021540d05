"""Process groups: one for each set of axes that a program communicates over, made once."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from typing import Any

import torch

from distpar.errors import LayoutError, UsageError
from distpar.mesh import Mesh
from distpar.program import Bucket, Convert, Program


def start(timeout: float) -> tuple[int, int]:
    """(rank, number of ranks); joins torchrun's process group when there is one to join.

    Raises:
        UsageError: there is no backend for this machine.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return 0, 1
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise UsageError(
            "ranks cannot talk to each other",
            why=f"this build of torch has no {backend} backend",
            fix="install a build of torch with torch.distributed",
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def check(mesh: Mesh, num_ranks: int) -> None:
    """Raises LayoutError when the mesh does not have exactly the ranks that run."""
    if mesh.num_ranks != num_ranks:
        raise LayoutError(
            f"{mesh} does not fit {num_ranks} ranks",
            why=f"it has {mesh.num_ranks} ranks, {num_ranks} are running",
            fix=f"start {mesh.num_ranks} ranks, or use a mesh whose sizes multiply to {num_ranks}",
        )


def control(timeout: float) -> Any:
    """A group of all ranks on the CPU, for agreements between calls."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


class Groups:
    """The process groups of a mesh by axes, in mesh order; made by all ranks in the same order."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.names: dict[tuple[str, ...], str] = {}

    def need(self, program: Program) -> None:
        """Make what a program communicates over."""
        for axes in sorted({tuple(sorted(a, key=self.mesh.position)) for a in _axes(program)}):
            if axes not in self.names:
                self.names[axes] = self._make(axes)

    def _make(self, axes: tuple[str, ...]) -> str:
        import torch.distributed as dist

        name = ""
        for ranks in self.mesh.groups(axes):
            whole = len(ranks) == self.mesh.num_ranks
            group = dist.group.WORLD if whole else dist.new_group(list(ranks))
            if self.rank in ranks:
                assert group is not None, "bug: no process group"
                name = group.group_name
        return name


def _axes(program: Program) -> Iterable[tuple[str, ...]]:
    for instruction in program.instructions:
        match instruction:
            case Convert(step=step):
                yield step.axes
            case Bucket(parts):
                yield parts[0].step.axes
            case _:
                pass
