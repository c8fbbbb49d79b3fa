"""From a model to a report: what `autoremat.report` and `autoremat report` do."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import autoremat
from autoremat._allocator_settings import AllocatorSettings
from autoremat._api import frontier as find_frontier
from autoremat._api import layers, profile, trace
from autoremat._api import plan as make_plan
from autoremat._errors import UsageError
from autoremat._figures import memory_file
from autoremat._frontier import Frontier
from autoremat._plan import Plan
from autoremat._planning import BudgetKind, Objective
from autoremat._report import render_report
from autoremat._report_data import ReportSection
from autoremat._step import Batch
from autoremat._step_graph import StepGraph
from autoremat._targets import Target

ReportKind = Literal["html", "png", "svg", "json"]
KINDS: tuple[ReportKind, ...] = ("html", "png", "svg", "json")
_NUM_POINTS = 40
_NOTEBOOK_HEIGHT = 640


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one model as a page, a picture or JSON; notebooks show the page.

    Attributes:
        section: What it shows.
        footer: How it was made.
    """

    section: ReportSection
    footer: str = ""

    def to_html(self) -> str:
        """One self-contained, interactive page."""
        return render_report((self.section,), title="Memory over one training step", footer=self.footer)

    def to_json(self) -> str:
        """The same figures as JSON; bytes are ints, times are seconds."""
        section = self.section
        contents: dict[str, Any] = {
            "title": section.title,
            "plan": None if section.plan is None else json.loads(section.plan.to_json()),
        }
        contents |= {name.lower(): found.to_dict() for name, found in section.profiles}
        for name, found in (("frontier", section.frontier), ("layers", section.layers)):
            if found is not None:
                contents[name] = found.to_dict()
        return json.dumps(contents, indent=1)

    def to_bytes(self, kind: ReportKind) -> bytes:
        """The contents of a file.

        Args:
            kind: "html", "json", or a picture of memory alone: "png", "svg".

        Raises:
            UsageError: If matplotlib is not installed and a picture is asked for.
        """
        if kind == "html":
            return self.to_html().encode()
        if kind == "json":
            return (self.to_json() + "\n").encode()
        budget = None if self.section.plan is None else self.section.plan.budget_bytes
        return memory_file(self.section.profiles, budget_bytes=budget, kind=kind)

    def save(self, path: str | Path) -> None:
        """Write it to a file, as what the file's name says: .html, .png, .svg or .json.

        Raises:
            UsageError: If the name says none of these, or the file cannot be written.
        """
        output = Path(path)
        contents = self.to_bytes(report_kind(output, None))
        try:
            output.write_bytes(contents)
        except OSError as error:
            raise UsageError(f"Cannot write the report to {output}: {error.strerror}.") from error

    def __repr__(self) -> str:
        return f"<Report on {self.section.title}: .save('report.html') writes it>"

    def _repr_html_(self) -> str:
        # A frame of its own keeps the page's style and script apart from the notebook's.
        page = html.escape(self.to_html())
        return f'<iframe srcdoc="{page}" style="width:100%;height:{_NOTEBOOK_HEIGHT}px;border:0"></iframe>'


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


def report(
    model: nn.Module | StepGraph,
    batch: Batch | None = None,
    *,
    plan: Plan | None = None,
    budget: int | str | None = None,
    frontier: bool | Frontier = True,
    name: str = "",
    target: str | Target | None = None,
    objective: Objective | None = None,
    budget_is: BudgetKind = "allocated",
    allocator: str | AllocatorSettings | None = None,
    progress: Callable[[str, float], None] | None = None,
    command: str = "",
    **trace_options: Any,
) -> Report:
    """Lay out one training step for people: memory over time by cause, the frontier, a map of layers.

    Args:
        model: A model, or a step that `trace` returned.
        batch: The batch, with a model; not with a step.
        plan: A plan for it, to show beside the plain step.
        budget: As for `plan`, instead of a plan: one is made. With neither, the plain step alone.
        frontier: A frontier of the step; True finds one, and prices the schedules of `classic`; False leaves it out.
        name: What to call the model in the title.
        target: As for `plan`; None for that of the plan.
        objective: As for `plan`.
        budget_is: As for `plan`.
        allocator: As for `plan`; None for the plan's own.
        progress: Called with a label and a fraction done.
        command: How it was asked for, for the last line.
        **trace_options: As for `trace`, with a model.

    Returns:
        The report; ``save("report.html")`` writes it, and a notebook shows it.

    Raises:
        PlanMismatch: If the plan names what the step does not run.
        BudgetInfeasible: If no plan fits into the budget.
        UsageError: If both a plan and a budget are given.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> report(model, torch.ones(512, 64), budget="1MiB", loss=lambda y: y.sum())
        <Report on Sequential: .save('report.html') writes it>
    """
    tell = progress or (lambda label, fraction: None)
    if plan is not None and budget is not None:
        raise UsageError("Give a plan or a budget, not both: the plan has its budget.")
    tell("Tracing the step", 0.1)
    if target is None and plan is not None and plan.target:
        target = plan.target
    graph = _graph(model, batch, target, trace_options)
    curve = frontier if isinstance(frontier, Frontier) else None
    if frontier is True:
        tell("Walking along the frontier", 0.5)
        curve = find_frontier(graph, num_points=_NUM_POINTS, classics=True, target=target, objective=objective)
    if plan is None and budget is not None:
        tell("Planning", 0.8)
        planning = {"objective": objective, "budget_is": budget_is, "allocator": allocator, "target": target}
        plan = make_plan(graph, budget=budget, **planning)  # type: ignore[arg-type]
    tell("Laying out memory", 0.9)
    if allocator is None and plan is not None:
        allocator = plan.allocator
    section = ReportSection(
        title=f"{graph.model} ({name})" if name else graph.model,
        text=_about(graph, target, allocator),
        plain=profile(graph, target=target, allocator=allocator),
        planned=None if plan is None else profile(graph, plan, target=target, allocator=allocator),
        plan=plan,
        frontier=curve,
        layers=layers(graph, plan, target=target),
    )
    versions = f"autoremat {autoremat.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return Report(section, footer=f"{command}. {versions}." if command else f"{versions}.")


def _graph(
    model: nn.Module | StepGraph, batch: Batch | None, target: str | Target | None, options: dict[str, Any]
) -> StepGraph:
    if isinstance(model, StepGraph):
        if batch is not None or options:
            raise UsageError("A traced step has its batch and options already: report(graph, ...).")
        return model
    if batch is None:
        raise UsageError(f"A report on {type(model).__name__} needs a batch: report(model, batch, budget=...).")
    return trace(model, batch, target=target, **options)


def _about(graph: StepGraph, target: str | Target | None, allocator: str | AllocatorSettings | None) -> str:
    device = target.name if isinstance(target, Target) else target
    settings = allocator.to_text() if isinstance(allocator, AllocatorSettings) else allocator
    parts = [graph.input_signature, graph.precision, graph.optimizer, f"on {device}" if device else ""]
    parts.append(f"PYTORCH_ALLOC_CONF={settings}" if settings else "")
    return "Predicted from a trace of one training step: " + "; ".join(part for part in parts if part) + "."
