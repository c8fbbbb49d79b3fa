"""The decision table in words, for terminals and pages. Computes nothing but its wording."""

from __future__ import annotations

from rich import box
from rich.table import Table

from autoremat._advice import Advice, AdviceRow
from autoremat._step_graph import CAUSES
from autoremat._units import format_bytes, format_percent, format_seconds

ADVICE_COLUMNS = (
    "way",
    "micro-batch",
    "peak",
    "fits",
    "step",
    "samples/s",
    "tokens/s",
    "numbers",
    "largest batch",
    "longest sequence",
)


def advice_cells(advice: Advice) -> list[tuple[str, ...]]:
    """The decision table in words: a cell for each of `ADVICE_COLUMNS`; the fastest setting is the last row."""
    rows = [*advice.rows, *([] if advice.fastest is None else [advice.fastest])]
    return [
        (
            row.name if row is not advice.fastest else f"fastest for {row.effective_batch} ({_setting(row)})",
            f"{row.micro_batch}" if row.accumulate == 1 else f"{row.micro_batch} x {row.accumulate}",
            format_bytes(row.peak_bytes),
            "yes" if row.fits else "no",
            format_seconds(row.step_s),
            f"{row.samples_per_s:,.0f}" if row.samples_per_s >= 100 else f"{row.samples_per_s:.3g}",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            row.numerics,
            *("" if size is None else f"{size:,}" for size in (row.largest_batch, row.longest_sequence)),
        )
        for row in rows
    ]


def cause_cells(advice: Advice) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column names and a row for each way: its peak by cause, and what there is to do."""
    causes = [c for c in CAUSES if any(row.peak_by_cause.get(c) for row in advice.rows)]
    names = ("way", *(cause.replace("_", " ") for cause in causes), "to do")
    cells = [
        (row.name, *(format_bytes(row.peak_by_cause.get(cause, 0)) for cause in causes), row.effort)
        for row in advice.rows
    ]
    return names, cells


def advice_table(advice: Advice) -> Table:
    """The decision table."""
    where = f"{advice.model}, batch {advice.batch}" + (f" x {advice.tokens} tokens" if advice.tokens else "")
    title = f"{where}, on {advice.target}, {format_bytes(advice.budget_bytes)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [i for i, name in enumerate(ADVICE_COLUMNS) if any(cells[i] for cells in advice_cells(advice))]
    for i in shown:
        table.add_column(ADVICE_COLUMNS[i], justify="left" if i in {0, 7} else "right", overflow="fold")
    for cells in advice_cells(advice):
        table.add_row(*(cells[i] for i in shown), style="" if cells[3] == "yes" else "dim")
    table.caption = f"Times are predictions, within {format_percent(advice.time_error)}; peaks are allocated bytes."
    return table


def advice_causes_table(advice: Advice) -> Table:
    """Peaks by cause, and what there is to do."""
    names, rows = cause_cells(advice)
    table = Table(title="peak by cause", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in {0, len(names) - 1} else "right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def advice_lines(advice: Advice) -> list[str]:
    """The recommendation and what decides it, a paragraph each."""
    lines = [f"Recommended: {advice.action}. {advice.reason}"]
    for found in advice.diagnoses:
        parts = [
            f"{r.name}: {format_bytes(r.peak_bytes)}{' (estimate)' if r.is_estimate else ''}, "
            f"{'fits' if r.fits else 'does not fit'}"
            for r in found.remedies
        ]
        end = f" With the tightest checkpointing on top: {'; '.join(parts)}." if parts else ""
        lines.append(f"{found.kind.capitalize()}: {found.text}{end}")
    return lines


def _setting(row: AdviceRow) -> str:
    return f"planned, {row.precision}" if row.precision else "planned"
