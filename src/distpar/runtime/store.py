"""Parameters, buffers and optimizer state on real ranks: each rank keeps its blocks, as DTensors.

What is cut becomes a DTensor in every module that holds it and inside the user's optimizer, so
`state_dict()` speaks of the trained values. What is replicated stays as it is, updated by every rank alike.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from distpar.capture.captured import Captured
from distpar.capture.fake import ModuleBinding, StateBinding
from distpar.capture.objects import Leaf
from distpar.graph import TensorType
from distpar.layout import Layout, Partial, Reduction, Shard, box
from distpar.mesh import Mesh


class Store:
    """Where the values of one mesh's ranks live."""

    def __init__(self, mesh: Mesh, rank: int, device: str) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.mesh, self.rank = mesh, rank
        ranks = torch.arange(mesh.num_ranks).reshape(mesh.sizes)
        self.device_mesh = DeviceMesh(device, ranks, mesh_dim_names=mesh.names)

    def settle(self, captured: Captured, leaves: tuple[Leaf, ...], layouts: dict[int, Layout]) -> None:
        """Cut every parameter, buffer and state that the plan cuts; what is cut already stays."""
        for node, binding in zip(captured.graph.inputs, captured.bindings, strict=True):
            if isinstance(binding, ModuleBinding):
                self._settle_module(binding, leaves, layouts[node.index])
        for node, binding in zip(captured.graph.inputs, captured.bindings, strict=True):
            type_ = node.outputs[0]
            if isinstance(binding, StateBinding) and isinstance(type_, TensorType):
                self._settle_state(binding, leaves, type_, layouts[node.index])

    def _settle_module(self, binding: ModuleBinding, leaves: tuple[Leaf, ...], layout: Layout) -> None:
        module = leaves[binding.leaf].value
        value = attrgetter(binding.paths[0])(module)
        if layout.is_replicated or is_dtensor(value):
            return
        block = self.wrap(self.cut(value.detach(), layout), layout, value.shape)
        if not isinstance(value, torch.nn.Parameter):
            for path in binding.paths:
                owner, name = _owner(module, path)
                owner._buffers[name] = block
            return
        new = torch.nn.Parameter(block, requires_grad=value.requires_grad)
        for leaf in leaves:
            if isinstance(leaf.value, torch.nn.Module):
                _replace(leaf.value, value, new)
            if isinstance(leaf.value, torch.optim.Optimizer):
                _replace_in_optimizer(leaf.value, value, new)

    def _settle_state(self, binding: StateBinding, leaves: tuple[Leaf, ...], type_: TensorType, layout: Layout) -> None:
        optimizer = leaves[binding.leaf].value
        parameter = optimizer.param_groups[binding.group]["params"][binding.position]
        state = optimizer.state[parameter]
        value = state.get(binding.key)
        if isinstance(value, torch.Tensor):
            if not layout.is_replicated and not is_dtensor(value):
                state[binding.key] = self.wrap(self.cut(value, layout), layout, value.shape)
            return
        shape = tuple(stop - start for start, stop in box(layout, type_.shape, self.mesh, self.rank))
        dtype = parameter.dtype if type_.shape else _DTYPES[type_.dtype]
        new = torch.full(shape, binding.initial, dtype=dtype, device=_device(parameter))
        state[binding.key] = new if layout.is_replicated else self.wrap(new, layout, type_.shape)

    def cut(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's block of a whole tensor, in memory of its own."""
        for dim, (start, stop) in enumerate(box(layout, tuple(value.shape), self.mesh, self.rank)):
            value = value.narrow(dim, start, stop - start)
        return value.clone(memory_format=torch.contiguous_format)

    def wrap(self, block: torch.Tensor, layout: Layout, shape: Any) -> torch.Tensor:
        """A block as a DTensor of the global shape."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size(shape)
        return DTensor.from_local(
            block, self.device_mesh, self.placements(layout), run_check=False,
            shape=shape, stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    def placements(self, layout: Layout) -> list[Any]:
        """A layout as DTensor's placements, one an axis."""
        from torch.distributed import tensor as dt

        found: list[Any] = []
        for axis in self.mesh.names:
            match layout.placement(axis):
                case Shard(dim):
                    found.append(dt.Shard(dim))
                case Partial(reduction):
                    found.append(dt.Partial("product" if reduction is Reduction.PROD else reduction.value))
                case _:
                    found.append(dt.Replicate())
        return found


_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64}


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor" or hasattr(value, "_local_tensor")


def local(value: Any) -> Any:
    """The block behind a value: a DTensor's local tensor, anything else itself."""
    return value._local_tensor if hasattr(value, "_local_tensor") else value


def _device(parameter: torch.Tensor) -> torch.device:
    return local(parameter).device


def _owner(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


def _replace(root: torch.nn.Module, old: torch.Tensor, new: torch.nn.Parameter) -> None:
    for module in root.modules():
        for name, value in module._parameters.items():
            if value is old:
                module._parameters[name] = new


def _replace_in_optimizer(optimizer: torch.optim.Optimizer, old: torch.Tensor, new: torch.nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if value is old else value for value in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
