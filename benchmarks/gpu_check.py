"""Predicted against measured on a real GPU, for a zoo of models, plain and planned. One command, under eight minutes.

    python benchmarks/gpu_check.py [--models bert,gpt2] [--json FILE] [--device cpu]

Without a GPU it says so and exits with 0. ``--device cpu`` runs the same code with small models on the CPU (allocated
bytes from the profiler, nothing reserved, no promises), to see that it works.

For each model, in processes of their own, so that each allocator starts empty:

- the step is traced and planned for a budget 40 % of the way from the smallest possible to the plain peak; it is also
  traced on the CPU, as where there is no GPU;
- plain and planned, with and without ``expandable_segments``, it runs for real: allocated and reserved peaks, and time;
- every allocation of the first two steps is recorded (``torch.cuda.memory._record_memory_history``) and replayed
  through the model of the allocator: its reserved bytes must be the device's at every allocation;
- loss, gradients, buffers and random state are compared bit for bit, plain against planned, with deterministic kernels.

Exit status 1 if a promise is not kept: allocated within 0.5 %, reserved within 3 %, no measured peak over its budget by
more than the former, snapshots exact, gradients equal.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "gpu_check.json"
SHARE = 0.4
NUM_TIMED_STEPS = 5
DEADLINE_S = 420
CHILD_S = 120
ALLOCATED_WITHIN, RESERVED_WITHIN = 0.005, 0.03
LARGE_DEVICE_BYTES = 70 * 2**30
KINDS = ("plain", "planned")
SETTINGS = {"default": "", "expandable": "expandable_segments:True"}
MAX_TRACE_ENTRIES = 4_000_000


# -- in a child ------------------------------------------------------------------------------------------------


def load(name, device):
    from gpu_zoo import build

    return build(name, small=device == "cpu")


def to_device(batch, device):
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


def plan_child(options):
    """Trace and plan; writes the plan, prints the predictions."""
    import autoremat as ar
    from autoremat._planning import find_target

    case = load(options.model, options.device)
    on_device = case.model.to(options.device)
    target = find_target(on_device, None)
    batch = to_device(case.batch, options.device)
    common = {"loss": case.loss, "precision": case.precision}
    start = time.perf_counter()
    graph = ar.trace(on_device, batch, **common)
    trace_s = time.perf_counter() - start
    free = ar.plan(graph, budget=2**60, target=target)
    between = free.plain.peak_bytes - free.smallest_bytes
    plan = ar.plan(graph, budget=free.smallest_bytes + int(SHARE * between), target=target)
    plan_s = time.perf_counter() - start - trace_s
    plan.save(options.plan)
    without = ar.trace(case.model.to("cpu"), case.batch, target=target, **common)
    found = {
        "target": target.name,
        "trace_s": trace_s,
        "plan_s": plan_s,
        "budget_bytes": plan.budget_bytes,
        "num_regions": len(plan.regions),
        "overhead_flops": plan.overhead_flops,
        "overhead_s": plan.overhead_s,
        "plain_peak_bytes_traced_without_gpu": ar.profile(without, target=target).peak_bytes,
    }
    for kind, chosen in (("plain", None), ("planned", plan)):
        for setting, text in SETTINGS.items():
            profile = ar.profile(graph, chosen, target=target, allocator=text)
            found[f"{kind} {setting}"] = {
                "peak_bytes": profile.peak_bytes,
                "step_s": profile.step_s,
                "allocator": profile.allocator and profile.allocator.to_dict(),
            }
    return found


def measure_child(options):
    """Real steps in an empty allocator: peaks, time, and every allocation of the first two steps."""
    import contextlib

    import torch

    import autoremat as ar
    from autoremat._measure import record_memory, unique_bytes
    from autoremat._step import Precision, find_loss, split_batch

    is_gpu = options.device == "cuda"
    case = load(options.model, options.device)
    if is_gpu:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MAX_TRACE_ENTRIES)
    model = case.model.to(options.device).train()
    batch = to_device(case.batch, options.device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    args, kwargs = split_batch(batch)
    precision = Precision.parse(case.precision)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with precision.context(options.device):
            loss = find_loss(model(*args, **kwargs), case.loss, model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    plan = None if options.kind == "plain" else ar.Plan.load(options.plan)
    with contextlib.nullcontext() if plan is None else ar.apply(model, plan, check="never"):
        for _ in range(2):
            loss = step()
        found = {"loss": float(loss)}
        if is_gpu:
            torch.cuda.synchronize()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["snapshot"] = check_snapshot(torch.cuda.memory._snapshot(), options.setting)
            torch.cuda.memory._record_memory_history(enabled=None)
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["requested_bytes"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
            found["blas_workspace_bytes"] = getattr(torch.backends.cuda, "cublas_workspace_size", int)()
        else:
            optimizer.zero_grad(set_to_none=True)
            state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            static = unique_bytes([*parameters, *model.buffers(), *tensors_in(batch), *state])
            _, events = record_memory(step)
            live, peak = static, static
            for _, change in events:
                live += change
                peak = max(peak, live)
            found |= {"allocated_bytes": peak, "reserved_bytes": None, "requested_bytes": peak, "snapshot": None}
        found["all_step_s"] = time_steps(step, is_gpu=is_gpu)
        found["step_s"] = statistics.median(found["all_step_s"])
    return found


def tensors_in(batch):
    import torch
    from torch.utils._pytree import tree_iter

    return [x for x in tree_iter(batch) if isinstance(x, torch.Tensor)]


def time_steps(step, *, is_gpu):
    import torch

    times = []
    for turn in range(NUM_TIMED_STEPS + 1):
        start = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        if turn > 0:
            times.append(time.perf_counter() - start)
    return times


def check_snapshot(snapshot, settings_text):
    """Replay a recorded history through the model; where reserved bytes first differ, if they do."""
    from autoremat._allocator import Allocate, _Allocator
    from autoremat._allocator_settings import AllocatorSettings

    entries = snapshot["device_traces"][0]
    allocator = _Allocator(AllocatorSettings.parse(settings_text), None)
    real = peak = num_allocations = 0
    first = None
    for entry in entries:
        action, size = entry["action"], entry["size"]
        if action in ("segment_alloc", "segment_map"):
            real += size
            peak = max(peak, real)
        elif action in ("segment_free", "segment_unmap"):
            real -= size
        elif action == "alloc":
            allocator.allocate(Allocate(entry["addr"], size, entry["stream"]))
            num_allocations += 1
            if allocator.reserved != real and first is None:
                first = {"allocation": num_allocations, "model_bytes": allocator.reserved, "device_bytes": real}
        elif action == "free_completed" and entry["addr"] in allocator.live:
            allocator.free(entry["addr"])
    return {
        "num_allocations": num_allocations,
        "device_reserved_bytes": peak,
        "model_reserved_bytes": allocator.peak_reserved,
        "model_allocated_bytes": allocator.peak_allocated,
        "exact": first is None,
        "first_difference": first,
    }


def verify_child(options):
    """Plain against planned, bit for bit; and plain against plain, which says what the kernels themselves repeat."""
    import torch

    import autoremat as ar

    case = load(options.model, options.device)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    model, batch = case.model.to(options.device), to_device(case.batch, options.device)
    common = {"loss": case.loss, "precision": case.precision}
    itself = ar.verify(model, batch, ar.Plan(regions=()), **common)
    report = ar.verify(model, batch, ar.Plan.load(options.plan), **common)
    return {
        "equal": report.equal,
        "plain_repeats_itself": itself.equal,
        "num_compared": report.num_compared,
        "differences": [f"{d.kind} {d.name}" for d in report.differences[:20]],
        "num_recomputed_regions": report.num_recomputed_regions,
    }


CHILDREN = {"plan": plan_child, "measure": measure_child, "verify": verify_child}


# -- the parent ------------------------------------------------------------------------------------------------


def run_child(what, model, device, plan, *, kind="plain", setting="default"):
    """One child; its JSON, or the end of what it said when it failed."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if what == "verify" else dict(os.environ)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(name, None)
        if SETTINGS[setting]:
            environment[name] = SETTINGS[setting]
    command = [sys.executable, __file__, "--child", what, "--model", model, "--device", device, "--plan", str(plan)]
    command += ["--kind", kind, "--setting", SETTINGS[setting]]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {CHILD_S} s", "child_s": CHILD_S}
    took = {"child_s": round(time.perf_counter() - start, 2)}
    if done.returncode:
        return {"error": (done.stderr.strip() or done.stdout.strip())[-2000:]} | took
    return json.loads(done.stdout.splitlines()[-1]) | took


def compare(row, predicted, measured):
    """Signed relative errors of the predictions, and which promises hold."""
    usage = predicted["allocator"]
    allocated = usage["allocated_bytes"] if usage else predicted["peak_bytes"]
    row["allocated_error"] = allocated / measured["allocated_bytes"] - 1
    row["requested_error"] = (usage["requested_bytes"] if usage else allocated) / measured["requested_bytes"] - 1
    row["reserved_error"] = usage["reserved_bytes"] / measured["reserved_bytes"] - 1 if usage else None
    row["step_s_error"] = predicted["step_s"] / measured["step_s"] - 1
    row["kept"] = {}
    if usage:
        row["kept"] = {
            "allocated": abs(row["allocated_error"]) <= ALLOCATED_WITHIN,
            "reserved": abs(row["reserved_error"]) <= RESERVED_WITHIN,
            "snapshot": measured["snapshot"]["exact"],
        }
    return row


def measure_row(task):
    """One measured row: (model, device, plan, predictions, kind, setting, deadline)."""
    model, device, plan, predictions, kind, setting, deadline = task
    if time.monotonic() > deadline:
        return {"kind": kind, "setting": setting, "left_out": True}
    measured = run_child("measure", model, device, plan, kind=kind, setting=setting)
    row = {"kind": kind, "setting": setting, "measured": measured}
    if "error" not in measured:
        compare(row, predictions[f"{kind} {setting}"], measured)
        if kind == "planned" and device == "cuda":
            row["kept"]["budget"] = measured["requested_bytes"] / predictions["budget_bytes"] - 1 <= ALLOCATED_WITHIN
    print(line(model, row), flush=True)
    return row


def verify_model(task):
    model, device, plan, deadline = task
    if time.monotonic() > deadline:
        return {"left_out": True, "equal": True}
    found = run_child("verify", model, device, plan)
    print(f"{model:<9} {verdict(found)}", flush=True)
    return found


def check_models(models, device, plans, deadline):
    """Every measurement. What is timed runs alone; the rest side by side where the device has the memory."""
    lanes = num_lanes(device)
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2))) as pool:
        planned = list(pool.map(lambda m: run_child("plan", m, device, plans[m]), models))
    predictions = dict(zip(models, planned, strict=True))
    able = [model for model in models if "error" not in predictions[model]]
    settings = list(SETTINGS) if device == "cuda" else ["default"]
    tasks = {
        setting: [(m, device, plans[m], predictions[m], kind, setting, deadline) for m in able for kind in KINDS]
        for setting in settings
    }
    rows = [(task[0], measure_row(task)) for task in tasks["default"]]
    with ThreadPoolExecutor(lanes) as pool:
        others = [task for setting in settings[1:] for task in tasks[setting]]
        rows += zip([task[0] for task in others], pool.map(measure_row, others), strict=True)
        verified = dict(zip(able, pool.map(verify_model, [(m, device, plans[m], deadline) for m in able]), strict=True))
    entries = []
    for model in models:
        own = [row for name, row in rows if name == model]
        times = {(r["kind"], r["setting"]): r["measured"].get("step_s") for r in own if "measured" in r}
        plain, with_plan = times.get(("plain", "default")), times.get(("planned", "default"))
        overhead = with_plan / plain - 1 if plain and with_plan else None
        entry = {"model": model, "prediction": predictions[model], "measured_overhead_s": overhead, "rows": own}
        entries.append(entry | ({"verified": verified[model]} if model in verified else {}))
    return entries


def num_lanes(device):
    """How many children may share the device."""
    import torch

    return 3 if device == "cuda" and torch.cuda.get_device_properties(0).total_memory > LARGE_DEVICE_BYTES else 1


def line(model, row):
    from autoremat._units import format_bytes, format_seconds

    if "error" in row["measured"]:
        return f"{model:<9} {row['kind']:<8} {row['setting']:<11} FAILED: {row['measured']['error'].splitlines()[-1]}"
    measured = row["measured"]
    reserved = ""
    if row["reserved_error"] is not None:
        reserved = f"  reserved {format_bytes(measured['reserved_bytes']):>9} ({row['reserved_error']:+.2%})"
    broken = [name for name, kept in row["kept"].items() if not kept]
    promises = "NOT KEPT: " + ", ".join(broken) if broken else "kept" if row["kept"] else ""
    return (
        f"{model:<9} {row['kind']:<8} {row['setting']:<11} allocated {format_bytes(measured['allocated_bytes']):>9} "
        f"({row['allocated_error']:+.2%}){reserved}  step {format_seconds(measured['step_s']):>8} "
        f"({row['step_s_error']:+.0%})  {promises}"
    )


def verdict(verified):
    if "error" in verified:
        return f"verify FAILED: {verified['error'].splitlines()[-1]}"
    if not verified["plain_repeats_itself"]:
        return "verify: the plain step does not repeat itself bit for bit, so plans cannot be judged by it"
    return "verify: equal to the bit" if verified["equal"] else f"verify: DIFFERS in {verified['differences']}"


def broken_promises(entries):
    """What was promised and not kept, in words."""
    broken = []
    for entry in entries:
        name = entry["model"]
        broken += [f"{name}: planning failed"] if "error" in entry["prediction"] else []
        for row in (row for row in entry["rows"] if "left_out" not in row):
            failed = ["run"] if "error" in row["measured"] else [key for key, kept in row["kept"].items() if not kept]
            broken += [f"{name}, {row['kind']}, {row['setting']}: {what}" for what in failed]
        verified = entry.get("verified", {"equal": True})
        if "error" in verified or (verified.get("plain_repeats_itself", True) and not verified["equal"]):
            broken.append(f"{name}: verify")
    return broken


def describe_machine(device):
    import torch

    found = {"device": device, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert,gpt2,llama,t5,vit,resnet50,unet")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=RESULTS)
    for hidden in ("--child", "--model", "--plan", "--kind", "--setting"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse_options()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: no GPU here. Run this on a machine with one; --device cpu tries the script itself.")
        return 0
    start = time.monotonic()
    models = options.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        plans = {model: Path(folder) / f"{model}.json" for model in models}
        entries = check_models(models, options.device, plans, start + DEADLINE_S)
    broken = broken_promises(entries)
    left_out = sum("left_out" in row for e in entries for row in (*e["rows"], e.get("verified", {})))
    result = {
        "left_out": left_out,
        "machine": describe_machine(options.device),
        "took_s": time.monotonic() - start,
        "broken_promises": broken,
        "models": entries,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{result['took_s']:.0f} s, written to {options.json}")
    if left_out:
        print(f"{left_out} measurements were left out: {DEADLINE_S} s were over.")
    print("\n".join(["Not kept:", *broken]) if broken else "Every promise was kept.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
