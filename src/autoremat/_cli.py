"""The command line: the same verbs as the package.

Exit codes: 0 success; 1 `verify` found differences, or `measure` a peak over the budget; 2 any error, with one message.
Tables and JSON go to stdout, progress to stderr (and nowhere if that is not a terminal, or with ``--json``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
from rich.console import Console

from autoremat import _advice_tables, _tables, _why_tables
from autoremat._cli_export import export
from autoremat._cli_options import (
    AccumulateOption,
    AllocatorOption,
    BatchOption,
    BudgetIsOption,
    BudgetOption,
    ClipOption,
    CurveOption,
    DdpOption,
    EmaOption,
    JsonOption,
    ModelArgument,
    ObjectiveOption,
    OptimizerOption,
    OutputOption,
    PageOption,
    PictureOption,
    PlanOption,
    PrecisionOption,
    ReportOption,
    ScalerOption,
    SeqOption,
    ShardOption,
    TargetOption,
)
from autoremat._cli_profile import profile
from autoremat._cli_run import run as run_command
from autoremat._cli_support import (
    autocast_of,
    budget_bytes,
    budget_kind,
    building,
    find_reasons,
    make_plan,
    optimizer_of,
    parallel_of,
    read_or_make_plan,
    read_plan,
    show,
    show_json,
    show_plan,
    shown_progress,
    write_file,
    write_frontier,
)
from autoremat._cli_teach import teach
from autoremat._errors import UsageError
from autoremat._targets import HERE, get_target, target_names, this_machine

EXIT_FAILED_CHECK = 1

app = typer.Typer(
    name="autoremat",
    help="Automatic activation checkpointing for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
    dry_run: Annotated[
        bool, typer.Option(help="Run the plan on fake tensors before it is shown, and promise the peak of that.")
    ] = True,
    for_compile: Annotated[
        bool, typer.Option("--for-compile", help="Only regions that torch.compile can express: none inside another.")
    ] = False,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Find the plan with the least slowdown under a budget. Needs no GPU and no memory for the weights."""
    resolved = budget_bytes(budget, target)
    parallel = parallel_of(ddp=ddp, shard=shard)
    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
        made = make_plan(
            built,
            report,
            budget=resolved,
            target=target,
            precision=autocast_of(precision),
            optimizer=optimizer_of(optimizer),
            objective=objective,
            accumulate=accumulate,
            budget_is=budget_is or budget_kind(budget, target),
            allocator=allocator,
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
            dry_run=dry_run,
            for_compile=for_compile,
        )
    if output is not None:
        write_file(made.to_json(), output, what="plan")
    show_plan(made, json=json, output=output)


@app.command()
def why(
    model: ModelArgument,
    *,
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    step: Annotated[Optional[str], typer.Option(help="More and less memory to look at: 1GiB.")] = None,  # noqa: UP045
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    objective: ObjectiveOption = None,
    accumulate: AccumulateOption = 1,
    json: JsonOption = False,
) -> None:
    """Say why each region of a plan is there, what more memory would buy, and what stops a budget from going lower."""
    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
        found = find_reasons(
            built,
            report,
            plan_file=plan_file,
            budget=budget,
            step=step,
            target=target,
            objective=objective,
            precision=autocast_of(precision),
            optimizer=optimizer_of(optimizer),
            accumulate=accumulate,
        )
    if json:
        show(found.to_json(), json=True)
        return
    console = Console()
    for table in (_why_tables.reasons_table(found), _why_tables.budgets_table(found)):
        console.print(table)
    console.print(_why_tables.floor_table(found.floor))
    for line in _why_tables.reason_lines(found):
        console.print(line, soft_wrap=True)


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
    output: CurveOption = None,
    json: JsonOption = False,
) -> None:
    """Find the least slowdown for every budget, from the smallest possible peak to no checkpointing."""
    parallel = parallel_of(ddp=ddp, shard=shard)
    is_picture = output is not None and output.suffix in (".svg", ".png")
    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
        from autoremat._api import frontier as find_frontier

        curve = find_frontier(
            built.model,
            built.batch,
            loss=built.loss,
            num_points=points,
            classics=classic or is_picture,
            progress=report,
            target=target,
            precision=autocast_of(precision),
            optimizer=optimizer_of(optimizer),
            objective=objective,
            accumulate=accumulate,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
        )
    if output is not None:
        write_frontier(curve, output)
    show(curve.to_json() if json else _tables.frontier_table(curve), json=json)
    if classic and not json:
        show(_tables.classics_table(curve), json=False)


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

    with building(model, batch=batch, seq=seq, precision=precision, fake=False, quiet=json) as (built, report):
        chosen, around = optimizer_of(optimizer), {"scaler": scaler, "ema": ema}
        options = {"target": target, "optimizer": chosen, "objective": objective, **around}
        made = read_or_make_plan(plan_file, built, report, budget=budget, precision=precision, **options)
        report("Running a plain and a planned step", 0.0)
        result = run_verify(
            built.model,
            built.batch,
            made,
            loss=built.loss,
            precision=autocast_of(precision),
            accumulate=made.accumulate,
            optimizer=chosen if scaler or ema else None,
            against_fp32=against_fp32,
            **around,
        )
    show(result.to_json() if json else _tables.verify_table(result), json=json)
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

    with building(model, batch=batch, seq=seq, precision=precision, fake=False, quiet=json) as (built, report):
        chosen = optimizer_of(optimizer)
        around: dict[str, Any] = {"clip_grad_norm": clip_grad_norm, "scaler": scaler, "ema": ema}
        options = {"target": target, "optimizer": chosen, "objective": objective, **around}
        made = read_or_make_plan(plan_file, built, report, budget=budget, precision=precision, **options)
        result = run_measure(
            built.model,
            built.batch,
            made,
            loss=built.loss,
            optimizer=chosen,
            precision=autocast_of(precision),
            accumulate=made.accumulate,
            **around,
            progress=report,
        )
    show(result.to_json() if json else _tables.usage_table(result), json=json)
    if result.within_budget is False:
        raise typer.Exit(EXIT_FAILED_CHECK)


app.command()(export)


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
    picture: PictureOption = None,
    json: JsonOption = False,
) -> None:
    """Work out the ways to train a model on a device, and say which to take and why. Needs no GPU."""
    from autoremat._advice_figure import save_advice_figure
    from autoremat._advise import advise as run_advise
    from autoremat._loader import builder

    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
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
            optimizer=optimizer_of(optimizer),
            precision=autocast_of(precision),
        )
    if picture is not None:
        save_advice_figure(found, picture)
    if json:
        show(found.to_json(), json=True)
        return
    console = Console()
    console.print(*_advice_tables.advice_tables(found), sep="\n")
    for line in _advice_tables.advice_lines(found):
        console.print(line + "\n")


@app.command()
def targets(*, json: JsonOption = False) -> None:
    """List the devices that a plan can be made for: a name, or the path of a .toml or .json file of your own."""
    found = [get_target(name) for name in target_names() if name != HERE]
    try:
        found.append(this_machine())
    except UsageError as error:  # what can be planned for does not hang on an old file
        typer.echo(f"{HERE} is not listed: {error}", err=True)
    if json:
        show_json([target.to_dict() for target in found])
    else:
        show(_tables.targets_table(found), json=False)


@app.command()
def calibrate(
    *,
    dtypes: Annotated[str, typer.Option(help="Dtypes to measure, with commas between.")] = "float32,bfloat16",
    json: JsonOption = False,
) -> None:
    """Measure this machine, for --target here. Takes under two minutes; leave the machine alone meanwhile."""
    from autoremat._calibrate import calibrate as run_calibrate

    with shown_progress(quiet=json) as report:
        found = run_calibrate(dtypes=tuple(name.strip() for name in dtypes.split(",")), progress=report)
    show(found.to_json() if json else _tables.calibration_table(found), json=json)


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
    output: ReportOption = Path("report.html"),
    format_: Annotated[
        Optional[Literal["html", "png", "svg", "json"]],  # noqa: UP045 - as above
        typer.Option("--format", help="What to write; by default what the file's name says."),
    ] = None,
    frontier: Annotated[bool, typer.Option(help="Find the plans for all budgets too.")] = True,
) -> None:
    """Show memory over the step by cause, the frontier and a map of layers. Without budget or plan, plain alone."""
    from autoremat._report_file import report, report_kind

    kind = report_kind(output, format_)
    made = read_plan(plan_file, budget)
    resolved = budget_bytes(budget, target) if made is None and (budget or target) else None
    parallel = parallel_of(ddp=ddp, shard=shard)
    with building(model, batch=batch, seq=seq, precision=precision, quiet=False) as (built, progress):
        made_report = report(
            built.model,
            built.batch,
            loss=built.loss,
            name=model,
            command=" ".join(["autoremat", *sys.argv[1:]]),
            frontier=frontier and kind in ("html", "json"),
            plan=made,
            budget=resolved,
            progress=progress,
            target=target,
            precision=autocast_of(precision),
            optimizer=optimizer_of(optimizer),
            objective=objective,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            ema=ema,
            parallel=parallel,
            budget_is=budget_is or budget_kind(budget, target),
            allocator=allocator,
        )
        written = made_report.to_bytes(kind)
    write_file(written, output, what="report")
    Console().print(f"Written to {output}", soft_wrap=True)


@app.command()
def demo(
    *,
    report: PageOption = Path("autoremat-demo.html"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps, plain and planned.")] = 20,
) -> None:
    """Plan BERT-large for a 24 GB card, then train a small GPT-2 plain and under a budget. Takes minutes, no GPU."""
    from autoremat._demo import run_demo

    with shown_progress(quiet=False) as progress:
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


app.command(name="run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    run_command
)
app.command()(profile)
teach(app)
