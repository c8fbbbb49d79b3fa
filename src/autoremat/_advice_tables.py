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
            _seconds(row.step_s),
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


def advice_tables(advice: Advice) -> tuple[Table, ...]:
    """The decision table, what each way takes, and its peak by cause; ways have numbers, as in the picture.

    For a terminal of 80 columns.
    """
    return _decision_table(advice), _effort_table(advice), _causes_table(advice)


def _decision_table(advice: Advice) -> Table:
    where = f"{advice.model}, batch {advice.batch}" + (f" x {advice.tokens} tokens" if advice.tokens else "")
    table = _table(f"{where}, on {advice.target}, {format_bytes(advice.budget_bytes)}", padding=0)
    rows = [dict(zip(ADVICE_COLUMNS, cells, strict=True)) for cells in advice_cells(advice)]
    speed = "tokens/s" if advice.tokens else "samples/s"
    names = ("way", "micro-batch", "peak", "fits", "step", speed, "largest batch", "longest sequence")
    shown = [name for name in names if any(row[name] for row in rows)]
    for name in shown:
        _add_column(table, name, is_text=name == "way")
    for number, row in enumerate(rows, 1):
        table.add_row(_number(advice, number), *(row[n] for n in shown), style="" if row["fits"] == "yes" else "dim")
    table.caption = f"Times are predictions, within {format_percent(advice.time_error)}; peaks are allocated bytes."
    if "longest sequence" in shown:
        table.caption += " Sequences: what memory allows; a model may have positions for fewer tokens."
    return table


def _effort_table(advice: Advice) -> Table:
    table = _table("what it does to the numbers, and what there is to do")
    for name in ("numbers", "to do"):
        _add_column(table, name, is_text=True)
    for number, row in enumerate(advice.rows, 1):
        table.add_row(str(number), row.numerics, row.effort)
    return table


def _causes_table(advice: Advice) -> Table:
    names, rows = cause_cells(advice)
    table = _table("peak by cause")
    for name in names[1:-1]:
        _add_column(table, name, is_text=False)
    for number, cells in enumerate(rows, 1):
        table.add_row(str(number), *cells[1:-1])
    return table


def _table(title: str, *, padding: int = 1) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, padding, 0, 0),
    )
    table.add_column("", justify="right", no_wrap=True)
    return table


def _add_column(table: Table, name: str, *, is_text: bool) -> None:
    table.add_column(
        name if is_text else name.replace("-", " ").replace(" ", "\n"),
        justify="left" if is_text else "right",
        overflow="fold",
    )


def _number(advice: Advice, number: int) -> str:
    return str(number) if number <= len(advice.rows) else ""


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


def _seconds(value: float) -> str:
    """Three digits: ways are compared."""
    return format_seconds(value) if value < 1 else f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _setting(row: AdviceRow) -> str:
    words = "planned" if row.regions == "planned" else "no checkpointing"
    return f"{words}, {row.precision}" if row.precision else words
