"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import autoremat

PUBLIC = [
    "Advice",
    "AdviceRow",
    "Applied",
    "AutorematError",
    "BatchError",
    "BudgetError",
    "BudgetInfeasible",
    "Calibration",
    "CallName",
    "DataParallel",
    "Enabled",
    "Explanation",
    "Export",
    "Floor",
    "FloorPart",
    "Frontier",
    "FrontierPoint",
    "GradientCheck",
    "LayerMap",
    "LossError",
    "MemoryProfile",
    "Monitor",
    "MonitorResults",
    "NamedPoint",
    "OpCall",
    "OtherBudget",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "Prediction",
    "Reasons",
    "RecomputeError",
    "Region",
    "RegionReason",
    "Report",
    "ReportSection",
    "SavedOutput",
    "Sharding",
    "StepGraph",
    "StepRecord",
    "Target",
    "ThroughputWarning",
    "TraceError",
    "UsageError",
    "UsageReport",
    "VerifyReport",
    "advise",
    "apply",
    "build_preset",
    "calibrate",
    "checkpoint",
    "checkpoint_sequential",
    "classic",
    "distribute",
    "enable",
    "enabled",
    "explain",
    "export",
    "fake_weights",
    "frontier",
    "get_target",
    "layers",
    "load_target",
    "measure",
    "plan",
    "plan_schema",
    "preset_names",
    "profile",
    "render_report",
    "replay_safe",
    "report",
    "retry_step",
    "target_names",
    "trace",
    "verify",
    "why",
]


def test_the_public_names_are_these():
    assert autoremat.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_is_documented(name):
    value = getattr(autoremat, name)
    assert value.__doc__
    assert name in dir(autoremat)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = autoremat.plam


def test_errors_form_one_tree():
    errors = [getattr(autoremat, name) for name in PUBLIC if name.endswith(("Error", "Infeasible", "Mismatch"))]
    assert len(errors) == 10
    assert all(issubclass(error, autoremat.AutorematError) for error in errors)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import autoremat", "torch"),
        ("import autoremat.solve", "torch"),
        ("from autoremat import Plan, get_target", "torch"),
        ("from autoremat import trace, plan, apply, verify, measure", "transformers"),
        ("from autoremat import trace, plan, apply, verify, measure", "matplotlib"),
        ("import autoremat.runtime", "highspy"),
    ],
)
def test_heavy_packages_are_imported_only_where_needed(statement, absent):
    program = f"import sys; {statement}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
