"""The classic result again: a ResNet of 1,001 layers, whose memory fell from 48 to 7 GB at 30 % more time (2016).

    python benchmarks/resnet_1001.py [--json FILE]

The pre-activation ResNet of 1,001 layers for 32-pixel images (preset ``resnet-1001``), forward and backward with
gradients kept. Chen et al., "Training Deep Nets with Sublinear Memory Cost", report 48 GB without and 7 GB with
checkpointing, at 30 % more time. Reported here: the least overhead at 7/48 of the plain peak, the smallest peak at
30 % more FLOPs, and what their schedules give on the same step, all priced by the ledger.
"""

import argparse
import json
import time
from pathlib import Path

from judge import machine
from rich.console import Console
from rich.table import Table

import autoremat as ar

SHARE = 7 / 48
OVERHEAD = 0.30
NAMES = ("every-block", "sqrt", "recursive")
STEPS = 14


def smallest_peak_at(curve, overhead):
    """The plan with the smallest peak that costs at most this much, by bisection."""
    low, high = curve.smallest_bytes, curve.plain_bytes
    for _ in range(STEPS):
        middle = (low + high) // 2
        low, high = (low, middle) if curve.plan(middle).overhead_flops <= overhead else (middle, high)
    return curve.plan(high)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--points", type=int, default=24)
    options = parser.parse_args()
    built = ar.build_preset("resnet-1001")
    start, cpu = time.perf_counter(), time.process_time()
    graph = ar.trace(built.model, built.batch, loss=built.loss, optimizer=None, gradients="kept")
    trace_s, trace_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    start, cpu = time.perf_counter(), time.process_time()
    curve = ar.frontier(graph, num_points=options.points)
    solve_s, solve_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    rows = []

    def add(how, plan):
        peak = plan.planned.peak_bytes
        rows.append(
            {
                "how": how,
                "peak_bytes": peak,
                "of_plain": peak / curve.plain_bytes,
                "extra_flops": plan.overhead_flops,
                "bound": plan.bound,
            }
        )

    add("ours at 7/48", curve.plan(int(SHARE * curve.plain_bytes)))
    add("ours at +30 %", smallest_peak_at(curve, OVERHEAD))
    add("ours, smallest", curve.plan(curve.smallest_bytes))
    for name in NAMES:
        add(name, ar.classic(graph, name))
    found = {
        "machine": machine(),
        "num_ops": len(graph.ops),
        "plain_bytes": curve.plain_bytes,
        "trace_s": trace_s,
        "trace_cpu_s": trace_cpu_s,
        "solve_s": solve_s,
        "solve_cpu_s": solve_cpu_s,
        "rows": rows,
        "frontier": curve.to_dict(),
    }
    table = Table(title=f"ResNet-1001, {len(graph.ops)} ops: plain peak {curve.plain_bytes} bytes")
    for name in ("schedule", "peak of plain", "extra FLOPs", "bound"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in rows:
        bound = "" if row["bound"] is None else f"{row['bound']:.1%}"
        table.add_row(row["how"], f"{row['of_plain']:.3f}", f"{row['extra_flops']:.1%}", bound)
    Console(width=120).print(table)
    print(f"trace {trace_s:.0f} s ({trace_cpu_s:.0f} s of CPU), frontier {solve_s:.0f} s ({solve_cpu_s:.0f} s of CPU)")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
