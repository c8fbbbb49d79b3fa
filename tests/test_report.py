"""The HTML report and the terminal tables, on results made up for them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

import colours
import synthetic
from autoremat import Plan, Region, UsageError, _tables
from autoremat._figures import DARK, LIGHT, MAX_POINTS, memory_file
from autoremat._frontier import NamedPoint
from autoremat._plan import CallName
from autoremat._report import render_report
from autoremat._report_data import highest, section_data
from autoremat._step_graph import CAUSES
from autoremat._targets import get_target

FAR_APART = 14
"""In Lab; the smallest of what the palettes reach, seven times what can just be told apart."""
VOID = {"meta", "br", "link"}


class _Balance(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_complete_in_itself():
    page = render_report([synthetic.section()], title="Title", footer="Foot")
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    loads = re.findall(
        r"""(?:src|href)=["'](?!#|data:,)[^"']*|url\((?!#)[^)]*|@import|<script src|https?://(?!www.w3.org)""", page
    )
    assert loads == []
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "$" not in re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL), "a part of the template is left"
    assert len(page) < 10**6


def test_the_page_says_the_numbers_it_was_given():
    page = render_report([synthetic.section()])
    for text in ("27.3 GiB", "7.31 GiB", "12.0 GiB", "rtx3090-24g", "11 of 12", "within the budget", "over the budget"):
        assert text in page
    assert "bert.encoder.layer.{0-23}" in page
    assert "least is +9.0 %, proved" in page
    assert f"{synthetic.usage().planned.peak_bytes:,}" in page
    assert page.count(">differs<") == 1
    assert page.count(">equal<") == 11 + 3


def test_the_page_says_what_is_alive_at_the_peaks():
    page = render_report([synthetic.section()])
    assert page.count("Alive at the plain peak") == page.count("Alive at the planned peak") == 1
    rows = [re.sub(r"<[^>]+>", "|", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    cells = [[cell for cell in row.split("|") if cell] for row in rows]
    assert cells.count(["activation", "bert.encoder.layer.{0-23}.mlp", "softmax", "48", "12.0 GiB"]) == 2
    assert ["parameter", "bert.pooler", "weight", "1", "256 MiB"] in cells
    assert ["temporary", "(the model itself, or the loss)", "nll_loss_backward", "1", "1.00 GiB"] in cells
    assert f'data-v="{12 * 2**30}">12.0 GiB<' in page


def test_the_page_says_which_moments_come_next():
    page = render_report([synthetic.section()])
    assert "Highest moments, plain" in page
    assert re.search(r"backward, bert.pooler, aten.mm.default</th><td[^>]*>26.3 GiB</td><td[^>]*>1.00 GiB</td>", page)


def test_what_is_left_over_is_one_row():
    rows = _tables.live_rows(synthetic.alive(), limit=1)
    assert rows == [
        ("activation", "bert.encoder.layer.{0-23}.mlp", "softmax", 48, 12 * 2**30),
        ("2 more", "", "", 2, 5 * 2**28),
    ]


def test_reserved_bytes_are_named_wherever_there_are_some():
    without = render_report([synthetic.section()])
    assert "peak reserved" not in without
    assert section_data(synthetic.section())["memory"]["profiles"][0]["reserved_bytes"] is None
    plain = dataclasses.replace(synthetic.profile(), allocator=synthetic.usage_of_allocator())
    page = render_report([dataclasses.replace(synthetic.section(), plain=plain)])
    for text in ("peak reserved", "29.0 GiB", "unused at that peak", ">321<"):
        assert text in page
    made = synthetic.plan()
    made = dataclasses.replace(
        made,
        plain=dataclasses.replace(made.plain, reserved_bytes=30 * 2**30),
        planned=dataclasses.replace(made.planned, reserved_bytes=11 * 2**30),
        budget_is="reserved",
    )
    assert (
        section_data(dataclasses.replace(synthetic.section(), plain=plain))["memory"]["profiles"][0]["reserved_bytes"]
        == 29 * 2**30
    )
    cards = render_report([dataclasses.replace(synthetic.section(), plan=made)])
    assert "3.69 GiB beyond allocated" in cards
    assert "budget reserved" in cards
    text = _text(_tables.plan_table(made))
    assert re.search(r"peak reserved +│ +30.0 GiB │ +11.0 GiB", text)
    assert re.search(r"budget 12.0 GiB reserved +│ +too small by 18.0 GiB │ +fits, 1.00 GiB free", text)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_of_its_own(kind):
    profiles = [("Plain", synthetic.profile()), ("Planned", synthetic.profile(num_regions=24))]
    picture = memory_file(profiles, budget_bytes=12 * 2**30, kind=kind)
    assert picture == memory_file(profiles, budget_bytes=12 * 2**30, kind=kind)
    if kind == "png":
        assert picture.startswith(b"\x89PNG")
        return
    root = ET.fromstring(picture)
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"activation", "optimizer state", "budget 12.0 GiB", "Planned: peak 7.31 GiB"} <= set(texts)
    assert b"prefers-color-scheme: dark" in picture
    assert b"#fe" not in picture
    assert root.get("width")


def test_every_colour_is_in_both_palettes():
    assert LIGHT.keys() == DARK.keys()
    assert {f"cause-{cause.replace('_', '-')}" for cause in CAUSES} <= LIGHT.keys()


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_causes_can_be_told_apart_whatever_colours_a_reader_sees(palette):
    roles = [role for role in palette if role.startswith("cause-")]
    pairs = [(a, b, sight) for a, b in itertools.combinations([*roles, "page"], 2) for sight in colours.SIGHTS]
    close = [(a, b, sight) for a, b, sight in pairs if colours.distance(palette[a], palette[b], sight) < FAR_APART]
    assert close == []


def test_text_is_escaped():
    section = dataclasses.replace(synthetic.section(), verified=synthetic.verified(equal=False))
    page = render_report([section], title="<i>")
    assert "<b>model" not in page
    assert "<i></title>" not in page
    assert "layer.&lt;0&gt;.weight" in page


@pytest.mark.parametrize(
    "field", ["plain", "planned", "plan", "frontier", "layers", "verified", "usage", "trained", "text"]
)
def test_any_part_may_be_missing(field):
    missing = {"text": ""}.get(field)
    page = render_report([dataclasses.replace(synthetic.section(), **{field: missing})])
    assert "<section>" in page
    assert "None" not in page


def test_the_peak_is_drawn_however_many_points_there_are():
    seconds = [0.001 * i for i in range(50_000)]
    values = [1] * 50_000
    values[31_415] = 99
    drawn = highest(seconds, values, MAX_POINTS)
    assert len(drawn) <= MAX_POINTS + 1
    assert 31_415 in drawn
    assert drawn == sorted(drawn)


def test_small_steps_are_drawn_in_small_units():
    small = synthetic.profile()
    small = dataclasses.replace(
        small,
        peak_bytes=small.peak_bytes // 2**20,
        by_cause={cause: tuple(v // 2**20 for v in values) for cause, values in small.by_cause.items()},
    )
    assert b"allocated, KiB" in memory_file([("Plain", small)], kind="svg")


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"autoremat\[report\]"):
        memory_file([("Plain", synthetic.profile())], kind="png")


def _text(table, width=100) -> str:
    console = Console(width=width, record=True, file=__import__("io").StringIO())
    console.print(table)
    return console.export_text()


def test_the_plan_table():
    text = _text(_tables.plan_table(synthetic.plan()))
    assert "BertForMaskedLM, adamw, on rtx3090-24g" in text
    assert re.search(r"peak allocated +│ +27.3 GiB │ +7.31 GiB", text)
    assert re.search(r"budget 12.0 GiB +│ +too small by 15.3 GiB │ +fits, 4.69 GiB free", text)
    assert "11.00 TFLOP (+10.0 %)" in text
    assert re.search(r"least FLOPs \(proved\) .*\+9.0 %, 1.0 % away", text)
    assert "proved" not in _text(_tables.plan_table(dataclasses.replace(synthetic.plan(), bound=None)))


def test_like_regions_share_a_row():
    rows = _tables.region_rows(
        (*synthetic.plan(num_regions=3).regions, Region(path="head"), Region(path="", children=(Region(path="x"),)))
    )
    assert rows == [
        ("bert.encoder.layer.{0-2}", 3, 2**27, "scaled_dot_product_flash_attention"),
        ("head", 1, 0, "inputs only"),
        ("(the whole model)", 1, 0, "1 region inside"),
    ]
    assert "3 regions" in _text(_tables.regions_table(Plan(regions=synthetic.plan(num_regions=3).regions)))


def test_extra_time_says_if_it_was_not_minimised():
    for objective, note in (("flops", "predicted; FLOPs were minimised"), ("time", "predicted")):
        made = dataclasses.replace(synthetic.plan(), objective=objective)
        page = render_report([dataclasses.replace(synthetic.section(), plan=made)])
        assert re.search(rf"extra time</?[^+]*\+[\d.]+ %<[^>]*><[^>]*>{note}<", page), objective


def test_a_span_is_named_by_both_its_ends():
    spans = [Region(path=f"h.{i}.norm", then=(CallName(f"h.{i}.mlp"),)) for i in (0, 1, 3)]
    rows = _tables.region_rows((*spans, Region(path="drop", then=(CallName("h.7"),))))
    assert [row[:2] for row in rows] == [("h.{0-1,3}.norm .. h.{0-1,3}.mlp", 3), ("drop .. h.7", 1)]
    assert "h.{0-1,3}.norm .. h.{0-1,3}.mlp" in _text(_tables.regions_table(Plan(regions=tuple(spans))))


def test_numbers_and_units_are_not_torn_apart_in_80_columns():
    point = NamedPoint("save:attention+matmuls", 78 * 2**20, 0.304, 0.519)
    text = _text(_tables.classics_table(dataclasses.replace(synthetic.frontier(), classics=(point,))), width=80)
    assert re.search(r"78.0 MiB .*\+30.4 % │ +\+51.9 %", text)


def test_the_verify_table():
    assert "equal to the bit" in _text(_tables.verify_table(synthetic.verified()))
    text = _text(_tables.verify_table(synthetic.verified(equal=False)))
    assert "1 differences" in text
    assert "gradient: layer.<0>.weight" in text
    assert "1 differ" in text


def test_the_usage_table():
    text = _text(_tables.usage_table(synthetic.usage()))
    assert "measured by profiler memory events" in text
    assert "within" in text
    assert "OVER" in _text(_tables.usage_table(synthetic.usage(budget_bytes=1)))
    assert "7.31 GiB" in _text(_tables.usage_table(dataclasses.replace(synthetic.usage(), plain=None)))


def test_the_targets_table_marks_what_a_device_lacks():
    assert re.search(r"t4-16g .*none", _text(_tables.targets_table([get_target("t4-16g")])))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (synthetic.plan(), ("peak allocated", "bert.encoder.layer.{0-23}")),
        (Plan(regions=(Region("h.0"),)), ("h.0",)),
        (synthetic.frontier(), ("every-block", "27.0 GiB")),
        (synthetic.profile(), ("peak allocated at", "bert.pooler")),
        (synthetic.layer_map(), ("left for backward", "bert.encoder.layer.23")),
        (synthetic.verified(), ("equal to the bit",)),
        (synthetic.usage(), ("profiler memory events",)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_results_show_as_tables_in_terminals_and_notebooks(result, words):
    text, page = _text(result), result._repr_html_()
    for word in words:
        assert word in text
        assert word in page
    assert page.startswith("<pre")


def test_results_without_a_table_show_their_repr():
    item = synthetic.alive()[0]
    assert item._repr_html_() is None
    assert "bert.encoder.layer.0.mlp" in _text(item)
