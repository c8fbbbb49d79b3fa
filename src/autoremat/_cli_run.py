"""``autoremat run``: a training script, unmodified, under a budget."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from autoremat._errors import UsageError
from autoremat._plan import Plan
from autoremat._units import format_bytes, parse_bytes


class Watch(StrEnum):
    """Where --monitor writes."""

    CONSOLE = "console"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"


EXIT_SCRIPT_FAILED = 1
EXIT_INTERRUPTED = 130
MIN_RESTART = 0.5
"""Share of the first budget below which a run is not started again."""
_FIRST_BUDGET = "AUTOREMAT_RUN_FIRST_BUDGET"


def run(
    script: Annotated[Path, typer.Argument(help="The script, as you would give it to python.")],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it
        typer.Argument(metavar="[ARGUMENTS]...", help="The script's own arguments: everything behind its name."),
    ] = None,
    *,
    budget: Annotated[
        Optional[str],  # noqa: UP045 - as above
        typer.Option(help="Device memory for the whole step: 8GiB; auto is what the device has left."),
    ] = None,
    plan_file: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option("--plan", help="Train under this plan instead of making some."),
    ] = None,
    save_plan: Annotated[
        Optional[Path],  # noqa: UP045 - as above
        typer.Option(help="Write the plan of the largest step here."),
    ] = None,
    monitor: Annotated[
        Optional[list[Watch]],  # noqa: UP045 - as above
        typer.Option(help="Watch the run: lines on stderr, autoremat.jsonl, or runs/autoremat. Can be repeated."),
    ] = None,
    on_oom: Annotated[
        Literal["stop", "restart"],
        typer.Option(help="Out of memory: stop, or run the script again from the start with a tenth less budget."),
    ] = "stop",
) -> None:
    """Train with an unmodified script under a budget: autoremat run --budget 8GiB train.py --epochs 1.

    The script runs as it does with python. The model that it trains is planned for at its first step, and keeps the
    budget from then on; what it computes stays the same, bit for bit. Exit codes are the script's own; 2 says that
    autoremat could not do what was asked, 130 that you pressed Ctrl-C.
    """
    from autoremat._run_script import OutOfMemory, ScriptFailed, Wanted, check_script, run_script

    check_script(script, budget=budget, plan_file=plan_file, save_plan=save_plan)
    chosen = "auto" if budget is None else budget
    if on_oom == "restart" and chosen == "auto":
        raise UsageError("--on-oom restart needs --budget, a number of bytes to take a tenth from.")
    wanted = Wanted(
        budget=chosen,
        plan=None if plan_file is None else Plan.load(plan_file),
        save_plan=save_plan,
        monitor=monitor_options(monitor or []),
    )
    try:
        run_script(script, arguments or [], wanted)
    except ScriptFailed:
        raise typer.Exit(EXIT_SCRIPT_FAILED) from None
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OutOfMemory as error:
        if on_oom == "stop":
            raise
        _restart(str(error), chosen)


def monitor_options(kinds: list[Watch]) -> dict[str, Any] | None:
    """Options of the `Monitor` that --monitor asks for; None without it."""
    if not kinds:
        return None
    return {
        "console_every": 10 if "console" in kinds else None,
        "jsonl": "autoremat.jsonl" if "jsonl" in kinds else None,
        "tensorboard": "runs/autoremat" if "tensorboard" in kinds else None,
    }


def _restart(message: str, budget: str) -> None:
    """Replace this process by one that runs the same with less."""
    now = parse_bytes(budget)
    first = int(os.environ.setdefault(_FIRST_BUDGET, str(now)))
    less = now * 9 // 10
    if less < MIN_RESTART * first:
        raise UsageError(f"{message} It was run again down to {format_bytes(now)}; see `autoremat advise` for more.")
    sys.stderr.write(f"autoremat: {message}\nautoremat: starting again with {format_bytes(less)}\n")
    sys.stderr.flush()
    given = sys.argv[1:]
    position = next(i for i, word in enumerate(given) if word == "--budget" or word.startswith("--budget="))
    given[position : position + (1 if "=" in given[position] else 2)] = ["--budget", str(less)]
    os.execv(sys.executable, [sys.executable, "-m", "autoremat", *given])  # noqa: S606 - our own command line
