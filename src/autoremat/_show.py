"""Which tables show which result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group

from autoremat._advice import Advice
from autoremat._advice_tables import advice_lines, advice_tables
from autoremat._calibration import Calibration
from autoremat._frontier import Frontier
from autoremat._layer_map import LayerMap
from autoremat._plan import Plan
from autoremat._reasons import Reasons
from autoremat._results import MemoryProfile, UsageReport, VerifyReport
from autoremat._tables import (
    calibration_table,
    classics_table,
    frontier_table,
    layers_table,
    plan_table,
    profile_table,
    regions_table,
    usage_table,
    verify_table,
)
from autoremat._why_tables import budgets_table, floor_table, reason_lines, reasons_table


def _plan(plan: Plan) -> list[Any]:
    predicted = [plan_table(plan)] if plan.plain is not None and plan.planned is not None else []
    return [*predicted, regions_table(plan)] if plan.regions or not predicted else predicted


def _frontier(curve: Frontier) -> list[Any]:
    return [frontier_table(curve), *([classics_table(curve)] if curve.classics else [])]


def _advice(advice: Advice) -> list[Any]:
    return [*advice_tables(advice), *advice_lines(advice)]


def _reasons(found: Reasons) -> list[Any]:
    return [reasons_table(found), budgets_table(found), floor_table(found.floor), *reason_lines(found)]


_TABLES: dict[type, Callable[[Any], list[Any]]] = {
    Plan: _plan,
    Frontier: _frontier,
    Advice: _advice,
    Reasons: _reasons,
    MemoryProfile: lambda profile: [profile_table(profile)],
    LayerMap: lambda layers: [layers_table(layers)],
    VerifyReport: lambda report: [verify_table(report)],
    UsageReport: lambda usage: [usage_table(usage)],
    Calibration: lambda found: [calibration_table(found)],
}


def shown(result: Any) -> Group | None:
    """The tables of a result; None if there are none for its class."""
    tables = _TABLES.get(type(result))
    return None if tables is None else Group(*tables(result))
