"""The frontier of a step: the least overhead for every budget, as plain data with the plans behind it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from autoremat._plan import Plan
from autoremat._results import JsonResult
from autoremat._units import format_bytes, format_percent, parse_bytes

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class FrontierPoint(JsonResult):
    """One plan on the frontier.

    Attributes:
        peak_bytes: Predicted peak of the step: the smallest budget that this plan is for.
        overhead_flops: Recomputed FLOPs over those of the plain step.
        overhead_s: Predicted extra time over that of the plain step.
        bound: A proved lower limit on the overhead (in what was minimised) of any plan within `peak_bytes`.
        num_regions: How many regions the plan has.
    """

    peak_bytes: int
    overhead_flops: float
    overhead_s: float
    bound: float
    num_regions: int


@dataclass(frozen=True, slots=True)
class NamedPoint(JsonResult):
    """A schedule that is known by name, priced like a plan on the frontier.

    Attributes:
        name: As `autoremat.classic` knows it.
        peak_bytes: Predicted peak of the step.
        overhead_flops: Recomputed FLOPs over those of the plain step.
        overhead_s: Predicted extra time over that of the plain step.
    """

    name: str
    peak_bytes: int
    overhead_flops: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Frontier(JsonResult):
    """Plans of one step for all budgets, from the smallest possible peak to no checkpointing.

    Attributes:
        points: By rising peak; overhead falls from each to the next.
        plain_bytes: Predicted peak without checkpointing.
        smallest_bytes: Smallest budget that a plan meets.
        static_bytes: Bytes that no plan changes.
        model: Class name of the model.
        target: Device that times are predicted for.
        objective: What was minimised: "time" or "flops".
        classics: Schedules by name, to compare with, if they were asked for.

    Example:
        >>> Frontier(points=(FrontierPoint(8, 0.0, 0.0, 0.0, 0),), plain_bytes=8, smallest_bytes=8, model="Net")
        <Frontier of Net: 1 points, 8 B (+0.0 % FLOPs) to 8 B (plain)>
    """

    points: tuple[FrontierPoint, ...]
    plain_bytes: int
    smallest_bytes: int
    static_bytes: int = 0
    model: str = ""
    target: str = ""
    objective: str = "flops"
    classics: tuple[NamedPoint, ...] = ()
    make_plan: Callable[[int], Plan] | None = field(default=None, repr=False, compare=False)

    def plan(self, budget: int | str) -> Plan:
        """The plan for a budget, as `autoremat.plan` would make it.

        Args:
            budget: Bytes for the whole step: an int or "24GiB".

        Raises:
            BudgetError: If the budget cannot be read.
            BudgetInfeasible: If it is below `smallest_bytes`.
        """
        assert self.make_plan is not None, "a frontier that `frontier` made has its plans"
        return self.make_plan(parse_bytes(budget))

    def point(self, budget: int | str) -> FrontierPoint | None:
        """The last point whose peak is at most a budget; None if there is none."""
        peaks = [point.peak_bytes for point in self.points]
        position = bisect_right(peaks, parse_bytes(budget))
        return self.points[position - 1] if position else None

    def share(self, peak_bytes: int) -> float:
        """A peak as a share of the plain one, static bytes left out of both."""
        return (peak_bytes - self.static_bytes) / max(1, self.plain_bytes - self.static_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The frontier as plain dicts, lists and numbers."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "make_plan"}
        lists = {name: [point.to_dict() for point in named[name]] for name in ("points", "classics")}
        return named | lists

    def __repr__(self) -> str:
        first = self.points[0]
        lowest = f"{format_bytes(first.peak_bytes)} (+{format_percent(first.overhead_flops)} FLOPs)"
        return (
            f"<Frontier of {self.model or 'a model'}: {len(self.points)} points, {lowest} to "
            f"{format_bytes(self.plain_bytes)} (plain)>"
        )
