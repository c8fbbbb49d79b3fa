"""Prove that a plan changes nothing: the same step plain and planned, compared bit for bit.

Compared: loss, every parameter's gradient (None included), gradients of inputs that require them, buffers, tensors that
are plain attributes, and random state after the step. With an optimizer also the parameters after its step and what it
keeps; with a gradient scaler a step at a scale that makes gradients overflow comes first, and then steps until one is
not left out. The model is left as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_iter

from autoremat._errors import RecomputeError, TraceError
from autoremat._fake import is_fake
from autoremat._model_states import EmaFactory, OptimizerFactory, States, StatesFactory
from autoremat._plan import Plan
from autoremat._precision_check import compare_with_fp32
from autoremat._random import RandomState
from autoremat._results import Difference, LayerPrecision, VerifyReport
from autoremat._state import plain_tensors, preserved
from autoremat._step import Batch, LossFunction, Precision, check_batch, run_step
from autoremat.runtime import apply

OVERFLOWING_SCALE = 2.0**127
"""The largest power of two in float32: a gradient of a loss scaled by it overflows unless it is tiny or zero."""
MAX_BACKOFFS = 24
"""Steps after which a scaler that halves has come from its usual 2**16 down to where nothing overflows."""


def verify(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    *,
    loss: LossFunction | None = None,
    precision: str | None = None,
    accumulate: int = 1,
    optimizer: str | OptimizerFactory | None = None,
    scaler: bool | GradScaler = False,
    ema: bool | EmaFactory = False,
    against_fp32: bool = False,
    seed: int = 0,
) -> VerifyReport:
    """Run a step plain and planned from the same state, and compare everything bit for bit.

    Args:
        model: With real parameters; put back as it was afterwards.
        batch: As for `trace`.
        plan: The plan to check.
        loss: As for `trace`.
        precision: As for `trace`; autocast is applied, casts are the caller's business.
        accumulate: Number of micro-steps.
        optimizer: As for `trace`; None runs forward and backward alone.
        scaler: As for `trace`. The step that overflows is compared too, and has to be left out in both runs.
        ema: As for `trace`.
        against_fp32: Also compare the step's gradients with those in fp32, layer by layer (`VerifyReport.layers`);
            they differ, by as much as the precision is low, and say nothing about the plan.
        seed: Seed of torch's random numbers for both runs.

    Returns:
        What was compared, and by name what differs. A planned step that refuses to run is one difference of kind
        "error".

    Raises:
        TraceError: If the model's parameters are fake.
        PlanMismatch: If the plan was made for another model.

    Example:
        >>> from autoremat import Plan
        >>> from autoremat._plan import Region
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        >>> verify(model, torch.ones(2, 4), Plan(regions=(Region("1"),)), loss=lambda y: y.sum()).equal
        True
    """
    if is_fake(model):
        raise TraceError(
            f"{type(model).__name__} has no weights in memory, so it cannot run. Build it without fake_weights()."
        )
    check_batch(model, batch)
    device = next((p.device.type for p in model.parameters()), "cpu")
    factory = StatesFactory.parse(optimizer, scaler=scaler, ema=ema, precision=precision, device_kind=device)
    step = _Step(model, batch, loss, Precision.parse(precision), accumulate, seed)
    runs = []
    executed = 0
    error: Difference | None = None
    for planned in (False, True):
        with preserved(model):
            model.train()
            states = factory.build(model)
            if not planned:
                runs.append(step.run(states))
                continue
            with apply(model, plan, check="always") as applied:
                try:
                    runs.append(step.run(states))
                except RecomputeError as refusal:
                    error = Difference("error", type(refusal).__name__, "runs", str(refusal))
                executed = sum(region.num_recomputes for region in applied.executed)
    plain = runs[0]
    layers: tuple[LayerPrecision, ...] = ()
    if against_fp32:
        usual = factory.build(model).scaler
        with preserved(model):
            model.train()
            layers = compare_with_fp32(
                model,
                batch,
                loss=loss,
                precision=step.precision,
                accumulate=accumulate,
                scale=usual.get_scale() if usual is not None else 1.0,
                seed=seed,
            )
    differences = (error,) if error is not None else tuple(_compare(plain, runs[1]))
    return VerifyReport(
        equal=not differences,
        num_compared=dict(Counter(kind for kind, _ in plain.values)),
        differences=differences,
        loss=plain.loss,
        planned_loss=runs[-1].loss if error is None else float("nan"),
        num_recomputed_regions=executed,
        num_skipped_steps=plain.num_skipped_steps,
        layers=layers,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that a user could notice after one step."""

    loss: float
    values: dict[tuple[str, str], Tensor | None]
    random: RandomState
    num_skipped_steps: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Everything needed to run a step again."""

    model: nn.Module
    batch: Batch
    loss: LossFunction | None
    precision: Precision
    accumulate: int
    seed: int

    def run(self, states: States) -> _Run:
        """Run a step, after one that overflows where a scaler is to be seen doing its work."""
        torch.manual_seed(self.seed)
        inputs = [x for x in tree_iter(self.batch) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
        before = [x.grad for x in inputs]
        values: dict[tuple[str, str], Tensor | None] = {}
        num_skipped = 0
        try:
            if states.scaler is not None:
                usual = states.scaler.get_scale()
                states.scaler.scale(torch.zeros((), device=next(self.model.parameters()).device))
                states.scaler.update(OVERFLOWING_SCALE)
                num_skipped += self._run_scaled(states.scaler, states, inputs, values, prefix="overflow: ")
                states.scaler.update(usual)
                for _ in range(MAX_BACKOFFS):
                    if not self._run_scaled(states.scaler, states, inputs, values):
                        break
                    num_skipped += 1
            else:
                self._run_once(states, inputs, values)
        finally:
            for x, gradient in zip(inputs, before, strict=True):
                x.grad = gradient
        loss = values["loss", "loss"]
        assert loss is not None
        return _Run(float(loss), values, RandomState.now(), num_skipped)

    def _run_scaled(
        self,
        scaler: GradScaler,
        states: States,
        inputs: list[Tensor],
        values: dict[tuple[str, str], Tensor | None],
        prefix: str = "",
    ) -> bool:
        """Run one step; whether its optimizer step was left out: then, and only then, the scale goes down."""
        scale = scaler.get_scale()
        self._run_once(states, inputs, values, prefix)
        return scaler.get_scale() < scale

    def _run_once(
        self, states: States, inputs: list[Tensor], values: dict[tuple[str, str], Tensor | None], prefix: str = ""
    ) -> None:
        """Run one step and note everything that it leaves behind."""
        model = self.model
        for x in (*inputs, *model.parameters()):
            x.grad = None
        value = run_step(
            model, self.batch, loss=self.loss, states=states, precision=self.precision, accumulate=self.accumulate
        )
        values["loss", f"{prefix}loss"] = value
        values.update({("gradient", prefix + n): _copy(p.grad) for n, p in model.named_parameters()})
        values.update({("buffer", prefix + n): _copy(b) for n, b in model.named_buffers()})
        values.update({("attribute", prefix + n): _copy(t) for n, t in plain_tensors(model).items()})
        values.update({("input gradient", f"{prefix}{i}"): _copy(x.grad) for i, x in enumerate(inputs)})
        if states.optimizer is not None:
            values.update({("parameter", prefix + n): _copy(p) for n, p in model.named_parameters()})
        for cause, name, tensor in states.tensors(model):
            values[cause.replace("_", " "), prefix + name] = _copy(tensor)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _compare(plain: _Run, planned: _Run) -> Iterator[Difference]:
    for kind, name in dict.fromkeys((*plain.values, *planned.values)):
        a, b = plain.values.get((kind, name)), planned.values.get((kind, name))
        if a is None and b is None:
            continue
        if a is None or b is None or not same_bits(a, b):
            yield Difference(kind, name, _describe(a, b), _describe(b, a))
    for source in plain.random.differences(planned.random):
        yield Difference("random state", source, "state after the plain step", "another state")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaNs of the same bits are equal, 0.0 and -0.0 are not."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided or a.numel() == 0:
        return torch.equal(a, b)
    flat = [x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def _describe(tensor: Tensor | None, other: Tensor | None) -> str:
    if tensor is None:
        return "None"
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.numel() == 0 or tensor.is_complex():
        return text
    text += f", largest magnitude {tensor.double().abs().max().item():.6g}"
    if other is not None and other.shape == tensor.shape:
        text += f", largest difference {(tensor.double() - other.double()).abs().max().item():.3g}"
    return text
