"""The demo: a plan for the case that the technique is known for, and a small training that keeps its promises.

The training text is this package's own source code, byte by byte: it is there wherever the package is.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import autoremat
from autoremat import _tables
from autoremat._api import frontier, layers, plan, profile, trace
from autoremat._measure import measure
from autoremat._plan import Plan
from autoremat._presets import build_preset, gpt2
from autoremat._report import render_report
from autoremat._report_data import ReportSection
from autoremat._results import TrainedRuns
from autoremat._targets import get_target
from autoremat._units import format_bytes
from autoremat._verify import verify
from autoremat.runtime import apply

Progress = Callable[[str, float], None]

BUDGET_SHARE = 0.55
"""Budget of the training, as a share of the plain step's peak."""
_SEED = 0
_BATCH, _SEQ, _BYTE_VALUES = 4, 256, 256
_SHAPE = {"n_layer": 8, "n_embd": 256, "n_head": 4}
_LEARNING_RATE = 5e-4
_NUM_POINTS = 32
_KNOWN_CASE = ("bert-large", 16, 1024, "rtx3090-24g")
_ALLOCATOR = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found.

    Attributes:
        known_case: BERT-large on a card that it does not fit.
        training: The small GPT-2.
    """

    known_case: ReportSection
    training: ReportSection

    @property
    def failures(self) -> tuple[str, ...]:
        """Promises that were not kept; empty if all were."""
        usage, trained, verified = self.training.usage, self.training.trained, self.training.verified
        assert usage is not None
        assert usage.plain is not None
        assert trained is not None
        assert verified is not None
        checks = {
            "the plan for BERT-large exceeds its budget": not _fits(self.known_case.plan),
            f"{len(trained.plain_losses) - trained.num_equal} losses differ": not trained.equal,
            "gradients, buffers or random state differ": not verified.equal,
            "the measured peak exceeds the budget": not usage.within_budget,
            f"the measured peak is over {BUDGET_SHARE:.0%} of plain": usage.planned.peak_bytes
            > BUDGET_SHARE * usage.plain.peak_bytes,
        }
        return tuple(text for text, failed in checks.items() if failed)

    def tables(self) -> tuple[Any, ...]:
        """Tables and lines for a terminal."""
        known, training = self.known_case, self.training
        assert known.plan is not None
        assert training.plan is not None
        assert training.usage is not None
        assert training.trained is not None
        return (
            f"\n[bold]1. {known.title}[/]",
            _tables.plan_table(known.plan),
            _tables.regions_table(known.plan),
            f"\n[bold]2. {training.title}[/]",
            _tables.regions_table(training.plan),
            _tables.usage_table(training.usage),
            _trained_table(training.trained),
        )

    def html(self) -> str:
        """The report: one self-contained page."""
        versions = f"autoremat {autoremat.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        return render_report(
            (self.known_case, self.training), title="autoremat demo", footer=f"Made by `autoremat demo`: {versions}."
        )


def run_demo(*, num_steps: int, progress: Progress) -> DemoResult:
    """Plan BERT-large for a 24 GB card, then train a small GPT-2 plain and planned.

    Args:
        num_steps: Training steps of each.
        progress: Called with a label and a fraction done.
    """
    known_case = _known_case(_part(progress, 0.0, 0.4))
    return DemoResult(known_case=known_case, training=_training(num_steps, _part(progress, 0.4, 1.0)))


def _known_case(progress: Progress) -> ReportSection:
    name, batch, seq, target = _KNOWN_CASE
    progress(f"Tracing {name} on fake weights", 0.0)
    built = build_preset(name, batch=batch, seq=seq)
    graph = trace(built.model, built.batch, optimizer="adamw", target=target)
    budget_bytes = get_target(target).usable_bytes
    made = plan(
        graph,
        budget=budget_bytes,
        budget_is="reserved",
        target=target,
        allocator=_ALLOCATOR,
        progress=_part(progress, 0.5, 1.0),
    )
    return ReportSection(
        title="BERT-large, sequence 1,024, batch 16, AdamW, on a 24 GB RTX 3090",
        text=(
            f"{get_target(target).title} leaves {format_bytes(budget_bytes)} to a training step, what the caching "
            f"allocator reserves included (with PYTORCH_ALLOC_CONF={_ALLOCATOR}). "
            "Predicted from a trace on fake weights: no GPU, no memory for the weights."
        ),
        plain=profile(graph, target=target, allocator=_ALLOCATOR),
        planned=profile(graph, made, target=target),
        plan=made,
        frontier=frontier(graph, num_points=_NUM_POINTS, classics=True, target=target),
        layers=layers(graph, made, target=target),
    )


def _training(num_steps: int, progress: Progress) -> ReportSection:
    text = _own_source()
    model, batch = _small_gpt2(), _sample(text, 0)
    progress("Tracing a small GPT-2", 0.0)
    graph = trace(model, batch, optimizer="adamw", target="cpu")
    plain = profile(graph)
    curve = frontier(graph, num_points=_NUM_POINTS, classics=True, target="cpu", progress=_part(progress, 0.05, 0.15))
    made = curve.plan(int(BUDGET_SHARE * plain.peak_bytes))
    progress("Comparing a plain and a planned step", 0.15)
    verified = verify(model, batch, made)
    usage = measure(model, batch, made, progress=_part(progress, 0.25, 0.4))
    trained = _train(made, text, num_steps=num_steps, progress=_part(progress, 0.4, 1.0))
    return ReportSection(
        title=f"A small GPT-2, trained for {num_steps} steps under {BUDGET_SHARE:.0%} of its plain peak",
        text=(
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {_BATCH} x {_SEQ} bytes "
            f"a step, dropout on, on {torch.get_num_threads()} CPU threads; the text is this package's source. "
            "Plain and planned runs start from the same seed."
        ),
        plain=plain,
        planned=profile(graph, made),
        plan=made,
        frontier=curve,
        layers=layers(graph, made),
        verified=verified,
        usage=usage,
        trained=trained,
    )


def _small_gpt2() -> nn.Module:
    torch.manual_seed(_SEED)
    tokens = {"n_positions": _SEQ, "vocab_size": _BYTE_VALUES, "bos_token_id": 0, "eos_token_id": 0}
    model = gpt2(_SEQ, **_SHAPE, **tokens)
    return model.train()


def _own_source() -> Tensor:
    files = sorted(Path(autoremat.__file__).parent.rglob("*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)))


def _sample(text: Tensor, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - _SEQ, (_BATCH,), generator=generator)
    ids = torch.stack([text[start : start + _SEQ] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(slots=True)
class _Training:
    """A training with a random state of its own, so that two can take turns and their times compare."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    random_state: Tensor
    losses: list[float]
    times: list[float]

    @classmethod
    def start(cls, made: Plan | None) -> _Training:
        model = _small_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        if made is not None:
            apply(model, made)
        return cls(model, optimizer, torch.Generator().manual_seed(_SEED).get_state(), [], [])

    def step(self, batch: dict[str, Tensor]) -> None:
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.random_state = torch.get_rng_state()


def _train(made: Plan, text: Tensor, *, num_steps: int, progress: Progress) -> TrainedRuns:
    """Train plain and planned from the same seed, in turns."""
    plain, planned = _Training.start(None), _Training.start(made)
    for step in range(num_steps):
        progress(f"Training plain and planned, step {step + 1} of {num_steps}", step / num_steps)
        for training in (plain, planned):
            training.step(_sample(text, step))
    return TrainedRuns(
        plain_losses=tuple(plain.losses),
        planned_losses=tuple(planned.losses),
        plain_step_s=statistics.median(plain.times),
        planned_step_s=statistics.median(planned.times),
    )


def _trained_table(trained: TrainedRuns) -> Table:
    table = Table(title="trained", title_justify="left", title_style="bold")
    for column in ("step", "plain loss", "planned loss"):
        table.add_column(column, justify="right")
    table.add_column("")
    last = len(trained.plain_losses) - 1
    shown = sorted({0, last // 2, last})
    for step in shown:
        pair = trained.plain_losses[step], trained.planned_losses[step]
        table.add_row(str(step + 1), *(repr(loss) for loss in pair), "equal" if pair[0] == pair[1] else "differs")
    table.add_section()
    table.add_row("all", "", "", f"{trained.num_equal} of {last + 1} equal to the bit")
    table.add_row("time", f"{trained.plain_step_s:.3f} s", f"{trained.planned_step_s:.3f} s", "median step")
    return table


def _fits(made: Plan | None) -> bool:
    assert made is not None
    assert made.planned is not None
    used = made.planned.reserved_bytes if made.budget_is == "reserved" else made.planned.peak_bytes
    return made.budget_bytes is None or (used is not None and used <= made.budget_bytes)


def _part(progress: Progress, start: float, end: float) -> Progress:
    """Reports a part's progress as that of the whole."""
    return lambda label, fraction: progress(label, start + (end - start) * fraction)
