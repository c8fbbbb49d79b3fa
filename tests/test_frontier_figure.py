"""The picture of a frontier shows what the curve says, in light and dark."""

import pytest

from autoremat._figures import DARK, LIGHT
from autoremat._frontier import Frontier, FrontierPoint, NamedPoint
from autoremat._frontier_figure import _draw, frontier_file

MIB = 2**20
POINTS = ((100, 0.5, 0.4), (200, 0.1, 0.08), (300, 0.0, 0.0))
NAMED = (("every-block", 180, 0.3), ("sqrt", 180, 0.3), ("none", 400, 0.0))


def curve(objective="flops", classics=NAMED):
    points = (FrontierPoint(size * MIB, cost, 2 * cost, bound, 1) for size, cost, bound in POINTS)
    named = (NamedPoint(name, size * MIB, cost, 2 * cost) for name, size, cost in classics)
    sizes = {"plain_bytes": 400 * MIB, "smallest_bytes": 100 * MIB}
    return Frontier(tuple(points), model="Net", objective=objective, classics=tuple(named), **sizes)


@pytest.mark.parametrize(("objective", "factor", "unit"), [("flops", 100, "FLOPs"), ("time", 200, "time")])
def test_lines_and_points_are_those_of_the_curve(objective, factor, unit):
    axes = _draw(curve(objective), LIGHT).axes[0]
    plans, bounds, *named = axes.lines
    assert plans.get_xydata().tolist() == [[100, 0.5 * factor], [200, 0.1 * factor], [300, 0], [400, 0]]
    assert bounds.get_xydata().tolist() == [[100, 40], [200, 8], [300, 0], [400, 0]]
    assert {line.get_drawstyle() for line in (plans, bounds)} == {"steps-post"}
    at_once = [[180, 0.3 * factor], [180, 0.3 * factor]]
    assert [line.get_xydata().tolist() for line in named] == [at_once, [[400, 0]]]
    assert "every-block, sqrt" in {text.get_text() for text in axes.texts}
    assert unit in axes.get_ylabel()
    assert "MiB" in axes.get_xlabel()


def test_what_costs_far_more_than_any_schedule_by_name_is_cut_off():
    assert _draw(curve(), LIGHT).axes[0].get_ylim()[1] < 50
    assert _draw(curve(classics=()), LIGHT).axes[0].get_ylim()[1] > 50


def test_one_vector_file_serves_light_and_dark_pages():
    text = frontier_file(curve(), kind="svg").decode()
    assert all(palette["planned"] in text for palette in (LIGHT, DARK))
    assert "var(--planned)" in text
    assert 'aria-label="Overhead over peak memory of plans for Net"' in text
    assert frontier_file(curve(), kind="svg").decode() == text
    assert frontier_file(curve(), kind="png").startswith(b"\x89PNG")
