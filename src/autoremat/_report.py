"""One self-contained HTML page about plans and results: pictures, tables, light and dark, no network.

Renders plain data and computes nothing: every figure on the page is in a `ReportSection`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoremat._figures import css_variables, measured_figure, memory_figure
from autoremat._plan import Plan
from autoremat._results import MemoryProfile, TrainedRuns, UsageReport, VerifyReport
from autoremat._step_graph import CAUSES
from autoremat._tables import live_rows, region_rows
from autoremat._units import format_bytes, format_flops, format_percent, format_seconds

_NUM_MOMENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """One model in a report; what is None is left out.

    Attributes:
        title: Heading.
        text: A paragraph below it.
        plain: Predicted memory of the plain step.
        planned: Predicted memory of the planned step.
        plan: The plan.
        verified: What `verify` found.
        usage: What `measure` found.
        trained: Losses and times of two trainings.
    """

    title: str
    text: str = ""
    plain: MemoryProfile | None = None
    planned: MemoryProfile | None = None
    plan: Plan | None = None
    verified: VerifyReport | None = None
    usage: UsageReport | None = None
    trained: TrainedRuns | None = None


def render_report(sections: Sequence[ReportSection], *, title: str = "autoremat", footer: str = "") -> str:
    """Render a page.

    Args:
        sections: In order.
        title: Title of the page.
        footer: A line at its end, such as the command and the versions that made it.

    Returns:
        HTML, complete in itself.

    Raises:
        UsageError: If matplotlib is not installed.
    """
    body = "\n".join(_section(section) for section in sections)
    return _PAGE.format(
        title=html.escape(title),
        style=css_variables() + _STYLE,
        body=body,
        footer=f"<footer>{html.escape(footer)}</footer>" if footer else "",
    )


def _section(section: ReportSection) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    parts.append(_cards(section))
    profiles = [(name, p) for name, p in (("Plain", section.plain), ("Planned", section.planned)) if p is not None]
    if profiles:
        budget = section.plan.budget_bytes if section.plan is not None else None
        legend = _legend(
            {cause for _, profile in profiles for cause, values in profile.by_cause.items() if any(values)}
        )
        parts.append(f"<figure>{legend}<div>{memory_figure(profiles, budget_bytes=budget)}</div></figure>")
    if section.usage is not None and section.usage.planned.curve_s:
        parts.append(f"<figure><figcaption>Measured: {html.escape(section.usage.judge)}</figcaption>")
        parts.append(f"<div>{measured_figure(section.usage)}</div></figure>")
    tables = [_peak_table(profiles), _measured_table(section), _verified_table(section)]
    moments = [_moments_table(name, profile) for name, profile in profiles]
    more = [*(_live_table(name, profile) for name, profile in profiles), _regions_table(section.plan)]
    parts += [f'<div class="tables">{"".join(group)}</div>' for group in (tables, moments, more)]
    parts.append(_losses(section.trained))
    return f"<section>{''.join(parts)}</section>"


def _cards(section: ReportSection) -> str:
    cards: list[tuple[str, str, str]] = []
    if section.plan is not None and section.plan.plain is not None and section.plan.planned is not None:
        plan, plain, planned = section.plan, section.plan.plain, section.plan.planned
        over = plan.budget_bytes is not None and plain.peak_bytes > plan.budget_bytes
        cards.append(
            ("plain peak allocated", format_bytes(plain.peak_bytes), "over the budget" if over else "predicted")
        )
        cards.append(("planned peak allocated", format_bytes(planned.peak_bytes), "predicted"))
        if planned.reserved_bytes is not None:
            beyond = f"{format_bytes(planned.fragmentation_bytes or 0)} beyond allocated"
            cards.append(("planned peak reserved", format_bytes(planned.reserved_bytes), beyond))
        if plan.budget_bytes is not None:
            what = " reserved" if plan.budget_is == "reserved" else ""
            cards.append((f"budget{what}", format_bytes(plan.budget_bytes), plan.target))
        cards.append(("extra FLOPs", f"+{format_percent(plan.overhead_flops or 0)}", format_flops(planned.flops)))
        cards.append(("extra time", f"+{format_percent(plan.overhead_s or 0)}", "predicted"))
        if plan.bound is not None and plan.gap is not None:
            what = "time" if plan.objective == "time" else "FLOPs"
            least = f"least is +{format_percent(plan.bound)}, proved"
            cards.append((f"extra {what} over the least", format_percent(plan.gap), least))
    if section.usage is not None:
        word = {True: "within the budget", False: "over the budget", None: ""}[section.usage.within_budget]
        cards.append(("measured peak", format_bytes(section.usage.planned.peak_bytes), word))
    if section.trained is not None:
        total = len(section.trained.plain_losses)
        cards.append(("equal losses", f"{section.trained.num_equal} of {total}", "to the bit"))
    items = (
        f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd><small>{_e(note)}</small></div>" for name, value, note in cards
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def _legend(causes: Iterable[str]) -> str:
    found = set(causes)
    items = (
        f'<li><i style="background:var(--cause-{cause.replace("_", "-")})"></i>{cause.replace("_", " ")}</li>'
        for cause in reversed(CAUSES)
        if cause in found
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _peak_table(profiles: Sequence[tuple[str, MemoryProfile]]) -> str:
    if not profiles:
        return ""
    causes = [cause for cause in CAUSES if any(profile.peak_by_cause.get(cause, 0) for _, profile in profiles)]
    rows = [
        [cause.replace("_", " "), *(format_bytes(profile.peak_by_cause.get(cause, 0)) for _, profile in profiles)]
        for cause in causes
    ]
    rows.append(["peak allocated", *(format_bytes(profile.peak_bytes) for _, profile in profiles)])
    usages = [profile.allocator for _, profile in profiles]
    if any(usages):
        rows.append(["peak reserved", *("" if u is None else format_bytes(u.reserved_bytes) for u in usages)])
        rows.append(["unused at that peak", *("" if u is None else format_bytes(u.unused_bytes) for u in usages)])
        rows.append(["segments", *("" if u is None else str(u.num_segments) for u in usages)])
    rows.append(["at", *(profile.peak_at for _, profile in profiles)])
    return _table("Predicted peak by cause", ["", *(name.lower() for name, _ in profiles)], rows, total=len(causes))


def _moments_table(name: str, profile: MemoryProfile) -> str:
    rows = [
        [moment.at, format_bytes(moment.num_bytes), format_bytes(profile.peak_bytes - moment.num_bytes)]
        for moment in profile.high_moments[:_NUM_MOMENTS]
    ]
    return _table(f"Highest moments, {name.lower()}", ["", "bytes", "below the peak"], rows, kind="moments")


def _live_table(name: str, profile: MemoryProfile) -> str:
    rows = [
        [cause, module, maker, str(count), format_bytes(num_bytes)]
        for cause, module, maker, count, num_bytes in live_rows(profile.alive_at_peak)
    ]
    head = ["what", "module", "made by", "storages", "bytes"]
    return _table(f"Alive at the {name.lower()} peak, largest first", head, rows, kind="wide live")


def _measured_table(section: ReportSection) -> str:
    usage, trained = section.usage, section.trained
    rows: list[list[str]] = []
    if usage is not None:
        plain = usage.plain
        peaks = (format_bytes(plain.peak_bytes) if plain else "", format_bytes(usage.planned.peak_bytes))
        rows.append(["peak allocated", *peaks])
        predicted = (usage.predicted_plain_bytes, usage.predicted_planned_bytes)
        rows.append(["predicted peak", *("" if value is None else format_bytes(value) for value in predicted)])
        rows.append(["bytes", f"{plain.peak_bytes:,}" if plain else "", f"{usage.planned.peak_bytes:,}"])
        rows.append(["predicted bytes", *("" if value is None else f"{value:,}" for value in predicted)])
        rows.append(["step time", format_seconds(plain.step_s) if plain else "", format_seconds(usage.planned.step_s)])
    if trained is not None:
        times = (trained.plain_step_s, trained.planned_step_s)
        rows.append(["step time in training", *(format_seconds(value) for value in times)])
    return _table("Measured", ["", "plain", "planned"], rows)


def _verified_table(section: ReportSection) -> str:
    report = section.verified
    if report is None:
        return ""
    rows = [["loss", repr(report.loss), repr(report.planned_loss)]]
    for kind, count in report.num_compared.items():
        different = sum(difference.kind == kind for difference in report.differences)
        rows.append([f"{count} x {kind}", "", f"{different} differ" if different else "equal"])
    rows += [[f"{d.kind}: {d.name}", d.plain, d.planned] for d in report.differences]
    title = "Verified: equal to the bit" if report.equal else "Verified: differences"
    return _table(title, ["", "plain", "planned"], rows)


def _regions_table(plan: Plan | None) -> str:
    if plan is None:
        return ""
    rows = [
        [path, str(calls), format_bytes(num_bytes), outputs]
        for path, calls, num_bytes, outputs in region_rows(plan.regions)
    ]
    return _table(f"{len(plan.regions)} regions", ["region", "calls", "stores", "stored outputs"], rows, kind="wide")


def _losses(trained: TrainedRuns | None) -> str:
    if trained is None:
        return ""
    pairs = zip(trained.plain_losses, trained.planned_losses, strict=True)
    rows = [[str(step), repr(a), repr(b), "equal" if a == b else "differs"] for step, (a, b) in enumerate(pairs)]
    table = _table("", ["step", "plain loss", "planned loss", ""], rows)
    return f"<details><summary>Losses of all {len(rows)} steps</summary>{table}</details>"


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, total: int | None = None, kind: str = ""
) -> str:
    if not rows:
        return ""
    caption = f"<caption>{_e(title)}</caption>" if title else ""
    heads = "".join(f'<th scope="col">{_e(text)}</th>' for text in head)
    lines = []
    for index, row in enumerate(rows):
        first, *others = row
        cells = f'<th scope="row">{_e(first)}</th>' + "".join(f"<td>{_e(text)}</td>" for text in others)
        lines.append(f'<tr class="total">{cells}</tr>' if index == total else f"<tr>{cells}</tr>")
    which = f' class="{kind}"' if kind else ""
    return f"<table{which}>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _e(text: str) -> str:
    return html.escape(text)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
{footer}
</main>
</body>
</html>
"""
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .25rem; }
p { max-width: 46rem; margin: .25rem 0 1rem; color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0 1.5rem; }
.cards div { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
.cards dt { color: var(--muted); font-size: .8rem; }
.cards dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.cards small { color: var(--muted); }
figure { margin: 0 0 1.5rem; }
figure > div { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 700px; height: auto; }
figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; list-style: none; margin: 0 0 .4rem; padding: 0;
  font-size: .85rem; color: var(--muted); }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem 2.5rem;
  align-items: start; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
table.wide, table:only-child { grid-column: 1 / -1; }
.tables + .tables { margin-top: 1rem; }
caption { text-align: left; font-weight: 600; font-size: .95rem; padding: .3rem 0; }
th, td { text-align: right; padding: .28rem 0 .28rem .9rem; border-bottom: 1px solid var(--grid); font-weight: 400;
  vertical-align: top; }
td, table.wide th:first-child { overflow-wrap: anywhere; }
th:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
table.wide th:first-child { white-space: normal; }
thead th { color: var(--muted); font-size: .8rem; }
table.wide th, table.wide td:last-child { text-align: left; }
table.wide th:nth-child(2), table.wide th:nth-child(3) { text-align: right; }
table.wide.live :is(th, td) { text-align: left; }
table.wide.live :is(th, td):nth-child(n + 4) { text-align: right; white-space: nowrap; }
table.moments th:first-child { white-space: normal; overflow-wrap: anywhere; }
table.moments td { white-space: nowrap; }
table.wide.live th:first-child { white-space: nowrap; overflow-wrap: normal; }
.total th, .total td { font-weight: 600; }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--muted); }
footer { margin-top: 3rem; color: var(--muted); font-size: .85rem; }
"""
