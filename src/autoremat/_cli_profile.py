"""``autoremat profile``: predicted memory over the step by cause."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from autoremat._cli_options import (
    AccumulateOption,
    AllocatorOption,
    BatchOption,
    BudgetOption,
    ClipOption,
    EmaOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PlanOption,
    PrecisionOption,
    ScalerOption,
    SeqOption,
    TargetOption,
)
from autoremat._cli_support import autocast_of, building, optimizer_of, read_plan, show
from autoremat._errors import UsageError


def profile(
    model: ModelArgument,
    *,
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    accumulate: AccumulateOption = 1,
    clip_grad_norm: ClipOption = None,
    scaler: ScalerOption = False,
    ema: EmaOption = False,
    allocator: AllocatorOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run the planned step on fake tensors, and show what that took.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show predicted memory over the step by cause; beside it, under a plan or a budget. Needs no GPU."""
    from autoremat._api import plan as make_plan
    from autoremat._api import profile as make_profile
    from autoremat._api import trace
    from autoremat._dry_run import dry_run as run_dry
    from autoremat._profile_tables import profile_table

    if dry_run and plan_file is None and budget is None:
        raise UsageError("--dry-run needs a plan to run: give --plan or --budget.")
    made = read_plan(plan_file, budget)
    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
        options: dict[str, Any] = {
            "loss": built.loss,
            "target": target,
            "precision": autocast_of(precision),
            "optimizer": optimizer_of(optimizer),
            "accumulate": accumulate if made is None else made.accumulate,
            "clip_grad_norm": clip_grad_norm,
            "scaler": scaler,
            "ema": ema,
        }
        report("Tracing the step", 0.2)
        graph = trace(built.model, built.batch, **options)
        if budget is not None:
            report("Planning", 0.5)
            made = make_plan(graph, budget=budget, target=target, allocator=allocator)
        plain = make_profile(graph, target=target, allocator=allocator)
        planned = None if made is None else make_profile(graph, made, target=target, allocator=allocator)
        if dry_run and made is not None:
            report("Running the plan dry", 0.8)
            planned = run_dry(built.model, built.batch, made, **options)
    if json:
        both = {"plain": plain.to_dict()} | ({} if planned is None else {"planned": planned.to_dict()})
        show(json_module.dumps(both | {"is_dry_run": dry_run}, indent=1), json=True)
        return
    show(profile_table(f"{model}{', planned step run dry' if dry_run else ''}", plain, planned), json=False)
