"""Options that several commands share, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from autoremat._cli_complete import complete_model, complete_optimizer, complete_precision, complete_target
from autoremat._errors import UsageError


def to_write(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before minutes of work go into it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"Cannot write to {path}: {path.parent} is no directory.")
    return path


_MODEL, _BUDGET, _STEP = "Model and batch", "Budget and device", "Step"
_MANY, _FILES = "Many devices", "Files and output"
ModelArgument = Annotated[
    str, typer.Argument(help="A preset (`autoremat presets`) or file.py:function.", autocompletion=complete_model)
]
BatchOption = Annotated[Optional[int], typer.Option(help="Samples in the batch.", rich_help_panel=_MODEL)]  # noqa: UP045 - typer reads it
SeqOption = Annotated[Optional[int], typer.Option(help="Tokens in each sample.", rich_help_panel=_MODEL)]  # noqa: UP045 - as above
BudgetOption = Annotated[
    Optional[str],  # noqa: UP045 - typer reads it
    typer.Option(help="Device memory for the whole step: 24GiB, 8GB.", rich_help_panel=_BUDGET),
]
TargetOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(
        help="Device to plan for: `autoremat targets`.", rich_help_panel=_BUDGET, autocompletion=complete_target
    ),
]
PrecisionOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(
        help="fp32, bf16, fp16, amp-bf16 or amp-fp16.", rich_help_panel=_MODEL, autocompletion=complete_precision
    ),
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        help="adamw, sgd, ..., or none for forward and backward alone.",
        rich_help_panel=_STEP,
        autocompletion=complete_optimizer,
    ),
]
ObjectiveOption = Annotated[
    Optional[Literal["time", "flops"]],  # noqa: UP045 - as above
    typer.Option(help="What to minimise; by default time with --target, FLOPs without.", rich_help_panel=_BUDGET),
]
BudgetIsOption = Annotated[
    Optional[Literal["allocated", "reserved"]],  # noqa: UP045 - as above
    typer.Option(
        help="Whether the budget is for living tensors or for all that the CUDA caching allocator takes; by default "
        "allocated with --budget, reserved for all the memory of a GPU.",
        rich_help_panel=_BUDGET,
    ),
]
AllocatorOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(
        help="Settings of the caching allocator, as in PYTORCH_ALLOC_CONF: expandable_segments:True.",
        rich_help_panel=_BUDGET,
    ),
]
AccumulateOption = Annotated[int, typer.Option(min=1, help="Micro-steps in an optimizer step.", rich_help_panel=_STEP)]
ClipOption = Annotated[
    Optional[float],  # noqa: UP045 - as above
    typer.Option("--clip-grad-norm", help="Clip gradients to this norm before the optimizer.", rich_help_panel=_STEP),
]
ScalerOption = Annotated[
    bool, typer.Option("--scaler", help="Scale the loss by torch's GradScaler.", rich_help_panel=_STEP)
]
EmaOption = Annotated[bool, typer.Option("--ema", help="Keep a running average of the weights.", rich_help_panel=_STEP)]
DdpOption = Annotated[
    bool, typer.Option("--ddp", help="Plan for one device under DistributedDataParallel.", rich_help_panel=_MANY)
]
ShardOption = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option(
        metavar="STAGE:DEVICES",
        help="Plan for one of many devices that share states: 3:8 is fully_shard.",
        rich_help_panel=_MANY,
    ),
]
PlanOption = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it
    typer.Option("--plan", help="A plan file; without it one is made.", rich_help_panel=_FILES),
]
OutputOption = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it
    typer.Option("--output", "-o", help="Write the plan here.", callback=to_write, rich_help_panel=_FILES),
]
CurveOption = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option(
        "--output", "-o", help="Write the curve here: a .svg or .png picture, or else JSON.", callback=to_write
    ),
]
TextOption = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option("--output", "-o", help="Write the text here.", callback=to_write),
]
PictureOption = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option(help="Draw the frontier with the ways as points into this .svg, .png or .pdf.", callback=to_write),
]
ReportOption = Annotated[Path, typer.Option("--output", "-o", help="Where to write it.", callback=to_write)]
PageOption = Annotated[Path, typer.Option(help="Where to write the HTML report.", callback=to_write)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_FILES)]
