"""The command line: the same verbs as the package.

Exit codes: 0 success; 1 `verify` found differences, or `measure` a peak over the budget; 2 any error, with one message.
Tables and JSON go to stdout, progress to stderr (and nowhere if that is not a terminal, or with ``--json``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoremat import _advice_tables, _tables
from autoremat._errors import UsageError
from autoremat._plan import Plan
from autoremat._targets import get_target, target_names
from autoremat._units import format_bytes

if TYPE_CHECKING:
    from autoremat._data_parallel import DataParallel
    from autoremat._presets import Built
    from autoremat._sharding import Sharding

EXIT_FAILED_CHECK = 1
NO_OPTIMIZER = "none"

app = typer.Typer(
    name="autoremat",
    help="Automatic activation checkpointing for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelArgument = Annotated[str, typer.Argument(help="A preset (`autoremat presets`) or file.py:function.")]
BatchOption = Annotated[Optional[int], typer.Option(help="Samples in the batch.")]  # noqa: UP045 - typer reads it
SeqOption = Annotated[Optional[int], typer.Option(help="Tokens in each sample.")]  # noqa: UP045 - as above
BudgetOption = Annotated[Optional[str], typer.Option(help="Device memory for the whole step: 24GiB, 8GB.")]  # noqa: UP045
TargetOption = Annotated[Optional[str], typer.Option(help="Device to plan for: `autoremat targets`.")]  # noqa: UP045
PrecisionOption = Annotated[Optional[str], typer.Option(help="fp32, bf16, fp16, amp-bf16 or amp-fp16.")]  # noqa: UP045
OptimizerOption = Annotated[str, typer.Option(help="adamw, sgd, ..., or none for forward and backward alone.")]
ObjectiveOption = Annotated[
    Optional[Literal["time", "flops"]],  # noqa: UP045 - as above
    typer.Option(help="What to minimise; by default time with --target, FLOPs without."),
]
BudgetIsOption = Annotated[
    Optional[Literal["allocated", "reserved"]],  # noqa: UP045 - as above
    typer.Option(
        help="Whether the budget is for living tensors or for all that the CUDA caching allocator takes; by default "
        "allocated with --budget, reserved for all the memory of a GPU."
    ),
]
AllocatorOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(help="Settings of the caching allocator, as in PYTORCH_ALLOC_CONF: expandable_segments:True."),
]
AccumulateOption = Annotated[int, typer.Option(min=1, help="Micro-steps in an optimizer step.")]
ClipOption = Annotated[
    Optional[float],  # noqa: UP045 - as above
    typer.Option("--clip-grad-norm", help="Clip gradients to this norm before the optimizer."),
]
ScalerOption = Annotated[bool, typer.Option("--scaler", help="Scale the loss by torch's GradScaler.")]
EmaOption = Annotated[bool, typer.Option("--ema", help="Keep a running average of the weights.")]
DdpOption = Annotated[bool, typer.Option("--ddp", help="Plan for one device under DistributedDataParallel.")]
ShardOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(metavar="STAGE:DEVICES", help="Plan for one of many devices that share states: 3:8 is fully_shard."),
]
PlanOption = Annotated[Optional[Path], typer.Option("--plan", help="A plan file; without it one is made.")]  # noqa: UP045
OutputOption = Annotated[Optional[Path], typer.Option("--output", "-o", help="Write the plan here.")]  # noqa: UP045
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def plan(
    model: ModelArgument,
    *,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    accumulate: AccumulateOption = 1,
    budget_is: BudgetIsOption = None,
    allocator: AllocatorOption = None,
    clip_grad_norm: ClipOption = None,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    ddp: DdpOption = False,
    shard: ShardOption = None,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Find the plan with the least slowdown under a budget. Needs no GPU and no memory for the weights."""
    resolved = _budget(budget, target)
    parallel = _parallel(ddp=ddp, shard=shard)
    with _progress(quiet=json) as report:
        report(f"Building {model}", 0.0)
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=True)
        made = _make_plan(
            built,
            report,
            budget=resolved,
            target=target,
            precision=_autocast(precision),
            optimizer=_optimizer(optimizer),
            objective=objective,
            accumulate=accumulate,
            budget_is=budget_is or _budget_kind(budget, target),
            allocator=allocator,
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
        )
    if output is not None:
        _write(made.to_json(), output, what="plan")
    _print_plan(made, json=json, output=output)


@app.command()
def frontier(
    model: ModelArgument,
    *,
    batch: BatchOption = None,
    seq: SeqOption = None,
    points: Annotated[int, typer.Option(min=2, help="Most plans to find.")] = 64,
    classic: Annotated[bool, typer.Option("--classic", help="Compare with schedules known by name.")] = False,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    accumulate: AccumulateOption = 1,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    ddp: DdpOption = False,
    shard: ShardOption = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="Write the curve here, as JSON.")] = None,  # noqa: UP045
    json: JsonOption = False,
) -> None:
    """Find the least slowdown for every budget, from the smallest possible peak to no checkpointing."""
    parallel = _parallel(ddp=ddp, shard=shard)
    with _progress(quiet=json) as report:
        report(f"Building {model}", 0.0)
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=True)
        from autoremat._api import frontier as find_frontier

        curve = find_frontier(
            built.model,
            built.batch,
            loss=built.loss,
            num_points=points,
            classics=classic,
            progress=report,
            target=target,
            precision=_autocast(precision),
            optimizer=_optimizer(optimizer),
            objective=objective,
            accumulate=accumulate,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
        )
    if output is not None:
        _write(curve.to_json() + "\n", output, what="frontier")
    _print(curve.to_json() if json else _tables.frontier_table(curve), json=json)
    if classic and not json:
        _print(_tables.classics_table(curve), json=False)


@app.command()
def verify(
    model: ModelArgument,
    *,
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    against_fp32: Annotated[bool, typer.Option("--against-fp32", help="Also compare gradients with fp32.")] = False,
    json: JsonOption = False,
) -> None:
    """Run a plain and a planned step and compare loss, gradients, buffers and random state, bit for bit."""
    from autoremat._verify import verify as run_verify

    with _progress(quiet=json) as report:
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=False)
        chosen, around = _optimizer(optimizer), {"scaler": scaler, "ema": ema}
        options = {"target": target, "optimizer": chosen, "objective": objective, **around}
        made = _read_or_make(plan_file, built, report, budget=budget, precision=precision, **options)
        report("Running a plain and a planned step", 0.0)
        result = run_verify(
            built.model,
            built.batch,
            made,
            loss=built.loss,
            precision=_autocast(precision),
            accumulate=made.accumulate,
            optimizer=chosen if scaler or ema else None,
            against_fp32=against_fp32,
            **around,
        )
    _print(result.to_json() if json else _tables.verify_table(result), json=json)
    if not result.equal:
        raise typer.Exit(EXIT_FAILED_CHECK)


@app.command()
def measure(
    model: ModelArgument,
    *,
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    clip_grad_norm: ClipOption = None,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    json: JsonOption = False,
) -> None:
    """Run real steps, plain and planned, and measure peak and time beside the prediction."""
    from autoremat._measure import measure as run_measure

    with _progress(quiet=json) as report:
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=False)
        chosen = _optimizer(optimizer)
        around: dict[str, Any] = {"clip_grad_norm": clip_grad_norm, "scaler": scaler, "ema": ema}
        options = {"target": target, "optimizer": chosen, "objective": objective, **around}
        made = _read_or_make(plan_file, built, report, budget=budget, precision=precision, **options)
        result = run_measure(
            built.model,
            built.batch,
            made,
            loss=built.loss,
            optimizer=chosen,
            precision=_autocast(precision),
            accumulate=made.accumulate,
            **around,
            progress=report,
        )
    _print(result.to_json() if json else _tables.usage_table(result), json=json)
    if result.within_budget is False:
        raise typer.Exit(EXIT_FAILED_CHECK)


@app.command()
def advise(
    model: ModelArgument,
    *,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    effective_batch: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it
        typer.Option(min=1, help="Samples in an optimizer step, for the fastest setting; the batch's by default."),
    ] = None,
    sizes: Annotated[
        bool, typer.Option(help="Look for the largest batch and the longest sequence of each way.")
    ] = True,
    picture: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option(help="Draw the frontier with the ways as points into this .svg, .png or .pdf."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Work out the ways to train a model on a device, and say which to take and why. Needs no GPU."""
    from autoremat._advice_figure import save_advice_figure
    from autoremat._advise import advise as run_advise
    from autoremat._loader import builder

    with _progress(quiet=json) as report:
        report(f"Building {model}", 0.0)
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=True)
        found = run_advise(
            built.model,
            built.batch,
            budget=budget,
            target=target,
            effective_batch=effective_batch,
            sizes=sizes,
            build=builder(model, precision=precision),
            progress=report,
            loss=built.loss,
            optimizer=_optimizer(optimizer),
            precision=_autocast(precision),
        )
    if picture is not None:
        save_advice_figure(found, picture)
    if json:
        _print(found.to_json(), json=True)
        return
    console = Console()
    console.print(_advice_tables.advice_table(found))
    console.print(_advice_tables.advice_causes_table(found))
    for line in _advice_tables.advice_lines(found):
        console.print(line + "\n")


@app.command()
def targets(*, json: JsonOption = False) -> None:
    """List the devices that a plan can be made for: a name, or the path of a .toml or .json file of your own."""
    found = [get_target(name) for name in target_names()]
    if json:
        _print_json([target.to_dict() for target in found])
    else:
        _print(_tables.targets_table(found), json=False)


@app.command()
def calibrate(
    *,
    dtypes: Annotated[str, typer.Option(help="Dtypes to measure, with commas between.")] = "float32,bfloat16",
    json: JsonOption = False,
) -> None:
    """Measure this machine, for --target here. Takes under two minutes; leave the machine alone meanwhile."""
    from autoremat._calibrate import calibrate as run_calibrate

    with _progress(quiet=json) as report:
        found = run_calibrate(dtypes=tuple(name.strip() for name in dtypes.split(",")), progress=report)
    _print(found.to_json() if json else _tables.calibration_table(found), json=json)


@app.command()
def presets() -> None:
    """List the models that can be named."""
    from autoremat._presets import preset_about, preset_names

    for name in preset_names():
        typer.echo(f"{name:<14}{preset_about(name)}")


@app.command(name="report")
def write_report(
    model: ModelArgument,
    *,
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    accumulate: AccumulateOption = 1,
    clip_grad_norm: ClipOption = None,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    ddp: DdpOption = False,
    shard: ShardOption = None,
    budget_is: BudgetIsOption = None,
    allocator: AllocatorOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")] = Path("report.html"),
    format_: Annotated[
        Optional[Literal["html", "png", "svg", "json"]],  # noqa: UP045 - as above
        typer.Option("--format", help="What to write; by default what the file's name says."),
    ] = None,
) -> None:
    """Show memory over the step as a picture by cause, plain and planned. Without budget or plan, plain alone."""
    from autoremat._report_file import report_bytes, report_kind, report_section

    kind = report_kind(output, format_)
    if plan_file is not None and budget is not None:
        raise UsageError("--plan and --budget exclude each other: the plan has its budget.")
    made = None if plan_file is None else Plan.load(plan_file)
    resolved = _budget(budget, target) if made is None and (budget or target) else None
    parallel = _parallel(ddp=ddp, shard=shard)
    with _progress(quiet=False) as progress:
        progress(f"Building {model}", 0.0)
        built = _load(model, batch=batch, seq=seq, precision=precision, fake=True)
        section = report_section(
            built,
            name=model,
            plan=made,
            budget=resolved,
            progress=progress,
            target=target,
            precision=_autocast(precision),
            optimizer=_optimizer(optimizer),
            objective=objective,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
            budget_is=budget_is or _budget_kind(budget, target),
            allocator=allocator,
        )
        written = report_bytes(section, kind=kind, command=" ".join(["autoremat", *sys.argv[1:]]))
    try:
        output.write_bytes(written)
    except OSError as error:
        raise UsageError(f"Cannot write the report to {output}: {error.strerror}.") from error
    Console().print(f"Written to {output}", soft_wrap=True)


@app.command()
def demo(
    *,
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("autoremat-demo.html"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps, plain and planned.")] = 20,
) -> None:
    """Plan BERT-large for a 24 GB card, then train a small GPT-2 plain and under a budget. Takes minutes, no GPU."""
    from autoremat._demo import run_demo

    with _progress(quiet=False) as progress:
        result = run_demo(num_steps=steps, progress=progress)
    console = Console()
    for part in result.tables():
        console.print(part)
    report.write_text(result.html(), encoding="utf-8")
    console.print(f"Report: {report.resolve()}", soft_wrap=True)
    for failure in result.failures:
        console.print(f"[bold red]Promise not kept:[/] {failure}.")
    if result.failures:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _budget(budget: str | None, target: str | None) -> int | str:
    if budget is not None:
        from autoremat._units import parse_bytes

        return parse_bytes(budget)
    if target is None:
        raise UsageError("Give --budget (such as 24GiB), or --target for all the memory of that device.")
    return get_target(target).usable_bytes


def _budget_kind(budget: str | None, target: str | None) -> Literal["allocated", "reserved"]:
    """All the memory of a GPU is what its allocator can reserve."""
    is_whole_gpu = budget is None and target is not None and get_target(target).device_kind == "cuda"
    return "reserved" if is_whole_gpu else "allocated"


def _parallel(*, ddp: bool, shard: str | None) -> DataParallel | Sharding | None:
    from autoremat._data_parallel import DataParallel
    from autoremat._sharding import Sharding

    if ddp and shard is not None:
        raise UsageError("--ddp and --shard exclude each other: either every device has the whole model, or a part.")
    return Sharding.parse(shard) if shard is not None else DataParallel() if ddp else None


def _optimizer(name: str) -> str | None:
    return None if name == NO_OPTIMIZER else name


def _autocast(precision: str | None) -> str | None:
    """The part of the precision that is the step's: casts have been made when the model was built."""
    from autoremat._presets import CAST_DTYPES

    return None if precision in CAST_DTYPES else precision


def _load(model: str, *, batch: int | None, seq: int | None, precision: str | None, fake: bool) -> Built:
    from autoremat._loader import load_model
    from autoremat._step import Precision

    Precision.parse(precision)
    return load_model(model, batch=batch, seq=seq, precision=precision, fake=fake)


def _make_plan(built: Built, report: Callable[[str, float], None], **options: Any) -> Plan:
    from autoremat._api import plan as run_plan

    made: Plan = run_plan(built.model, built.batch, loss=built.loss, progress=report, **options)
    return made


def _read_or_make(
    plan_file: Path | None,
    built: Built,
    report: Callable[[str, float], None],
    *,
    budget: str | None,
    precision: str | None,
    **options: Any,
) -> Plan:
    if plan_file is not None:
        if budget is not None:
            raise UsageError("--plan and --budget exclude each other: the plan has its budget.")
        return Plan.load(plan_file)
    resolved = _budget(budget, options["target"])
    return _make_plan(built, report, budget=resolved, precision=_autocast(precision), **options)


def _write(text: str, output: Path, *, what: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write the {what} to {output}: {error.strerror}.") from error


def _print_plan(made: Plan, *, json: bool, output: Path | None) -> None:
    if json:
        _print(made.to_json().rstrip(), json=True)
        return
    console = Console()
    console.print(_tables.plan_table(made))
    if made.regions:
        console.print(_tables.regions_table(made))
    else:
        console.print("The plain step fits: nothing is recomputed.")
    usable = get_target(made.target).usable_bytes if made.target else made.budget_bytes
    if made.budget_bytes and usable and made.budget_bytes > usable:
        console.print(
            f"Note: of {made.target}'s memory a step can have {format_bytes(usable)}, less than this budget: driver "
            "and context take the rest. Leave --budget out to plan for that.",
            soft_wrap=True,
        )
    reserved = made.planned.reserved_bytes if made.planned is not None else None
    if reserved is not None and usable and reserved > usable:
        console.print(
            f"Note: the caching allocator is predicted to reserve {format_bytes(reserved)} for this plan, and a step "
            f"on {made.target} can have {format_bytes(usable)}: it may run out of memory. Plan with --budget-is "
            "reserved, best with --allocator expandable_segments:True and the same in PYTORCH_ALLOC_CONF.",
            soft_wrap=True,
        )
    if output is not None:
        console.print(f"Written to {output}", soft_wrap=True)


def _print(what: Any, *, json: bool) -> None:
    if json:
        sys.stdout.write(what + "\n")
    else:
        Console().print(what)


def _print_json(value: Any) -> None:
    import json

    _print(json.dumps(value, indent=1), json=True)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows a label and a fraction done, on stderr."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda *_: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda label, fraction: bar.update(task, description=label, completed=fraction)
