"""The report in a browser: it loads offline, shows the numbers it was given, sorts, answers to pointer and keys."""

from __future__ import annotations

import dataclasses
import random

import pytest

import browser
import synthetic
from autoremat._report import render_report
from autoremat._report_data import ReportSection
from autoremat._results import PointEvent
from autoremat._units import format_bytes, format_flops, format_percent, format_seconds

pytestmark = browser.needs_browser
"""A page of a large model takes half a second on a free machine; more means that something grows out of hand."""


def _section() -> ReportSection:
    return dataclasses.replace(synthetic.section(), title="A model </script><b>x", text="")


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render_report([_section()], title="Title"), encoding="utf-8")
    return file


@pytest.fixture
def page(chromium, path):
    with browser.opened(chromium, path) as (found, seen):
        found.wait_for_selector("html[data-ready]")
        yield found
        assert seen == browser.Seen()


def test_pictures_and_layers_are_there_without_errors_or_requests(page):
    assert page.locator("svg").count() == 4
    assert page.locator(".layers tbody tr").count() == 25, "the model and its layers; what is inside them is closed"
    causes = {cause for cause, values in synthetic.profile().by_cause.items() if any(values)}
    drawn = page.locator("[data-draw=memory] svg").first.locator("path[data-cause]")
    assert {drawn.nth(i).get_attribute("data-cause") for i in range(drawn.count())} == causes
    assert page.locator("h2").inner_text() == "A model </script><b>x"


def test_the_pointer_gets_the_numbers_of_the_moment(page):
    profile = synthetic.profile()
    picture = page.locator("[data-draw=memory] svg").first
    box = picture.bounding_box()
    longest = max(profile.seconds[-1], synthetic.profile(num_regions=24).seconds[-1])
    point = 20
    inner = box["width"] - 62 - 14  # as the margins of charts.js
    second = profile.seconds[point] + 0.004
    picture.hover(position={"x": 62 + inner * second / longest, "y": 100})
    told = page.locator("#tip").inner_text()
    total = sum(values[point] for values in profile.by_cause.values())
    assert format_bytes(total) in told
    assert format_bytes(profile.by_cause["activation"][point]) in told
    event = profile.events[point]
    assert all(text in told for text in event)
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def test_keys_walk_through_the_points_and_to_the_peak(page):
    profile = synthetic.profile()
    page.locator("[data-draw=memory] svg").first.focus()
    page.keyboard.press("p")
    assert format_bytes(profile.peak_bytes) in page.locator("#tip b").inner_text()
    page.keyboard.press("Home")
    assert f"at {format_seconds(0)}" in page.locator("#tip b").inner_text()
    page.keyboard.press("ArrowRight")
    assert f"at {format_seconds(profile.seconds[1])}" in page.locator("#tip b").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_the_frontier_tells_plan_and_schedules_by_name(page):
    plan, curve = synthetic.plan(), synthetic.frontier()
    picture = page.locator("[data-draw=frontier] svg")
    picture.focus()
    page.keyboard.press("p")
    told = page.locator("#tip").inner_text()
    assert "the plan" in told
    assert format_bytes(plan.planned.peak_bytes) in told
    assert f"+{format_percent(plan.overhead_flops)}" in told
    told = []
    for _ in range(len(curve.points) + len(curve.classics) + 1):
        page.keyboard.press("ArrowRight" if told else "Home")
        told.append(page.locator("#tip").inner_text())
    by_name = {point.name: next(text for text in told if text.startswith(point.name)) for point in curve.classics}
    for point in curve.classics:
        assert format_bytes(point.peak_bytes) in by_name[point.name]
        assert f"+{format_percent(point.overhead_s)}" in by_name[point.name]
    assert "above the picture" in by_name["recursive"]
    before = picture.inner_html()
    page.locator("select").select_option("overhead_s")
    assert page.locator("[data-draw=frontier] svg").inner_html() != before


def _shown(page, key: str) -> list[str]:
    return page.locator(f".layers td[data-key={key}]").all_text_contents()


def test_the_map_of_layers_opens_sorts_and_searches(page):
    layers = synthetic.layer_map().layers
    tops = [row for row in layers if row.parent == 0]
    assert _shown(page, "plain_bytes")[1:] == [format_bytes(row.total.plain_bytes) for row in tops]
    assert _shown(page, "flops")[0] == format_flops(layers[0].total.flops)
    page.locator(".layers th[data-key=plain_bytes] button").click()
    falling = sorted((row.total.plain_bytes for row in tops), reverse=True)
    assert _shown(page, "plain_bytes")[1:] == [format_bytes(size) for size in falling]
    assert page.locator(".layers th[data-key=plain_bytes]").get_attribute("aria-sort") == "descending"
    page.locator(".layers th[data-key=plain_bytes] button").press("Enter")
    assert _shown(page, "plain_bytes")[1:] == [format_bytes(size) for size in reversed(falling)]

    toggle = page.get_by_role("button", name="open bert.encoder.layer.3", exact=True)
    toggle.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".layers tbody tr").count() == 27
    page.get_by_placeholder("find a path or class").fill("layer.23.")
    assert page.locator(".layers tbody tr").count() == 2
    page.get_by_placeholder("find a path or class").fill("")
    page.get_by_label("one list, each layer by itself").check()
    assert page.locator(".layers tbody tr").count() == len(layers)
    own = sorted((row.own.plain_bytes for row in layers), reverse=False)
    assert _shown(page, "plain_bytes") == [format_bytes(size) if size else "0" for size in own]


def test_tables_sort_by_number_and_by_text(page):
    table = page.locator("table.sortable", has_text="Operators")
    names = lambda: table.locator("tbody th").all_text_contents()  # noqa: E731 - asked three times
    assert names() == [op.name for op in synthetic.layer_map().ops]
    table.get_by_role("button", name="FLOPs").click()
    assert names() == ["aten.mm.default", "aten.gelu.default"]
    table.get_by_role("button", name="FLOPs").click()
    assert names() == ["aten.gelu.default", "aten.mm.default"]
    table.get_by_role("button", name="operator").click()
    assert names() == sorted(names())


def test_dark_is_another_set_of_colours_by_system_and_by_switch(chromium, path):
    def colours(page) -> tuple[str, str]:
        fill = "e => [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).fill]"
        return tuple(page.locator("path[data-cause=activation]").first.evaluate(fill))

    with browser.opened(chromium, path, scheme="dark") as (dark, _):
        by_system = colours(dark)
    with browser.opened(chromium, path) as (page, seen):
        light = colours(page)
        assert all(one != other for one, other in zip(light, by_system, strict=True))
        switch = page.locator("#theme")
        switch.click()
        assert colours(page) == light
        switch.click()
        assert colours(page) == by_system
        assert switch.get_attribute("aria-label") == "Colours: dark"
        assert seen == browser.Seen()


def test_a_phone_scrolls_tables_not_the_page(chromium, path):
    with browser.opened(chromium, path, width=360, height=740) as (page, seen):
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        widths = page.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)")
        assert all(280 <= width <= 360 for width in widths)
        assert seen == browser.Seen()


def test_numbers_are_written_as_python_writes_them(chromium, path):
    pick = random.Random(0)
    sizes = [0, 1, 1023, 1024, 1048550, 2**20, 2**40] + [int(2 ** pick.uniform(0, 45)) for _ in range(200)]
    flops = [0, 7, 999, 1000, 10**16] + [int(10 ** pick.uniform(0, 17)) for _ in range(200)]
    seconds = [0.0, 0.000999, 0.25, 1.0, 599.0, 700.0] + [10 ** pick.uniform(-7, 3) for _ in range(200)]
    script = next(part for part in browser.scripts() if "function formatBytes" in part)
    functions = script[script.index("function formatBytes") : script.index("const formatPercent")]
    body = f"{functions} return [b.map(formatBytes), f.map(formatFlops), s.map(formatSeconds)];"
    with browser.opened(chromium, path) as (page, _):
        found = page.evaluate(f"([b, f, s]) => {{ {body} }}", [sizes, flops, seconds])
    assert found[0] == [format_bytes(size) for size in sizes]
    assert found[1] == [format_flops(count) for count in flops]
    assert found[2] == [format_seconds(second) for second in seconds]


def test_a_large_model_loads_in_seconds(chromium, tmp_path):
    num_ops = 30_000
    small = synthetic.profile(num_blocks=num_ops // 2, block_bytes=2**20)
    events = tuple(PointEvent("forward", f"layers.{i % 400}.mlp", "aten.mm.default") for i in range(len(small.seconds)))
    section = dataclasses.replace(
        _section(),
        plain=dataclasses.replace(small, events=events),
        planned=dataclasses.replace(small, events=events),
        layers=synthetic.layer_map(num_layers=1_500),
    )
    text = render_report([section])
    assert len(text) < 1_500_000
    file = tmp_path / "large.html"
    file.write_text(text, encoding="utf-8")
    with browser.opened(chromium, file) as (page, seen):
        page.wait_for_selector("html[data-ready]")
        page.get_by_role("button", name="open all").click()
        assert page.locator(".layers tbody tr").count() == 400
        assert "more rows" in page.locator("[data-draw=layers] .hint").inner_text()
        assert seen == browser.Seen()
