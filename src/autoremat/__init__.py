"""Automatic activation checkpointing for PyTorch. Public names; each is imported from its home when first used."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from autoremat._advice import Advice, AdviceRow
    from autoremat._advise import advise
    from autoremat._api import classic, distribute, frontier, layers, plan, profile, trace, why
    from autoremat._calibrate import calibrate
    from autoremat._calibration import Calibration
    from autoremat._data_parallel import DataParallel
    from autoremat._enable import enable, enabled
    from autoremat._enabled import Enabled
    from autoremat._errors import (
        AutorematError,
        BatchError,
        BudgetError,
        BudgetInfeasible,
        LossError,
        PlanError,
        PlanMismatch,
        RecomputeError,
        TraceError,
        UsageError,
    )
    from autoremat._export import Export, export
    from autoremat._fake import fake_weights
    from autoremat._frontier import Frontier, FrontierPoint, NamedPoint
    from autoremat._layer_map import LayerMap
    from autoremat._measure import measure
    from autoremat._monitor import Monitor
    from autoremat._monitor_results import GradientCheck, MonitorResults, StepRecord, ThroughputWarning
    from autoremat._plan import CallName, OpCall, Plan, Prediction, Region, SavedOutput, plan_schema
    from autoremat._presets import build_preset, preset_names
    from autoremat._reasons import Floor, FloorPart, OtherBudget, Reasons, RegionReason
    from autoremat._report import render_report
    from autoremat._report_data import ReportSection
    from autoremat._report_file import Report, report
    from autoremat._results import MemoryProfile, UsageReport, VerifyReport
    from autoremat._retry import retry_step
    from autoremat._sharding import Sharding
    from autoremat._step_graph import StepGraph
    from autoremat._targets import Target, get_target, load_target, target_names
    from autoremat._verify import verify
    from autoremat.runtime import Applied, Explanation, apply, checkpoint, checkpoint_sequential, explain, replay_safe

__version__ = "0.1.0"

_HOMES = {
    "_advice": ("Advice", "AdviceRow"),
    "_advise": ("advise",),
    "_api": ("classic", "distribute", "frontier", "layers", "plan", "profile", "trace", "why"),
    "_calibrate": ("calibrate",),
    "_calibration": ("Calibration",),
    "_data_parallel": ("DataParallel",),
    "_enable": ("enable", "enabled"),
    "_enabled": ("Enabled",),
    "_errors": (
        "AutorematError",
        "BatchError",
        "BudgetError",
        "BudgetInfeasible",
        "LossError",
        "PlanError",
        "PlanMismatch",
        "RecomputeError",
        "TraceError",
        "UsageError",
    ),
    "_export": ("Export", "export"),
    "_fake": ("fake_weights",),
    "_frontier": ("Frontier", "FrontierPoint", "NamedPoint"),
    "_layer_map": ("LayerMap",),
    "_measure": ("measure",),
    "_monitor": ("Monitor",),
    "_monitor_results": ("GradientCheck", "MonitorResults", "StepRecord", "ThroughputWarning"),
    "_plan": ("CallName", "OpCall", "Plan", "Prediction", "Region", "SavedOutput", "plan_schema"),
    "_presets": ("build_preset", "preset_names"),
    "_reasons": ("Floor", "FloorPart", "OtherBudget", "Reasons", "RegionReason"),
    "_report": ("render_report",),
    "_report_data": ("ReportSection",),
    "_report_file": ("Report", "report"),
    "_results": ("MemoryProfile", "UsageReport", "VerifyReport"),
    "_retry": ("retry_step",),
    "_sharding": ("Sharding",),
    "_step_graph": ("StepGraph",),
    "_targets": ("Target", "get_target", "load_target", "target_names"),
    "_verify": ("verify",),
    "runtime": ("Applied", "Explanation", "apply", "checkpoint", "checkpoint_sequential", "explain", "replay_safe"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
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


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF:
        msg = f"module 'autoremat' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(_import_module(f"autoremat.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
