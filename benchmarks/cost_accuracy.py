"""Predicted against measured step time on the machine at hand: plain and under three plans, six models.

    python benchmarks/cost_accuracy.py [--threads 1] [--rounds 5] [--models gpt2,bert] [--malloc keep] [--json FILE]
                                       [--calibrate]

Calibrates the machine if need be (or with --calibrate), then, model by model, runs the plain step, its plans and its
single op calls in turn, in an order that rotates, and predicts each step from the roofline and from the calls. The
lower quartile of a kind's rounds is its time, as it is a call's; its overhead is the median over rounds of its time
over the plain step's of that round. With one thread times are CPU times of this process (pages that the kernel maps
included), which other processes disturb little; with more, or on a GPU, they are wall times: leave the machine alone
then. The load average is stored with the figures.

The C library is told to keep the memory that is freed (--malloc keep), as a GPU's allocator does: by default whether a
large tensor pays for fresh pages depends on the history of the process, and a plain step that gives hundreds of MiB
back to the system pays for them again where the next planned step does not. --malloc default leaves it alone.

Bars: median error at most 8 % from the roofline, 3 % from measured ops; overhead within 2 points.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import autoremat as ar
from autoremat._bench import Bench, low_quartile
from autoremat._build_graph import trace
from autoremat._cost import RegionCost
from autoremat._measure_ops import CallLog, CallTimes, grouped
from autoremat._model_states import States
from autoremat._planning import find_target
from autoremat._regions import resolve
from autoremat._step import run_step

SHARES = (0.7, 0.45, 0.25)
"""Budgets: static bytes and this share of what the plain step peaks above them."""
BARS = {"roofline": 0.08, "measured": 0.03}
OVERHEAD_BAR = 0.02


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory():
    """Tell glibc to serve all sizes from its heap, and to give nothing of it back."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)):
        raise SystemExit("mallopt failed: this is not glibc; use --malloc default")


def _tokens(vocabulary, batch, length):
    ids = torch.randint(1, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=8192, n_positions=256, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss", use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens(8192, 4, 256)


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.BertForMaskedLM(config), _tokens(8192, 4, 256)


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=1024, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(8192, 4, 256)


def t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=8192, d_model=384, d_ff=1024, num_layers=3, num_heads=6, d_kv=64, decoder_start_token_id=0,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens(8192, 4, 192)


def vit():
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, image_size=128,
        patch_size=8, hidden_dropout_prob=0.1, num_labels=100,
    )  # fmt: skip
    images = torch.randn(4, 3, 128, 128)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(4)}


def resnet50():
    built = ar.build_preset("resnet-50", batch=2, fake=False)
    return built.model, built.batch


MODELS = {function.__name__: function for function in (gpt2, bert, llama, t5, vit, resnet50)}


def run_model(name, bench, rounds):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.to(bench.device).train()
    batch = {key: value.to(bench.device) for key, value in batch.items()}
    target = find_target(None, "here")
    log = CallLog()
    graph = trace(model, batch, device_kind=bench.device.type, on_op=log)
    plain, static = ar.profile(graph).peak_bytes, graph.static_bytes
    smallest = ar.frontier(graph, num_points=2, target=target).smallest_bytes
    budgets = [max(smallest, static + int(share * (plain - static))) for share in SHARES]
    kinds = [None, *(ar.plan(graph, budget=budget, target=target) for budget in budgets)]
    times = [CallTimes(group, bench) for group in grouped(log.calls)]
    taken = _run(model, batch, kinds, bench, rounds, times)
    known = {key: seconds for group in times for key, seconds in group.seconds().items()}
    measured = dataclasses.replace(graph, measured_s=tuple(known[key] for key in log.keys))
    graphs = {"roofline": graph, "measured": measured}
    rows = []
    for number, kind in enumerate(kinds):
        share = "plain" if kind is None else f"{SHARES[number - 1]:.2f}"
        row = {"model": name, "plan": share, "run_s": low_quartile(taken[number])}
        ratios = [own / base for own, base in zip(taken[number], taken[0], strict=True)]
        row["run_overhead"] = statistics.median(ratios) - 1
        row["rounds_s"] = taken[number]
        for cost, step in graphs.items():
            predicted = _predict(step, kind, target)
            row[f"{cost}_s"] = predicted
            row[f"{cost}_overhead"] = predicted / _predict(step, None, target) - 1
        rows.append(row)
    return rows


def _predict(graph, plan, target):
    """Seconds of the step under a plan (made from whichever prediction)."""
    specs = [] if plan is None else resolve(graph, plan)
    return ar.profile(graph, plan, target=target).step_s + RegionCost(graph, target).total(specs)


def _run(model, batch, kinds, bench, rounds, times):
    """CPU or wall seconds of each kind in each round, and rounds of single calls between them; the first warms up."""
    states = States(torch.optim.AdamW(model.parameters(), foreach=bench.device.type == "cuda"))
    taken = [[] for _ in kinds]
    for number in range(rounds + 1):
        order = [(number + i) % len(kinds) for i in range(len(kinds))]
        for i in order:
            applied = None if kinds[i] is None else ar.apply(model, kinds[i], check="never")
            run_step(model, batch, states=states)  # buffers and pages of this kind
            model.zero_grad(set_to_none=True)
            seconds = bench.taken_s(lambda: run_step(model, batch, states=states))
            model.zero_grad(set_to_none=True)
            if applied is not None:
                applied.remove()
            if number:
                taken[i].append(seconds)
            if number and i % 2:  # two rounds of single calls among four steps
                for group in times:
                    group.round()
    return taken


def summary(rows):
    errors = {cost: [abs(row[f"{cost}_s"] / row["run_s"] - 1) for row in rows] for cost in BARS}
    planned = [row for row in rows if row["plan"] != "plain"]
    overheads = {cost: [abs(r[f"{cost}_overhead"] - r["run_overhead"]) for r in planned] for cost in BARS}
    return {
        f"{what}, {cost}": {
            "median": statistics.median(found[cost]),
            "largest": max(found[cost]),
            "bar": bar(cost),
            "within": sum(error <= bar(cost) for error in found[cost]),
            "of": len(found[cost]),
        }
        for what, found, bar in (
            ("error of step time", errors, BARS.get),
            ("error of overhead", overheads, lambda _: OVERHEAD_BAR),
        )
        for cost in BARS
    }


def table(rows):
    made = Table(title="step time, predicted and measured")
    for name in (
        "model",
        "plan",
        "measured",
        "roofline",
        "",
        "measured ops",
        "",
        "overhead",
        "roofline",
        "measured ops",
    ):
        made.add_column(name, justify="right")
    for row in rows:
        times = [f"{row['run_s'] * 1e3:.0f} ms"]
        for cost in BARS:
            times += [f"{row[f'{cost}_s'] * 1e3:.0f} ms", f"{row[f'{cost}_s'] / row['run_s'] - 1:+.1%}"]
        overheads = [f"{row[f'{cost}_overhead']:+.1%}" for cost in BARS]
        made.add_row(row["model"], row["plan"], *times, f"{row['run_overhead']:+.1%}", *overheads)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calibrate", action="store_true", help="measure the machine again")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    options = parser.parse_args()
    if options.malloc == "keep":
        keep_freed_memory()
    torch.set_num_threads(options.threads)
    if options.calibrate or find_target(None, "here").calibration is None:
        ar.calibrate(progress=lambda label, _: print(f"calibrating: {label}", flush=True))
    calibration = find_target(None, "here").calibration
    bench = Bench(torch.device(calibration.device_kind))
    load = [os.getloadavg()[0]]
    rows = []
    for name in options.models.split(","):
        rows += run_model(name, bench, options.rounds)
        load.append(os.getloadavg()[0])
        print(f"{name}: done", flush=True)
    Console(width=150).print(table(rows))
    found = summary(rows)
    for name, value in found.items():
        within = f"{value['within']} of {value['of']} within"
        print(f"{name}: median {value['median']:.1%}, largest {value['largest']:.1%}, {within} {value['bar']:.0%}")
    machine = f"{calibration.device}, {options.threads} threads, {platform.system()}, torch {torch.__version__}"
    clock = "CPU time of the process" if options.threads == 1 and bench.device.type == "cpu" else "wall time"
    loads = f"load average {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores"
    print(f"{machine}; {clock}; malloc: {options.malloc}; {loads}")
    if options.json:
        result = {
            "machine": machine,
            "clock": clock,
            "malloc": options.malloc,
            "load_average": [min(load), max(load)],
            "calibration_error": calibration.error,
            "summary": found,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
