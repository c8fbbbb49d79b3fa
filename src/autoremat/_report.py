"""One self-contained, interactive HTML page about plans and results: light and dark, no network.

Tables are HTML; pictures, the map of layers and sorting are the page's own script (`_page/`), which draws from the
JSON of `_report_data`. Renders plain data and computes nothing: every figure on the page is in a `ReportSection`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from string import Template

from autoremat._figures import css_variables
from autoremat._report_data import MAX_POINTS, ReportSection, section_data
from autoremat._report_tables import (
    live_table,
    losses,
    measured_table,
    moments_table,
    ops_table,
    peak_table,
    regions_table,
    verified_table,
)
from autoremat._step_graph import CAUSES
from autoremat._units import format_bytes, format_flops, format_percent

_OVER = "over the budget"
_SCRIPTS = ("base.js", "charts.js", "layers.js", "start.js")


def render_report(sections: Sequence[ReportSection], *, title: str = "autoremat", footer: str = "") -> str:
    """Render a page.

    Args:
        sections: In order.
        title: Title of the page.
        footer: A line at its end, such as the command and the versions that made it.

    Returns:
        HTML, complete in itself.

    Example:
        >>> page = render_report([ReportSection(title="Nothing yet")])
        >>> "<h2>Nothing yet</h2>" in page
        True
    """
    data = json.dumps([section_data(section) for section in sections], separators=(",", ":"))
    return Template(_file("page.html")).substitute(
        title=html.escape(title),
        style=css_variables() + "\n" + _file("report.css"),
        body="\n".join(_section(section, index) for index, section in enumerate(sections)),
        footer=f"<footer>{html.escape(footer)}</footer>" if footer else "",
        data=data.replace("<", "\\u003c"),  # no "</script>" can end the data early
        script="\n".join(map(_file, _SCRIPTS)),
    )


@cache
def _file(name: str) -> str:
    return (files("autoremat") / "_page" / name).read_text(encoding="utf-8")


def _section(section: ReportSection, index: int) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    parts.append(_cards(section))
    parts += [_memory(section, index), _measured(section, index), _frontier(section, index), _layers(section, index)]
    tables = [peak_table(section.profiles), measured_table(section), verified_table(section.verified)]
    moments = [moments_table(name, profile) for name, profile in section.profiles]
    more = [
        *(live_table(name, profile) for name, profile in section.profiles),
        regions_table(section.plan),
        ops_table(section.layers),
    ]
    parts += [f'<div class="tables">{"".join(group)}</div>' for group in (tables, moments, more) if any(group)]
    parts.append(losses(section.trained))
    return f"<section>{''.join(parts)}</section>"


def _article(title: str, inside: str, *, what: str, index: int, hint: str = "") -> str:
    below = f'<p class="hint">{_e(hint)}</p>' if hint else ""
    host = f'<div class="chart" data-draw="{what}" data-section="{index}"></div>'
    return f"<article><h3>{_e(title)}</h3>{inside}{host}{below}</article>"


def _memory(section: ReportSection, index: int) -> str:
    if not section.profiles:
        return ""
    found = {cause for _, profile in section.profiles for cause, values in profile.by_cause.items() if any(values)}
    most = max(len(profile.seconds) for _, profile in section.profiles)
    drawn = f" Of up to {most:,} events the highest of each short interval is drawn." if most > MAX_POINTS else ""
    line = '<li><i class="line dotted" style="color:var(--plain)"></i>the plain step</li>' if section.planned else ""
    hint = f"Point, or focus the picture and use the arrow keys; p goes to the peak.{drawn}"
    legend = _legend(found, more=line if section.plain else "")
    return _article("Memory over the step, by cause", legend, what="memory", index=index, hint=hint)


def _measured(section: ReportSection, index: int) -> str:
    if section.usage is None or not section.measured:
        return ""
    items = "".join(
        f'<li><i class="line" style="color:var(--{name})"></i>{name}, peak {_e(format_bytes(step.peak_bytes))}</li>'
        for name, step in section.measured
    )
    title = f"Measured: {section.usage.judge}"
    return _article(title, f'<ul class="legend">{items}</ul>', what="measured", index=index)


def _frontier(section: ReportSection, index: int) -> str:
    frontier = section.frontier
    if frontier is None:
        return ""
    swatch = '<li><i class="{}" style="{}"></i>{}</li>'
    items = [
        swatch.format("line", "color:var(--planned)", "the least overhead found at each peak"),
        swatch.format("line dotted", "color:var(--muted)", "proved: no plan can be below"),
    ]
    if section.plan is not None:
        items.append("<li><span style='color:var(--planned)'>★</span> the plan</li>")
    if frontier.classics:
        items.append(swatch.format("diamond", "background:var(--cause-activation)", "schedules known by name"))
    choice = (
        '<div class="bar"><label>extra <select><option value="overhead_s">time (predicted)</option>'
        '<option value="overhead_flops">FLOPs</option></select></label></div>'
    )
    least = "time" if frontier.objective == "time" else "FLOPs"
    hint = f"Against the peak of allocated bytes. What was minimised is {least}."
    title = "Frontier: what less memory costs"
    return _article(title, f'{choice}<ul class="legend">{"".join(items)}</ul>', what="frontier", index=index, hint=hint)


def _layers(section: ReportSection, index: int) -> str:
    return "" if section.layers is None else _article("Map of layers", "", what="layers", index=index)


def _cards(section: ReportSection) -> str:
    cards: list[tuple[str, str, str]] = []
    if section.plan is not None and section.plan.plain is not None and section.plan.planned is not None:
        plan, plain, planned = section.plan, section.plan.plain, section.plan.planned
        over = plan.budget_bytes is not None and plain.peak_bytes > plan.budget_bytes
        cards.append(("plain peak allocated", format_bytes(plain.peak_bytes), _OVER if over else "predicted"))
        cards.append(("planned peak allocated", format_bytes(planned.peak_bytes), "predicted"))
        if planned.reserved_bytes is not None:
            beyond = f"{format_bytes(planned.fragmentation_bytes or 0)} beyond allocated"
            cards.append(("planned peak reserved", format_bytes(planned.reserved_bytes), beyond))
        if plan.budget_bytes is not None:
            what = " reserved" if plan.budget_is == "reserved" else ""
            cards.append((f"budget{what}", format_bytes(plan.budget_bytes), plan.target))
        cards.append(("extra FLOPs", f"+{format_percent(plan.overhead_flops or 0)}", format_flops(planned.flops)))
        minimised = "; FLOPs were minimised" if plan.objective == "flops" else ""
        cards.append(("extra time", f"+{format_percent(plan.overhead_s or 0)}", f"predicted{minimised}"))
        if plan.bound is not None and plan.gap is not None:
            what = "time" if plan.objective == "time" else "FLOPs"
            least = f"least is +{format_percent(plan.bound)}, proved"
            cards.append((f"extra {what} over the least", format_percent(plan.gap), least))
    if section.usage is not None:
        word = {True: "within the budget", False: _OVER, None: ""}[section.usage.within_budget]
        cards.append(("measured peak", format_bytes(section.usage.planned.peak_bytes), word))
    if section.trained is not None:
        total = len(section.trained.plain_losses)
        cards.append(("equal losses", f"{section.trained.num_equal} of {total}", "to the bit"))
    return f'<dl class="cards">{"".join(_card(*card) for card in cards)}</dl>'


def _card(name: str, value: str, note: str) -> str:
    kind = ' class="bad"' if note == _OVER else ""
    return f"<div{kind}><dt>{_e(name)}</dt><dd>{_e(value)}</dd><small>{_e(note)}</small></div>"


def _legend(causes: Iterable[str], *, more: str = "") -> str:
    found = set(causes)
    items = (
        f'<li><i style="background:var(--cause-{cause.replace("_", "-")})"></i>{cause.replace("_", " ")}</li>'
        for cause in reversed(CAUSES)
        if cause in found
    )
    return f'<ul class="legend">{"".join(items)}{more}</ul>'


def _e(text: str) -> str:
    return html.escape(text)
