"""The command line: plan, verify, measure, demo, bench. Exit codes: 0 done, 1 the answer is no, 2 wrong use.

Every error is three lines on stderr: what, why, fix. `--debug` shows the traceback instead.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from distpar.errors import DistParError, Infeasible, NumbersDiffer, UsageError

_WRONG_WORDS = cast(type[Exception], typer.BadParameter.__base__)
"""What typer raises for words that it cannot read: click's UsageError, whichever click this typer has."""


class _Commands(TyperGroup):
    """The commands; an error of ours in one of them ends the program by its exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # --debug is added to a command that failed, so it may stand at the end.
        debug = ["--debug"] if "--debug" in args else []
        return super().parse_args(ctx, debug + [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DistParError as error:
            raise typer.Exit(_show(error, debug=ctx.params["debug"])) from error


def _show(error: DistParError, *, debug: bool = False) -> int:
    """Print an error; its exit code."""
    if debug:
        traceback.print_exception(error)
    else:
        print(error, file=sys.stderr)
    return 1 if isinstance(error, (NumbersDiffer, Infeasible)) else 2


def main() -> None:
    """The entry point."""
    try:
        sys.exit(app(prog_name="distpar", standalone_mode=False))
    except typer.Abort:
        sys.exit(130)
    except _WRONG_WORDS as error:
        sys.exit(_show(_unread(error)))


def _unread(error: Any) -> UsageError:
    command = error.ctx.command_path if error.ctx else "distpar"
    why = " ".join(error.format_message().split())
    return UsageError("cannot read the command line", why=why, fix=f"see `{command} --help`")


app = typer.Typer(
    cls=_Commands,
    help="Run a one-device PyTorch training step on many devices, partitioned by search, with the same numbers.\n\n"
    "JOB is FILE.py:FUNCTION, a function without arguments that returns (step, args): what trains, and what it is "
    "called with.\n\n"
    "Examples:\n\n"
    "\b\n"
    "  distpar plan examples/gpt.py:job --ranks 4       the best plan, without devices\n"
    "  distpar verify examples/gpt.py:job --ranks 3     the same numbers as on one device?\n"
    "  distpar bench examples/face.py:job --ranks 2     faster than DDP and FSDP2?\n"
    "  torchrun --nproc-per-node 2 examples/gpt.py      run it: parallelize(step) is in the file\n\n"
    "Exit codes: 0 done, 1 the answer is no (numbers differ, no plan fits the memory), 2 wrong use.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: layouts such as [*/ranks, *] are not markup, and help goes through a pipe unchanged.
    rich_markup_mode=None,
)

Job = Annotated[str, typer.Argument(metavar="JOB", help="FILE.py:FUNCTION returning (step, args)", show_default=False)]
Ranks = Annotated[int | None, typer.Option(help="number of ranks, on one axis called ranks; 2 if no --mesh is given")]
MeshText = Annotated[str | None, typer.Option("--mesh", help="named axes instead of --ranks: dp=2,tp=4")]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="cpu, dgx-v100, dgx-a100, dgx-h100 (xN for N hosts), or a file of `measure`")
]
Limit = Annotated[str | None, typer.Option("--memory-limit", help="peak bytes a rank may use: 16GiB")]
SolverName = Annotated[str, typer.Option("--solver", help="auto, exact, brute or random:SEED")]
Space = Annotated[str, typer.Option("--space", help="full, or alpa (no op reads a Partial)")]
Beta = Annotated[float, typer.Option("--beta", help="weight of communication against compute; 1 is physical")]
Pin = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="NAME=LAYOUT", help='fix a layout, repeatable: "model.head.weight=[*/ranks, *]"'),
]
Seconds = Annotated[float, typer.Option("--time-limit", help="seconds that the solver may take")]


@app.command()
def plan(
    job: Job,
    ranks: Ranks = None,
    mesh: MeshText = None,
    cluster: ClusterName = "cpu",
    memory_limit: Limit = None,
    solver: SolverName = "auto",
    space: Space = "full",
    beta: Beta = 1.0,
    pin: Pin = None,
    time_limit: Seconds = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan as JSON")] = None,
    table: Annotated[bool, typer.Option("--table", help="print a line for every op")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON, as -o writes it")] = False,
) -> None:
    """Print the best plan for a job. Nothing is run and no devices are needed.

    Examples:

    \b
      distpar plan examples/face.py:job --ranks 4 -o plan.json
      distpar plan examples/gpt.py:job --mesh dp=2,tp=4 --cluster dgx-a100
      distpar plan examples/gpt.py:job --memory-limit 16GiB --table
      distpar plan examples/face.py:job --pin "model.head.weight=[*/ranks, *]"
    """
    import distpar
    from distpar.cli.job import code_of
    from distpar.launch import load_job

    if table and json:
        raise UsageError("--table and --json are both given", why="each says what to print", fix="give one")
    options = _options(memory_limit, solver, space, beta, time_limit)
    shape, pins = _mesh(ranks, mesh), _pins(pin)
    _check_output(output)
    with code_of(job):
        step, args = load_job(job)
        found = distpar.plan(step, *args, mesh=shape, cluster=_cluster(cluster), options=options, pins=pins)
    if output is not None:
        _save(found, output)
    print(found.json() if json else found.table() if table else found)


@app.command()
def verify(
    job: Job,
    ranks: Ranks = None,
    mesh: MeshText = None,
    solver: SolverName = "auto",
    steps: Annotated[int, typer.Option(help="training steps to compare")] = 3,
    time_limit: Seconds = 60.0,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a plan of `plan -o`, instead of a search")] = None,
    real: Annotated[bool, typer.Option("--real", help="on real ranks of this host instead of simulated ones")] = False,
) -> None:
    """Check that many ranks give the numbers of one device.

    Compared are results, gradients, parameters, buffers and optimizer state, after every step. The ranks are
    simulated in this process, whatever their number; --real starts a process for each. Exit code 1 says that the
    numbers differ, and names the first op that does.

    Examples:

    \b
      distpar verify examples/resnet.py:job --mesh a=2,b=2
      distpar verify examples/gpt.py:job --ranks 3 --solver random:7
      distpar verify examples/face.py:job --plan plan.json --steps 10
      distpar verify examples/gpt.py:job --ranks 2 --real
    """
    import distpar
    from distpar.cli.job import code_of
    from distpar.launch import load_job
    from distpar.verification import verify_on_ranks

    options = _options(None, solver, "full", 1.0, time_limit)
    shape = _mesh(ranks, mesh)
    _at_least_one("--steps", steps)
    if plan_file is not None and (real or ranks is not None or mesh is not None):
        raise UsageError(
            "--plan is given beside --ranks, --mesh or --real",
            why="a plan has its own mesh, and is verified on simulated ranks",
            fix="give --plan alone",
        )
    chosen = distpar.Plan.load(plan_file) if plan_file is not None else None
    with code_of(job):
        step, args = load_job(job)
        if real:
            print(verify_on_ranks(job, shape, options, steps))
        else:
            print(distpar.verify(step, *args, mesh=shape, plan=chosen, options=options, steps=steps))


@app.command()
def measure(
    output: Annotated[Path, typer.Option("-o", "--output", help="the cluster file to write")] = Path("cluster.json"),
    ranks: Annotated[int, typer.Option(help="local ranks to measure with")] = 2,
) -> None:
    """Measure this machine's links and compute, in under a minute; use the file as --cluster.

    Example: distpar measure -o cluster.json
    """
    import distpar

    _check_output(output)
    found = distpar.Cluster.measure(ranks)
    _save(found, output)
    print(found)
    print(f"wrote {output}")


@app.command()
def demo(
    identities: Annotated[int, typer.Option(help="classes of the face head")] = 50_000,
    ranks: Annotated[int, typer.Option(help="local ranks")] = 2,
    steps: Annotated[int, typer.Option(help="training steps of each job")] = 40,
    only: Annotated[str | None, typer.Option(help="face or lm; both if it is not given")] = None,
) -> None:
    """Train two real models on local ranks, beside one device and DDP.

    Face recognition at scale, and language modelling. Needs `pip install "distpar[demo]"`.

    Examples:

    \b
      distpar demo
      distpar demo --only face --identities 100000 --ranks 4
    """
    from distpar.demo import run

    run(identities=identities, ranks=ranks, steps=steps, only=only)


@app.command()
def bench(
    job: Job,
    ranks: Annotated[int, typer.Option(help="local ranks")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds, each running every scheme in turn")] = 5,
    steps: Annotated[int, typer.Option(help="steps of a scheme in a round")] = 4,
    against: Annotated[str, typer.Option(help="baselines, separated by commas: ddp, fsdp2")] = "ddp,fsdp2",
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure DistPar beside DDP and FSDP2 on the same local ranks.

    Samples a second, in turns; memory and the losses' distance from one device beside.

    Examples:

    \b
      distpar bench examples/face.py:job --ranks 2
      distpar bench examples/gpt.py:job --ranks 4 --against ddp --json
    """
    from distpar.bench import run
    from distpar.cli.job import code_of

    names = tuple(name.strip() for name in against.split(",") if name.strip())
    with code_of(job):
        run(job, ranks=ranks, against=names, rounds=rounds, steps=steps, json=json)


def _options(memory_limit: str | None, solver: str, space: str, beta: float, time_limit: float) -> Any:
    from distpar.options import Options

    return Options(memory_limit=memory_limit, solver=solver, space=space, beta=beta, time_limit=time_limit)


def _mesh(ranks: int | None, text: str | None) -> Any:
    from distpar.mesh import Mesh

    if ranks is not None and text is not None:
        raise UsageError("--ranks and --mesh are both given", why="each says how many ranks there are", fix="give one")
    if text is not None:
        return Mesh.parse(text)
    ranks = 2 if ranks is None else ranks
    _at_least_one("--ranks", ranks)
    return Mesh(ranks=ranks)


def _at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{flag} {value} cannot be used", why="it is a whole number, 1 or more", fix=f"write {flag} 2")


def _cluster(name: str) -> str | Path:
    return Path(name) if Path(name).is_file() else name


def _pins(texts: list[str] | None) -> dict[str, str]:
    pins: dict[str, str] = {}
    for text in texts or ():
        name, _, layout = (part.strip() for part in text.partition("="))
        if not name or not layout or name in pins:
            raise UsageError(
                f"cannot read the pin {text!r}",
                why=f"{name} is pinned twice" if layout and name in pins else "it is not NAME=LAYOUT",
                fix='write for example --pin "model.head.weight=[*/ranks, *]"',
            )
        pins[name] = layout
    return pins


def _check_output(path: Path | None) -> None:
    """A search or a measurement takes minutes: whether its answer can be written is looked at before."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = f"{str(path)!r} is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise UsageError(f"cannot write {path}", why=why, fix="name a file in a folder that is there")


def _save(found: Any, path: Path) -> None:
    try:
        found.save(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}",
            why=f"{type(error).__name__}: {error.strerror}",
            fix="name a file that can be written",
        ) from error


def _version(value: bool) -> None:
    if value:
        from distpar import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options of every command. `debug` is read by the group."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


if __name__ == "__main__":
    main()
