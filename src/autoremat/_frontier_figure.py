"""A picture of a frontier: overhead over peak, the proved bound below it, schedules by name as points.

Needs the ``report`` extra.
"""

from __future__ import annotations

from typing import Any, Literal

from autoremat._figures import new_figure, picture, text_style
from autoremat._frontier import Frontier, FrontierPoint, NamedPoint
from autoremat._units import format_bytes

_HIGHEST = 1.25
"""The picture ends this much above the dearest schedule by name: the last bytes cost many times that."""
_NEAR = 0.05
"""Points closer than this share of the picture share a name."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def frontier_file(curve: Frontier, *, kind: Literal["png", "svg"]) -> bytes:
    """Draw a frontier.

    Args:
        curve: With `Frontier.classics` for points beside the line.
        kind: "png" is light; "svg" follows the reader's system.

    Raises:
        UsageError: If matplotlib is not installed.
    """
    label = f"Overhead over peak memory of plans for {curve.model}"
    return picture(lambda ink: _draw(curve, ink), label=label, kind=kind)


def _overhead(curve: Frontier, point: FrontierPoint | NamedPoint) -> float:
    return 100 * (point.overhead_s if curve.objective == "time" else point.overhead_flops)


def _draw(curve: Frontier, ink: dict[str, str]) -> Any:
    figure = new_figure()
    axes = figure.subplots(1, 1)
    unit, scale = next(((u, s) for u, s in _UNITS if curve.plain_bytes >= 2 * s), ("B", 1))
    _style(axes, ink)
    peaks = [*(point.peak_bytes / scale for point in curve.points), curve.plain_bytes / scale]
    costs = [_overhead(curve, point) for point in curve.points]
    bounds = [100 * point.bound for point in curve.points]
    axes.fill_between(peaks, [*bounds, 0], [*costs, 0], step="post", color=ink["planned"], alpha=0.12, lw=0)
    axes.plot(peaks, [*costs, 0], color=ink["planned"], lw=1.8, drawstyle="steps-post", zorder=3)
    axes.plot(peaks, [*bounds, 0], color=ink["muted"], lw=1.0, ls=":", drawstyle="steps-post")
    named = [_overhead(curve, point) for point in curve.classics]
    top = min(max(costs), _HIGHEST * max(named)) if any(named) else max(costs)
    axes.set_ylim(0, 1.05 * max(top, 1.0))
    _classics(axes, curve, scale, top, ink)
    left = min(peaks[0], *(named.peak_bytes / scale for named in curve.classics)) if curve.classics else peaks[0]
    margin = 0.03 * (peaks[-1] - left)
    axes.set_xlim(left - margin, peaks[-1] + 5 * margin)
    _name_lines(axes, ink)
    what = "time (predicted)" if curve.objective == "time" else "FLOPs"
    axes.set_xlabel(f"peak allocated, {unit}", **text_style(ink, "muted", 9))
    axes.set_ylabel(f"extra {what}, %", **text_style(ink, "muted", 9))
    title = f"{curve.model}: {format_bytes(curve.smallest_bytes)} to {format_bytes(curve.plain_bytes)}"
    axes.set_title(title, loc="left", pad=14, **text_style(ink, "text", 11, bold=True))
    return figure


def _style(axes: Any, ink: dict[str, str]) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.patch.set_visible(False)
    axes.grid(visible=True, axis="y", color=ink["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=ink["muted"])


def _classics(axes: Any, curve: Frontier, scale: int, top: float, ink: dict[str, str]) -> None:
    """Schedules by name; those that lie close to one another are named together, at the rightmost."""
    places = sorted((point.peak_bytes / scale, _overhead(curve, point), point.name) for point in curve.classics)
    width = curve.plain_bytes / scale - min((x for x, _, _ in places), default=0.0)
    groups: list[list[tuple[float, float, str]]] = []
    for place in places:
        last = groups[-1][-1] if groups else None
        if last and place[0] - last[0] <= _NEAR * width and abs(place[1] - last[1]) <= _NEAR * top:
            groups[-1].append(place)
        else:
            groups.append([place])
    for group in groups:
        axes.plot(*zip(*((x, y) for x, y, _ in group), strict=True), "o", ms=5.5, color=ink["cause-activation"],
                  clip_on=False, zorder=4)  # fmt: skip
        names = ", ".join(name for _, _, name in group)
        where = {"xytext": (6, 5), "textcoords": "offset points"}
        axes.annotate(names, group[-1][:2], **where, **text_style(ink, "text", 8.5))


def _name_lines(axes: Any, ink: dict[str, str]) -> None:
    """What the lines are, at the right above the picture."""
    texts = (("planned", "plans"), ("muted", "proved: nothing below"), ("cause-activation", "schedules by name"))
    for position, (role, text) in enumerate(texts):
        axes.annotate(
            text,
            (1.0, 1.0),
            xycoords="axes fraction",
            xytext=(-10 - 150 * (len(texts) - 1 - position), 16),
            textcoords="offset points",
            ha="right",
            **text_style(ink, role, 9, bold=role == "planned"),
        )
