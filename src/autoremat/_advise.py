"""The decision table: will it fit, what should be done, and when checkpointing is the wrong answer.

Every row is worked out on the model and batch at hand: traced, or interpolated between traces (`_scaling`), planned and
priced. Sizes that are promised are traced themselves. What decides it comes from `_diagnose`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoremat._advice import NUMERICS, Action, Advice, AdviceRow, Diagnosis, Numerics
from autoremat._cost import relative_error
from autoremat._diagnose import Facts, diagnose
from autoremat._errors import UsageError
from autoremat._expand import expand
from autoremat._ledger import peak_bytes
from autoremat._planning import find_target
from autoremat._scaling import with_kept_gradients
from autoremat._sizes import Sizes
from autoremat._step import Batch
from autoremat._targets import Target
from autoremat._units import format_bytes, format_percent, parse_bytes
from autoremat._ways import Build, Progress, Regions, Setting, Steps, Way

MAX_MICRO_BATCHES = 6
"""How many micro-batches are tried for the fastest setting, the largest that fit first."""
NUM_POINTS = 24
"""Points of the frontier that is drawn behind the rows."""
MARGIN = 0.03
"""A way that changes the order of sums must be faster by this share than one that changes nothing."""
_PLAN = "apply a plan: one line"
_NO_PLAN = {True: "no plan needed", False: "no plan helps"}
_FUSABLE = ("adamw", "adam", "sgd", "sgd-momentum")

_SMALLEST_FIRST: tuple[Regions, ...] = ("planned", "every block", "none")


def advise(
    model: nn.Module,
    batch: Batch,
    *,
    budget: int | str | None = None,
    target: str | Target | None = None,
    effective_batch: int | None = None,
    sizes: bool = True,
    build: Build | None = None,
    progress: Progress | None = None,
    **trace_options: Any,
) -> Advice:
    """Work out the ways to train a model on a device, and say which to take and why. Needs no GPU.

    Args:
        model: As for `trace`.
        batch: As for `trace`; rows with other batch sizes repeat or cut it along the first dimension, other sequence
            lengths along the second of integer matrices.
        budget: Memory for the whole step; None is all that the target has for it.
        target: As for `plan`.
        effective_batch: Samples in an optimizer step that the fastest setting is looked for; None is the batch's.
        sizes: Whether to look for the largest batch and the longest sequence of each row, which takes longest.
        build: A function of samples and tokens that returns a model and a batch, for models that must be built for a
            length; called for sequences longer than the batch's.
        progress: Called with a label and a fraction done.
        **trace_options: As for `trace`: loss, optimizer, gradients, precision and so on.

    Returns:
        The table, a recommendation with its reason, and what decides it.

    Raises:
        BatchError: If the batch cannot be made larger or smaller.
        UsageError: If an option is out of range.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
        >>> model, loss = nn.Sequential(*layers), lambda y: y.square().mean()
        >>> advice = advise(model, torch.ones(1, 4096, 64), loss=loss, budget="18MiB", sizes=False)
        >>> advice.row("plain").fits, advice.row("best checkpointing").fits, advice.action
        (False, True, 'checkpoint')
    """
    if effective_batch is not None and effective_batch < 1:
        raise UsageError(f"effective_batch={effective_batch}: an optimizer step has at least one sample.")
    if unknown := {"accumulate", "scaler", "cost"} & set(trace_options):
        raise UsageError(f"advise chooses {', '.join(sorted(unknown))} itself: leave it out.")
    device = find_target(model, target)
    budget_bytes = device.usable_bytes if budget is None else parse_bytes(budget)
    base = trace_options.pop("precision", None)
    report = progress or (lambda label, fraction: None)
    steps = Steps(model, batch, device, build=build, options=trace_options, progress=report)
    table = _Table(steps, device, budget_bytes, base, trace_options)
    return table.advice(effective_batch or steps.samples, with_sizes=sizes)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A row before it is worked out; micro_batch None means the largest part of the batch that fits."""

    name: str
    precision: str | None
    regions: Regions
    micro_batch: int | None
    effort: str


class _Table:
    """Works the rows out."""

    def __init__(
        self, steps: Steps, target: Target, budget_bytes: int, base: str | None, options: dict[str, Any]
    ) -> None:
        self.steps, self.target, self.budget_bytes, self.base, self.options = steps, target, budget_bytes, base, options
        self._ways: dict[tuple[Setting, Regions], Way] = {}
        first = steps.traced(self._setting(steps.samples))
        self.model_name = first.model
        self.has_batch_norm = any("batch_norm" in op.name for op in first.ops)
        self.is_low = any(op.dtype in ("bfloat16", "float16") for op in first.ops if op.flops)

    def _setting(self, samples: int, precision: str | None = None, *, accumulates: bool = False) -> Setting:
        return Setting(precision or self.base, samples, self.steps.tokens, accumulates)

    def way(self, setting: Setting, regions: Regions) -> Way:
        """A way to run a step, worked out once."""
        key = setting, regions
        if key not in self._ways:
            self._ways[key] = Way(self.steps.step(setting), self.target, regions, self.budget_bytes)
        return self._ways[key]

    def advice(self, effective_batch: int, *, with_sizes: bool) -> Advice:
        """Everything."""
        rows = [row for recipe in self._recipes() if (row := self._row(recipe)) is not None]
        fastest = self._fastest(effective_batch)
        if with_sizes:  # the largest first: where a trace agrees with interpolation there, it settles smaller sizes
            order = sorted(range(len(rows)), key=lambda i: _SMALLEST_FIRST.index(rows[i].regions))
            sized = {i: self._with_sizes(rows[i]) for i in order}
            rows = [sized[i] for i in range(len(rows))]
        diagnoses = diagnose(self._facts())
        action, reason = _recommend(rows, diagnoses, fastest, self.budget_bytes)
        return Advice(
            model=self.model_name,
            target=self.target.name,
            budget_bytes=self.budget_bytes,
            batch=self.steps.samples,
            tokens=self.steps.tokens,
            rows=tuple(rows),
            fastest=fastest,
            action=action,
            reason=reason,
            diagnoses=diagnoses,
            frontier=self._frontier(),
            time_error=relative_error(self.steps.traced(self._setting(self.steps.samples)), self.target),
        )

    @property
    def low_precision(self) -> str | None:
        """The autocast that this device is fastest at; None where the step is in low precision already."""
        if self.is_low:
            return None
        rates = self.target.flops_per_s
        has_bf16 = rates.get("bfloat16", 0.0) > rates["float32"]
        has_fp16 = rates.get("float16", 0.0) > rates["float32"] and self.target.device_kind == "cuda"
        return "amp-bf16" if has_bf16 or not has_fp16 else "amp-fp16"

    def _recipes(self) -> list[_Recipe]:
        whole, low = self.steps.samples, self.low_precision
        plan_it, loop = _PLAN, "a loop over micro-batches, the loss divided by their number"
        found = [
            _Recipe("plain", self.base, "none", whole, "nothing"),
            _Recipe("smaller batch, accumulated", self.base, "none", None, loop),
            _Recipe("every block checkpointed", self.base, "every block", whole, "a switch of most libraries"),
            _Recipe("best checkpointing", self.base, "planned", whole, plan_it),
            _Recipe("best checkpointing, accumulated", self.base, "planned", None, f"{plan_it}; {loop}"),
        ]
        if low is None:
            return found
        words = {"amp-bf16": "autocast around forward and loss", "amp-fp16": "autocast, and a GradScaler"}
        both = ("amp-bf16", "amp-fp16") if self.target.device_kind == "cuda" and low == "amp-bf16" else (low,)
        for name in both:
            short = name.removeprefix("amp-")
            found.append(_Recipe(f"mixed precision, {short}", name, "none", whole, words[name]))
        short = low.removeprefix("amp-")
        found += [
            _Recipe(f"mixed precision, {short}, accumulated", low, "none", None, f"{words[low]}; {loop}"),
            _Recipe(f"mixed precision, {short}, every block", low, "every block", whole, f"{words[low]}; a switch"),
            _Recipe(f"mixed precision, {short}, best checkpointing", low, "planned", whole, f"{words[low]}; {plan_it}"),
        ]
        return found

    def _row(self, recipe: _Recipe) -> AdviceRow | None:
        whole = self.steps.samples
        micro = recipe.micro_batch
        if micro is None:
            parts = [d for d in range(1, whole) if whole % d == 0]
            fitting = (d for d in reversed(parts) if self._can_fit(d, recipe, accumulates=True))
            micro = next(fitting, min(parts, default=0))
            if not micro:
                return None  # one sample cannot be split
        return self._worked_out(recipe, micro, whole // micro)

    def _can_fit(self, samples: int, recipe: _Recipe, *, accumulates: bool) -> bool:
        return self.way(self._setting(samples, recipe.precision, accumulates=accumulates), recipe.regions).can_fit

    def _worked_out(self, recipe: _Recipe, micro: int, accumulate: int) -> AdviceRow:
        way = self.way(self._setting(micro, recipe.precision, accumulates=accumulate > 1), recipe.regions)
        seconds = way.seconds(accumulate)
        tokens = self.steps.tokens
        per_s = micro * accumulate / seconds
        fits = way.profile.peak_bytes <= self.budget_bytes
        return AdviceRow(
            name=recipe.name,
            precision=recipe.precision or "",
            micro_batch=micro,
            accumulate=accumulate,
            regions=recipe.regions,
            peak_bytes=way.profile.peak_bytes,
            peak_by_cause=dict(way.profile.peak_by_cause),
            fits=fits,
            step_s=seconds,
            samples_per_s=per_s,
            tokens_per_s=None if tokens is None else per_s * tokens,
            numerics=self._numerics(recipe.precision, accumulate),
            effort=recipe.effort if way.specs else recipe.effort.replace(_PLAN, _NO_PLAN[fits]),
        )

    def _numerics(self, precision: str | None, accumulate: int) -> Numerics:
        if precision != self.base:
            return "lower precision"
        if accumulate > 1:
            return "batch statistics differ" if self.has_batch_norm else "another order of sums"
        return "same bits"

    def _with_sizes(self, row: AdviceRow) -> AdviceRow:
        """The row with the largest batch of one forward, and the longest sequence at its micro-batch."""
        precision, accumulates = row.precision or None, row.accumulate > 1
        spare = 0
        if precision == "amp-fp16" and self.low_precision == "amp-bf16":  # its tensors have the sizes of bf16's
            own, other = (self._setting(self.steps.samples, name) for name in ("amp-fp16", "amp-bf16"))
            spare = max(0, self.way(own, row.regions).least_bytes - self.way(other, row.regions).least_bytes)
            precision = "amp-bf16"
        if accumulates and not self._is_as_kept(row):
            return row
        batch = self._setting(self.steps.samples, precision)
        micro = self._setting(row.micro_batch, precision)
        sizes = Sizes(self.steps, self.target, self.budget_bytes - spare, self.way, keeps_gradients=accumulates)
        longest = None if self.steps.tokens is None else sizes.largest(micro, row.regions, "tokens")
        return replace(row, largest_batch=sizes.largest(batch, row.regions, "samples"), longest_sequence=longest)

    def _is_as_kept(self, row: AdviceRow) -> bool:
        """Whether an accumulated step peaks as the step alone does with gradients that are there before it."""
        setting = self._setting(row.micro_batch, row.precision)
        kept = with_kept_gradients(self.steps.step(setting))
        return peak_bytes(kept, expand(kept)) == self.way(replace(setting, accumulates=True), "none").least_bytes

    def _fastest(self, effective: int) -> AdviceRow | None:
        """The fastest way to an effective batch, over micro-batches, precisions and plans."""
        found: list[AdviceRow] = []
        for precision in dict.fromkeys((self.base, self.low_precision or self.base)):
            recipe = _Recipe("fastest setting", precision, "planned", None, "a plan, a loop, autocast as the row says")
            tried = 0
            for micro in sorted((d for d in range(1, effective + 1) if effective % d == 0), reverse=True):
                if not self._can_fit(micro, recipe, accumulates=micro < effective):
                    continue
                plain = self.way(self._setting(micro, precision, accumulates=micro < effective), "planned").specs == ()
                chosen = replace(recipe, regions="none" if plain else "planned")
                found.append(self._worked_out(chosen, micro, effective // micro))
                tried += 1
                if plain or tried == MAX_MICRO_BATCHES:  # where nothing is recomputed, smaller only means more launches
                    break
        return min((row for row in found if row.fits), key=lambda row: row.step_s, default=None)

    def _frontier(self) -> tuple[tuple[int, float], ...]:
        way = self.way(self._setting(self.steps.samples), "planned")
        plain_s = sum(way.op_seconds)
        points = way.planning.frontier(NUM_POINTS).points
        return tuple((point.peak_bytes, plain_s * (1 + point.overhead_s)) for point in points)

    def _facts(self) -> Facts:
        whole = self._setting(self.steps.samples)
        one = self._setting(1, accumulates=self.steps.samples > 1)
        return Facts(
            plain=self.way(whole, "none"),
            tightest=lambda: self.way(one, "planned"),
            planned=self.way(whole, "planned"),
            every_block=self.way(whole, "every block"),
            budget_bytes=self.budget_bytes,
            fused=lambda: self._fused(one),
        )

    def _fused(self, setting: Setting) -> Way | None:
        optimizer = self.options.get("optimizer", "adamw")
        if optimizer not in _FUSABLE or self.target.device_kind != "cuda":
            return None
        options = self.options | {"optimizer": f"{optimizer}:fused"}
        steps = Steps(
            self.steps.model, self.steps.batch, self.target, build=None, options=options, progress=lambda *_: None
        )
        return Way(steps.traced(setting), self.target, "planned", self.budget_bytes)


def _recommend(
    rows: list[AdviceRow], diagnoses: tuple[Diagnosis, ...], fastest: AdviceRow | None, budget_bytes: int
) -> tuple[Action, str]:
    """What to do, and why."""
    fitting = [row for row in rows if row.fits]
    plain = rows[0]
    if plain.fits:
        return "plain", _with_faster(
            f"The plain step fits: {format_bytes(plain.peak_bytes)} of {format_bytes(budget_bytes)}.", plain, fastest
        )
    safe = [row for row in fitting if NUMERICS.index(row.numerics) <= NUMERICS.index("another order of sums")]
    if safe:
        best = _fastest_safe(safe)
        cost = best.step_s / plain.step_s - 1
        text = (
            f"The plain step needs {format_bytes(plain.peak_bytes)}; {best.name} needs {format_bytes(best.peak_bytes)} "
            f"and costs {format_percent(cost)} more time than a plain step would, with {best.numerics}."
        )
        return ("accumulate" if best.regions == "none" else "checkpoint"), _with_faster(text, best, fastest)
    if fitting:
        best = min(fitting, key=lambda row: row.step_s)
        text = f"Only ways that change the numbers fit: {best.name} ({best.numerics}) is the fastest of them"
        action: Action = "mixed precision" if best.numerics == "lower precision" else "accumulate"
        return action, f"{text}: {format_bytes(best.peak_bytes)}."
    return _nothing_fits(rows, diagnoses, budget_bytes)


def _fastest_safe(safe: list[AdviceRow]) -> AdviceRow:
    """The fastest; one that changes the order of sums only if it is clearly faster than one that changes nothing."""
    best = min(safe, key=lambda row: row.step_s)
    same = min((row for row in safe if row.numerics == "same bits"), key=lambda row: row.step_s, default=best)
    return same if same.step_s <= (1 + MARGIN) * best.step_s else best


def _with_faster(text: str, row: AdviceRow, fastest: AdviceRow | None) -> str:
    if fastest is None or fastest.numerics == "same bits":
        return text
    gain = fastest.samples_per_s / row.samples_per_s
    if gain < 1 + MARGIN:
        return text
    return (
        f"{text} If {fastest.numerics} is acceptable: micro-batches of {fastest.micro_batch}"
        f"{f' in {fastest.precision}' if fastest.precision else ''} are {gain:.1f} times as fast."
    )


def _nothing_fits(rows: list[AdviceRow], diagnoses: tuple[Diagnosis, ...], budget_bytes: int) -> tuple[Action, str]:
    smallest = min(rows, key=lambda row: row.peak_bytes)
    start = (
        f"No way fits {format_bytes(budget_bytes)}: the smallest, {smallest.name}, needs "
        f"{format_bytes(smallest.peak_bytes)}."
    )
    remedies: tuple[tuple[str, Action], ...] = (("loss", "chunk the loss"), ("states", "shrink states"))
    for kind, action in remedies:
        found = next((d for d in diagnoses if d.kind == kind), None)
        fitting = [remedy for remedy in found.remedies if remedy.fits] if found is not None else []
        if fitting:
            words = "; ".join(f"{r.name}: {format_bytes(r.peak_bytes)}" for r in fitting)
            return action, f"{start} What would fit, with checkpointing on top: {words}."
    return "nothing fits", f"{start} Nor does anything that was tried on top. Take a larger device, or a smaller model."
