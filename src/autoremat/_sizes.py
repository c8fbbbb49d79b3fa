"""The largest batch and the longest sequence that fit, for a way to run a step.

Peaks at other sizes are those of interpolated steps; a size that is promised is one at which a trace says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoremat._errors import AutorematError
from autoremat._expand import expand
from autoremat._ledger import peak_bytes
from autoremat._scaling import with_kept_gradients
from autoremat._step_graph import StepGraph
from autoremat._targets import Target
from autoremat._ways import Axis, Regions, Setting, Steps, Way

SEQUENCE_STEP = 32
"""Sequence lengths are looked for in multiples of this; attention kernels round them up to it."""
MOST_SAMPLES = MOST_TOKENS = 1 << 20
MAX_SEARCHES = 4
"""How often the largest size is looked for again with tighter regions."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Looks for sizes.

    Args:
        steps: Of the model.
        target: Device.
        budget_bytes: Memory for the whole step.
        way: Gives a way to run a step at a setting.
        keeps_gradients: Whether the step adds to gradients that are there; the regions are then those that are tightest
            where it makes them.
    """

    steps: Steps
    target: Target
    budget_bytes: int
    way: Callable[[Setting, Regions], Way]
    keeps_gradients: bool = False

    def largest(self, setting: Setting, regions: Regions, axis: Axis) -> int:
        """The largest size along an axis, planned for that size; 0 if none fits.

        Planning takes longest: sizes are tried with the tightest regions of one, and only the size above the one that
        is found so is planned.

        Args:
            setting: The step, at the size to begin with.
            regions: What is checkpointed.
            axis: What is made larger.
        """
        budget, found = self.budget_bytes, 0
        start = getattr(setting, axis)
        step = 1 if axis == "samples" else min(SEQUENCE_STEP, start)
        tightest = self.way(setting.resized("samples", self.steps.samples), regions)
        for _ in range(MAX_SEARCHES):

            def least(graph: StepGraph, like: Way = tightest) -> int:
                specs = Way(graph, self.target, regions, budget).least_specs_like(like)
                kept = with_kept_gradients(graph) if self.keeps_gradients else graph
                return peak_bytes(kept, expand(kept, specs))

            def at(size: int) -> Setting:
                return setting.resized(axis, size)

            likely = largest_that_fits(
                lambda n: least(self.steps.step(at(n))), budget, start=start, step=step, most=MOST_TOKENS
            )
            checked = verified_size(lambda n: least(self.steps.exact(at(n))), likely, budget, step=step)
            if checked <= found:
                break
            found = start = checked
            if regions != "planned" or self.keeps_gradients or checked < likely:
                break  # above it the traced step does not fit, or does not run
            tightest = self.way(at(found + step), regions).keep_least_only()
            if tightest.least_bytes > budget:
                break
        return found


def largest_that_fits(
    least_bytes: Callable[[int], int], budget_bytes: int, *, start: int, step: int = 1, most: int = 1 << 20
) -> int:
    """The largest size, in steps, whose least peak is within a budget; 0 if none is.

    Secants first, since peaks are close to affine in size; a bracket in any case.

    Args:
        least_bytes: Smallest peak at a size; grows with it.
        budget_bytes: The budget.
        start: A size to begin with.
        step: Sizes are multiples of it.
        most: Largest size to look at.
    """
    known: dict[int, int] = {}

    def over(count: int) -> int:
        if count not in known:
            known[count] = least_bytes(count * step) - budget_bytes
        return known[count]

    low, high = 0, most // step + 1
    guess = max(1, start // step)
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        excess = over(guess)
        low, high = (guess, high) if excess <= 0 else (low, guess)
        guess = _secant(known, guess) if len(known) > 1 else guess * 2 if excess <= 0 else guess // 2
        if len(known) > 24:  # not affine at all: halve
            guess = (low + high) // 2
    return low * step


def _secant(known: dict[int, int], latest: int) -> int:
    """Where a line through the two known sizes nearest to the budget meets it, rounded down."""
    (a, at_a), (b, at_b) = sorted(known.items(), key=lambda item: abs(item[1]))[:2]
    if at_a == at_b:
        return latest * 2
    crossing = a - at_a * (b - a) / (at_b - at_a)
    nearest = int(crossing)
    return nearest + 1 if nearest in known and known[nearest] <= 0 else nearest


def verified_size(
    traced_least: Callable[[int], int], found: int, budget_bytes: int, *, step: int = 1, tries: int = 4
) -> int:
    """A size found on interpolated steps, lowered until the step itself, traced there, fits; 0 if none does.

    Args:
        traced_least: Smallest peak of the traced step at a size.
        found: What was found.
        budget_bytes: The budget.
        step: What it is lowered by.
        tries: How often.
    """
    size = found
    for _ in range(tries):
        if size <= 0:
            return 0
        try:
            if traced_least(size) <= budget_bytes:
                return size
        except AutorematError:  # the model does not run at that size: a position table that ends before it, say
            size //= 2
            size -= size % step
            continue
        size -= step
    return 0
