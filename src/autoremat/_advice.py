"""What `advise` returns: the decision table, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoremat._results import JsonResult
from autoremat._units import format_bytes, format_seconds

Numerics = Literal["same bits", "another order of sums", "batch statistics differ", "lower precision"]
NUMERICS: tuple[Numerics, ...] = ("same bits", "another order of sums", "batch statistics differ", "lower precision")
"""What a way of training does to the numbers, from nothing to most."""


@dataclass(frozen=True, slots=True)
class AdviceRow(JsonResult):
    """One way to run the step, worked out.

    Attributes:
        name: In a few words.
        precision: As for `trace`; "" is the model's own.
        micro_batch: Samples in a forward.
        accumulate: Micro-steps in an optimizer step.
        regions: What is checkpointed: "none", "every block", or "planned".
        peak_bytes: Predicted peak, allocated.
        peak_by_cause: The same by cause.
        fits: Whether that is within the budget.
        step_s: Predicted time of one optimizer step over all its micro-steps.
        samples_per_s: Samples that it gets through.
        tokens_per_s: Tokens that it gets through; None for batches without a sequence.
        numerics: What it does to the numbers, one of `NUMERICS`.
        effort: What there is to do.
        largest_batch: Most samples in a forward that fit in this way, at the sequence length given; 0 if none does.
        longest_sequence: Most tokens in a sample that fit in this way, at this micro-batch; 0 if none does, None
            without tokens.
    """

    name: str
    precision: str
    micro_batch: int
    accumulate: int
    regions: Literal["none", "every block", "planned"]
    peak_bytes: int
    peak_by_cause: dict[str, int]
    fits: bool
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    numerics: Numerics
    effort: str
    largest_batch: int | None = None
    longest_sequence: int | None = None

    @property
    def effective_batch(self) -> int:
        """Samples in an optimizer step."""
        return self.micro_batch * self.accumulate


@dataclass(frozen=True, slots=True)
class Diagnosis(JsonResult):
    """Something about the step that decides what helps.

    Attributes:
        kind: "states", "loss", "shallow", "roomy" or "launches".
        text: What it is, with its numbers.
        share: How much of the peak (or of the time) it is.
        remedies: What would help, each with the peak (bytes) or the time (seconds) that would come out; estimates
            are marked as such.
    """

    kind: Literal["states", "loss", "shallow", "roomy", "launches"]
    text: str
    share: float
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True)
class Remedy(JsonResult):
    """Something that autoremat does not do itself.

    Attributes:
        name: What to do.
        peak_bytes: Peak that would come out with the best checkpointing on top.
        is_estimate: Whether that is arithmetic on the step's own bytes; False if the changed step was worked out.
        fits: Whether that is within the budget.
    """

    name: str
    peak_bytes: int
    is_estimate: bool
    fits: bool


Action = Literal[
    "plain", "checkpoint", "accumulate", "mixed precision", "shrink states", "chunk the loss", "nothing fits"
]


@dataclass(frozen=True, slots=True)
class Advice(JsonResult):
    """The decision table for one model, batch and device.

    Attributes:
        model: Class name of the model.
        target: Device.
        budget_bytes: Memory for the whole step.
        batch: Samples in the batch that was given.
        tokens: Tokens in each; None without a sequence.
        rows: The ways to run it, as named.
        fastest: The fastest way found for the effective batch, over plans, micro-batches and precisions.
        action: What to do, in one word or two.
        reason: Why.
        diagnoses: What decides it.
        frontier: (peak in bytes, step time in seconds) of the plans for this batch in the model's own precision, from
            the smallest peak to no checkpointing.
        time_error: Half-width of the range around all times, as a share of them.
    """

    model: str
    target: str
    budget_bytes: int
    batch: int
    tokens: int | None
    rows: tuple[AdviceRow, ...]
    fastest: AdviceRow | None
    action: Action
    reason: str
    diagnoses: tuple[Diagnosis, ...]
    frontier: tuple[tuple[int, float], ...]
    time_error: float

    def row(self, name: str) -> AdviceRow:
        """The row of a name.

        Raises:
            KeyError: If there is none.
        """
        found = {row.name: row for row in self.rows}
        return found[name]

    def diagnosis(self, kind: str) -> Diagnosis | None:
        """The diagnosis of a kind, if it was made."""
        return next((found for found in self.diagnoses if found.kind == kind), None)

    def __repr__(self) -> str:
        fitting = [row for row in self.rows if row.fits]
        best = min(fitting, key=lambda row: row.step_s / row.effective_batch, default=None)
        rest = "" if best is None else f"; {best.name}: {format_bytes(best.peak_bytes)}, {format_seconds(best.step_s)}"
        budget = format_bytes(self.budget_bytes)
        return (
            f"<Advice for {self.model} in {budget}: {self.action}; {len(fitting)} of {len(self.rows)} ways fit{rest}>"
        )
