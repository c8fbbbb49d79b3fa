"""A table of memory over a step: by cause, by phase, and at its highest moments. Renders and computes nothing else."""

from __future__ import annotations

from rich.table import Table

from autoremat._results import MemoryProfile
from autoremat._units import format_bytes


def profile_table(title: str, plain: MemoryProfile, planned: MemoryProfile | None = None) -> Table:
    """Predicted peak by cause, the most in each phase, and the highest moments; plain, and planned where given.

    Args:
        title: What was profiled.
        plain: The step without a plan.
        planned: The step with one.
    """
    kinds = [plain] if planned is None else [plain, planned]
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("live bytes")
    for name in ("plain", "planned")[: len(kinds)]:
        table.add_column(name, justify="right")
    table.add_row("peak", *(format_bytes(kind.peak_bytes) for kind in kinds))
    for cause in plain.peak_by_cause:
        if any(kind.peak_by_cause.get(cause) for kind in kinds):
            cells = (format_bytes(kind.peak_by_cause.get(cause, 0)) for kind in kinds)
            table.add_row(f"  {cause.replace('_', ' ')}", *cells, style="dim")
    table.add_row("static", *(format_bytes(kind.static_bytes) for kind in kinds))
    table.add_section()
    for phase, _ in plain.phases:
        table.add_row(f"most in {phase}", *(_highest(kind, phase) for kind in kinds))
    table.add_section()
    for rank in range(max(len(kind.high_moments) for kind in kinds)):
        moments = [kind.high_moments[rank] if rank < len(kind.high_moments) else None for kind in kinds]
        words = ["" if m is None else f"{format_bytes(m.num_bytes)} at {m.at}" for m in moments]
        table.add_row("high" if rank else "highest", *words, style="dim" if rank else "")
    return table


def phase_peaks(profile: MemoryProfile) -> dict[str, int]:
    """The most live bytes in each phase."""
    totals = [sum(values) for values in zip(*profile.by_cause.values(), strict=True)]
    starts = [*(first for _, first in profile.phases), len(totals)]
    found: dict[str, int] = {}
    for (phase, first), end in zip(profile.phases, starts[1:], strict=True):
        if first < end:
            found[phase] = max(found.get(phase, 0), *totals[first:end])
    return found


def _highest(profile: MemoryProfile, phase: str) -> str:
    peaks = phase_peaks(profile)
    return format_bytes(peaks[phase]) if phase in peaks else ""
