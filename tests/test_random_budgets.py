"""Cases of `benchmarks/random_budgets.py`: a real step stays within its budget and uses it."""

import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("number", [33, 36], ids=["unet", "gpt2"])
def test_a_random_case_stays_within_its_budget_and_uses_it(number, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    random_budgets = __import__("random_budgets")
    row = random_budgets.run_case(number)
    assert row.smallest_bytes <= row.budget_bytes < row.plain_bytes
    assert row.measured_bytes == row.promised_bytes <= row.budget_bytes
    assert row.used >= random_budgets.USED_GOAL
    assert row.bound <= row.overhead
    sys.modules.pop("random_budgets", None)
