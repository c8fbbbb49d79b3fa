"""A picture of a decision table: the frontier of the batch with the rows as points. Needs the ``report`` extra."""

from __future__ import annotations

import importlib
from pathlib import Path

from autoremat._advice import Advice
from autoremat._errors import UsageError
from autoremat._units import format_bytes, format_seconds

SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = {"same bits": "#1f6f5c", "another order of sums": "#8a6d1a", "batch statistics differ": "#a3531f"}
_LOW = "#5b4a9e"


def save_advice_figure(advice: Advice, path: Path) -> None:
    """Draw time over a sample against peak memory: the frontier as a line, each way as a point, the budget.

    Args:
        advice: What to draw.
        path: Where to write it; its suffix, one of `SUFFIXES`, is the format.

    Raises:
        UsageError: If matplotlib is not installed, the suffix is another one, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: write a picture to a file that ends in {', '.join(SUFFIXES)}.")
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError('Pictures need matplotlib: pip install "autoremat[report]".') from error
    figure = figure_module.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    gib = 2**30
    line = [(peak / gib, seconds / advice.batch) for peak, seconds in advice.frontier]
    axes.plot(*zip(*line, strict=True), color="#777777", linewidth=1.2, label="plans for this batch", zorder=1)
    axes.axvline(advice.budget_bytes / gib, color="#b03030", linewidth=1, linestyle="--")
    axes.annotate(
        f" budget {format_bytes(advice.budget_bytes)}",
        (advice.budget_bytes / gib, 1.0),
        xycoords=("data", "axes fraction"),
        va="top",
        color="#b03030",
        fontsize=8,
    )
    for number, row in enumerate(advice.rows, 1):
        x, y = row.peak_bytes / gib, row.step_s / row.effective_batch
        colour = _COLOURS.get(row.numerics, _LOW)
        filled = colour if row.fits else "none"
        axes.scatter([x], [y], s=46, facecolors=filled, edgecolors=colour, zorder=2, label=f"{number} {row.name}")
        axes.annotate(f"{number}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=9, color=colour)
    axes.set_xlabel("predicted peak, GiB allocated (hollow: does not fit)")
    axes.set_ylabel("predicted seconds for a sample")
    plain = format_seconds(advice.rows[0].step_s)
    axes.set_title(
        f"{advice.model}, batch {advice.batch}, {advice.target} (plain step {plain})", loc="left", fontsize=10
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, loc="best", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UsageError(f"Cannot write the picture to {path}: {error.strerror}.") from error
