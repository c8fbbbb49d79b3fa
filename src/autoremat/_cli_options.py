"""Options that several commands share, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

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
