"""Colours of reports, and pictures of memory over a step as files of their own.

matplotlib draws with placeholder colours; they are then replaced by CSS variables, so that one SVG serves light and
dark pages. Pictures need the ``report`` extra.
"""

from __future__ import annotations

import html
import importlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from autoremat._errors import UsageError
from autoremat._report_data import highest
from autoremat._results import MemoryProfile
from autoremat._step_graph import CAUSES
from autoremat._units import format_bytes

MAX_POINTS = 700
"""Points drawn across a picture; of those that fall together the highest is drawn."""

LIGHT = {
    "page": "#fcfcfb",
    "card": "#f3f3f0",
    "text": "#1c1e21",
    "muted": "#666b73",
    "grid": "#e3e3de",
    "budget": "#c2312b",
    "plain": "#8a8f98",
    "planned": "#1f6fd1",
    "cause-parameter": "#33465e",
    "cause-optimizer-state": "#5d7796",
    "cause-ema": "#9933cc",
    "cause-gradient": "#93a9c2",
    "cause-buffer": "#b9a87f",
    "cause-input": "#d9cfb4",
    "cause-communication": "#389485",
    "cause-activation": "#e08a2e",
    "cause-temporary": "#f3c98b",
}
DARK = {
    "page": "#15171a",
    "card": "#1f2226",
    "text": "#e8e9ea",
    "muted": "#9a9fa8",
    "grid": "#2e3238",
    "budget": "#ff6b61",
    "plain": "#8f959e",
    "planned": "#62a8ff",
    "cause-parameter": "#3f5877",
    "cause-optimizer-state": "#6485ad",
    "cause-ema": "#9933cc",
    "cause-gradient": "#94b0d0",
    "cause-buffer": "#8d7f5c",
    "cause-input": "#b8aa82",
    "cause-communication": "#99e6d9",
    "cause-activation": "#e8963c",
    "cause-temporary": "#f5cd92",
}
_PLACEHOLDERS = {role: f"#fe{index:02x}a7" for index, role in enumerate(LIGHT)}
_WIDTH, _HEIGHT = 11.0, 3.9


def css_variables() -> str:
    """Both palettes as CSS variables: dark where the reader's system is, unless the page says otherwise."""
    light, dark = (" ".join(f"--{role}: {colour};" for role, colour in palette.items()) for palette in (LIGHT, DARK))
    light, dark = f"color-scheme: light; {light}", f"color-scheme: dark; {dark}"
    return (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}'
    )


def memory_file(
    profiles: Sequence[tuple[str, MemoryProfile]], *, budget_bytes: int | None = None, kind: Literal["png", "svg"]
) -> bytes:
    """Live bytes by cause over a step as a picture with a legend.

    Args:
        profiles: Titles with profiles, at least one; side by side on one scale.
        budget_bytes: Where to draw the budget, if anywhere.
        kind: "png" is light; "svg" follows the reader's system.

    Raises:
        UsageError: If matplotlib is not installed.
    """

    def draw(ink: dict[str, str]) -> Any:
        figure = _draw_memory(profiles, budget_bytes, ink)
        _draw_legend(figure, profiles, ink)
        return figure

    return picture(draw, label=_label(profiles), kind=kind)


def picture(draw: Callable[[dict[str, str]], Any], *, label: str, kind: Literal["png", "svg"]) -> bytes:
    """A picture as a file of its own.

    Args:
        draw: Makes the figure in these colours.
        label: What it shows, for those who do not see it.
        kind: "png" is light; "svg" follows the reader's system.
    """
    if kind == "png":
        buffer = io.BytesIO()
        draw(LIGHT).savefig(buffer, format="png", dpi=160, facecolor=LIGHT["page"], metadata={"Software": None})
        return buffer.getvalue()
    style = f"<style>{css_variables()} svg {{ background: var(--page); font-family: sans-serif; }}</style>"
    head, rest = _svg(draw(_PLACEHOLDERS), label).split(">", 1)
    size = f'width="{_WIDTH * 96:.0f}" height="{_HEIGHT * 96:.0f}"'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head} {size}>{style}{rest}'.encode()


def _label(profiles: Sequence[tuple[str, MemoryProfile]]) -> str:
    return f"Memory over one step by cause: {', '.join(title for title, _ in profiles)}"


def _draw_memory(profiles: Sequence[tuple[str, MemoryProfile]], budget_bytes: int | None, ink: dict[str, str]) -> Any:
    figure = new_figure()
    reserved = [profile.allocator.reserved_bytes for _, profile in profiles if profile.allocator is not None]
    top = max([profile.peak_bytes for _, profile in profiles] + reserved + ([budget_bytes] if budget_bytes else []))
    axes_row = figure.subplots(1, len(profiles), sharey=True, squeeze=False)[0]
    for axes, (title, profile) in zip(axes_row, profiles, strict=True):
        unit, scale = _style(axes, top, ink)
        _stack(axes, profile, scale, ink)
        _phases(axes, profile, top / scale, ink)
        axes.set_title(
            f"{title}: peak {format_bytes(profile.peak_bytes)}",
            loc="left",
            pad=20,
            **text_style(ink, "text", 11, bold=True),
        )
        axes.set_xlabel("predicted time since the start of the step, s", **text_style(ink, "muted", 9))
        if axes is axes_row[0]:
            axes.set_ylabel(f"allocated, {unit}", **text_style(ink, "muted", 9))
        if budget_bytes is not None:
            _line(axes, budget_bytes, scale, ink, role="budget", text=f"budget {format_bytes(budget_bytes)}")
        if profile.allocator is not None:
            level = profile.allocator.reserved_bytes
            is_crowded = budget_bytes is not None and 0 <= budget_bytes - level < 0.06 * top
            text = f"reserved {format_bytes(level)}"
            _line(axes, level, scale, ink, role="muted", text=text, is_below=is_crowded)
    return figure


def _causes_in(profiles: Sequence[tuple[str, MemoryProfile]]) -> list[str]:
    return [cause for cause in CAUSES if any(any(profile.by_cause.get(cause, ())) for _, profile in profiles)]


def _draw_legend(figure: Any, profiles: Sequence[tuple[str, MemoryProfile]], ink: dict[str, str]) -> None:
    patches = importlib.import_module("matplotlib.patches")
    causes = list(reversed(_causes_in(profiles)))
    handles = [
        patches.Patch(color=ink[f"cause-{cause.replace('_', '-')}"], label=cause.replace("_", " ")) for cause in causes
    ]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=ink["muted"],
        handlelength=0.8,
        handleheight=0.8,
        columnspacing=1.4,
    )


def new_figure() -> Any:
    """An empty figure, as wide as a page."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError('A report needs matplotlib: pip install "autoremat[report]".') from error
    return module.Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")


def text_style(ink: dict[str, str], role: str, size: float, *, bold: bool = False) -> dict[str, Any]:
    """How text looks, as keyword arguments."""
    return {"color": ink[role], "fontsize": size, "fontweight": "bold" if bold else "normal"}


def _style(axes: Any, top: int, ink: dict[str, str]) -> tuple[str, int]:
    """Bare axes with light horizontal lines; returns the unit of the vertical one, and its bytes."""
    unit, scale = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if top >= 2 * s), ("B", 1))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.patch.set_visible(False)
    axes.grid(visible=True, axis="y", color=ink["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=ink["muted"])
    axes.set_ylim(0, 1.08 * top / scale)
    return unit, scale


def _stack(axes: Any, profile: MemoryProfile, scale: int, ink: dict[str, str]) -> None:
    totals = [sum(values) for values in zip(*profile.by_cause.values(), strict=True)]
    points = highest(profile.seconds, totals, MAX_POINTS)
    seconds = [profile.seconds[i] for i in points]
    causes = [cause for cause in CAUSES if any(profile.by_cause.get(cause, ()))]
    axes.stackplot(
        seconds,
        [[profile.by_cause[cause][i] / scale for i in points] for cause in causes],
        colors=[ink[f"cause-{cause.replace('_', '-')}"] for cause in causes],
        step="post",
        lw=0,
    )
    if seconds:
        axes.set_xlim(seconds[0], max(seconds[-1], seconds[0] + 1e-9))
    at = profile.seconds[profile.peak_point]
    axes.plot([at], [profile.peak_bytes / scale], "o", ms=5, color=ink["text"], clip_on=False, zorder=5)


def _phases(axes: Any, profile: MemoryProfile, top: float, ink: dict[str, str]) -> None:
    starts = [profile.seconds[first] for _, first in profile.phases if first < len(profile.seconds)]
    ends = [*starts[1:], profile.seconds[-1]]
    span = profile.seconds[-1] - profile.seconds[0]
    for (name, _), start, end in zip(profile.phases, starts, ends, strict=False):
        if start > starts[0]:
            axes.axvline(start, color=ink["muted"], lw=0.8, ls=":")
        if end - start > 0.12 * span:
            axes.text(start, 1.095 * top, name, ha="left", va="bottom", **text_style(ink, "muted", 9))


def _line(
    axes: Any, num_bytes: int, scale: int, ink: dict[str, str], *, role: str, text: str, is_below: bool = False
) -> None:
    """A level with its name above or below it: that of the budget stands at the right, others at the left."""
    is_budget = role == "budget"
    axes.axhline(num_bytes / scale, color=ink[role], lw=1.4 if is_budget else 0.9, ls=(0, (5, 3)) if is_budget else ":")
    axes.annotate(
        text,
        (1.0 if is_budget else 0.0, num_bytes / scale),
        xycoords=("axes fraction", "data"),
        xytext=(-3 if is_budget else 3, -12 if is_below else 5),
        textcoords="offset points",
        ha="right" if is_budget else "left",
        bbox={"facecolor": ink["page"], "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
        **text_style(ink, role, 9, bold=is_budget),
    )


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
