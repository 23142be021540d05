"""A plan: the chosen signature of every op, so the layout of every tensor, with what it is predicted to cost.

`print(plan)` fits a page: what it costs, how each stored tensor lies, which conversions a step makes.
`plan.table()` has a line for every op.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distpar.errors import UsageError
from distpar.graph import NumberType, Ref, TensorType, ValueType, Where
from distpar.layout import Layout, Reduction
from distpar.mesh import Mesh
from distpar.notation import format_layout
from distpar.reshard import AllToAll, Step
from distpar.rules.spec import Signature

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Conversion:
    """One value converted to one layout, once, for all its readers that want it there.

    `seconds` is the predicted duration; `steps` is empty when nothing has to be done.
    """

    ref: Ref
    target: Layout
    steps: tuple[Step, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a plan remembers of a node, to be read by people. `kind` is an input's kind, "" for a call."""

    name: str
    op: str
    kind: str
    types: tuple[ValueType, ...]
    where: Where
    seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one kind of collective does over some axes in a step: calls, bytes sent by the busiest rank, seconds."""

    kind: str
    axes: tuple[str, ...]
    calls: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step by the cost model, peak bytes of the fullest rank, and what the solver proved."""

    compute: float
    communication: float
    peak_bytes: int
    traffic: tuple[Traffic, ...]
    cost: float
    bound: float
    status: str

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    @property
    def gap(self) -> float:
        """How far from the best possible the plan may be, as a fraction of its cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """Layouts for a whole step on a mesh.

    Attributes:
        signatures: one a node of the graph; an input node's has no operands and one output.
        conversions: every (value, wanted layout) whose wanted layout differs from the one it is made in.
        results: the layout in which each flat result is wanted; None for a constant or a number.
        gradients: the layout in which each entry of `Graph.gradients` is wanted.
        A write is wanted in the layout of the input that it is stored into.
        nodes, prediction, graph_hash: for people, reports and checks.
    """

    mesh: Mesh
    signatures: tuple[Signature, ...]
    conversions: tuple[Conversion, ...]
    results: tuple[Layout | None, ...]
    gradients: tuple[Layout, ...]
    nodes: tuple[NodeInfo, ...] = ()
    prediction: Prediction | None = None
    graph_hash: str = ""

    def layout_of(self, ref: Ref) -> Layout:
        """The layout in which a value is made."""
        return self.signatures[ref.node].outputs[ref.output]

    def stored(self) -> dict[str, Layout]:
        """The layout of every parameter, buffer and state, by name: pins that repeat this plan's choice."""
        kinds = ("parameter", "buffer", "state", "gradient")
        return {
            node.name: signature.outputs[0]
            for node, signature in zip(self.nodes, self.signatures, strict=True)
            if node.kind in kinds
        }

    @property
    def hash(self) -> str:
        """A digest of the layouts and conversions: equal on all ranks or the plans differ."""
        parts = (self.mesh, self.signatures, self.conversions, self.results, self.gradients)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.json() + "\n")

    def json(self) -> str:
        """The plan as JSON, what `save` writes."""
        return json.dumps(_to_json(self), indent=1)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            UsageError: the file is missing or is not a plan.
        """
        try:
            return _from_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(
                f"cannot read the plan {path}",
                why=f"{type(error).__name__}: {error}",
                fix="write it with Plan.save or `distpar plan JOB -o plan.json`, with this version",
            ) from error

    def table(self) -> str:
        """A line for every op: name, layouts of its outputs, seconds, conversions of its outputs."""
        conversions: dict[int, list[str]] = {}
        for conversion in self.conversions:
            text = " -> ".join(map(describe_step, conversion.steps))
            conversions.setdefault(conversion.ref.node, []).append(text)
        lines = []
        for index, (node, signature) in enumerate(zip(self.nodes, self.signatures, strict=True)):
            layouts = "; ".join(map(_typed, node.types, signature.outputs))
            what = node.kind or node.op.removeprefix("aten.")
            moves = " | ".join(conversions.get(index, ()))
            lines.append(f"{node.name:<36} {what:<28} {layouts:<40} {moves}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(_page(self))


def _typed(type_: ValueType, layout: Layout) -> str:
    return format_layout(type_, layout) if isinstance(type_, TensorType) else str(type_)


def describe_step(step: Step) -> str:
    """`AllGather(dim=0, axes=("dp",))` -> `all_gather(dp, dim 0)`."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(step).__name__).lower()
    parts = [" ".join(step.axes)]
    parts += [f"dim {step.dim}"] if hasattr(step, "dim") else []
    parts += [f"dim {step.source} to {step.target}"] if isinstance(step, AllToAll) else []
    return f"{name}({', '.join(parts)})"


def _page(plan: Plan) -> Iterable[str]:
    prediction = plan.prediction
    yield f"Plan on {plan.mesh}: {sum(not node.kind for node in plan.nodes)} ops, {plan.mesh.num_ranks} ranks"
    if prediction is not None:
        yield (
            f"  predicted {duration(prediction.seconds)} a step: compute {duration(prediction.compute)}, "
            f"communication {duration(prediction.communication)}; peak {size(prediction.peak_bytes)} a rank"
        )
        yield f"  {_proof(prediction)}"
    yield f"  scheme: {scheme(plan)}"
    for kind, title in (("parameter", "parameters"), ("buffer", "buffers"), ("state", "optimizer state")):
        rows = _states(plan) if kind == "state" else _grouped(plan, kind)
        if rows:
            yield ""
            yield title
            yield from rows
    yield ""
    yield "activations (the heaviest op of each module, forward; share of the step's compute)"
    yield from _activations(plan)
    yield ""
    yield "conversions in a step"
    yield from _traffic_lines(plan)


def _proof(prediction: Prediction) -> str:
    if prediction.gap <= 1e-6:
        return "proved to be the best plan of the space under this cost"
    return f"within {prediction.gap:.1%} of the best possible under this cost"


def scheme(plan: Plan) -> str:
    """What a person would call the plan: how much of the parameters is cut, and what the data do.

    Counted, not guessed: bytes of parameters by layout, and whether the first activations are cut.
    """
    whole = cut = 0
    names = []
    for node, signature in zip(plan.nodes, plan.signatures, strict=True):
        type_ = node.types[0] if node.types else None
        if node.kind == "parameter" and isinstance(type_, TensorType):
            if signature.outputs[0].is_replicated:
                whole += type_.num_bytes
            else:
                cut += type_.num_bytes
                names.append(node.name)
    flops_cut = _share_cut(plan)
    total = max(1, whole + cut)
    work = f"{flops_cut:.0%} of the predicted compute is on cut activations"
    if plan.mesh.num_ranks == 1:
        return "one rank, nothing is cut"
    if not cut:
        return f"parameters replicated (data parallel where rows are cut); {work}"
    if not whole:
        return f"every parameter cut over the ranks; {work}"
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    # Rounded down: what is replicated is not rounded away.
    return f"{100 * cut // total}% of the parameter bytes cut ({few}), the rest replicated; {work}"


def _share_cut(plan: Plan) -> float:
    total = sum(node.seconds for node in plan.nodes)
    cut = sum(
        node.seconds
        for node, signature in zip(plan.nodes, plan.signatures, strict=True)
        if any(any(layout.dims) or layout.partial for layout in signature.outputs)
    )
    return cut / total if total else 0.0


def _grouped(plan: Plan, kind: str) -> list[str]:
    """Lines of names and layouts; names that differ only in numbers and lie alike share a line."""
    pairs = zip(plan.nodes, plan.signatures, strict=True)
    return _lines([(node, signature) for node, signature in pairs if node.kind == kind])


def _lines(pairs: Iterable[tuple[NodeInfo, Signature]]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for node, signature in pairs:
        pattern = re.sub(r"\d+", "*", node.name)
        groups.setdefault((pattern, _typed(node.types[0], signature.outputs[0])), []).append(node.name)
    width = max((len(_label(key[0], names)) for key, names in groups.items()), default=0)
    return [f"  {_label(key[0], names):<{width}}  {key[1]}" for key, names in groups.items()]


_SHOWN = 8


def _activations(plan: Plan) -> list[str]:
    """Modules by their share of the predicted compute; numbered ones that lie alike share a line."""
    heaviest: dict[str, tuple[NodeInfo, Signature]] = {}
    shares: dict[str, float] = {}
    for node, signature in zip(plan.nodes, plan.signatures, strict=True):
        module = node.where.module
        if node.kind or not module or node.where.phase != "forward":
            continue
        shares[module] = shares.get(module, 0.0) + node.seconds
        if module not in heaviest or node.seconds > heaviest[module][0].seconds:
            heaviest[module] = (node, signature)
    groups: dict[tuple[str, str], list[str]] = {}
    for module, (node, signature) in heaviest.items():
        key = (re.sub(r"\d+", "*", module), _typed(node.types[0], signature.outputs[0]))
        groups.setdefault(key, []).append(module)
    total = sum(node.seconds for node in plan.nodes) or 1.0
    rows = sorted(((sum(map(shares.__getitem__, names)), key, names) for key, names in groups.items()), reverse=True)
    width = max((len(_label(key[0], names)) for _, key, names in rows[:_SHOWN]), default=0)
    lines = [
        f"  {_label(key[0], names):<{width}}  {seconds / total:>4.0%}  {key[1]}"
        for seconds, key, names in rows[:_SHOWN]
    ]
    more = len(rows) - _SHOWN
    return [*lines, f"  and {more} lighter ones"] if more > 0 else lines or ["  none in a module"]


_STATE = re.compile(r"[^\[]*\.state\[(?P<parameter>.*)\]\.(?P<key>\w+)")


def _states(plan: Plan) -> list[str]:
    """Optimizer state by key: most of it lies as its parameter does; only what does not is listed."""
    stored = plan.stored()
    alike: dict[str, int] = {}
    scalars: dict[str, int] = {}
    others = []
    for node, signature in zip(plan.nodes, plan.signatures, strict=True):
        found = _STATE.fullmatch(node.name) if node.kind == "state" else None
        type_ = node.types[0] if found else None
        if found is None or not isinstance(type_, TensorType):
            continue
        if not type_.shape:
            scalars[found["key"]] = scalars.get(found["key"], 0) + 1
        elif stored.get(found["parameter"]) == signature.outputs[0]:
            alike[found["key"]] = alike.get(found["key"], 0) + 1
        else:
            others.append((node, signature))
    lines = [f"  {key:<14} as its parameter (x{count})" for key, count in alike.items()]
    lines += [f"  {key:<14} a number, on every rank (x{count})" for key, count in scalars.items()]
    return lines + _lines(others)


def _label(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern} (x{len(names)})"


def _traffic_lines(plan: Plan) -> Iterable[str]:
    traffic = plan.prediction.traffic if plan.prediction else ()
    if not traffic:
        yield "  none"
        return
    for row in traffic:
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", row.kind).lower()
        yield (
            f"  {kind:<15} over {' '.join(row.axes):<10} {row.calls:>5} x  {size(row.num_bytes):>10} sent a rank"
            f"  {duration(row.seconds):>9}"
        )


def duration(seconds: float) -> str:
    """`0.00123` -> `1.23 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"


def size(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "mesh": list(plan.mesh.axes),
        "graph_hash": plan.graph_hash,
        "prediction": _prediction_json(plan.prediction),
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "kind": node.kind,
                "types": [_type_json(type_) for type_ in node.types],
                "where": [node.where.module, node.where.line, node.where.phase],
                "seconds": node.seconds,
                "operands": [_layout_json(layout) for layout in signature.operands],
                "outputs": [_layout_json(layout) for layout in signature.outputs],
            }
            for node, signature in zip(plan.nodes, plan.signatures, strict=True)
        ],
        "conversions": [
            {
                "value": [conversion.ref.node, conversion.ref.output],
                "target": _layout_json(conversion.target),
                "steps": [_step_json(step) for step in conversion.steps],
                "seconds": conversion.seconds,
            }
            for conversion in plan.conversions
        ],
        "results": [None if layout is None else _layout_json(layout) for layout in plan.results],
        "gradients": [_layout_json(layout) for layout in plan.gradients],
    }


def _prediction_json(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    fields = {name: getattr(prediction, name) for name in Prediction.__slots__ if name != "traffic"}
    rows = [[t.kind, list(t.axes), t.calls, t.num_bytes, t.seconds] for t in prediction.traffic]
    return fields | {"traffic": rows}


def _type_json(type_: ValueType) -> Any:
    return type_.kind if isinstance(type_, NumberType) else [type_.dtype, list(type_.shape)]


def _layout_json(layout: Layout) -> Any:
    return [[list(cut) for cut in layout.dims], list(layout.partial), layout.reduction]


def _step_json(step: Step) -> Any:
    return [type(step).__name__, {name: getattr(step, name) for name in type(step).__slots__}]


def _from_json(data: dict[str, Any]) -> Plan:
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']}, this version reads {_FORMAT}")
    return Plan(
        mesh=Mesh(**dict(data["mesh"])),
        signatures=tuple(
            Signature(
                tuple(map(_layout, node["operands"])), tuple(map(_layout, node["outputs"]))
            )
            for node in data["nodes"]
        ),
        conversions=tuple(
            Conversion(
                Ref(*item["value"]),
                _layout(item["target"]),
                tuple(map(_step, item["steps"])),
                item["seconds"],
            )
            for item in data["conversions"]
        ),
        results=tuple(None if item is None else _layout(item) for item in data["results"]),
        gradients=tuple(map(_layout, data["gradients"])),
        nodes=tuple(
            NodeInfo(
                node["name"], node["op"], node["kind"], tuple(map(_type, node["types"])),
                Where(*node["where"]), node["seconds"],
            )
            for node in data["nodes"]
        ),
        prediction=_prediction(data["prediction"]),
        graph_hash=data["graph_hash"],
    )  # fmt: skip


def _prediction(data: dict[str, Any] | None) -> Prediction | None:
    if data is None:
        return None
    rows = tuple(Traffic(kind, tuple(axes), *rest) for kind, axes, *rest in data["traffic"])
    return Prediction(**(data | {"traffic": rows}))


def _type(data: Any) -> ValueType:
    return NumberType(data) if isinstance(data, str) else TensorType(data[0], tuple(data[1]))


def _layout(data: Any) -> Layout:
    dims, partial, reduction = data
    return Layout(tuple(tuple(cut) for cut in dims), tuple(partial), Reduction(reduction) if reduction else None)


def _step(data: Any) -> Step:
    from distpar import reshard

    name, fields = data
    if name not in {kind.__name__ for kind in Step.__args__}:
        raise ValueError(f"no conversion step is called {name!r}")
    if "reduction" in fields:
        fields = fields | {"reduction": Reduction(fields["reduction"])}
    if "axes" in fields:
        fields = fields | {"axes": tuple(fields["axes"])}
    step: Step = getattr(reshard, name)(**fields)
    return step
