"""Rich tables of plans and results, for terminals. Renders what it is given and computes nothing but its wording."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from autoremat._calibration import Calibration
from autoremat._frontier import Frontier
from autoremat._layer_map import LayerMap
from autoremat._plan import Plan, Prediction, Region
from autoremat._results import LiveItem, MemoryProfile, UsageReport, VerifyReport
from autoremat._targets import Target
from autoremat._units import format_bytes, format_flops, format_percent, format_seconds

MAX_POINTS = 24
"""How many points a table of a `Frontier` lists."""
MAX_DIFFERENCES = 20
"""How many differences a table of `VerifyReport` lists."""
TO = " .. "
"""Between the first and the last of a span, as in `Region.name`."""
MAX_LIVE_ROWS = 12
"""How many kinds of living storages a table lists."""
MAX_LAYER_DEPTH = 2
"""Layers further inside are not listed."""


def plan_table(plan: Plan) -> Table:
    """The predicted step, plain beside planned: peak by cause, FLOPs, time, and what is left of the budget.

    Args:
        plan: With both predictions.
    """
    assert plan.plain is not None
    assert plan.planned is not None
    table = Table(title=_plan_title(plan), title_justify="left", title_style="bold")
    table.add_column("predicted")
    table.add_column("plain", justify="right", overflow="fold")
    table.add_column("planned", justify="right", style="bold", overflow="fold")
    plain, planned = plan.plain, plan.planned
    table.add_row("peak allocated", format_bytes(plain.peak_bytes), format_bytes(planned.peak_bytes))
    for cause in plain.peak_by_cause | planned.peak_by_cause:
        pair = [plain.peak_by_cause.get(cause, 0), planned.peak_by_cause.get(cause, 0)]
        if any(pair):
            table.add_row(f"  {cause.replace('_', ' ')}", *(format_bytes(value) for value in pair), style="dim")
    if plain.reserved_bytes is not None and planned.reserved_bytes is not None:
        settings = f" ({plan.allocator})" if plan.allocator else ""
        table.add_row(
            f"peak reserved{settings}", format_bytes(plain.reserved_bytes), format_bytes(planned.reserved_bytes)
        )
        fragments = (plain.fragmentation_bytes or 0, planned.fragmentation_bytes or 0)
        table.add_row("  beyond allocated", *(format_bytes(value) for value in fragments), style="dim")
    if plan.budget_bytes is not None:
        of = " reserved" if plan.budget_is == "reserved" else ""
        margins = (_margin(prediction, plan) for prediction in (plain, planned))
        table.add_row(f"budget {format_bytes(plan.budget_bytes)}{of}", *margins)
    table.add_section()
    table.add_row("FLOPs", format_flops(plain.flops), _with_overhead(format_flops(planned.flops), plan.overhead_flops))
    seconds = format_seconds(planned.seconds)
    within = "" if plan.time_error is None else f", within {format_percent(plan.time_error)}"
    table.add_row(f"step time{within}", format_seconds(plain.seconds), _with_overhead(seconds, plan.overhead_s))
    if plan.bound is not None and plan.gap is not None:
        what = "time" if plan.objective == "time" else "FLOPs"
        table.add_row(f"least {what} (proved)", "", f"+{format_percent(plan.bound)}, {format_percent(plan.gap)} away")
    table.add_row("peak at", plain.peak_at, planned.peak_at, style="dim")
    return table


def profile_table(profile: MemoryProfile) -> Table:
    """The peak by cause, and the next highest moments."""
    table = Table(title=f"peak allocated at {profile.peak_at}", title_justify="left", title_style="bold")
    table.add_column("predicted")
    table.add_column("bytes", justify="right")
    for cause, num_bytes in profile.peak_by_cause.items():
        if num_bytes:
            table.add_row(cause.replace("_", " "), format_bytes(num_bytes))
    table.add_row("peak allocated", format_bytes(profile.peak_bytes), style="bold")
    if profile.allocator is not None:
        table.add_row("peak reserved", format_bytes(profile.allocator.reserved_bytes))
    table.add_section()
    for moment in profile.high_moments[1:]:
        table.add_row(moment.at, format_bytes(moment.num_bytes), style="dim")
    return table


def layers_table(layers: LayerMap) -> Table:
    """The layers that the model calls and those that these call, with what is inside them."""
    table = Table(title=f"{layers.model}, {len(layers.layers)} layers", title_justify="left", title_style="bold")
    table.add_column("layer", overflow="fold")
    for column in ("left for backward", "planned", "FLOPs", "recomputed", "time"):
        table.add_column(column, justify="right")
    depth: dict[int, int] = {}
    for place, row in enumerate(layers.layers):
        depth[place] = 0 if row.parent < 0 else depth[row.parent] + 1
        if depth[place] > MAX_LAYER_DEPTH:
            continue
        total = row.total
        table.add_row(
            f"{'  ' * depth[place]}{row.path or layers.model}",
            *(format_bytes(size) for size in (total.plain_bytes, total.planned_bytes)),
            *(format_flops(count) for count in (total.flops, total.recomputed_flops)),
            format_seconds(total.seconds),
        )
    return table


def regions_table(plan: Plan) -> Table:
    """What a plan recomputes: one row for all regions that differ only in numbers of their paths."""
    table = Table(title=f"{len(plan.regions)} regions", title_justify="left", title_style="bold")
    table.add_column("region", overflow="fold")
    table.add_column("calls", justify="right")
    table.add_column("stores", justify="right")
    table.add_column("stored outputs", overflow="fold")
    for path, calls, num_bytes, outputs in region_rows(plan.regions):
        table.add_row(path, str(calls), format_bytes(num_bytes), outputs)
    return table


def region_rows(regions: Iterable[Region]) -> list[tuple[str, int, int, str]]:
    """Regions in words: paths that differ in one number together, how many, bytes stored in each, what is stored.

    Example:
        >>> from autoremat._plan import CallName
        >>> region_rows([Region(path="layers.0"), Region(path="layers.1"), Region(path="layers.4")])
        [('layers.{0-1,4}', 3, 0, 'inputs only')]
        >>> region_rows(Region(path=f"h.{i}.norm", then=(CallName(f"h.{i}.mlp"),)) for i in range(3))
        [('h.{0-2}.norm .. h.{0-2}.mlp', 3, 0, 'inputs only')]
    """
    groups: dict[tuple[str, int, str], list[Region]] = {}
    for region in regions:
        alike = (general_path(_ends(region)), sum(s.num_bytes for s in region.saved), _outputs(region))
        groups.setdefault(alike, []).append(region)
    return [
        (common_path(general, [_ends(region) for region in found]), len(found), num_bytes, outputs)
        for (general, num_bytes, outputs), found in groups.items()
    ]


def frontier_table(curve: Frontier) -> Table:
    """Points of a frontier: peak, what it is of the plain one, overhead, and how far it can be from the best.

    Args:
        curve: Of any length; `MAX_POINTS` of it are shown, spread evenly.
    """
    title = ", ".join(part for part in (curve.model, f"{len(curve.points)} plans", f"on {curve.target}") if part)
    table = Table(title=title, title_justify="left", title_style="bold")
    what = "time" if curve.objective == "time" else "FLOPs"
    for name in ("peak", "of plain*", "extra FLOPs", "extra time", f"least {what}**", "regions"):
        table.add_column(name, justify="right")
    last = len(curve.points) - 1
    shown = min(MAX_POINTS, len(curve.points))
    for row in sorted({last * i // max(1, shown - 1) for i in range(shown)}):
        point = curve.points[row]
        table.add_row(
            format_bytes(point.peak_bytes),
            f"{curve.share(point.peak_bytes):.3f}",
            f"+{format_percent(point.overhead_flops)}",
            f"+{format_percent(point.overhead_s)}",
            f"+{format_percent(point.bound)}",
            str(point.num_regions),
        )
    table.caption = "* above what is static; ** proved: no schedule within that peak costs less"
    return table


def classics_table(curve: Frontier) -> Table:
    """Schedules by name beside the cheapest plan of the frontier whose peak is no higher.

    Args:
        curve: With `Frontier.classics`.
    """
    table = Table(title="schedules by name", title_justify="left", title_style="bold")
    for name in ("schedule", "peak", "of plain", "extra FLOPs", "extra time", "ours: FLOPs", "ours: time"):
        is_name = name == "schedule"
        width = None if is_name else len("78.3 MiB") if name == "peak" else len("+35.2 %")
        table.add_column(
            name, justify="left" if is_name else "right", overflow="fold", min_width=width, max_width=width
        )
    for named in curve.classics:
        ours = curve.point(named.peak_bytes)
        table.add_row(
            named.name,
            format_bytes(named.peak_bytes),
            f"{curve.share(named.peak_bytes):.3f}",
            f"+{format_percent(named.overhead_flops)}",
            f"+{format_percent(named.overhead_s)}",
            "none" if ours is None else f"+{format_percent(ours.overhead_flops)}",
            "none" if ours is None else f"+{format_percent(ours.overhead_s)}",
        )
    return table


def live_rows(items: Iterable[LiveItem], *, limit: int = MAX_LIVE_ROWS) -> list[tuple[str, str, str, int, int]]:
    """What is alive at a peak in words: cause, module, maker, storages and bytes; like modules together, largest first.

    Args:
        items: As in `MemoryProfile.alive_at_peak`.
        limit: Most rows; what is left over is one more.

    Example:
        >>> made = [LiveItem("activation", f"h.{i}.mlp", "aten.gelu.default", 8, 1) for i in range(3)]
        >>> live_rows(made)
        [('activation', 'h.{0-2}.mlp', 'gelu', 3, 24)]
        >>> live_rows([LiveItem("activation", "h", "aten.gelu.default", 8, 1, line="models/gpt.py:31")])
        [('activation', 'h', 'gelu, gpt.py:31', 1, 8)]
    """
    groups: dict[tuple[str, str, str], list[LiveItem]] = {}
    for item in items:
        name = item.name.removeprefix(f"{item.module}.") if item.module else item.name
        maker = name.removeprefix("aten.").split(".")[0].lstrip("_") if name.startswith("aten.") else name
        maker = f"{maker}, {item.line.rpartition('/')[2]}" if item.line else maker
        groups.setdefault((item.cause, general_path(item.module), maker), []).append(item)
    rows = [
        (cause, _place(general, [item.module for item in found]), maker, _storages(found), _bytes(found))
        for (cause, general, maker), found in groups.items()
    ]
    rows.sort(key=lambda row: (-row[-1], row))
    shown, others = rows[:limit], rows[limit:]
    if others:
        shown.append((f"{len(others)} more", "", "", sum(row[3] for row in others), sum(row[4] for row in others)))
    return [(cause.replace("_", " "), module, maker, count, size) for cause, module, maker, count, size in shown]


def _place(general: str, paths: list[str]) -> str:
    return common_path(general, paths) if any(paths) else "(the model itself, or the loss)"


def _storages(items: Iterable[LiveItem]) -> int:
    return sum(item.num_storages for item in items)


def _bytes(items: Iterable[LiveItem]) -> int:
    return sum(item.num_bytes for item in items)


def verify_table(report: VerifyReport) -> Table:
    """What was compared, and what differs."""
    title = "equal to the bit" if report.equal else f"{len(report.differences)} differences"
    table = Table(title=title, title_justify="left", title_style="bold green" if report.equal else "bold red")
    table.add_column("compared")
    table.add_column("plain", justify="right")
    table.add_column("planned", justify="right")
    table.add_row("loss", repr(report.loss), repr(report.planned_loss))
    for kind, count in report.num_compared.items():
        different = sum(difference.kind == kind for difference in report.differences)
        table.add_row(f"{count} x {kind}", "", f"{different} differ" if different else "equal")
    table.add_row("regions recomputed", "", str(report.num_recomputed_regions))
    if report.num_skipped_steps:
        table.add_row("overflow, step left out", str(report.num_skipped_steps), str(report.num_skipped_steps))
    large = [layer for layer in report.layers if layer.is_large]
    if report.layers:
        table.add_section()
        table.add_row("gradients against fp32", "", f"{len(large)} of {len(report.layers)} layers differ much")
    for layer in (large or list(report.layers))[:MAX_DIFFERENCES]:
        norms = f"{layer.norm:.3g}, in fp32 {layer.fp32_norm:.3g}"
        table.add_row(f"  {layer.path or 'the model itself'}", norms, f"off by {format_percent(layer.difference)}")
    for difference in report.differences[:MAX_DIFFERENCES]:
        table.add_row(f"{difference.kind}: {difference.name}", difference.plain, difference.planned, style="red")
    return table


def usage_table(report: UsageReport) -> Table:
    """Measured peak and step time, plain beside planned, with the predictions."""
    table = Table(title=f"measured by {report.judge}", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("planned", justify="right", style="bold")
    plain, planned = report.plain, report.planned
    table.add_row("peak allocated", format_bytes(plain.peak_bytes) if plain else "", format_bytes(planned.peak_bytes))
    predicted = (report.predicted_plain_bytes, report.predicted_planned_bytes)
    if any(predicted):
        table.add_row("predicted peak", *("" if value is None else format_bytes(value) for value in predicted))
    if report.budget_bytes is not None:
        word = "within" if report.within_budget else "OVER"
        table.add_row(f"budget {format_bytes(report.budget_bytes)}", "", word)
    steps = (plain, planned)
    table.add_row("step time", *("" if step is None else format_seconds(step.step_s) for step in steps))
    return table


def targets_table(targets: Iterable[Target]) -> Table:
    """Targets with their memory, rates and links; how many of a target's figures were checked against another place."""
    caption = "Dense peaks; memory as the driver offers it. --json: each figure's source, and where it was checked."
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("target", no_wrap=True)
    columns = ("memory", "usable", "float32\nTFLOP/s", "bfloat16\nTFLOP/s", "memory\nGB/s", "host\nGB/s")
    for column in (*columns, "checked"):
        table.add_column(column, justify="right", no_wrap=True)
    for target in targets:
        rates = [target.flops_per_s.get(dtype) for dtype in ("float32", "bfloat16")]
        table.add_row(
            target.name,
            format_bytes(target.memory_bytes),
            format_bytes(target.usable_bytes),
            *("none" if rate is None else f"{rate / 1e12:,.2f}" for rate in rates),
            f"{target.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{target.host_link_bytes_per_s / 1e9:,.0f}",
            f"{len(target.checked)}/{len(target.sources)}",
        )
    return table


def calibration_table(found: Calibration) -> Table:
    """What was measured on a machine."""
    title = f"{found.device}, {found.num_threads} threads, torch {found.torch_version}"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for dtype, rate in found.best_rates.items():
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e9:,.0f} GFLOP/s")
    small, large = found.traffic_s_per_byte[0][1], found.traffic_s_per_byte[-1][1]
    table.add_row("elementwise, small to large", f"{1e-9 / small:,.0f} to {1e-9 / large:,.0f} GB/s")
    if found.fault_s_per_byte:
        size = format_bytes(found.fault_from_bytes)
        table.add_row(f"fresh pages, tensors from {size}", f"{1e-9 / found.fault_s_per_byte:,.1f} GB/s")
    for phase, seconds in found.op_s.items():
        table.add_row(f"around an op, {phase}", format_seconds(seconds))
    table.add_row("around a region", format_seconds(found.region_s))
    table.add_row("around a tensor that is saved in a region", format_seconds(found.saved_s))
    table.add_row("around an op of a region that stores single outputs", format_seconds(found.watched_op_s))
    table.add_row("error on a step that was predicted and run", format_percent(found.error))
    return table


def _plan_title(plan: Plan) -> str:
    parts = [
        plan.model,
        plan.precision,
        plan.optimizer,
        plan.around,
        plan.parallel,
        f"on {plan.target}" if plan.target else "",
    ]
    return ", ".join(part for part in parts if part)


def _margin(prediction: Prediction, plan: Plan) -> Text:
    used = prediction.reserved_bytes if plan.budget_is == "reserved" else prediction.peak_bytes
    left = (plan.budget_bytes or 0) - (used or 0)
    if left < 0:
        return Text(f"too small by {format_bytes(-left)}", style="red")
    return Text(f"fits, {format_bytes(left)} free", style="green")


def _with_overhead(text: str, overhead: float | None) -> str:
    return text if overhead is None else f"{text} (+{format_percent(overhead)})"


def _ends(region: Region) -> str:
    """The path of a region, or the first and the last of a span."""
    return f"{region.path}{TO}{region.then[-1].path}" if region.then else region.path


def general_path(path: str) -> str:
    """A path with ``*`` for its first number; paths that agree in this are written together.

    Example:
        >>> general_path("h.0.attn.0"), general_path("h.0.norm .. h.0.mlp"), general_path("h.0 .. h.3")
        ('h.*.attn.0', 'h.*.norm .. h.*.mlp', 'h.* .. h.3')
    """
    first, to, last = path.partition(TO)
    found = re.search(r"(^|\.)(\d+)(\.|$)", first)
    if found:
        start, end = found.span(2)
        if last.startswith(first[: end + 1]):  # of the same layer
            last = f"{first[:start]}*{last[end:]}"
        first = f"{first[:start]}*{first[end:]}"
    return first + to + last or "(the whole model)"


def common_path(general: str, paths: list[str]) -> str:
    """The general path with the numbers that occur in place of its ``*``."""
    prefix, star, _ = general.partition("*")
    if not star:
        return general
    numbers = sorted({int(re.match(r"\d+", path[len(prefix) :])[0]) for path in paths})  # type: ignore[index]
    return general.replace("*", f"{{{_ranges(numbers)}}}" if len(numbers) > 1 else str(numbers[0]))


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _outputs(region: Region) -> str:
    """Stored op calls by operator; an op that stores several outputs counts once."""
    calls = {(saved.op, saved.occurrence) for saved in region.saved}
    names = Counter(op.removeprefix("aten.").split(".")[0].lstrip("_") for op, _ in sorted(calls))
    parts = [name if count == 1 else f"{count} {name}" for name, count in names.items()]
    if region.children:
        inside = len(region.children)
        parts.append(f"{inside} region{'s' if inside > 1 else ''} inside")
    return ", ".join(parts) or "inputs only"
