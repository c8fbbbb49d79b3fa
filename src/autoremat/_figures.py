"""Pictures of memory over a step, as SVG that takes its colours from the page around it.

matplotlib draws with placeholder colours; they are then replaced by CSS variables, so that one picture serves light and
dark pages. Needs the ``report`` extra.
"""

from __future__ import annotations

import html
import importlib
import io
import re
from collections.abc import Sequence
from typing import Any

from autoremat._errors import UsageError
from autoremat._results import MemoryProfile, UsageReport
from autoremat._step_graph import CAUSES
from autoremat._units import format_bytes

MAX_POINTS = 700
"""Points drawn across a picture; of those that fall together the highest is drawn."""

_ROLES = (
    *(f"cause-{cause.replace('_', '-')}" for cause in CAUSES),
    "text",
    "muted",
    "grid",
    "page",
    "budget",
    "plain",
    "planned",
)
_PLACEHOLDERS = {role: f"#fe{index:02x}a7" for index, role in enumerate(_ROLES)}
_WIDTH, _HEIGHT = 11.0, 3.9


def memory_figure(profiles: Sequence[tuple[str, MemoryProfile]], *, budget_bytes: int | None = None) -> str:
    """Live bytes by cause over a step, one picture per profile, side by side on one scale.

    Args:
        profiles: Titles with profiles, at least one.
        budget_bytes: Where to draw the budget, if anywhere.

    Returns:
        An ``<svg>`` element.

    Raises:
        UsageError: If matplotlib is not installed.
    """
    figure = _figure()
    top = max([profile.peak_bytes for _, profile in profiles] + ([budget_bytes] if budget_bytes else []))
    axes_row = figure.subplots(1, len(profiles), sharey=True, squeeze=False)[0]
    for axes, (title, profile) in zip(axes_row, profiles, strict=True):
        unit, scale = _style(axes, top)
        _stack(axes, profile, scale)
        _phases(axes, profile, top / scale)
        axes.set_title(
            f"{title}: peak {format_bytes(profile.peak_bytes)}", loc="left", pad=20, **_text("text", 11, bold=True)
        )
        axes.set_xlabel("predicted time since the start of the step, s", **_text("muted", 9))
        if axes is axes_row[0]:
            axes.set_ylabel(f"allocated, {unit}", **_text("muted", 9))
        if budget_bytes is not None:
            _budget_line(axes, budget_bytes, scale)
    causes = ", ".join(title for title, _ in profiles)
    return _svg(figure, f"Memory over one step by cause: {causes}")


def measured_figure(usage: UsageReport) -> str:
    """Measured live bytes over a step, plain and planned in one picture.

    Args:
        usage: With curves.

    Returns:
        An ``<svg>`` element.
    """
    figure = _figure()
    axes = figure.subplots(1, 1)
    steps = [("plain", usage.plain), ("planned", usage.planned)]
    top = max([step.peak_bytes for _, step in steps if step is not None] + [usage.budget_bytes or 0])
    unit, scale = _style(axes, top)
    for role, step in steps:
        if step is None or not step.curve_s:
            continue
        points = _highest(step.curve_s, step.curve_bytes)
        seconds = [step.curve_s[i] for i in points]
        axes.plot(
            seconds,
            [step.curve_bytes[i] / scale for i in points],
            color=_PLACEHOLDERS[role],
            lw=1.4,
            drawstyle="steps-post",
        )
        axes.annotate(
            f"{role}, {format_bytes(step.peak_bytes)}",
            _peak(step.curve_s, step.curve_bytes, scale),
            xytext=(6, 3),
            textcoords="offset points",
            **_text(role, 10, bold=True),
        )
    axes.set_xlabel("wall time since the start of the step, s", **_text("muted", 9))
    axes.set_ylabel(f"allocated, {unit}", **_text("muted", 9))
    axes.set_xlim(left=0)
    if usage.budget_bytes is not None:
        _budget_line(axes, usage.budget_bytes, scale)
    return _svg(figure, "Measured memory over one step, plain and planned")


def _figure() -> Any:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError('A report needs matplotlib: pip install "autoremat[report]".') from error
    return module.Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")


def _text(role: str, size: float, *, bold: bool = False) -> dict[str, Any]:
    return {"color": _PLACEHOLDERS[role], "fontsize": size, "fontweight": "bold" if bold else "normal"}


def _style(axes: Any, top: int) -> tuple[str, int]:
    """Bare axes with light horizontal lines; returns the unit of the vertical one, and its bytes."""
    unit, scale = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if top >= 2 * s), ("B", 1))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.patch.set_visible(False)
    axes.grid(visible=True, axis="y", color=_PLACEHOLDERS["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=_PLACEHOLDERS["muted"])
    axes.set_ylim(0, 1.08 * top / scale)
    return unit, scale


def _stack(axes: Any, profile: MemoryProfile, scale: int) -> None:
    totals = [sum(values) for values in zip(*profile.by_cause.values(), strict=True)]
    points = _highest(profile.seconds, totals)
    seconds = [profile.seconds[i] for i in points]
    causes = [cause for cause in CAUSES if any(profile.by_cause.get(cause, ()))]
    axes.stackplot(
        seconds,
        [[profile.by_cause[cause][i] / scale for i in points] for cause in causes],
        colors=[_PLACEHOLDERS[f"cause-{cause.replace('_', '-')}"] for cause in causes],
        step="post",
        lw=0,
    )
    if seconds:
        axes.set_xlim(seconds[0], max(seconds[-1], seconds[0] + 1e-9))
    at = profile.seconds[profile.peak_point]
    axes.plot([at], [profile.peak_bytes / scale], "o", ms=5, color=_PLACEHOLDERS["text"], clip_on=False, zorder=5)


def _phases(axes: Any, profile: MemoryProfile, top: float) -> None:
    starts = [profile.seconds[first] for _, first in profile.phases if first < len(profile.seconds)]
    ends = [*starts[1:], profile.seconds[-1]]
    span = profile.seconds[-1] - profile.seconds[0]
    for (name, _), start, end in zip(profile.phases, starts, ends, strict=False):
        if start > starts[0]:
            axes.axvline(start, color=_PLACEHOLDERS["muted"], lw=0.8, ls=":")
        if end - start > 0.12 * span:
            axes.text(start, 1.095 * top, name, ha="left", va="bottom", **_text("muted", 9))


def _budget_line(axes: Any, budget_bytes: int, scale: int) -> None:
    axes.axhline(budget_bytes / scale, color=_PLACEHOLDERS["budget"], lw=1.4, ls=(0, (5, 3)))
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}",
        (1.0, budget_bytes / scale),
        xycoords=("axes fraction", "data"),
        xytext=(-3, 5),
        textcoords="offset points",
        ha="right",
        bbox={"facecolor": _PLACEHOLDERS["page"], "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
        **_text("budget", 9, bold=True),
    )


def _highest(seconds: Sequence[float], values: Sequence[int]) -> list[int]:
    """Indices of at most `MAX_POINTS` points over time, in each short interval the one with the largest value."""
    if len(seconds) <= MAX_POINTS:
        return list(range(len(seconds)))
    width = (seconds[-1] - seconds[0]) / MAX_POINTS or 1.0
    best: dict[int, int] = {}
    for index, second in enumerate(seconds):
        place = int((second - seconds[0]) / width)
        if place not in best or values[index] > values[best[place]]:
            best[place] = index
    return list(best.values())


def _peak(seconds: Sequence[float], values: Sequence[int], scale: int) -> tuple[float, float]:
    at = max(range(len(values)), key=values.__getitem__)
    return seconds[at], values[at] / scale


def _svg(figure: Any, label: str) -> str:
    """The picture as an inline element: colours from CSS variables, font and size from the page around it."""
    matplotlib = importlib.import_module("matplotlib")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoremat"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # two pictures on a page would share them
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # a hundredth of a point is finer than any screen
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    for role, colour in _PLACEHOLDERS.items():
        rest = rest.replace(colour, f"var(--{role})")
    return head.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1) + ">" + rest
