"""What commands do with options: read, build, plan, show. Imports what needs torch only where it is used."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoremat import _tables
from autoremat._errors import UsageError
from autoremat._plan import Plan
from autoremat._targets import get_target
from autoremat._units import format_bytes

if TYPE_CHECKING:
    from autoremat._data_parallel import DataParallel
    from autoremat._frontier import Frontier
    from autoremat._presets import Built
    from autoremat._reasons import Reasons
    from autoremat._sharding import Sharding
    from autoremat._step_graph import StepGraph

NO_OPTIMIZER = "none"


def budget_bytes(budget: str | None, target: str | None) -> int | str:
    """The budget that was given, or all the memory of the target that a step can have."""
    if budget is not None:
        from autoremat._units import parse_bytes

        return parse_bytes(budget)
    if target is None:
        raise UsageError("Give --budget (such as 24GiB), or --target for all the memory of that device.")
    return get_target(target).usable_bytes


def budget_kind(budget: str | None, target: str | None) -> Literal["allocated", "reserved"]:
    """All the memory of a GPU is what its allocator can reserve."""
    is_whole_gpu = budget is None and target is not None and get_target(target).device_kind == "cuda"
    return "reserved" if is_whole_gpu else "allocated"


def parallel_of(*, ddp: bool, shard: str | None) -> DataParallel | Sharding | None:
    """What --ddp and --shard say."""
    from autoremat._data_parallel import DataParallel
    from autoremat._sharding import Sharding

    if ddp and shard is not None:
        raise UsageError("--ddp and --shard exclude each other: either every device has the whole model, or a part.")
    return Sharding.parse(shard) if shard is not None else DataParallel() if ddp else None


def optimizer_of(name: str) -> str | None:
    """What --optimizer says."""
    return None if name == NO_OPTIMIZER else name


def autocast_of(precision: str | None) -> str | None:
    """The part of the precision that is the step's: casts have been made when the model was built."""
    from autoremat._presets import CAST_DTYPES

    return None if precision in CAST_DTYPES else precision


@contextlib.contextmanager
def building(
    model: str, *, batch: int | None, seq: int | None, precision: str | None, fake: bool = True, quiet: bool
) -> Iterator[tuple[Built, Callable[[str, float], None]]]:
    """Build the model that was named; yields it and the function that shows progress."""
    from autoremat._loader import load_model
    from autoremat._step import Precision

    with shown_progress(quiet=quiet) as report:
        report(f"Building {model}", 0.0)
        Precision.parse(precision)
        yield load_model(model, batch=batch, seq=seq, precision=precision, fake=fake), report


def read_plan(plan_file: Path | None, budget: str | None) -> Plan | None:
    """The plan in the file, if one was given."""
    if plan_file is None:
        return None
    if budget is not None:
        raise UsageError("--plan and --budget exclude each other: the plan has its budget.")
    return Plan.load(plan_file)


def make_plan(built: Built, report: Callable[[str, float], None], **options: Any) -> Plan:
    """Plan for a model."""
    from autoremat._api import plan as run_plan

    made: Plan = run_plan(built.model, built.batch, loss=built.loss, progress=report, **options)
    return made


def read_or_make_plan(
    plan_file: Path | None,
    built: Built,
    report: Callable[[str, float], None],
    *,
    budget: str | None,
    precision: str | None,
    **options: Any,
) -> Plan:
    """The plan in a file, or else one that is made."""
    made = read_plan(plan_file, budget)
    if made is not None:
        return made
    resolved = budget_bytes(budget, options["target"])
    return make_plan(built, report, budget=resolved, precision=autocast_of(precision), **options)


def find_reasons(
    built: Built,
    report: Callable[[str, float], None],
    *,
    plan_file: Path | None,
    budget: str | None,
    step: str | None,
    target: str | None,
    objective: Literal["time", "flops"] | None,
    **trace_options: Any,
) -> Reasons:
    """Why a plan is as it is: one in a file, or the one for a budget. One trace and one solve."""
    from autoremat._api import trace
    from autoremat._planning import Planning, choose_objective, find_target
    from autoremat._units import parse_bytes
    from autoremat._why import why

    made = read_plan(plan_file, budget)
    resolved = budget_bytes(budget, target) if made is None else 0
    target = (made.target or None) if made is not None and target is None else target
    report("tracing the step", 0.1)
    graph = trace(built.model, built.batch, loss=built.loss, target=target, **trace_options)
    chosen = choose_objective(graph, target, objective) if made is None else made.objective
    planning = Planning(graph, find_target(None, target, graph.device_kind), chosen)
    report("solving blocks", 0.4)
    made = made or planning.plan(parse_bytes(resolved))
    report("taking regions out", 0.8)
    return why(planning, made, step_bytes=None if step is None else parse_bytes(step))


def traced_and_planned(
    built: Built,
    plan_file: Path | None,
    report: Callable[[str, float], None],
    *,
    budget: str | None,
    target: str | None,
    precision: str | None,
    optimizer: str,
) -> tuple[StepGraph, Plan]:
    """The step of a model, and the plan in a file, or else one that is made for it."""
    from autoremat._api import plan as run_plan
    from autoremat._api import trace

    made = read_plan(plan_file, budget)
    resolved = budget_bytes(budget, target) if made is None else 0
    report("Tracing the step", 0.2)
    graph = trace(
        built.model, built.batch, loss=built.loss, target=target, precision=autocast_of(precision),
        optimizer=optimizer_of(optimizer),
    )  # fmt: skip
    return graph, made or run_plan(graph, budget=resolved, target=target, progress=report)


def write_file(content: str | bytes, output: Path, *, what: str) -> None:
    """Write a file, or say why not."""
    try:
        output.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"Cannot write the {what} to {output}: {error.strerror}.") from error


def write_frontier(curve: Frontier, output: Path) -> None:
    """Write a frontier as the picture or the JSON that the file's name says."""
    from autoremat._frontier_figure import frontier_file

    if output.suffix not in (".svg", ".png"):
        write_file(curve.to_json() + "\n", output, what="frontier")
        return
    drawn = frontier_file(curve, kind="svg" if output.suffix == ".svg" else "png")
    write_file(drawn, output, what="picture")


def show_plan(made: Plan, *, json: bool, output: Path | None) -> None:
    """Print a plan, and what is to be known about its budget."""
    if json:
        show(made.to_json().rstrip(), json=True)
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


def show(what: Any, *, json: bool) -> None:
    """Print a table, or JSON as it is."""
    if json:
        sys.stdout.write(what + "\n")
    else:
        Console().print(what)


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    import json

    show(json.dumps(value, indent=1), json=True)


@contextlib.contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows a label and a fraction done, on stderr."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda *_: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda label, fraction: bar.update(task, description=label, completed=fraction)
