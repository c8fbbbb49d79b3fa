"""How long tracing a whole training step takes and how much host memory, beside torch's own tracker.

    python benchmarks/trace_speed.py [--models bert-large,llama-3-8b] [--repeat 3] [--json FILE]

Each model is traced on fake weights in a process of its own: forward, loss, backward, AdamW. Beside it, in the same
run, ``torch.distributed._tools.mem_tracker.MemTracker`` follows the same step of the same fake model. Seconds are those
of the tracing alone (the least of the repeats), without imports and without building the model, which are given apart.
Host memory is the peak resident size of the process, everything included (``VmHWM``).

The bar is that of Llama-3-8B: at most 60 s and 2 GB on two cores. The exit status says whether it was met. Where the
machine was not idle, the load in the file says so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path

MODELS = {"bert-large": (8, 512), "llama-3-8b": (1, 4096), "llama-3-70b": (1, 4096)}
"""Preset: batch, tokens."""
TOOLS = ("autoremat", "memtracker")
BAR = {"llama-3-8b": (60.0, 2e9)}
RESULTS = Path(__file__).parent / "results" / "trace_speed.json"


def host_peak_bytes():
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not state a process's peak resident size")


def trace_with_autoremat(model, batch):
    import autoremat as ar

    start = time.perf_counter()
    graph = ar.trace(model, batch, optimizer="adamw")
    seconds = time.perf_counter() - start
    return seconds, {"num_ops": len(graph.ops), "peak_bytes": ar.profile(graph).peak_bytes}


def trace_with_memtracker(model, batch):
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from autoremat._fake import fake_copy

    twin, mode = fake_copy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, foreach=False)
    for parameter in twin.parameters():  # as for autoremat, the optimizer's state is there before the step
        with mode:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    warnings.simplefilter("ignore")  # about modules that are gone when backward reaches them
    tracker = MemTracker()
    start = time.perf_counter()
    tracker.track_external(twin, optimizer, *batch.values())
    with tracker:
        loss = twin(**batch).loss
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    peaks = tracker.get_tracker_snapshot("peak")
    return seconds, {"peak_bytes": sum(snapshot["Total"] for snapshot in peaks.values())}


def child(name, tool):
    """One measurement, printed as JSON."""
    start = time.perf_counter()
    from autoremat import build_preset

    imported = time.perf_counter()
    batch, seq = MODELS[name]
    built = build_preset(name, batch=batch, seq=seq)
    done = time.perf_counter()
    trace = trace_with_autoremat if tool == "autoremat" else trace_with_memtracker
    seconds, found = trace(built.model, built.batch)
    print(
        json.dumps(
            {
                "model": name,
                "tool": tool,
                "trace_s": seconds,
                "import_s": imported - start,
                "build_s": done - imported,
                "host_bytes": host_peak_bytes(),
                **found,
            }
        )
    )


def measure(name, tool, repeat):
    """The least time of a few processes, the most memory."""
    command = [sys.executable, __file__, "--child", name, tool]
    runs = []
    for _ in range(repeat):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    best = min(runs, key=lambda run: run["trace_s"])
    return best | {
        "all_trace_s": [run["trace_s"] for run in runs],
        "host_bytes": max(run["host_bytes"] for run in runs),
        "load": os.getloadavg()[0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    rows, load_before = [], os.getloadavg()[0]
    print(f"{'model':<12} {'tool':<10} {'trace':>8} {'build':>8} {'host memory':>12} {'load':>6}")
    for name in options.models.split(","):
        for tool in TOOLS:
            row = measure(name, tool, options.repeat)
            rows.append(row)
            gigabytes = f"{row['host_bytes'] / 1e9:.2f} GB"
            print(
                f"{name:<12} {tool:<10} {row['trace_s']:>6.1f} s {row['build_s']:>6.1f} s {gigabytes:>12} "
                f"{row['load']:>6.1f}",
                flush=True,
            )
    bars = {
        row["model"]: {
            "limit_s": BAR[row["model"]][0],
            "limit_bytes": BAR[row["model"]][1],
            "met": row["trace_s"] <= BAR[row["model"]][0] and row["host_bytes"] <= BAR[row["model"]][1],
        }
        for row in rows
        if row["model"] in BAR and row["tool"] == "autoremat"
    }
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": load_before,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "rows": rows, "bars": bars}, indent=1) + "\n", "utf-8")
    for name, bar in bars.items():
        word = "met" if bar["met"] else "MISSED"
        print(f"{name}: bar of {bar['limit_s']:.0f} s and {bar['limit_bytes'] / 1e9:.0f} GB {word}")
    return 0 if all(bar["met"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
