"""What a step is compared with: PyTorch's own DistributedDataParallel and fully sharded data parallelism.

Each takes (step, args) as written for one device, and gives them wrapped. The batch is cut over the ranks along
dim 0 of every tensor among the arguments, and gradients are *averaged over ranks*: that equals one device only
where all ranks have the same number of rows, no row is ignored in the loss, and batch norm and dropout are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Step = Callable[..., Any]


def ddp(step: Step, args: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """Modules in DistributedDataParallel, data cut. Needs a process group."""
    from torch.nn.parallel import DistributedDataParallel

    return step, cut(_map_modules(DistributedDataParallel, args))


def fsdp2(step: Step, args: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """`fully_shard` on every repeated layer and on the whole module, data cut. Needs a process group.

    Optimizers are pointed to the sharded parameters; they must not have state yet.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
    renamed: dict[nn.Parameter, nn.Parameter] = {}

    def shard(module: nn.Module) -> nn.Module:
        before = dict(module.named_parameters(remove_duplicate=False))
        for inner in module.modules():
            if isinstance(inner, nn.ModuleList):
                for layer in inner:
                    fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        after = dict(module.named_parameters(remove_duplicate=False))
        renamed.update({value: after[name] for name, value in before.items()})
        return module

    args = _map_modules(shard, args)
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, torch.optim.Optimizer):
            assert not leaf.state, "bug: the optimizer has state already"
            for group in leaf.param_groups:
                group["params"] = [renamed[p] for p in group["params"]]
    return step, cut(args)


def cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's rows of every tensor among the arguments, as torch.chunk cuts them."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        size = -(-leaf.shape[0] // count)
        return leaf[rank * size : (rank + 1) * size]

    found: tuple[Any, ...] = pytree.tree_map(rows, args)
    return found


def _map_modules(wrap: Callable[[nn.Module], nn.Module], args: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = pytree.tree_map(lambda leaf: wrap(leaf) if isinstance(leaf, nn.Module) else leaf, args)
    return found


BASELINES: dict[str, Callable[[Step, tuple[Any, ...]], tuple[Step, tuple[Any, ...]]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
}
