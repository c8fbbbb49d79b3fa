"""The demo, small: every part of it runs, and its promises can fail."""

from __future__ import annotations

import dataclasses

import pytest

import synthetic
from autoremat import _demo
from autoremat._demo import DemoResult, run_demo
from autoremat._report_data import ReportSection


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo, "_SEQ", 128)
        patch.setattr(_demo, "_SHAPE", {"n_layer": 4, "n_embd": 64, "n_head": 2})
        patch.setattr(_demo, "_KNOWN_CASE", ("bert-base", 32, 512, "rtx3060-12g"))
        seen: list[tuple[str, float]] = []
        found = run_demo(num_steps=2, progress=lambda label, fraction: seen.append((label, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1
    return found


def test_the_demo_keeps_its_promises(result):
    assert result.failures == ()
    plan = result.known_case.plan
    assert plan.plain.peak_bytes > plan.budget_bytes >= plan.planned.peak_bytes
    assert result.training.trained.equal
    assert result.training.usage.within_budget
    assert result.training.plan.regions


def test_the_demo_has_tables_and_a_page(result):
    assert len(result.tables()) == 7
    page = result.html()
    assert [page.count(f'data-draw="{what}"') for what in ("memory", "measured", "frontier", "layers")] == [2, 1, 2, 2]
    assert "2 of 2" in page


def _result(**changes) -> DemoResult:
    section = ReportSection(
        title="",
        plan=synthetic.plan(),
        usage=synthetic.usage(),
        verified=synthetic.verified(),
        trained=synthetic.trained(),
    )
    return DemoResult(known_case=section, training=dataclasses.replace(section, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trained": synthetic.trained(num_equal=10)}, "2 losses differ"),
        ({"verified": synthetic.verified(equal=False)}, "gradients"),
        ({"usage": synthetic.usage(budget_bytes=1)}, "exceeds the budget"),
        (
            {"usage": dataclasses.replace(synthetic.usage(), plain=synthetic.usage().planned)},
            "over 55% of plain",
        ),
    ],
)
def test_a_broken_promise_is_named(changes, words):
    assert _result().failures == ()
    (failure,) = _result(**changes).failures
    assert words in failure


def test_a_plan_over_its_budget_is_named():
    plan = dataclasses.replace(synthetic.plan(), budget_bytes=1)
    result = _result()
    result = dataclasses.replace(result, known_case=dataclasses.replace(result.known_case, plan=plan))
    assert result.failures == ("the plan for BERT-large exceeds its budget",)
