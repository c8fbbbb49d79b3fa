"""The tables of a report, as HTML. A cell that stands for a number carries it, for the page's script to sort by."""

from __future__ import annotations

import html
from collections.abc import Sequence

from autoremat._layer_map import LayerMap
from autoremat._plan import Plan
from autoremat._report_data import ReportSection
from autoremat._results import MemoryProfile, TrainedRuns, VerifyReport
from autoremat._step_graph import CAUSES
from autoremat._tables import live_rows, region_rows
from autoremat._units import format_bytes, format_flops, format_seconds

_NUM_MOMENTS = 6
_NUM_LIVE_ROWS = 40
_Cell = str | tuple[str, float]
"""Text, or text with the number that it stands for."""


def peak_table(profiles: Sequence[tuple[str, MemoryProfile]]) -> str:
    """Peak by cause, and what the caching allocator reserves, plain and planned."""
    if not profiles:
        return ""
    causes = [cause for cause in CAUSES if any(profile.peak_by_cause.get(cause, 0) for _, profile in profiles)]
    rows: list[list[_Cell]] = [
        [cause.replace("_", " "), *(_bytes(profile.peak_by_cause.get(cause, 0)) for _, profile in profiles)]
        for cause in causes
    ]
    rows.append(["peak allocated", *(_bytes(profile.peak_bytes) for _, profile in profiles)])
    usages = [profile.allocator for _, profile in profiles]
    if any(usages):
        rows.append(["peak reserved", *("" if u is None else _bytes(u.reserved_bytes) for u in usages)])
        rows.append(["unused at that peak", *("" if u is None else _bytes(u.unused_bytes) for u in usages)])
        rows.append(["segments", *("" if u is None else str(u.num_segments) for u in usages)])
    rows.append(["at", *(profile.peak_at for _, profile in profiles)])
    return _table("Predicted peak by cause", ["", *(name.lower() for name, _ in profiles)], rows, total=len(causes))


def moments_table(name: str, profile: MemoryProfile) -> str:
    """The next highest moments."""
    rows: list[list[_Cell]] = [
        [moment.at, _bytes(moment.num_bytes), _bytes(profile.peak_bytes - moment.num_bytes)]
        for moment in profile.high_moments[:_NUM_MOMENTS]
    ]
    return _table(f"Highest moments, {name.lower()}", ["", "bytes", "below the peak"], rows)


def live_table(name: str, profile: MemoryProfile) -> str:
    """What is alive at the peak."""
    rows: list[list[_Cell]] = [
        [cause, module, maker, (str(count), count), _bytes(num_bytes)]
        for cause, module, maker, count, num_bytes in live_rows(profile.alive_at_peak, limit=_NUM_LIVE_ROWS)
    ]
    head = ["what", "module", "made by", "storages", "bytes"]
    title = f"Alive at the {name.lower()} peak, largest first"
    return _table(title, head, rows, kind="wide sortable live", text_columns=3)


def measured_table(section: ReportSection) -> str:
    """Measured beside predicted peaks and times."""
    usage, trained = section.usage, section.trained
    rows: list[list[_Cell]] = []
    if usage is not None:
        plain = usage.plain
        rows.append(["peak allocated", _bytes(plain.peak_bytes) if plain else "", _bytes(usage.planned.peak_bytes)])
        predicted = (usage.predicted_plain_bytes, usage.predicted_planned_bytes)
        rows.append(["predicted peak", *("" if value is None else _bytes(value) for value in predicted)])
        rows.append(["bytes", f"{plain.peak_bytes:,}" if plain else "", f"{usage.planned.peak_bytes:,}"])
        rows.append(["predicted bytes", *("" if value is None else f"{value:,}" for value in predicted)])
        rows.append(["step time", format_seconds(plain.step_s) if plain else "", format_seconds(usage.planned.step_s)])
    if trained is not None:
        times = (trained.plain_step_s, trained.planned_step_s)
        rows.append(["step time in training", *(format_seconds(value) for value in times)])
    return _table("Measured", ["", "plain", "planned"], rows)


def verified_table(report: VerifyReport | None) -> str:
    """What `verify` compared."""
    if report is None:
        return ""
    rows: list[list[_Cell]] = [["loss", repr(report.loss), repr(report.planned_loss)]]
    for kind, count in report.num_compared.items():
        different = sum(difference.kind == kind for difference in report.differences)
        rows.append([f"{count} x {kind}", "", f"{different} differ" if different else "equal"])
    rows += [[f"{d.kind}: {d.name}", d.plain, d.planned] for d in report.differences]
    title = "Verified: equal to the bit" if report.equal else "Verified: differences"
    return _table(title, ["", "plain", "planned"], rows)


def regions_table(plan: Plan | None) -> str:
    """What a plan recomputes, like regions together."""
    if plan is None:
        return ""
    rows: list[list[_Cell]] = [
        [path, outputs, (str(calls), calls), _bytes(num_bytes)]
        for path, calls, num_bytes, outputs in region_rows(plan.regions)
    ]
    head = ["region", "stored outputs", "calls", "stores, each"]
    return _table(f"{len(plan.regions)} regions", head, rows, kind="wide sortable", text_columns=2)


def ops_table(layers: LayerMap | None) -> str:
    """Operators with what they cost and keep."""
    if layers is None:
        return ""
    has_plan = any(row.num_recomputed for row in layers.ops)
    rows: list[list[_Cell]] = []
    for op in layers.ops:
        cost = op.cost
        row: list[_Cell] = [op.name, (f"{op.num_calls:,}", op.num_calls)]
        row += [(format_seconds(cost.seconds), cost.seconds), (format_flops(cost.flops), cost.flops)]
        row.append(_bytes(cost.plain_bytes))
        if has_plan:
            row += [_bytes(cost.planned_bytes), (f"{op.num_recomputed:,}", op.num_recomputed)]
            row += [(format_seconds(cost.recomputed_s), cost.recomputed_s)]
        rows.append(row)
    head = ["operator", "calls", "time", "FLOPs", "left for backward"]
    head += ["planned", "calls again", "time again"] if has_plan else []
    return _table("Operators, slowest first", head, rows, kind="wide sortable")


def losses(trained: TrainedRuns | None) -> str:
    """Losses of two trainings, step by step."""
    if trained is None:
        return ""
    pairs = zip(trained.plain_losses, trained.planned_losses, strict=True)
    rows: list[list[_Cell]] = [
        [str(step), repr(a), repr(b), "equal" if a == b else "differs"] for step, (a, b) in enumerate(pairs)
    ]
    table = _table("", ["step", "plain loss", "planned loss", ""], rows)
    return f"<details><summary>Losses of all {len(rows)} steps</summary>{table}</details>"


def _bytes(num_bytes: int) -> _Cell:
    return format_bytes(num_bytes), num_bytes


def _table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[_Cell]],
    *,
    total: int | None = None,
    kind: str = "",
    text_columns: int = 1,
) -> str:
    """A table; empty without rows. ``total`` is the row that sums those above it, ``text_columns`` are not numbers."""
    if not rows:
        return ""
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    heads = "".join(_tag("th", text, 'scope="col"', _text_class(i, text_columns)) for i, text in enumerate(head))
    lines = []
    for index, row in enumerate(rows):
        first, *others = row
        cells = _cell("th", first, 'scope="row"') + "".join(
            _cell("td", value, _text_class(i, text_columns)) for i, value in enumerate(others, start=1)
        )
        lines.append(f'<tr class="total">{cells}</tr>' if index == total else f"<tr>{cells}</tr>")
    inside = f"{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    outer, inner = ("wide", "sortable" if "sortable" in kind else "") if "wide" in kind else ("", kind)
    outer = " ".join(name for name in (outer, "live" if "live" in kind else "", "scroll") if name)
    table = f'<table class="{inner}">' if inner else "<table>"
    return f'<div class="{outer}">{table}{inside}</table></div>'


def _text_class(index: int, text_columns: int) -> str:
    return 'class="text"' if index < text_columns else ""


def _cell(tag: str, value: _Cell, attributes: str) -> str:
    if isinstance(value, str):
        return _tag(tag, value, attributes)
    text, number = value
    return _tag(tag, text, attributes, f'class="num" data-v="{number!r}"')


def _tag(tag: str, text: str, *attributes: str) -> str:
    inside = "".join(f" {attribute}" for attribute in attributes if attribute)
    return f"<{tag}{inside}>{html.escape(text)}</{tag}>"
