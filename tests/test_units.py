"""Bytes, FLOPs and seconds in words."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat import BudgetError, UsageError
from autoremat._units import format_bytes, format_flops, format_percent, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 2**29),
        ("1.5KiB", 1536),
        (".5kb", 500),
        ("1024", 1024),
        ("7B", 7),
        (77, 77),
        ("1.9999B", 1),
    ],
)
def test_budgets_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "24 Gb s", "-1GiB", "24Gi", "1e9", "0", "0.1B", 0, -5, True, None, 2.5, "24GiB!"]
)
def test_anything_else_is_refused_with_the_spellings_that_work(text):
    with pytest.raises(BudgetError, match=r"budget|24GiB") as caught:
        parse_bytes(text)
    assert isinstance(caught.value, UsageError)


@given(st.decimals(min_value="0.000001", max_value=10**6, places=6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_budgets_round_down_exactly(number: Decimal, unit: str):
    scale = 2 ** (10 * (1 + ["KiB", "MiB", "GiB", "TiB"].index(unit)))
    exact = number * scale
    if exact >= 1:
        assert parse_bytes(f"{number:f}{unit}") == int(exact)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-(2**30), "-1.00 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (10**15, "909 TiB"),
    ],
)
def test_bytes_are_written_with_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_flops_seconds_and_percentages():
    assert [format_flops(value) for value in (7, 1500, 2 * 10**18)] == ["7 FLOP", "1.50 KFLOP", "2000.00 PFLOP"]
    assert [format_seconds(value) for value in (2e-6, 0.5, 60, 6000)] == ["2.0 us", "500.0 ms", "60.0 s", "100.0 min"]
    assert format_percent(-0.001) == "-0.1 %"
