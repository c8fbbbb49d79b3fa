"""Why a plan is as it is, as plain data: what each region is for, what other budgets give, what is the floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoremat._results import JsonResult, LiveItem
from autoremat._units import format_bytes, format_percent

SLIGHTEST = 1e-3
"""Claims of "at most so much" are rounded up to a whole number of these."""


@dataclass(frozen=True, slots=True)
class RegionReason(JsonResult):
    """What one region is for: the planned step beside the same one without this region.

    Attributes:
        name: Its calls; those of a region inside another follow the name of that one and " > ".
        freed_bytes: The most that it takes off the live bytes at any op of forward, backward or optimizer.
        peak_without_bytes: Peak of the step without it.
        breaks_at: The first op at which more than the limit would be alive without it; None if that never is.
        stored_bytes: Op outputs that it stores.
        flops: FLOPs that its recompute adds to the step.
        seconds: Predicted time that it adds.
        overhead: The same as a share of the plain step, in what was minimised.
        dearest: What of it runs again that costs most: op, module and how often.
    """

    name: str
    freed_bytes: int
    peak_without_bytes: int
    breaks_at: str | None
    stored_bytes: int
    flops: int
    seconds: float
    overhead: float
    dearest: str

    @property
    def bytes_per_flop(self) -> float | None:
        """Bytes freed for each FLOP that it adds; None if it adds none."""
        return self.freed_bytes / self.flops if self.flops else None


@dataclass(frozen=True, slots=True)
class OtherBudget(JsonResult):
    """The plan for more or less memory than a plan has.

    Attributes:
        budget_bytes: Its budget.
        peak_bytes: Its peak.
        overhead_flops: Recomputed FLOPs over those of the plain step.
        overhead_s: Predicted extra time over that of the plain step.
        bound: Least overhead of any schedule within the budget, in what was minimised.
        num_regions: Its regions.
        without: Regions of the plan that it has not, by name.
        instead: Regions that it has and the plan has not.
    """

    budget_bytes: int
    peak_bytes: int
    overhead_flops: float
    overhead_s: float
    bound: float
    num_regions: int
    without: tuple[str, ...]
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FloorPart(JsonResult):
    """One kind of what is alive at the peak of the smallest plan.

    Attributes:
        kind: "states" (parameters, gradients, optimizer state, buffers), "optimizer" (its temporaries), "inputs",
            "loss" (logits and what the loss makes of them), "working" (what the calls whose turn it is made), "held"
            (what regions hold for later, and what else is alive).
        num_bytes: Their bytes.
    """

    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Floor(JsonResult):
    """What stops a budget from going lower.

    Attributes:
        smallest_bytes: Smallest budget that a plan meets.
        least_bytes: No schedule of the same ops in the same order has a smaller peak: proved.
        at: Where the smallest plan peaks: phase, module and op.
        parts: What is alive there by kind, largest first; sums to `smallest_bytes`.
        by_cause: The same by cause.
        largest: The largest of it.
        working: Path of the calls whose turn it is there.
    """

    smallest_bytes: int
    least_bytes: int
    at: str
    parts: tuple[FloorPart, ...]
    by_cause: dict[str, int]
    largest: tuple[LiveItem, ...]
    working: str

    @property
    def activation_bytes(self) -> int:
        """Those of them that are neither states nor inputs."""
        return sum(part.num_bytes for part in self.parts if part.kind not in ("states", "inputs"))

    @property
    def advice(self) -> str:
        """What is most of it, and what would make it less."""
        most = self.parts[0]
        of_all = f"{format_percent(most.num_bytes / self.smallest_bytes)} of the smallest peak"
        of_activations = f"{format_percent(most.num_bytes / max(1, self.activation_bytes))} of activation bytes"
        texts = {
            "states": f"Parameters, gradients and optimizer state: {of_all}. No plan touches them; shard them, or take "
            "an optimizer with less state",
            "optimizer": f"The optimizer's temporaries: {of_all}. A fused optimizer has none",
            "inputs": f"The batch itself: {of_all}. A smaller micro-batch is what helps",
            "loss": f"The loss: {of_activations}. Use a chunked loss",
            "working": f"{self.working or 'The model itself'} at work: {of_activations}. All of it is needed at once; "
            "smaller modules, or a smaller micro-batch, would need less",
            "held": f"What is held for the rest of backward: {of_activations}. A smaller micro-batch holds less",
        }
        return texts[most.kind] + "."


@dataclass(frozen=True, slots=True)
class Reasons(JsonResult):
    """Why a plan is as it is. Bytes and FLOPs are the ledger's, for steps that differ in one thing each.

    Attributes:
        model: Class name of the model.
        limit_bytes: What live bytes are held against: the budget; the plan's own peak where it has none, or where the
            budget is of reserved bytes.
        peak_bytes: Peak of the plan.
        plain_bytes: Peak of the plain step.
        objective: What was minimised: "time" or "flops".
        overhead: What the plan costs in it, as a share of the plain step.
        bound: Least overhead of any schedule within the limit.
        regions: Why each is there, in order of execution, those inside others after them.
        num_left_out: Regions for which nothing was worked out, since there are so many.
        more: The plan for a step more of memory, or for the least more that has a cheaper one; None for a plan without
            regions.
        less: The plan for a step less; None if there is none.
        floor: What stops the budget from going lower.
    """

    model: str
    limit_bytes: int
    peak_bytes: int
    plain_bytes: int
    objective: str
    overhead: float
    bound: float
    regions: tuple[RegionReason, ...]
    num_left_out: int
    more: OtherBudget | None
    less: OtherBudget | None
    floor: Floor

    @property
    def possible_gain(self) -> float:
        """Largest share of the planned step's time (or FLOPs) that any other schedule could save; proved."""
        return max(0.0, 1 - (1 + self.bound) / (1 + self.overhead))

    @property
    def claim(self) -> str:
        """The bound in plain words."""
        gain = math.ceil(self.possible_gain / SLIGHTEST - 1e-9) * SLIGHTEST
        share = format_percent(gain)
        if self.objective == "time":
            most = f"more than {share} faster" if gain else "any faster"
        else:
            most = f"more than {share} cheaper in FLOPs" if gain else "any cheaper in FLOPs"
        return f"No schedule whatever that runs the same ops in the same order can be {most} at this budget."

    @property
    def next_step(self) -> str:
        """What a step more of memory would buy."""
        if self.more is None:
            return "The plain step fits: more memory buys nothing."
        now, then = self.overhead, self.more.overhead_s if self.objective == "time" else self.more.overhead_flops
        return (
            f"{format_bytes(self.more.budget_bytes - self.limit_bytes)} more would take the overhead from "
            f"{format_percent(now)} to {format_percent(then)}."
        )

    def __repr__(self) -> str:
        return f"<Reasons: {len(self.regions)} regions. {self.next_step} {self.floor.advice} {self.claim}>"
