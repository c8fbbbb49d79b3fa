"""The command that writes a plan in other libraries' words."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console

from autoremat._cli_options import (
    BatchOption,
    BudgetOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PlanOption,
    PrecisionOption,
    SeqOption,
    TargetOption,
    TextOption,
)
from autoremat._cli_support import building, show, traced_and_planned, write_file


def export(
    model: ModelArgument,
    *,
    to: Annotated[
        Literal["torch", "transformers", "megatron", "fsdp"],
        typer.Option(help="Python for torch and fsdp, training arguments for transformers, options for megatron."),
    ],
    plan_file: PlanOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: BudgetOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adamw",
    output: TextOption = None,
    json: JsonOption = False,
) -> None:
    """Write a plan in the words of another library. What is lost against the plan goes to stderr, with numbers."""
    from autoremat._export import export as run_export

    with building(model, batch=batch, seq=seq, precision=precision, quiet=json) as (built, report):
        graph, made = traced_and_planned(
            built, plan_file, report, budget=budget, target=target, precision=precision, optimizer=optimizer
        )
        found = run_export(graph, made, to)
    if output is not None:
        write_file(found.text + "\n", output, what="exported plan")
    if json or output is None:
        show((found.to_json() if json else found.text).rstrip(), json=True)
    for loss in () if json else found.losses:
        Console(stderr=True).print(f"Lost: {loss}", soft_wrap=True, highlight=False)
