"""Predicted against measured peaks of whole training steps, plain and planned, to the byte.

    python benchmarks/memory_accuracy.py [--quick] [--only NAME ...] [--share 0.6] [--json FILE]

For each setting of `memory_settings.py`: a trace on fake tensors, a plan at ``--share`` of the way from the smallest
possible peak to the plain one, a dry run of the plan, and real steps whose peaks the profiler's raw memory events
give. Differences are predicted less measured: positive is too much, negative too little. Rows that are not exact say
why. Exits with 1 if fewer than 90 % are exact or one is under by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from memory_settings import SEED, Setting, settings
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autoremat as ar
from autoremat._dry_run import dry_run
from autoremat._step import Precision

RESULTS = Path(__file__).parent / "results" / "memory_accuracy.json"
EXACT_GOAL = 0.9
UNDER_GOAL = 0.001


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured step.

    Attributes:
        setting: Its name.
        kind: "plain" or "planned".
        num_regions: Regions of the plan.
        predicted_bytes: Peak of the schedule.
        measured_bytes: Peak by the judge.
        dry_run_bytes: Peak of the dry run; None for plain steps.
        peak_at: Where the predicted peak is.
        why: What a difference comes from.
    """

    setting: str
    kind: str
    num_regions: int
    predicted_bytes: int
    measured_bytes: int
    dry_run_bytes: int | None
    peak_at: str
    why: str

    @property
    def difference_bytes(self) -> int:
        return self.predicted_bytes - self.measured_bytes

    @property
    def difference(self) -> float:
        return self.difference_bytes / self.measured_bytes


def smallest_bytes(graph: ar.StepGraph) -> int:
    try:
        ar.plan(graph, budget=1)
    except ar.BudgetInfeasible as error:
        return error.smallest_bytes
    raise AssertionError("a step fits into one byte")


def rows_of(setting: Setting, share: float) -> list[Row]:
    torch.manual_seed(SEED)
    model, batch = setting.build()
    precision = Precision.parse(setting.options.get("precision"))
    options = dict(setting.options)
    if precision.cast is not None:
        model, batch = model.to(precision.cast), precision.cast_batch(batch)
        del options["precision"]  # from here on the model has it
    graph = ar.trace(model, batch, fake=True, **options)
    plain = ar.profile(graph).peak_bytes
    smallest = smallest_bytes(graph)
    plan = ar.plan(graph, budget=smallest + int(share * (plain - smallest)), objective="flops")
    usage = ar.measure(model, batch, plan, num_steps=1, **options)
    dry = dry_run(model, batch, plan, fake=True, **options).peak_bytes
    assert plan.plain is not None
    assert plan.planned is not None
    assert usage.plain is not None
    found = []
    for kind, predicted, measured in (("plain", plan.plain, usage.plain), ("planned", plan.planned, usage.planned)):
        is_planned = kind == "planned"
        found.append(
            Row(
                setting=setting.name,
                kind=kind,
                num_regions=len(plan.regions) if is_planned else 0,
                predicted_bytes=predicted.peak_bytes,
                measured_bytes=measured.peak_bytes,
                dry_run_bytes=dry if is_planned else None,
                peak_at=predicted.peak_at,
                why="" if predicted.peak_bytes == measured.peak_bytes else setting.why or "not explained",
            )
        )
    return found


def table_of(rows: list[Row]) -> Table:
    table = Table("setting", "step", "regions", "predicted", "measured", "difference", "%", "dry run", "why")
    for row in rows:
        exact = row.difference_bytes == 0
        table.add_row(
            row.setting,
            row.kind,
            str(row.num_regions or ""),
            f"{row.predicted_bytes:,}",
            f"{row.measured_bytes:,}",
            f"{row.difference_bytes:+,}" if row.difference_bytes else "0",
            f"{100 * row.difference:+.4f}" if row.difference_bytes else "0",
            "" if row.dry_run_bytes is None else f"{row.dry_run_bytes - row.predicted_bytes:+,}",
            row.why,
            style="" if exact else "red" if row.difference < -UNDER_GOAL else "yellow",
        )
    return table


def summary_of(rows: list[Row]) -> dict[str, Any]:
    planned = [row for row in rows if row.dry_run_bytes is not None]
    return {
        "num_rows": len(rows),
        "num_exact": sum(row.difference_bytes == 0 for row in rows),
        "share_exact": sum(row.difference_bytes == 0 for row in rows) / len(rows),
        "worst_over": max(0.0, *(row.difference for row in rows)),
        "worst_under": min(0.0, *(row.difference for row in rows)),
        "num_dry_runs": len(planned),
        "num_dry_runs_equal_to_schedule": sum(row.dry_run_bytes == row.predicted_bytes for row in planned),
        "num_dry_runs_equal_to_measured": sum(row.dry_run_bytes == row.measured_bytes for row in planned),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one setting of each kind of model")
    parser.add_argument("--only", nargs="+", default=(), help="settings whose name contains one of these")
    parser.add_argument("--share", type=float, default=0.6, help="where plans lie between the smallest and plain peak")
    parser.add_argument("--json", type=Path, help=f"where to write; {RESULTS.name} in results/ if all settings ran")
    arguments = parser.parse_args()
    chosen = [s for s in settings() if not arguments.quick or s.quick]
    if arguments.only:
        chosen = [s for s in chosen if any(part.lower() in s.name.lower() for part in arguments.only)]
    if not chosen:
        parser.error("no setting has such a name")
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows = [row for s in track(chosen, "settings", console=Console(stderr=True)) for row in rows_of(s, arguments.share)]
    summary = summary_of(rows)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    Console(width=200).print(table_of(rows))
    equal = f"{summary['num_dry_runs_equal_to_schedule']} of {summary['num_dry_runs']}"
    print(
        f"{machine}\n{summary['num_exact']} of {len(rows)} exact ({100 * summary['share_exact']:.1f} %); "
        f"worst over {100 * summary['worst_over']:+.4f} %, worst under {100 * summary['worst_under']:+.4f} %; "
        f"dry runs equal to the schedule {equal}, to the measured peak {summary['num_dry_runs_equal_to_measured']}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    is_whole = not arguments.quick and not arguments.only
    target = arguments.json or (RESULTS if is_whole else None)
    if target is not None:
        content = {"machine": machine, "share": arguments.share, "summary": summary}
        target.write_text(json.dumps(content | {"rows": [dataclasses.asdict(r) for r in rows]}, indent=1) + "\n")
    return int(summary["share_exact"] < EXACT_GOAL or summary["worst_under"] < -UNDER_GOAL)


if __name__ == "__main__":
    sys.exit(main())
