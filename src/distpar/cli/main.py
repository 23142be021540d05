"""The command line: plan, verify, measure, demo, bench. Exit codes: 0 done, 1 the answer is no, 2 wrong use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distpar.errors import DistParError, Infeasible, NumbersDiffer, UsageError

app = typer.Typer(
    help="Run a one-device PyTorch training step on many devices, partitioned by search, with the same numbers.\n\n"
    "JOB is FILE.py:FUNCTION, a function without arguments that returns (step, args). "
    "Example: distpar plan examples/gpt.py:job --ranks 4",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Job = Annotated[str, typer.Argument(help="FILE.py:FUNCTION returning (step, args)", show_default=False)]
Ranks = Annotated[int | None, typer.Option(help="number of ranks, on one axis called ranks")]
MeshText = Annotated[str, typer.Option("--mesh", help="named axes instead of --ranks: dp=2,tp=4")]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="cpu, dgx-v100, dgx-a100, dgx-h100 (xN for N hosts), or a file of `measure`")
]
Limit = Annotated[str, typer.Option("--memory-limit", help="peak bytes a rank may use: 16GiB")]
SolverName = Annotated[str, typer.Option("--solver", help="auto, exact, brute or random:SEED")]
Space = Annotated[str, typer.Option("--space", help="full, or alpa (no op reads a Partial)")]
Beta = Annotated[float, typer.Option("--beta", help="weight of communication against compute; 1 is physical")]
Pin = Annotated[
    list[str] | None, typer.Option("--pin", help='NAME=LAYOUT, repeatable: "model.head.weight=[*/ranks, *]"')
]
Seconds = Annotated[float, typer.Option("--time-limit", help="seconds that the solver may take")]


@app.command()
def plan(
    job: Job,
    ranks: Ranks = None,
    mesh: MeshText = "",
    cluster: ClusterName = "cpu",
    memory_limit: Limit = "",
    solver: SolverName = "auto",
    space: Space = "full",
    beta: Beta = 1.0,
    pin: Pin = None,
    time_limit: Seconds = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan as JSON")] = None,
    table: Annotated[bool, typer.Option("--table", help="a line for every op")] = False,
) -> None:
    """Print the best plan for a job, without running it: no devices are needed.

    Example: distpar plan examples/face.py:job --ranks 4 -o plan.json
    """
    import distpar
    from distpar.launch import load_job

    options = _options(memory_limit, solver, space, beta, time_limit)
    shape = _mesh(ranks, mesh)
    step, args = load_job(job)
    found = distpar.plan(step, *args, mesh=shape, cluster=cluster, options=options, pins=_pins(pin))
    print(found.table() if table else found)
    if output is not None:
        found.save(output)


@app.command()
def verify(
    job: Job,
    ranks: Ranks = None,
    mesh: MeshText = "",
    solver: SolverName = "auto",
    steps: Annotated[int, typer.Option(help="training steps to compare")] = 3,
    time_limit: Seconds = 60.0,
) -> None:
    """Compare one device with all ranks, simulated in this process: results, gradients, parameters, buffers, state.

    Example: distpar verify examples/resnet.py:job --mesh a=2,b=2
    """
    import distpar
    from distpar.launch import load_job

    options = _options("", solver, "full", 1.0, time_limit)
    shape = _mesh(ranks, mesh)
    if steps < 1:
        raise UsageError(
            f"--steps {steps} compares nothing", why="a step is a whole number, 1 or more", fix="--steps 3"
        )
    step, args = load_job(job)
    print(distpar.verify(step, *args, mesh=shape, options=options, steps=steps))


@app.command()
def measure(
    output: Annotated[Path, typer.Option("-o", "--output", help="the cluster file to write")] = Path("cluster.json"),
    ranks: Annotated[int, typer.Option(help="local ranks to measure with")] = 2,
) -> None:
    """Measure this machine's links and compute, in under a minute; use the file as --cluster.

    Example: distpar measure -o cluster.json
    """
    import distpar

    found = distpar.Cluster.measure(ranks)
    found.save(output)
    print(found)
    print(f"wrote {output}")


@app.command()
def demo(
    identities: Annotated[int, typer.Option(help="classes of the face head")] = 50_000,
    ranks: Annotated[int, typer.Option(help="local ranks")] = 2,
    steps: Annotated[int, typer.Option(help="training steps of each job")] = 40,
    only: Annotated[str, typer.Option(help="face or lm")] = "",
) -> None:
    """Train two real models on local ranks: face recognition at scale, and language modelling.

    Example: distpar demo --only face --identities 100000
    """
    from distpar.demo import run

    run(identities=identities, ranks=ranks, steps=steps, only=only or None)


@app.command()
def bench(
    job: Job,
    ranks: Annotated[int, typer.Option(help="local ranks")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds, each running every scheme in turn")] = 5,
    steps: Annotated[int, typer.Option(help="steps of a scheme in a round")] = 4,
    against: Annotated[str, typer.Option(help="baselines, separated by commas: ddp, fsdp2")] = "ddp,fsdp2",
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Samples a second by DistPar and by baselines, in turns on the same local ranks; memory and losses beside.

    Example: distpar bench examples/face.py:job --ranks 2
    """
    from distpar.bench import run

    names = tuple(name.strip() for name in against.split(",") if name.strip())
    run(job, ranks=ranks, against=names, rounds=rounds, steps=steps, json=json)


def _options(memory_limit: str, solver: str, space: str, beta: float, time_limit: float) -> Any:
    from distpar.options import Options

    limit = memory_limit or None
    return Options(memory_limit=limit, solver=solver, space=space, beta=beta, time_limit=time_limit)


def _mesh(ranks: int | None, text: str) -> Any:
    from distpar.mesh import Mesh

    if ranks is not None and text:
        raise UsageError("--ranks and --mesh are both given", why="each says how many ranks there are", fix="give one")
    if text:
        return Mesh.parse(text)
    return Mesh(ranks=2 if ranks is None else ranks)


def _pins(texts: list[str] | None) -> dict[str, str]:
    pins = {}
    for text in texts or ():
        name, equals, layout = text.partition("=")
        if not equals:
            raise UsageError(f"cannot read the pin {text!r}", why="it is not NAME=LAYOUT", fix='"model.w=[*/ranks, *]"')
        pins[name.strip()] = layout.strip()
    return pins


def _version(value: bool) -> None:
    if value:
        from distpar import __version__

        print(__version__)
        raise typer.Exit


_DEBUG = False


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options that come before the command."""
    global _DEBUG
    _DEBUG = debug


def main() -> None:
    """The entry point: our own errors are three lines on stderr."""
    try:
        app()
    except DistParError as error:
        if _DEBUG:
            raise
        print(error, file=sys.stderr)
        sys.exit(1 if isinstance(error, (NumbersDiffer, Infeasible)) else 2)


if __name__ == "__main__":
    main()
