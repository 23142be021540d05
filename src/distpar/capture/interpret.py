"""Run a graph on one device, as it stands: what simulated and real ranks are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distpar.graph import Graph, Ref, fill
from distpar.runtime.kernels import materialize, resolve

Results = tuple[list[Any], dict[int, Any], dict[int, Any]]


def interpret(graph: Graph, inputs: Sequence[Any], *, watch: Callable[[int, list[Any]], None] | None = None) -> Results:
    """Run every node on whole tensors.

    Args:
        inputs: the values of the input nodes, in order.
        watch: called with each node's index and outputs.

    Returns:
        results (flat), writes by input node, gradients by parameter's input node.
    """
    values: dict[int, list[Any]] = {}
    with torch.no_grad():
        for node, value in zip(graph.inputs, inputs, strict=True):
            values[node.index] = [value]
        for node in graph.nodes:
            if node.input is not None:
                continue
            spec = graph.specs[node.index]
            operands = tuple(values[ref.node][ref.output] for ref in node.refs)
            args = [materialize(fill(arg, operands)) for arg in spec.args]
            kwargs = {key: materialize(fill(value, operands)) for key, value in spec.kwargs}
            out = resolve(node.op)(*args, **kwargs)
            values[node.index] = list(out) if isinstance(out, (tuple, list)) else [out]
            if watch is not None:
                watch(node.index, values[node.index])

    def value_of(ref: Any) -> Any:
        return values[ref.node][ref.output] if isinstance(ref, Ref) else ref

    return (
        [value_of(result) for result in graph.results],
        {index: value_of(ref) for index, ref in graph.writes},
        {index: value_of(ref) for index, ref in graph.gradients},
    )
