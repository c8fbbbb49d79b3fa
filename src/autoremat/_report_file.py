"""From a model to a report in a file: what `autoremat report` does."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import autoremat
from autoremat._api import plan as make_plan
from autoremat._api import profile, trace
from autoremat._errors import UsageError
from autoremat._figures import memory_file
from autoremat._plan import Plan
from autoremat._report import ReportSection, render_report

if TYPE_CHECKING:
    from autoremat._presets import Built

ReportKind = Literal["html", "png", "svg", "json"]
KINDS: tuple[ReportKind, ...] = ("html", "png", "svg", "json")


def report_kind(output: Path, kind: ReportKind | None) -> ReportKind:
    """What to write: as asked for, or as the file's name says.

    Raises:
        UsageError: If neither says.

    Example:
        >>> report_kind(Path("memory.png"), None)
        'png'
    """
    found = kind or next((known for known in KINDS if output.suffix == f".{known}"), None)
    if found is None:
        raise UsageError(f"What to write to {output}? Name it .html, .png, .svg or .json, or give --format.")
    return found


def report_section(
    built: Built,
    *,
    name: str,
    plan: Plan | None,
    budget: int | str | None,
    progress: Callable[[str, float], None],
    target: str | None,
    objective: Any,
    budget_is: Any,
    allocator: str | None,
    **trace_options: Any,
) -> ReportSection:
    """Trace a step and lay out its memory, plain and planned.

    Args:
        built: The model, fake or real.
        name: As the user calls it.
        plan: A plan for it; None makes one if there is a budget.
        budget: As for `autoremat.plan`; None for the plain step alone.
        progress: Called with a label and a fraction done.
        target: As for `autoremat.plan`.
        objective: As for `autoremat.plan`.
        budget_is: As for `autoremat.plan`.
        allocator: As for `autoremat.plan`.
        trace_options: As for `autoremat.trace`.

    Raises:
        PlanMismatch: If the plan names what the step does not run.
    """
    progress("Tracing the step", 0.1)
    target = target or (plan.target if plan is not None and plan.target else None)
    graph = trace(built.model, built.batch, loss=built.loss, target=target, **trace_options)
    if plan is None and budget is not None:
        progress("Planning", 0.6)
        plan = make_plan(
            graph, budget=budget, target=target, objective=objective, budget_is=budget_is, allocator=allocator
        )
    progress("Laying out memory", 0.9)
    allocator = plan.allocator if allocator is None and plan is not None else allocator
    parts = [graph.input_signature, graph.precision, graph.optimizer, f"on {target}" if target else ""]
    parts.append(f"PYTORCH_ALLOC_CONF={allocator}" if allocator else "")
    return ReportSection(
        title=f"{graph.model} ({name})",
        text="Predicted from a trace of one training step: " + "; ".join(part for part in parts if part) + ".",
        plain=profile(graph, target=target, allocator=allocator),
        planned=None if plan is None else profile(graph, plan, target=target, allocator=allocator),
        plan=plan,
    )


def report_bytes(section: ReportSection, *, kind: ReportKind, command: str) -> bytes:
    """The contents of the file.

    Args:
        section: What to show.
        kind: In which form.
        command: How the report was asked for, for its last line.

    Raises:
        UsageError: If matplotlib is not installed and a picture is asked for.
    """
    profiles = [(title, p) for title, p in (("Plain", section.plain), ("Planned", section.planned)) if p is not None]
    if kind == "html":
        versions = f"autoremat {autoremat.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        return render_report(
            (section,), title="Memory over one training step", footer=f"{command}. {versions}."
        ).encode()
    if kind == "json":
        contents = {title.lower(): found.to_dict() for title, found in profiles}
        plan = None if section.plan is None else json.loads(section.plan.to_json())
        return (json.dumps({"title": section.title, "plan": plan} | contents, indent=1) + "\n").encode()
    budget = section.plan.budget_bytes if section.plan is not None else None
    return memory_file(profiles, budget_bytes=budget, kind=kind)
