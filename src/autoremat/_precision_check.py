"""How far gradients in low precision are from those in fp32, layer by layer.

Both runs start from the same parameters and random state. Known limit: an operator that draws other random numbers in
another dtype (torch's dropout does not) makes a difference that is not one of precision.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from autoremat._results import LayerPrecision
from autoremat._step import Batch, LossFunction, Precision, find_loss, run_step

MAX_HALVINGS = 40
"""How often the scale of a loss is halved until no gradient overflows."""


def compare_with_fp32(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None,
    precision: Precision,
    accumulate: int,
    scale: float,
    seed: int,
) -> tuple[LayerPrecision, ...]:
    """Run forward and backward in a precision and in fp32.

    Args:
        model: Its gradients are overwritten; if its parameters are not fp32, a copy in fp32 is made.
        batch: As for `trace`.
        loss: As for `trace`.
        precision: Of the step.
        accumulate: Micro-steps.
        scale: What the loss is multiplied by in low precision, and the gradients divided by; halved after an overflow.
        seed: Seed of both runs.

    Returns:
        One entry for each module that has parameters of its own with gradients, the farthest from fp32 first.
    """
    low = _gradients(model, batch, loss, precision, accumulate, scale, seed)
    halvings = 0
    while scale > 1 and halvings < MAX_HALVINGS and not all(torch.isfinite(g).all() for g in low.values()):
        scale, halvings = scale / 2, halvings + 1
        low = _gradients(model, batch, loss, precision, accumulate, scale, seed)
    own = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
    reference = model if own else copy.deepcopy(model).float()
    in_fp32 = Precision.parse("fp32").cast_batch(batch)
    high = _gradients(reference, in_fp32, loss, Precision(), accumulate, 1.0, seed)
    names: dict[str, list[str]] = defaultdict(list)
    for name in high:
        names[name.rpartition(".")[0]].append(name)
    layers = [_layer(path, [low[n] for n in own], [high[n] for n in own]) for path, own in names.items()]
    return tuple(sorted(layers, key=lambda layer: -layer.difference))


def _gradients(
    model: nn.Module,
    batch: Batch,
    loss: LossFunction | None,
    precision: Precision,
    accumulate: int,
    scale: float,
    seed: int,
) -> dict[str, Tensor]:
    """Every parameter's gradient, as float64."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    run_step(
        model,
        batch,
        loss=lambda output: find_loss(output, loss, model).float() * scale,
        precision=precision,
        accumulate=accumulate,
    )
    found = {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _layer(path: str, low: list[Tensor], high: list[Tensor]) -> LayerPrecision:
    norm, fp32_norm = _norm(low), _norm(high)
    apart = _norm([a - b for a, b in zip(low, high, strict=True)])
    difference = apart / fp32_norm if fp32_norm else (0.0 if apart == 0 else math.inf)
    return LayerPrecision(path, norm, fp32_norm, difference if math.isfinite(difference) else math.inf)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))
