"""Plan files: read, written, refused, and their published schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat import OpCall, Plan, PlanError, Region, SavedOutput, plan_schema
from synthetic import plan as synthetic_plan

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "plan.schema.json"
RELEASED = Path(__file__).parent / "plans"

_names = st.text(st.characters(categories=("L", "N"), include_characters="._ "), max_size=12)
_counts = st.integers(0, 2**40)
_saved = st.builds(SavedOutput, op=_names, occurrence=_counts, output=_counts, module=_names, num_bytes=_counts)
_calls = st.builds(OpCall, op=_names, occurrence=_counts)
_numbers = st.none() | _counts


def _regions(children):
    return st.builds(
        Region,
        path=_names,
        number=_numbers,
        saved=st.lists(_saved, max_size=2).map(tuple),
        skipped=st.lists(_calls, max_size=2).map(tuple),
        children=children,
    )


_forest = st.recursive(st.just(()), lambda children: st.lists(_regions(children), max_size=2).map(tuple), max_leaves=4)
_plans = st.builds(
    Plan,
    regions=_forest,
    budget_bytes=_numbers,
    model=_names,
    objective=st.sampled_from(["time", "flops"]),
    versions=st.dictionaries(_names, _names, max_size=2),
)


@given(_plans)
def test_plans_survive_the_file_and_fit_the_schema(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    jsonschema.validate(json.loads(text), plan_schema())


def test_the_published_schema_is_the_one_in_force():
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == plan_schema()


def assert_contained(old, new):
    """Everything in an old file is in the new one as it was; the new one may have more fields."""
    if isinstance(old, dict):
        assert set(old) <= set(new)
        for key, value in old.items():
            assert_contained(value, new[key])
    elif isinstance(old, list):
        assert len(old) == len(new)
        for before, now in zip(old, new, strict=True):
            assert_contained(before, now)
    else:
        assert new == old


@pytest.mark.parametrize("file", sorted(RELEASED.glob("*.json")), ids=lambda file: file.stem)
def test_plans_of_every_released_schema_version_are_read(file):
    plan = Plan.load(file)
    assert plan.schema_version == 1
    assert plan.regions
    assert_contained(json.loads(file.read_text(encoding="utf-8")), json.loads(plan.to_json()))


def test_a_file_of_each_schema_version_is_kept():
    assert [file.stem for file in sorted(RELEASED.glob("*.json"))] == ["version-1"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "the file"),
        ("[]", "the file"),
        ("{}", "regions"),
        ('{"regions": [{"path": 3}]}', "regions.0.path"),
        ('{"regions": [], "surprise": 1}', "surprise"),
        ('{"regions": [], "schema_version": 2}', "schema_version"),
        ('{"regions": [], "objective": "luck"}', "objective"),
    ],
)
def test_what_is_not_a_plan_is_refused_by_field(text, names):
    with pytest.raises(PlanError, match=names) as caught:
        Plan.from_json(text)
    assert "autoremat plan" in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json")


def test_save_and_load(tmp_path):
    plan = synthetic_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_overhead_and_gap_follow_the_objective():
    plan = synthetic_plan()
    assert plan.overhead_flops == pytest.approx(0.1)
    assert plan.gap == pytest.approx(0.01)
    assert Plan(regions=()).overhead_flops is None
    assert Plan(regions=()).overhead_s is None
    assert Plan(regions=()).gap is None


def test_repr_says_what_matters():
    assert repr(synthetic_plan()).startswith("<Plan for BertForMaskedLM: 24 regions, peak ")
    assert "budget 12.0 GiB, +10.0 % FLOPs>" in repr(synthetic_plan())
    assert repr(Plan(regions=())) == "<Plan for a model: 0 regions>"


def test_two_plans_diff_well():
    lines = [synthetic_plan(num_regions=n).to_json().splitlines() for n in (2, 3)]
    assert len(set(lines[1]) - set(lines[0])) < 12


def test_a_file_that_is_no_plan_is_named(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("import torch")
    with pytest.raises(PlanError, match=r"train.py: Not a plan of schema version"):
        Plan.load(file)
