"""Batches of changing length under `enable`: is every step within the budget, and what does planning take?

    python benchmarks/variable_lengths.py [--only NAME] [--steps 200] [--json FILE]

A GPT-2 (4 layers, 256 wide, batch 4, AdamW) on sequences of 32 to 256 tokens: lengths drawn evenly; the same with
planning in the background; and lengths that grow from step to step, the worst case: a plan serves what is smaller, so
growth asks for one plan after another. The budget is a share of the largest plain peak. Every step runs under the
profiler, whose memory events judge the peaks (what is alive when a step starts is carried over from the steps before;
`off_at_the_end_bytes` is what that comes to after the run, less what model, gradients and optimizer hold then);
times are CPU time of the steps alone, without starting the profiler and reading it. Losses are compared with those of a
plain run from the same seeds.

`planning_share_after_two` is the time of all plans but the first two, as a share of the whole run: the project promises
less than 2 %. `waited_s` is what steps waited for. A switch is a step that takes another plan than the step before it;
`switch_ms` is the thread's own time for one to a plan that was used before, `no_switch_ms` for looking a plan up.
"""

import argparse
import json
import statistics
import time
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from judge import machine
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import autoremat as ar
from autoremat._measure import record_memory
from autoremat._memory_meter import unique_bytes

BATCH, SHORTEST, LONGEST, VOCABULARY = 4, 32, 256, 512
SHARE = 0.6
RUNS = {
    "drawn evenly": {},
    "drawn evenly, in the background": {"background": True},
    "growing": {"is_growing": True},
}


def build():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
        use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def draw_lengths(num_steps, *, is_growing):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(SHORTEST, LONGEST + 1, (num_steps,), generator=generator).tolist()
    return sorted(drawn) if is_growing else drawn


class Watched:
    """What `enable` does before each step: the plan that it puts on, and the time that takes."""

    def __init__(self, state):
        self.plans, self.all_s, self.own_s, self.num_made = [], [], [], []
        self._state, self._inner = state, state.before_forward
        state.before_forward = self._before_forward

    def _before_forward(self, *args, **kwargs):
        process, own = time.process_time(), time.thread_time()
        self._inner(*args, **kwargs)
        self.all_s.append(time.process_time() - process)
        self.own_s.append(time.thread_time() - own)
        self.plans.append(self._state._current)
        self.num_made.append(len(self._state._prepared))

    def figures(self, run_s, *, is_background):
        """Plans, switches, and what they take."""
        made = self._state._prepared
        waited = [self.all_s[self.num_made.index(number)] for number in range(1, len(made) + 1)]
        # What the planner does beside the steps, it does on a thread of its own, whose wall time is known.
        seconds = [max(p.seconds, s) if is_background else s for p, s in zip(made, waited, strict=True)]
        switches = [i for i, (a, b) in enumerate(pairwise(self.plans), start=1) if a is not b]
        again = [i for i in switches if self.plans[i] in self.plans[:i]]
        same = [i for i in range(1, len(self.plans)) if i not in switches]
        return {
            "run_s": run_s,
            "planning_s": sum(seconds),
            "waited_s": sum(waited),
            "planning_share": sum(seconds) / run_s,
            "planning_share_after_two": sum(seconds[2:]) / run_s,
            "num_plans": len(made),
            "num_switches": len(switches),
            "switch_ms": 1e3 * statistics.median(self.own_s[i] for i in again) if again else None,
            "no_switch_ms": 1e3 * statistics.median(self.own_s[i] for i in same),
            "plans": [
                {
                    "tokens": prepared.observed.sizes[1],
                    "seconds": s,
                    "num_regions": len(prepared.plan.regions),
                    "overhead_flops": prepared.plan.overhead_flops,
                    "num_steps": sum(prepared is used for used in self.plans),
                }
                for prepared, s in zip(made, seconds, strict=True)
            ],
        }


def train(model, lengths):
    """Losses and peaks (bytes) of all steps, what they took together, and by how much the bytes at the end are off."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    alive, run_s = unique_bytes([*model.parameters(), *model.buffers()]), 0.0
    losses, peaks = [], []

    def step(length):
        start = time.process_time()
        ids = torch.randint(VOCABULARY, (BATCH, length))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach(), time.process_time() - start

    for length in lengths:
        (loss, seconds), events = record_memory(lambda length=length: step(length))
        curve = list(accumulate((change for _, change in events), initial=alive))
        alive, run_s = curve[-1], run_s + seconds
        losses.append(loss.item())
        peaks.append(max(curve))
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses, peaks, run_s, alive - unique_bytes([*model.parameters(), *model.buffers(), *gradients, *states])


def measure(name, plain, lengths, *, background):
    losses, plain_peaks, plain_s, _ = plain
    budget = int(SHARE * max(plain_peaks))
    model = ar.enable(build(), budget, holds_output=False, background=background)
    watched = Watched(ar.enabled(model))
    found, peaks, run_s, off_bytes = train(model, lengths)
    return {
        "lengths": name,
        "num_steps": len(lengths),
        "plain_peak_bytes": max(plain_peaks),
        "budget_bytes": budget,
        "highest_peak_bytes": max(peaks),
        "off_at_the_end_bytes": off_bytes,
        "steps_over_budget": sum(peak > budget for peak in peaks),
        "losses_equal": found == losses,
        "plain_run_s": plain_s,
        **watched.figures(run_s, is_background=background),
    }


def table_of(rows):
    table = Table("", *(row["lengths"] for row in rows))
    for name in list(rows[0])[1:-1]:
        table.add_row(name, *(f"{v:.4g}" if isinstance(v := row[name], float) else str(v) for row in rows))
    table.add_row("plans", *(", ".join(f"{p['tokens']} ({p['seconds']:.1f} s)" for p in row["plans"]) for row in rows))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS, action="append", help="may be given more than once")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, plain = [], {}
    for name in options.only or RUNS:
        is_growing, background = RUNS[name].get("is_growing", False), RUNS[name].get("background", False)
        lengths = draw_lengths(options.steps, is_growing=is_growing)
        if is_growing not in plain:
            plain[is_growing] = train(build(), lengths)
        rows.append(measure(name, plain[is_growing], lengths, background=background))
        if options.json:
            found = {"machine": machine(), "threads": torch.get_num_threads(), "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
