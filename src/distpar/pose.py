"""From a graph to a labelling problem, and from its answer to a plan.

    node        the signatures of its op          cost: seconds on the largest block
    input       the layouts it may be kept in     parameters and states: any cut, never Partial; data: whole
    value       a fan: made in one layout, wanted in others, each converted once
    result      wanted whole                      a write: wanted in the layout of what it is stored into

Time, for memory, is the index of the node in the graph. Parameters, states, buffers and data live through the
whole step; an activation lives until its last reader, and a view keeps what it looks at alive.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from distpar import rules
from distpar.cost.cluster import Cluster
from distpar.cost.price import Prices
from distpar.errors import Infeasible, UsageError
from distpar.graph import Graph, InputKind, Node, NumberType, OpSpec, Ref, TensorType
from distpar.layout import Layout, Placement, Replicate, Shard, largest_shape
from distpar.mesh import Mesh
from distpar.notation import parse_pin
from distpar.options import Options
from distpar.plans import Conversion, NodeInfo, Plan, Prediction, Traffic
from distpar.reshard import after, volume
from distpar.rules.spec import Signature
from distpar.search import solve
from distpar.search.fold import fold
from distpar.search.problem import (
    Assignment,
    Choice,
    Consumer,
    Fan,
    Problem,
    peak_memory,
)

_FOLD_ABOVE = 1500
"""Graphs with more nodes than this have their repeated parts folded; smaller ones are solved as they are."""
_FOLD_ROUNDS = 12
"""How far, in edges, two nodes' surroundings must look alike to share one choice."""

_PERSISTENT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.GRADIENT, InputKind.STATE)


def make_plan(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    pins: Mapping[str, str | Layout],
) -> Plan:
    """The best plan that the solver finds for a captured step.

    Args:
        pins: layouts that are given, by the name of a parameter, buffer or state.

    Raises:
        UsageError: a pin names no tensor, or does not fit it.
        Infeasible: no plan stays within the memory limit.
    """
    posed = pose(graph, mesh, cluster, options, pins)
    problem, unfold = posed.problem, None
    if len(graph.nodes) > _FOLD_ABOVE and not str(options.solver).startswith("random"):
        problem, unfold = fold(posed.problem, posed.classes)
    starts = _starts(posed, problem, options, posed.classes if unfold else None)
    answer = solve(problem, options.solver, time_limit=options.time_limit, gap=options.gap, starts=starts)
    if answer.status == "infeasible":
        raise _infeasible(posed, answer, pins)
    if answer.status == "none in time":
        raise Infeasible(
            f"no plan was found within {options.time_limit:g} seconds on {mesh}",
            why="the memory limit leaves few plans, and the solver's time was over before it met one of them",
            fix="allow more time (time_limit), more memory, or fewer mesh axes",
        )
    strategies = unfold(answer.strategies) if unfold else answer.strategies
    return _plan(posed, tuple(int(s) for s in strategies), answer)


def _starts(posed: Posed, problem: Problem, options: Options, classes: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Good assignments of a mesh of several axes: one axis after the other, in both directions.

    Alone they are not good enough (the second axis is laid on top of what the first has chosen), but they give
    the joint search a plan to beat, and an answer when its time runs out.
    """
    axes = [name for name, size in posed.mesh.axes if size > 1]
    if len(axes) < 2 or options.solver not in ("auto", "exact"):
        return []
    labels = [tuple(map(_layouts, found)) for found in posed.signatures]
    labels += [tuple((layout,) for layout in found) for found in posed.wanted]
    if classes is not None:
        labels = [labels[list(classes).index(c)] for c in dict.fromkeys(classes)]
    found = [_one_by_one(problem, labels, order, options) for order in (axes, axes[::-1])]
    return [start for start in found if start]


def _layouts(signature: Signature) -> tuple[Layout, ...]:
    return (*signature.operands, *signature.outputs)


def _one_by_one(
    problem: Problem, labels: Sequence[Sequence[tuple[Layout, ...]]], order: Sequence[str], options: Options
) -> tuple[int, ...]:
    chosen: list[tuple[Layout, ...]] | None = None
    strategies: tuple[int, ...] = ()
    for number in range(len(order)):
        known, open_ = order[:number], order[number + 1 :]
        allowed = [
            [
                _free_of(label, open_) and (chosen is None or _on(label, known) == _on(chosen[node], known))
                for label in found
            ]
            for node, found in enumerate(labels)
        ]
        if not all(map(any, allowed)):
            return ()
        part = _masked(problem, allowed)
        answer = solve(part, "exact", time_limit=options.time_limit / 4, gap=max(options.gap, 1e-3))
        if not answer.strategies:
            return ()
        strategies = answer.strategies
        chosen = [found[s] for found, s in zip(labels, strategies, strict=True)]
    return strategies


def _free_of(label: tuple[Layout, ...], axes: Sequence[str]) -> bool:
    return all(axis not in layout.axes for layout in label for axis in axes)


def _on(label: tuple[Layout, ...], axes: Sequence[str]) -> tuple[Placement, ...]:
    return tuple(layout.placement(axis) for layout in label for axis in axes)


def _masked(problem: Problem, allowed: Sequence[Sequence[bool]]) -> Problem:
    """The same problem with some strategies forbidden; memory is looked at by the joint search alone."""
    choices = tuple(
        replace(choice, costs=np.where(row, choice.costs, np.inf))
        for choice, row in zip(problem.choices, allowed, strict=True)
    )
    return Problem(choices, problem.fans, None, problem.fixed_memory)


@dataclass(frozen=True)
class Posed:
    """A problem together with what its labels mean.

    The choices are the graph's nodes, then one for each distinct value that is a result, then one for
    each gradient; `signatures[i]` are node i's strategies, `wanted[j]` the layouts of the j-th extra choice.
    """

    graph: Graph
    mesh: Mesh
    prices: Prices
    problem: Problem
    signatures: tuple[tuple[Signature, ...], ...]
    classes: tuple[int, ...]
    results: Mapping[Ref, int]
    gradients: tuple[int, ...]
    wanted: tuple[tuple[Layout, ...], ...]


def pose(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    pins: Mapping[str, str | Layout],
) -> Posed:
    """The labelling problem of a graph on a mesh."""
    prices = Prices(cluster, mesh)
    pinned = _pinned(graph, mesh, pins)
    written = dict(graph.writes)
    signatures = tuple(_strategies(graph, node, mesh, options.space, pinned.get(node.index)) for node in graph.nodes)
    results = {
        ref: len(graph.nodes) + position
        for position, ref in enumerate(
            dict.fromkeys(r for r in graph.results if isinstance(r, Ref) and _is_tensor(graph, r))
        )
    }
    first = len(graph.nodes) + len(results)
    gradients = tuple(range(first, first + len(graph.gradients)))
    wanted = tuple(
        (Layout.replicate(_tensor(graph, ref).ndim),)
        if options.results == "plain"
        else _kept(_tensor(graph, ref), mesh)
        for ref in results
    ) + tuple(_kept(_tensor(graph, ref), mesh) for _, ref in graph.gradients)
    last_use = _last_uses(graph)
    choices = [
        _choice(graph, node, signatures[node.index], prices, last_use, set(written.values())) for node in graph.nodes
    ]
    choices += [Choice(np.zeros(len(options_)), np.zeros(len(options_), dtype=np.int64)) for options_ in wanted]
    fans = tuple(_fans(graph, signatures, wanted, results, gradients, written, prices, options.beta, last_use))
    limit = options.memory_bytes or cluster.memory
    return Posed(
        graph, mesh, prices, Problem(tuple(choices), fans, limit), signatures,
        _classes(graph, pinned, len(wanted)), results, gradients, wanted,
    )  # fmt: skip


def _strategies(graph: Graph, node: Node, mesh: Mesh, space: str, pin: Layout | None) -> tuple[Signature, ...]:
    if node.input is None:
        found = _signatures(graph.specs[node.index], mesh)
        if space == "alpa":
            found = tuple(s for s in found if not any(layout.partial for layout in s.operands))
        return found
    if pin is not None:
        return (Signature((), (pin,)),)
    kind, type_ = node.input.kind, node.outputs[0]
    if isinstance(type_, NumberType) or kind not in _PERSISTENT:
        ndim = 0 if isinstance(type_, NumberType) else type_.ndim
        return (Signature((), (Layout.replicate(ndim),)),)
    return tuple(Signature((), (layout,)) for layout in _kept(type_, mesh))


@cache
def _signatures(spec: OpSpec, mesh: Mesh) -> tuple[Signature, ...]:
    """The op's signatures, without those that cut a dim of size 1 (nothing is gained, an empty rank is made)."""
    found = rules.signatures(spec, mesh)
    return tuple(s for s in found if not _cuts_one(spec, s)) or found


def _cuts_one(spec: OpSpec, signature: Signature) -> bool:
    pairs = itertools.chain(
        zip(spec.operands, signature.operands, strict=True),
        zip(spec.outputs, signature.outputs, strict=True),
    )
    return any(
        axes and size == 1
        for type_, layout in pairs
        if isinstance(type_, TensorType)
        for size, axes in zip(type_.shape, layout.dims, strict=True)
    )


@cache
def _kept(type_: TensorType, mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts that a stored tensor may have: on each axis replicated or cut, in mesh order."""
    dims = [Shard(dim) for dim, size in enumerate(type_.shape) if size > 1]
    placements: list[Placement] = [Replicate(), *dims]
    axes = [name for name, size in mesh.axes if size > 1]
    return tuple(
        Layout.of(type_.ndim, zip(axes, row, strict=True)) for row in itertools.product(placements, repeat=len(axes))
    )


def _pinned(graph: Graph, mesh: Mesh, pins: Mapping[str, str | Layout]) -> dict[int, Layout]:
    names = {
        node.input.name: node for node in graph.inputs if node.input is not None and node.input.kind in _PERSISTENT
    }
    found: dict[int, Layout] = {}
    for name, text in pins.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or sorted(names)[:3]
            raise UsageError(
                f"the pin {name!r} names no tensor of the step",
                why=f"a pin is the name of a parameter, buffer or state; near it: {', '.join(near)}",
                fix="correct the name, or leave the pin out",
            )
        node = names[name]
        type_ = node.outputs[0]
        assert isinstance(type_, TensorType), "bug: a stored input is a tensor"
        layout = text if isinstance(text, Layout) else parse_pin(text)
        _check_pin(name, text, layout, type_, mesh)
        ordered = tuple(tuple(sorted(cut, key=mesh.position)) for cut in layout.dims)
        found[node.index] = Layout(ordered)
    return found


def _check_pin(name: str, text: str | Layout, layout: Layout, type_: TensorType, mesh: Mesh) -> None:
    why = ""
    if layout.ndim != type_.ndim:
        why = f"the tensor is {type_}, with {type_.ndim} dims, the pin has {layout.ndim}"
    elif layout.partial:
        why = "a stored tensor cannot wait for a reduction"
    elif unknown := sorted(layout.axes - set(mesh.names)):
        why = f"{mesh} has no axis {', '.join(unknown)}"
    elif any(list(cut) != sorted(cut, key=mesh.position) for cut in layout.dims):
        why = "stored tensors are cut in the order of the mesh's axes"
    if why:
        example = ", ".join(["*/" + mesh.names[0], *["*"] * (type_.ndim - 1)][: type_.ndim])
        raise UsageError(f"the pin {name}={text} does not fit", why=why, fix=f"write for example [{example}]")


def _is_tensor(graph: Graph, ref: Ref) -> bool:
    return isinstance(graph.type_of(ref), TensorType)


def _tensor(graph: Graph, ref: Ref) -> TensorType:
    type_ = graph.type_of(ref)
    assert isinstance(type_, TensorType), f"bug: {ref} is not a tensor"
    return type_


def _last_uses(graph: Graph) -> dict[Ref, int]:
    """For each value the index of the last node that needs its memory; results and gradients live to the end."""
    end = len(graph.nodes)
    kept = {r for r in graph.results if isinstance(r, Ref)} | {ref for _, ref in graph.gradients}
    last: dict[Ref, int] = {}
    for node in reversed(graph.nodes):
        for output in range(len(node.outputs)):
            ref = Ref(node.index, output)
            last[ref] = end if ref in kept else node.index
            for reader, _ in graph.users.get(ref, ()):
                last[ref] = max(last[ref], _reads_until(graph, reader, last))
    return last


def _reads_until(graph: Graph, reader: int, last: Mapping[Ref, int]) -> int:
    node = graph.nodes[reader]
    if not rules.is_view(graph.specs[reader]):
        return reader
    return max((last[Ref(reader, output)] for output in range(len(node.outputs))), default=reader)


def _choice(
    graph: Graph,
    node: Node,
    signatures: Sequence[Signature],
    prices: Prices,
    last_use: Mapping[Ref, int],
    written: set[Ref],
) -> Choice:
    end = len(graph.nodes)
    refs = [Ref(node.index, output) for output in range(len(node.outputs))]
    if node.input is not None:
        costs = np.zeros(len(signatures))
        memory = [_bytes(node, signature, prices.mesh) for signature in signatures]
        return Choice(costs, np.array(memory, dtype=np.int64), 0, end, node.name)
    spec = graph.specs[node.index]
    costs = np.array([prices.call(spec, signature) for signature in signatures])
    stop = max((last_use[ref] for ref in refs), default=node.index)
    # What is written back is made in the memory of what it replaces.
    free = rules.is_view(spec) or all(ref in written for ref in refs)
    memory = [0 if free else _bytes(node, signature, prices.mesh) for signature in signatures]
    return Choice(costs, np.array(memory, dtype=np.int64), node.index, stop + 1, node.name)


def _bytes(node: Node, signature: Signature, mesh: Mesh) -> int:
    return sum(
        _block_bytes(type_, layout, mesh)
        for type_, layout in zip(node.outputs, signature.outputs, strict=True)
        if isinstance(type_, TensorType)
    )


@cache
def _block_bytes(type_: TensorType, layout: Layout, mesh: Mesh) -> int:
    return TensorType(type_.dtype, largest_shape(layout, type_.shape, mesh)).num_bytes


def _fans(
    graph: Graph,
    signatures: Sequence[Sequence[Signature]],
    wanted: Sequence[tuple[Layout, ...]],
    results: Mapping[Ref, int],
    gradients: Sequence[int],
    written: Mapping[int, Ref],
    prices: Prices,
    beta: float,
    last_use: Mapping[Ref, int],
) -> Iterable[Fan]:
    """One fan for each tensor value that anybody reads."""
    extra: dict[Ref, list[tuple[int, tuple[Layout, ...]]]] = {}
    base = len(graph.nodes)
    for ref, index in results.items():
        extra.setdefault(ref, []).append((index, wanted[index - base]))
    for index, (_, ref) in zip(gradients, graph.gradients, strict=True):
        extra.setdefault(ref, []).append((index, wanted[index - base]))
    for index, ref in written.items():
        kept = tuple(signature.outputs[0] for signature in signatures[index])
        extra.setdefault(ref, []).append((index, kept))
    for node in graph.nodes:
        for output, type_ in enumerate(node.outputs):
            ref = Ref(node.index, output)
            readers = [
                (reader, tuple(signature.operands[position] for signature in signatures[reader]))
                for reader, position in graph.users.get(ref, ())
            ] + extra.get(ref, [])
            if readers and isinstance(type_, TensorType):
                made = tuple(signature.outputs[output] for signature in signatures[node.index])
                span = _copy_span(graph, ref, last_use)
                yield _fan(node.index, type_, made, readers, prices, beta, span)


def _copy_span(graph: Graph, ref: Ref, last_use: Mapping[Ref, int]) -> tuple[int, int]:
    """From the first reader to the last need: how long a converted copy lives."""
    first = min((reader for reader, _ in graph.users.get(ref, ())), default=len(graph.nodes) - 1)
    return first, max(first, last_use[ref]) + 1


def _fan(
    producer: int,
    type_: TensorType,
    made: tuple[Layout, ...],
    readers: Sequence[tuple[int, tuple[Layout, ...]]],
    prices: Prices,
    beta: float,
    span: tuple[int, int],
) -> Fan:
    sources = {layout: state for state, layout in enumerate(dict.fromkeys(made))}
    targets = {
        layout: state
        for state, layout in enumerate(dict.fromkeys(itertools.chain.from_iterable(layouts for _, layouts in readers)))
    }
    costs, memory = _conversion_table(type_, tuple(sources), tuple(targets), prices, beta)
    consumers = tuple(
        Consumer(node, np.array([targets[layout] for layout in layouts], dtype=np.int64)) for node, layouts in readers
    )
    states = np.array([sources[layout] for layout in made], dtype=np.int64)
    return Fan(producer, states, consumers, costs, memory, *span)


@cache
def _conversion_table(
    type_: TensorType,
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
    prices: Prices,
    beta: float,
) -> tuple[np.ndarray, np.ndarray]:
    costs = np.zeros((len(sources), len(targets)))
    memory = np.zeros((len(sources), len(targets)), dtype=np.int64)
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            if source != target:
                costs[row, column] = beta * prices.path(source, target, type_).seconds
                memory[row, column] = _block_bytes(type_, target, prices.mesh)
    return costs, memory


def _classes(graph: Graph, pinned: Mapping[int, Layout], num_extra: int) -> tuple[int, ...]:
    """Equal numbers for nodes whose surroundings look alike: they may share one choice.

    Colour refinement (Weisfeiler and Leman) for a fixed number of rounds: repeated layers fall together,
    except near the ends of the network, where the surroundings differ.
    """
    writes = dict(graph.writes)
    marks = [
        (
            graph.specs[node.index] if node.input is None else (node.input.kind, node.outputs),
            pinned.get(node.index),
        )
        for node in graph.nodes
    ]
    colours = _numbered(marks)
    results = {ref for ref in graph.results if isinstance(ref, Ref)}
    gradients = {ref for _, ref in graph.gradients}
    written_by = {ref: node for node, ref in writes.items()}
    for _ in range(_FOLD_ROUNDS):
        colours = _numbered(
            (
                colours[node.index],
                tuple((colours[ref.node], ref.output) for ref in node.refs),
                tuple(
                    (
                        ref in results,
                        ref in gradients,
                        colours[written_by[ref]] if ref in written_by else -1,
                        tuple(sorted((colours[r], p) for r, p in graph.users.get(ref, ()))),
                    )
                    for ref in (Ref(node.index, output) for output in range(len(node.outputs)))
                ),
                colours[writes[node.index].node] if node.index in writes else -1,
            )
            for node in graph.nodes
        )
    first = max(colours, default=-1) + 1
    return (*colours, *range(first, first + num_extra))


def _numbered(keys: Iterable[object]) -> list[int]:
    seen: dict[object, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _infeasible(posed: Posed, answer: Assignment, pins: Mapping[str, str | Layout]) -> Infeasible:
    limit = posed.problem.memory_limit or 0
    pinned = f" with the pins {', '.join(pins)}" if pins else ""
    smallest = answer.smallest_memory
    return Infeasible(
        f"no plan fits into {_mib(limit)} a rank on {posed.mesh}",
        why=f"the smallest peak of any plan{pinned} is "
        + (_mib(smallest) if smallest is not None else "larger than that"),
        fix=f"allow memory_limit={_mib(smallest)!r} or more, or use more ranks"
        if smallest is not None
        else "allow more memory, use more ranks, or free a pin",
    )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"


def _plan(posed: Posed, strategies: tuple[int, ...], answer: Assignment) -> Plan:
    graph, mesh, prices = posed.graph, posed.mesh, posed.prices
    chosen = tuple(posed.signatures[n.index][strategies[n.index]] for n in graph.nodes)
    base = len(graph.nodes)

    def wanted(index: int) -> Layout:
        return posed.wanted[index - base][strategies[index]]

    results = tuple(
        wanted(posed.results[r]) if isinstance(r, Ref) and r in posed.results else None for r in graph.results
    )
    gradients = tuple(wanted(index) for index in posed.gradients)
    conversions = tuple(_conversions(graph, chosen, results, gradients, prices))
    seconds = tuple(
        0.0 if node.input else prices.call(graph.specs[node.index], chosen[node.index]) for node in graph.nodes
    )
    nodes = tuple(
        NodeInfo(node.name, node.op, node.input.kind.value if node.input else "", node.outputs,
                 node.where, seconds[node.index])
        for node in graph.nodes
    )  # fmt: skip
    prediction = Prediction(
        compute=sum(seconds),
        communication=sum(conversion.seconds for conversion in conversions),
        peak_bytes=_peak(posed, strategies),
        traffic=_traffic(graph, mesh, chosen, conversions, prices),
        cost=answer.cost,
        bound=answer.bound,
        status=answer.status,
    )
    return Plan(mesh, chosen, conversions, results, gradients, nodes, prediction, graph_hash(graph))


def _peak(posed: Posed, strategies: tuple[int, ...]) -> int:
    return peak_memory(posed.problem, strategies)


def _conversions(
    graph: Graph,
    chosen: Sequence[Signature],
    results: Sequence[Layout | None],
    gradients: Sequence[Layout],
    prices: Prices,
) -> Iterable[Conversion]:
    wants: dict[tuple[Ref, Layout], None] = {}
    for node in graph.nodes:
        for ref, layout in zip(node.refs, chosen[node.index].operands, strict=True):
            wants[ref, layout] = None
    for result, layout_ in zip(graph.results, results, strict=True):
        if isinstance(result, Ref) and layout_ is not None:
            wants[result, layout_] = None
    for (_, ref), layout in zip(graph.gradients, gradients, strict=True):
        wants[ref, layout] = None
    for node_index, ref in graph.writes:
        wants[ref, chosen[node_index].outputs[0]] = None
    for ref, layout in wants:
        type_, made = graph.type_of(ref), chosen[ref.node].outputs[ref.output]
        if isinstance(type_, TensorType) and made != layout:
            path = prices.path(made, layout, type_)
            yield Conversion(ref, layout, path.steps, path.seconds)


def _traffic(
    graph: Graph,
    mesh: Mesh,
    chosen: Sequence[Signature],
    conversions: Sequence[Conversion],
    prices: Prices,
) -> tuple[Traffic, ...]:
    """Calls, bytes sent by the busiest rank and seconds, by kind of collective and axes."""
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for conversion in conversions:
        layout = chosen[conversion.ref.node].outputs[conversion.ref.output]
        type_ = _tensor(graph, conversion.ref)
        for step in conversion.steps:
            sent = volume(step, type_, layout, mesh)
            if sent:
                total = found.setdefault((type(step).__name__, step.axes), [0, 0, 0.0])
                total[0] += 1
                total[1] += sent
                total[2] += prices.step(step, type_, layout)
            layout = after(step, layout)
    return tuple(
        Traffic(kind, axes, int(calls), int(sent), seconds)
        for (kind, axes), (calls, sent, seconds) in sorted(found.items())
    )


def graph_hash(graph: Graph) -> str:
    """A digest of everything that a plan depends on: ops, types, wiring, inputs, writes, results."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        digest.update(repr((node.op, node.args, node.kwargs, node.outputs, node.input)).encode())
    digest.update(repr((graph.results, graph.writes, graph.gradients)).encode())
    return digest.hexdigest()[:16]
