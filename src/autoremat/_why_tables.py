"""Reasons in words, for terminals. Computes nothing but its wording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from autoremat._reasons import Floor, OtherBudget, Reasons, RegionReason
from autoremat._tables import common_path, general_path
from autoremat._units import format_bytes, format_percent

NEVER = "nowhere: the budget holds without it"


def reasons_table(reasons: Reasons) -> Table:
    """Why each region is there; like ones together.

    Args:
        reasons: With any number of regions.
    """
    title = f"why {len(reasons.regions)} regions: what the step would be without each of them alone"
    table = Table(title=title, title_justify="left", title_style="bold")
    what = "time" if reasons.objective == "time" else "FLOPs"
    for name in ("region", "frees", f"extra {what}", "bytes/FLOP", "peak without it", "the budget breaks first at"):
        is_text = name in ("region", "the budget breaks first at")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in reason_rows(reasons.regions):
        table.add_row(*row)
    if reasons.num_left_out:
        table.caption = f"{reasons.num_left_out} more that cost less are left out"
    return table


def reason_rows(regions: Iterable[RegionReason]) -> list[tuple[str, ...]]:
    """Cells of a row for all regions that differ only in a number of their paths.

    Example:
        >>> like = dict(freed_bytes=2048, peak_without_bytes=8192, breaks_at=None, stored_bytes=0, seconds=0.0)
        >>> rows = reason_rows(RegionReason(f"h.{i}", flops=0, overhead=0.0, dearest="", **like) for i in range(3))
        >>> rows[0][:3]
        ('h.{0-2} (3)', '2.00 KiB', '+0.0 %')
    """
    groups: dict[tuple[object, ...], list[RegionReason]] = {}
    for region in regions:
        alike = (general_path(region.name), region.stored_bytes, region.flops, region.breaks_at)
        groups.setdefault(alike, []).append(region)
    return [_row(found) for found in groups.values()]


def _row(found: Sequence[RegionReason]) -> tuple[str, ...]:
    first = found[0]
    name = common_path(general_path(first.name), [region.name for region in found])
    rates = [region.bytes_per_flop for region in found if region.bytes_per_flop is not None]
    return (
        f"{name} ({len(found)})" if len(found) > 1 else name,
        _span(format_bytes(region.freed_bytes) for region in sorted(found, key=lambda r: r.freed_bytes)),
        _span(f"+{format_percent(region.overhead)}" for region in sorted(found, key=lambda r: r.overhead)),
        _span(f"{rate:.2g}" for rate in sorted(rates)) if rates else "free",
        _span(format_bytes(region.peak_without_bytes) for region in sorted(found, key=lambda r: r.peak_without_bytes)),
        first.breaks_at or NEVER,
    )


def _span(texts: Iterable[str]) -> str:
    """The first and the last of some texts in order, once where they are the same."""
    ends = list(texts)
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} .. {ends[-1]}"


def budgets_table(reasons: Reasons) -> Table:
    """The plan beside those for a step more and a step less of memory."""
    table = Table(title="other budgets", title_justify="left", title_style="bold")
    for name in ("budget", "peak", "extra FLOPs", "extra time", "least (proved)", "regions", "what changes"):
        table.add_column(name, justify="left" if name == "what changes" else "right", overflow="fold")
    for other in (reasons.less, reasons.more):
        if other is not None:
            table.add_row(*_budget_row(reasons, other))
    return table


def _budget_row(reasons: Reasons, other: OtherBudget) -> tuple[str, ...]:
    step = other.budget_bytes - reasons.limit_bytes
    return (
        f"{'+' if step > 0 else ''}{format_bytes(step)}",
        format_bytes(other.peak_bytes),
        f"+{format_percent(other.overhead_flops)}",
        f"+{format_percent(other.overhead_s)}",
        f"+{format_percent(other.bound)}",
        str(other.num_regions),
        _changes(other),
    )


def _changes(other: OtherBudget) -> str:
    """What another plan has in place of regions of this one; where both have a region, it stores other outputs."""
    both = [name for name in other.without if name in other.instead]
    without, instead = ([name for name in names if name not in both] for names in (other.without, other.instead))
    changes = [f"without {_names(without)}; instead {_names(instead)}"] if without or instead else []
    changes += [f"other stored outputs in {_names(both)}"] if both else []
    return "; ".join(changes) or "nothing"


def _names(names: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(general_path(name), []).append(name)
    return ", ".join(common_path(general, found) for general, found in groups.items()) or "nothing"


def floor_table(found: Floor) -> Table:
    """What is alive at the peak of the smallest plan, by kind, and the largest of it."""
    title = f"what stops at {format_bytes(found.smallest_bytes)}: {found.at}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("alive there", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for part in found.parts:
        share = part.num_bytes / found.smallest_bytes
        table.add_row(part.kind, format_bytes(part.num_bytes), format_percent(share))
    table.add_section()
    for item in found.largest:
        what = f"{item.num_storages} of {item.name}" if item.num_storages > 1 else item.name
        where = f" in {item.module}" if item.module else ""
        table.add_row(f"{what or item.cause}{where}", format_bytes(item.num_bytes), "", style="dim")
    return table


def reason_lines(reasons: Reasons) -> list[str]:
    """The reasons in sentences: next step, floor, bound."""
    found = reasons.floor
    lowest = (
        f"No plan goes below {format_bytes(found.smallest_bytes)}, and no schedule whatever of the same ops in the "
        f"same order below {format_bytes(found.least_bytes)}. {found.advice}"
    )
    return [reasons.next_step, lowest, reasons.claim]
