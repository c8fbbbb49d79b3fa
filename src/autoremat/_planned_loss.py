"""The loss that a step is planned with, where the training loop has its own and the planner never sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from autoremat._step import LossFunction, loss_in


class PlannedLoss:
    """Finds or stands in for the loss of a model's output, and can hold the output as a training loop does.

    In order: the function that was given; the output's ``.loss``; the output itself where it is scalar; else a
    cross-entropy over the last dimension of every floating output that requires gradients. That takes three times the
    output's bytes, more than most losses do.

    Args:
        loss: What the user gave.
        holds_output: Whether the output outlives the call, as in ``output = model(x)``: the variable holds it until
            the next step.

    Attributes:
        stands_in: Whether the last output had no loss, so that the cross-entropy stood in.
    """

    def __init__(self, loss: LossFunction | None, *, holds_output: bool) -> None:
        self._loss = loss
        self._holds_output = holds_output
        self._held: Any = None
        self.stands_in = False

    def __call__(self, output: Any) -> Tensor:
        """The loss of an output."""
        self._held = output if self._holds_output else None
        self.stands_in = False
        if self._loss is not None:
            return self._loss(output)
        found = loss_in(output)
        if isinstance(found, Tensor) and (found.numel() == 1 or found is not output):
            return found
        outputs = [x for x in tree_iter(output) if _is_differentiable(x)]
        self.stands_in = bool(outputs)
        # None is for find_loss to refuse, in words that fit any model.
        return sum(map(_cross_entropy, outputs)) if outputs else found  # type: ignore[return-value]

    def forget(self) -> None:
        """Let go of the output."""
        self._held = None


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.is_floating_point() and x.dim() > 0 and x.numel() > 0


def _cross_entropy(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return F.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.long, device=x.device))
