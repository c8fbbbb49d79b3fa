"""Our frontier beside torch's ways and schedules by name, on other models: some traced, some run for real.

    python benchmarks/frontier_models.py [--models NAME,...] [--json FILE]

*Traced* (BERT-large, Llama 3 8B; no weights in memory): every schedule is priced by the ledger, forward and backward
with gradients kept. *Run* (ResNet-50, a U-Net, T5, ViT, small): torch's checkpoint and selective checkpointing around
each block, and for each of them our plan for the peak that it reached; peaks from the profiler above what was alive
before the step, FLOPs by a dispatch mode (`judge.py`), gradients compared with the plain step's, bit for bit.

Shares are of what the plain step peaks above its static bytes. *Bound* is the proved least overhead at that peak.
"""

import argparse
import contextlib
import functools
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from judge import Flops, machine, peak_bytes
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat as ar
from autoremat._dry_run import dry_run, keep_budget
from autoremat._resnet import Bottleneck, imagenet_resnet

ATTENTION = ("_scaled_dot_product",)
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
TRACED = {
    "bert-large": {"batch": 16, "seq": 512},
    "llama-3-8b": {"batch": 1, "seq": 4096, "precision": "bf16"},
}
POINTS = 32
TINY = 1e-9
"""Overheads below this are none."""


class Double(nn.Sequential):
    """Two convolutions with batch norm and ReLU."""

    def __init__(self, in_channels, out_channels):
        layers = []
        for channels in (in_channels, out_channels):
            layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels)]
            layers += [nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Four levels with skips."""

    def __init__(self, width=16, levels=4):
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.first = Double(3, widths[0])
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Double(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.last(x)


def resnet():
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 10, (8,))}
    return imagenet_resnet(50, num_classes=10), batch, Bottleneck, None


def unet():
    return UNet(), torch.randn(4, 3, 96, 96), Double, _square


def _square(output):
    return output.square().mean()


def t5():
    config = transformers.T5Config(
        vocab_size=2048,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    ids = torch.randint(0, 2048, (4, 128))
    block = transformers.models.t5.modeling_t5.T5Block
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, block, None


def vit():
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1024, image_size=96, patch_size=8
    )
    batch = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.zeros(8, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), batch, transformers.models.vit.modeling_vit.ViTLayer, None


RUN = {"resnet-50": resnet, "u-net": unet, "t5": t5, "vit": vit}


# -- traced -----------------------------------------------------------------------------------------------------


def traced(name):
    """Rows of the schedules by name, each with the cheapest plan of ours whose peak is no higher."""
    built = ar.build_preset(name, **TRACED[name])
    start = time.perf_counter()
    graph = ar.trace(built.model, built.batch, loss=built.loss, optimizer=None, gradients="kept")
    traced_s, start = time.perf_counter() - start, time.perf_counter()
    curve = ar.frontier(graph, num_points=POINTS, classics=True)
    solved_s = time.perf_counter() - start
    rows = []
    for named in curve.classics:
        plan = curve.plan(named.peak_bytes)
        rows.append(
            {
                "how": named.name,
                "peak": curve.share(named.peak_bytes),
                "extra_flops": named.overhead_flops,
                "our_peak": curve.share(plan.planned.peak_bytes),
                "our_extra_flops": plan.overhead_flops,
                "bound": plan.bound,
            }
        )
    lowest = curve.points[0]
    rows.append(_alone(curve.share(lowest.peak_bytes), lowest.overhead_flops, lowest.bound))
    facts = {"num_ops": len(graph.ops), "trace_s": traced_s, "solve_s": solved_s, "frontier": curve.to_dict()}
    return {"model": name, "kind": "traced", "options": TRACED[name], "rows": rows, **facts}


def _alone(peak, extra_flops, bound):
    return {"how": "nothing", "our_peak": peak, "our_extra_flops": extra_flops, "bound": bound}


# -- run --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpointed(model, block, *, every=1, saves=None):
    """Each n-th block under torch's checkpoint, which stores the outputs of some ops."""
    blocks = [m for m in model.modules() if isinstance(m, block)][::every]

    def policy(ctx, op, *args, **kwargs):
        is_stored = any(op.__name__.startswith(name) for name in saves)
        return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.PREFER_RECOMPUTE

    context = {} if saves is None else {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    for module in blocks:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **context)
    try:
        yield
    finally:
        for module in blocks:
            del module.forward


def peers(model, block):
    yield "torch checkpoint, every block", checkpointed(model, block)
    yield "torch checkpoint, every second block", checkpointed(model, block, every=2)
    yield "torch selective, attention", checkpointed(model, block, saves=ATTENTION)
    yield "torch selective, matmuls and convolutions", checkpointed(model, block, saves=MATMULS)
    yield "torch selective, both", checkpointed(model, block, saves=ATTENTION + MATMULS)


class Runner:
    """Runs steps of one model: peak above what was alive, FLOPs, and whether gradients are the plain ones."""

    def __init__(self, build):
        torch.manual_seed(0)
        self.model, self.batch, self.block, self.loss = build()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.plain = None
        self.plain_gradients = None
        self.plain = self.run()
        self.plain_gradients = [p.grad.clone() for p in self.model.parameters()]

    def step(self):
        torch.manual_seed(1)
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        self.loss_of().backward()

    def loss_of(self):
        output = self.model(**self.batch) if isinstance(self.batch, dict) else self.model(self.batch)
        return output.loss if self.loss is None else self.loss(output)  # the output itself dies here

    def run(self):
        with Flops() as flops:
            self.step()
        peak, _ = peak_bytes(self.step)
        if self.plain is None:
            return {"peak_bytes": peak, "flops": flops.total}
        pairs = zip(self.model.parameters(), self.plain_gradients, strict=True)
        return {
            "peak": peak / self.plain["peak_bytes"],
            "extra_flops": flops.total / self.plain["flops"] - 1,
            "peak_bytes": peak,
            "equal": all(torch.equal(p.grad, plain) for p, plain in pairs),
        }

    def ours(self, plan):
        with ar.apply(self.model, plan):
            row = self.run()
        predicted = plan.planned.peak_bytes - plan.static_bytes
        return {
            "our_peak": row["peak"],
            "our_extra_flops": row["extra_flops"],
            "our_equal": row["equal"],
            "predicted_is_measured": predicted == row["peak_bytes"],
            "predicted_off": predicted / row["peak_bytes"] - 1,
            "bound": plan.bound,
        }


def promised(curve, budget, run):
    """The plan for a budget as `plan` makes it, kept by a dry run; the smallest where no plan keeps it."""
    for _ in range(3):
        try:
            return keep_budget(curve.plan, budget, run)
        except ar.BudgetInfeasible as error:
            budget = error.smallest_bytes
    return curve.plan(budget)


def really(name):
    """Rows of torch's ways, each with our plan for the peak that it reached; both run."""
    runner = Runner(RUN[name])
    start = time.perf_counter()
    options = {"loss": runner.loss, "optimizer": None, "gradients": "kept"}
    curve = ar.frontier(runner.model, runner.batch, num_points=POINTS, objective="flops", **options)
    solved_s = time.perf_counter() - start
    rows, known = [], {}

    def ours(budget):
        plan = promised(curve, budget, lambda plan: dry_run(runner.model, runner.batch, plan, **options))
        if plan.regions not in known:
            known[plan.regions] = runner.ours(plan)
        return known[plan.regions]

    for how, context in peers(runner.model, runner.block):
        with context:
            row = runner.run()
        rows.append({"how": how, **row, **ours(curve.static_bytes + row["peak_bytes"])})
    rows.append({"how": "nothing", **ours(curve.smallest_bytes)})
    free = next(point for point in curve.points if point.overhead_flops < TINY)
    rows.append({"how": "plain", "peak": 1.0, "extra_flops": 0.0, **ours(free.peak_bytes)})
    return {"model": name, "kind": "run", "rows": rows, "solve_s": solved_s, "frontier": curve.to_dict()}


# -- showing ----------------------------------------------------------------------------------------------------


def table(found):
    shown = Table(title=f"{found['model']} ({found['kind']})", title_justify="left")
    for name in ("way", "its peak", "its extra FLOPs", "our peak", "ours", "bound", "same bits", "predicted"):
        shown.add_column(name, justify="left" if name == "way" else "right")
    for row in found["rows"]:
        its = (f"{row['peak']:.3f}", f"{row['extra_flops']:.1%}") if "peak" in row else ("", "")
        is_run = "our_equal" in row
        shown.add_row(
            row["how"],
            *its,
            f"{row['our_peak']:.3f}",
            f"{row['our_extra_flops']:.1%}",
            f"{row['bound']:.1%}",
            f"{row.get('equal', '')} {row['our_equal']}" if is_run else "",
            f"{row['predicted_off']:+.2%}" if is_run else "",
        )
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join((*RUN, *TRACED)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"machine": machine(), "models": []}
    if options.json and options.json.exists():
        wanted = options.models.split(",")
        found["models"] = [m for m in json.loads(options.json.read_text())["models"] if m["model"] not in wanted]
    for name in options.models.split(","):
        found["models"].append(really(name) if name in RUN else traced(name))
        Console(width=140).print(table(found["models"][-1]))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
