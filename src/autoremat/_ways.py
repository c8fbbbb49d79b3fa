"""Steps of one model at any batch size, sequence length and precision, and what each way to run them takes.

Few steps are traced; the others are interpolated between them (`_scaling`), where traces agree with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from autoremat._api import trace
from autoremat._cost import RegionCost, step_seconds
from autoremat._expand import expand, no_garbage_collection
from autoremat._ledger import peak_bytes, price
from autoremat._planning import Planning
from autoremat._replay import RegionSpec, obstacle
from autoremat._resize import batch_size, resize, sequence_length
from autoremat._results import MemoryProfile
from autoremat._scaling import Interpolation, interpolate_steps, multiply_steps, same_bytes, same_ops
from autoremat._schedule import Action
from autoremat._sharding import repeated_blocks
from autoremat._step import Batch
from autoremat._step_graph import StepGraph
from autoremat._targets import Target

Build = Callable[[int, int | None], tuple[nn.Module, Batch]]
Progress = Callable[[str, float], None]
Axis = Literal["samples", "tokens"]
Regions = Literal["none", "every block", "planned"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step runs, regions aside.

    Attributes:
        precision: As for `trace`; None is the model's own.
        samples: Samples in a forward.
        tokens: Tokens in a sample; None without a sequence.
        accumulates: Whether there is more than one micro-step; the traced step then has two.
    """

    precision: str | None
    samples: int
    tokens: int | None
    accumulates: bool = False

    def resized(self, axis: Axis, size: int) -> Setting:
        """The same at another size."""
        return replace(self, samples=size) if axis == "samples" else replace(self, tokens=size)


class Steps:
    """Traced and interpolated steps of one model, each made once.

    Args:
        model: As for `trace`.
        batch: As for `trace`.
        target: Device.
        build: Makes model and batch for a number of samples and tokens, where there are more tokens than in the batch.
        options: What else `trace` takes.
        progress: Called with a label and a fraction done.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        target: Target,
        *,
        build: Build | None,
        options: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.model, self.batch, self.target = model, batch, target
        self.samples, self.tokens = batch_size(batch), sequence_length(batch)
        self._build, self._options, self._progress = build, options, progress
        self._traced: dict[Setting, StepGraph] = {}
        self._scaled: dict[tuple[str | None, bool, str], Interpolation | None] = {}
        self._agreed: dict[Setting, range] = {}

    @property
    def num_traced(self) -> int:
        """How many steps were traced."""
        return len(self._traced)

    def traced(self, setting: Setting) -> StepGraph:
        """The step itself."""
        if setting not in self._traced:
            words = [f"batch {setting.samples}", f"{setting.tokens} tokens" if setting.tokens else ""]
            words.append(setting.precision or "")
            self._progress(f"tracing {', '.join(word for word in words if word)}", min(0.95, self.num_traced / 40))
            with no_garbage_collection():  # else each trace takes the longer, the more there are
                self._traced[setting] = self._trace(setting)
        return self._traced[setting]

    def _trace(self, setting: Setting) -> StepGraph:
        model, batch = self.model, self.batch
        if self._build is not None and self.tokens is not None and (setting.tokens or 0) > self.tokens:
            model, batch = self._build(setting.samples, setting.tokens)
        elif (setting.samples, setting.tokens) != (self.samples, self.tokens):
            batch = resize(batch, samples=setting.samples, tokens=setting.tokens)
        scaled = setting.precision == "amp-fp16" and self._options.get("optimizer") is not None
        return trace(
            model,
            batch,
            precision=setting.precision,
            accumulate=2 if setting.accumulates else 1,
            scaler=scaled,
            target=self.target,
            **self._options,
        )

    def step(self, setting: Setting) -> StepGraph:
        """The step, interpolated where that can be, else traced."""
        if setting in self._traced:
            return self._traced[setting]
        if (setting.samples, setting.tokens) == (self.samples, self.tokens):
            return self.traced(setting)
        if setting.accumulates:  # few sizes are asked for: each is traced until two are known
            return self._accumulated(setting)
        if setting.tokens == self.tokens:
            scaled = self._by(setting, "samples")
            return self.traced(setting) if scaled is None else scaled(setting.samples)
        if setting.samples == self.samples:
            scaled = self._by(setting, "tokens")
            return self.traced(setting) if scaled is None else scaled(setting.tokens or 0)
        whole = replace(setting, samples=self.samples, tokens=self.tokens)
        corners = [replace(whole, samples=setting.samples), replace(whole, tokens=setting.tokens), whole]
        made = multiply_steps(*map(self.step, corners))
        return self.traced(setting) if made is None else made

    def exact(self, setting: Setting) -> StepGraph:
        """The step with the bytes that a trace at its size has.

        Interpolation does between sizes at which a trace agreed with it to the byte; elsewhere the step is traced.
        """
        axis: Axis = "samples" if setting.tokens == self.tokens else "tokens"
        line, size = setting.resized(axis, 0), getattr(setting, axis) or 0
        if size in self._agreed.get(line, ()):
            return self.step(setting)
        made, traced = self.step(setting), self.traced(setting)
        if made is not traced:
            self._settle(setting, axis, made, traced)
        return traced

    def _settle(self, setting: Setting, axis: Axis, made: StepGraph, traced: StepGraph) -> None:
        """Note down for which sizes interpolation does, now that one is traced that was made by it."""
        key, size = (setting.precision, setting.accumulates, axis), getattr(setting, axis)
        scaled, agrees = self._scaled.get(key), same_bytes(made, traced)
        is_built = axis == "tokens" and self._build is not None and setting.samples == self.samples
        if is_built and not agrees and scaled is not None and (wider := scaled.extended(size, traced)):
            self._scaled[key], agrees = wider, True
        if agrees:
            sizes = (size, *self._nodes(axis))
            self._agreed[setting.resized(axis, 0)] = range(min(sizes), max(sizes) + 1)

    def _accumulated(self, setting: Setting) -> StepGraph:
        key = (setting.precision, True, f"samples of {setting.tokens}")
        if key not in self._scaled:
            alike = [s for s in self._traced if replace(s, samples=setting.samples) == setting]
            if len(alike) < 2:
                return self.traced(setting)
            self._scaled[key] = interpolate_steps([(s.samples, self._traced[s]) for s in alike[:2]])
        scaled = self._scaled[key]
        return self.traced(setting) if scaled is None else scaled(setting.samples)

    def _by(self, setting: Setting, axis: Axis) -> Interpolation | None:
        key = (setting.precision, setting.accumulates, axis)
        if key not in self._scaled:
            self._scaled[key] = self._interpolate(setting, axis, self._nodes(axis))
        return self._scaled[key]

    def _nodes(self, axis: Axis) -> list[int]:
        """Sizes that steps are interpolated between."""
        if axis == "samples":
            return [self.samples, self.samples // 2 if self.samples >= 4 else 2 * self.samples + 2]
        whole = self.tokens or 0
        return [whole, max(2, whole // 2), max(3, 3 * whole // 4)]

    def _interpolate(self, setting: Setting, axis: Axis, sizes: Sequence[int]) -> Interpolation | None:
        steps = []
        for size in sizes:
            samples = size if axis == "samples" else self.samples
            tokens = size if axis == "tokens" else self.tokens
            steps.append((size, self.traced(Setting(setting.precision, samples, tokens, setting.accumulates))))
        return interpolate_steps(steps)


class Way:
    """One step with one choice of regions, for a budget: what it takes.

    Args:
        graph: The step.
        target: Device.
        regions: "none", "every block" or "planned".
        budget_bytes: Memory for the whole step.
    """

    def __init__(self, graph: StepGraph, target: Target, regions: Regions, budget_bytes: int) -> None:
        self.graph, self.target, self.regions, self.budget_bytes = graph, target, regions, budget_bytes

    @cached_property
    def planning(self) -> Planning:
        """The planner of the step."""
        return Planning(self.graph, self.target, "time")

    @cached_property
    def specs(self) -> tuple[RegionSpec, ...]:
        """The regions; for a plan that cannot meet the budget, those with the smallest peak."""
        if self.regions == "none":
            return ()
        if self.regions == "every block":
            return every_block(self.graph)
        if self.plain_bytes <= self.budget_bytes:
            return ()
        return self.planning.planner.plan(self.budget_bytes).regions

    @cached_property
    def plain_bytes(self) -> int:
        """The peak without regions."""
        return peak_bytes(self.graph, expand(self.graph))

    @property
    def can_fit(self) -> bool:
        """Whether this way fits the budget; planning is only asked where the plain step does not."""
        if self.regions == "planned" and self.plain_bytes <= self.budget_bytes:
            return True
        return self.least_bytes <= self.budget_bytes

    @cached_property
    def least_bytes(self) -> int:
        """The smallest peak that this way can have."""
        if self.regions == "planned":
            return self.planning.planner.smallest_bytes
        return peak_bytes(self.graph, expand(self.graph, self.specs))

    def least_specs_like(self, other: Way) -> tuple[RegionSpec, ...]:
        """Regions of a small peak; for planned ones, the tightest of the same step at another size: much quicker."""
        is_alike = self.regions == "planned" and same_ops(self.graph, other.graph)
        return other.least_specs if is_alike else self.least_specs

    @cached_property
    def least_specs(self) -> tuple[RegionSpec, ...]:
        """The regions of the smallest peak."""
        if self.regions != "planned":
            return self.specs
        return self.planning.planner.plan(self.least_bytes).regions

    def keep_least_only(self) -> Way:
        """Work the smallest peak and its regions out and let go of the planner, which takes hundreds of MiB."""
        assert self.least_specs is not None
        self.__dict__.pop("planning", None)
        return self

    @cached_property
    def profile(self) -> MemoryProfile:
        """Bytes and time of the step as traced."""
        return price(self.graph, expand(self.graph, self.specs), self.op_seconds)

    @cached_property
    def op_seconds(self) -> tuple[float, ...]:
        """Predicted time of each op."""
        return step_seconds(self.graph, self.target)

    def seconds(self, accumulate: int) -> float:
        """Predicted time of an optimizer step of so many micro-steps; all but the first are like the second."""
        graph, calls = self.graph, self.graph.calls
        total = self.profile.step_s + RegionCost(graph, self.target).total(self.specs)
        if accumulate <= 2:
            return total
        later = sum(
            s
            for op, s in zip(graph.ops, self.op_seconds, strict=True)
            if op.phase != "optimizer" and calls[op.call].micro_step == 1
        )
        second = [spec for spec in self.specs if calls[spec.call].micro_step == 1]
        again = (event.op for event in expand(graph, self.specs).events if event.action is Action.RECOMPUTE)
        later += sum(self.op_seconds[i] for i in again if calls[graph.ops[i].call].micro_step == 1)
        later += RegionCost(graph, self.target).total(second)
        return total + (accumulate - 2) * later


def every_block(graph: StepGraph) -> tuple[RegionSpec, ...]:
    """The classic way: each repeated block is a region that stores its inputs only."""
    paths = set(repeated_blocks(graph))
    calls = [call.index for call in graph.calls if call.path in paths and obstacle(graph, call.index) is None]
    return tuple(RegionSpec(call) for call in calls)
