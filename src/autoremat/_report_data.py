"""What the report's script draws from: the results of a section as small JSON. Chooses points, computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from autoremat._frontier import Frontier
from autoremat._layer_map import LayerMap
from autoremat._plan import Plan
from autoremat._results import MeasuredStep, MemoryProfile, TrainedRuns, UsageReport, VerifyReport
from autoremat._step_graph import CAUSES

MAX_POINTS = 1_500
"""Points of a curve on a page; of those that fall together the highest is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One model in a report; what is None is left out.

    Attributes:
        title: Heading.
        text: A paragraph below it.
        plain: Predicted memory of the plain step.
        planned: Predicted memory of the planned step.
        plan: The plan.
        frontier: Plans for all budgets, with schedules known by name.
        layers: What each layer keeps, recomputes and costs, plain and planned.
        verified: What `verify` found.
        usage: What `measure` found.
        trained: Losses and times of two trainings.
    """

    title: str
    text: str = ""
    plain: MemoryProfile | None = None
    planned: MemoryProfile | None = None
    plan: Plan | None = None
    frontier: Frontier | None = None
    layers: LayerMap | None = None
    verified: VerifyReport | None = None
    usage: UsageReport | None = None
    trained: TrainedRuns | None = None

    @property
    def profiles(self) -> list[tuple[str, MemoryProfile]]:
        """What there is of plain and planned profiles, with names."""
        return [(name, p) for name, p in (("Plain", self.plain), ("Planned", self.planned)) if p is not None]

    @property
    def measured(self) -> list[tuple[str, MeasuredStep]]:
        """What there is of measured curves, with names."""
        steps = () if self.usage is None else (("plain", self.usage.plain), ("planned", self.usage.planned))
        return [(name, step) for name, step in steps if step is not None and step.curve_s]


def section_data(section: ReportSection) -> dict[str, Any]:
    """What the script of the page draws for a section."""
    found: dict[str, Any] = {}
    plan = section.plan
    if section.profiles:
        found["memory"] = {
            "budget_bytes": None if plan is None else plan.budget_bytes,
            "budget_is": "allocated" if plan is None else plan.budget_is,
            "profiles": [_profile(name, profile) for name, profile in section.profiles],
        }
    if section.usage is not None and section.measured:
        curves = [_measured(name, step) for name, step in section.measured]
        found["measured"] = {"budget_bytes": section.usage.budget_bytes, "curves": curves}
    if section.frontier is not None:
        found["frontier"] = _frontier(section.frontier, plan)
    if section.layers is not None:
        found["layers"] = _layers(section.layers, is_planned=section.planned is not None)
    return found


def highest(seconds: Sequence[float], values: Sequence[int], most: int = MAX_POINTS) -> list[int]:
    """Indices of at most ``most`` + 1 points over time, in each short interval the one with the largest value.

    Example:
        >>> highest([0.0, 0.1, 0.2, 10.0], [1, 3, 2, 1], most=2)
        [1, 3]
    """
    if len(seconds) <= most:
        return list(range(len(seconds)))
    width = (seconds[-1] - seconds[0]) / most or 1.0
    best: dict[int, int] = {}
    for index, second in enumerate(seconds):
        place = int((second - seconds[0]) / width)
        if place not in best or values[index] > values[best[place]]:
            best[place] = index
    return list(best.values())


def _profile(name: str, profile: MemoryProfile) -> dict[str, Any]:
    totals = [sum(values) for values in zip(*profile.by_cause.values(), strict=True)]
    points = highest(profile.seconds, totals)
    names: dict[str, int] = {}
    events = [[names.setdefault(text, len(names)) for text in profile.events[i]] for i in points if profile.events]
    causes = [cause for cause in CAUSES if any(profile.by_cause.get(cause, ()))]
    return {
        "name": name,
        "peak_bytes": profile.peak_bytes,
        "peak_at": profile.peak_at,
        "peak": max(range(len(points)), key=lambda place: totals[points[place]], default=0),
        "reserved_bytes": None if profile.allocator is None else profile.allocator.reserved_bytes,
        "num_events": len(totals),
        "seconds": [_short(profile.seconds[i]) for i in points],
        "totals": [totals[i] for i in points],
        "causes": causes,
        "by_cause": {cause: [profile.by_cause[cause][i] for i in points] for cause in causes},
        "phases": [[phase, _short(profile.seconds[i])] for phase, i in profile.phases if i < len(profile.seconds)],
        "names": list(names),
        "events": events,
    }


def _measured(name: str, step: MeasuredStep) -> dict[str, Any]:
    points = highest(step.curve_s, step.curve_bytes)
    values = [step.curve_bytes[i] for i in points]
    return {
        "name": name,
        "peak_bytes": step.peak_bytes,
        "peak": max(range(len(values)), key=values.__getitem__),
        "seconds": [_short(step.curve_s[i]) for i in points],
        "bytes": values,
    }


def _frontier(frontier: Frontier, plan: Plan | None) -> dict[str, Any]:
    def point(values: dict[str, Any]) -> dict[str, Any]:
        return values | {"share": frontier.share(values["peak_bytes"])}

    chosen = None
    if plan is not None and plan.planned is not None:
        chosen = point(
            {
                "peak_bytes": plan.planned.peak_bytes,
                "overhead_flops": plan.overhead_flops,
                "overhead_s": plan.overhead_s,
                "num_regions": len(plan.regions),
            }
            | ({} if plan.bound is None else {"bound": plan.bound})
        )
    is_allocated = plan is not None and plan.budget_is == "allocated"
    return {
        "objective": frontier.objective,
        "budget_bytes": plan.budget_bytes if plan is not None and is_allocated else None,
        "points": [point(found.to_dict()) for found in frontier.points],
        "classics": [point(found.to_dict()) for found in frontier.classics],
        "plan": chosen,
    }


def _layers(layers: LayerMap, *, is_planned: bool) -> dict[str, Any]:
    rows = [
        [
            row.path,
            row.class_name,
            row.parent,
            row.num_calls,
            row.treatment,
            row.note,
            *([_short(value) for value in astuple(cost)] for cost in (row.own, row.total)),
        ]
        for row in layers.layers
    ]
    return {"model": layers.model, "planned": is_planned, "rows": rows}


def _short(value: float) -> float:
    """Six digits of seconds are enough for a picture; bytes and FLOPs are ints and stay as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
