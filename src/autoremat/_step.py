"""One training step, the same for tracing, verifying and measuring.

    zero_grad ; [forward ; loss ; drop the output ; backward] x accumulate ; clip gradients ; optimizer.step()

The model's output object is dropped before backward: holding it would hold the logits and every hidden state in it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoremat._errors import BatchError, LossError, UsageError
from autoremat._model_states import States

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
LossFunction = Callable[[Any], Tensor]

_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
GRADIENTS = ("fresh", "kept")
"""``fresh``: set to None between steps, so that they appear in backward. ``kept``: zeroed, so there all along."""
PRECISIONS = (*_CAST, *_AUTOCAST)
"""``bf16``: parameters and inputs are cast. ``amp-bf16``: autocast around forward and loss."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How a step computes.

    Attributes:
        cast: Dtype that floating parameters, buffers and inputs are cast to; None leaves them.
        autocast: Dtype of an autocast around forward and loss; None for none.
    """

    cast: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @classmethod
    def parse(cls, name: str | None) -> Precision:
        """Read a precision name.

        Raises:
            UsageError: If it is not one of `PRECISIONS`.
        """
        if name is not None and name not in PRECISIONS:
            raise UsageError(f"precision={name!r} is not known. Use one of {', '.join(PRECISIONS)}, or None.")
        return cls(cast=_CAST.get(name or ""), autocast=_AUTOCAST.get(name or ""))

    def cast_batch(self, batch: Batch) -> Batch:
        """Cast the floating tensors of a batch."""
        if self.cast is None:
            return batch
        dtype = self.cast
        cast: Batch = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
        return cast

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward and loss run."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)


def check_step(*, gradients: str, accumulate: int, clip_grad_norm: float | None) -> None:
    """Check the numbers and words that describe a step.

    Raises:
        UsageError: With what may stand in their place.
    """
    if gradients not in GRADIENTS:
        raise UsageError(f"gradients={gradients!r}: use 'fresh' or 'kept'.")
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}: an optimizer step has at least one micro-step.")
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UsageError(f"clip_grad_norm={clip_grad_norm}: use a positive norm, or None to clip nothing.")


def split_batch(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``model(...)`` for a batch.

    Raises:
        BatchError: If the batch is not a tensor, a tuple or a mapping.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise BatchError(
        "A batch is a tensor, a tuple (positional arguments) or a dict (keyword arguments), not "
        f"{type(batch).__name__}."
    )


def own_batch(batch: Batch) -> Batch:
    """A batch that shares the caller's memory, not the caller's graph and gradients."""
    own: Batch = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, batch)
    return own


def check_batch(model: nn.Module, batch: Batch) -> None:
    """Check that a batch fits the signature of ``model.forward``.

    Raises:
        BatchError: With the argument that does not fit and the signature.
    """
    args, kwargs = split_batch(batch)
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise BatchError(
            f"The batch does not fit {type(model).__name__}.forward({names}): {error}. "
            "Give a tensor, a tuple of positional arguments or a dict of keyword arguments that it accepts."
        ) from error


def describe_batch(batch: Batch) -> str:
    """Argument names, dtypes and shapes of a batch, in words: two batches with the same text take the same plan."""
    args, kwargs = split_batch(batch)
    parts = [_describe(value) for value in args]
    parts += [f"{name}={_describe(value)}" for name, value in sorted(kwargs.items())]
    return ", ".join(parts)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_describe(v) for v in value) + ")"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def find_loss(output: Any, loss: LossFunction | None, model: nn.Module) -> Tensor:
    """The scalar to differentiate.

    Args:
        output: What the model returned.
        loss: Applied to the output if given; else the output's ``.loss`` or ``["loss"]``, or the output itself.
        model: For the error message.

    Raises:
        LossError: If there is no scalar floating tensor that requires gradients.
    """
    name = type(model).__name__
    value = loss(output) if loss is not None else loss_in(output)
    if value is None:
        raise LossError(
            f"{name} returned {type(output).__name__}, which has no loss. Put labels into the batch if the model takes "
            "them, or give loss=, a function of the output that returns a scalar."
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LossError(
            f"The loss of {name} is {what}, not a scalar. Give loss=, for example `lambda out: out.mean()`."
        )
    if not value.requires_grad:
        raise LossError(
            f"The loss of {name} does not require gradients: no parameter in it does, or it was computed under no_grad."
        )
    return value


def loss_in(output: Any) -> Any:
    """What may be the loss in an output: the output itself if it is a tensor, else its ``.loss``; None without."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def run_step(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    states: States | None = None,
    precision: Precision = Precision(),
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    on_micro_step: Callable[[int], None] | None = None,
    before_optimizer: Callable[[], None] | None = None,
) -> Tensor:
    """Run one training step; gradients must have been set to None (or zero) before.

    Args:
        model: In training mode, on its device.
        batch: The same batch for every micro-step.
        loss: As for `find_loss`.
        states: What stands around the model: the optimizer is stepped at the end.
        precision: Autocast to use; casting is the caller's business.
        accumulate: Number of micro-steps; the loss is divided by it.
        clip_grad_norm: Largest norm of all gradients together, for `torch.nn.utils.clip_grad_norm_`.
        on_micro_step: Called with its number before each micro-step.
        before_optimizer: Called between the last backward and the optimizer.

    Returns:
        The detached loss of the last micro-step.
    """
    args, kwargs = split_batch(batch)
    device = next((p.device.type for p in model.parameters()), "cpu")
    value = torch.zeros(())
    for micro_step in range(accumulate):
        if on_micro_step is not None:
            on_micro_step(micro_step)
        with precision.context(device):
            value = find_loss(model(*args, **kwargs), loss, model)
        if accumulate > 1:
            value = value / accumulate
        scaled = value if states is None or states.scaler is None else states.scaler.scale(value)
        scaled.backward()
        value = value.detach()
    if before_optimizer is not None:
        before_optimizer()
    (states or States()).end_step(model, clip_grad_norm=clip_grad_norm)
    return value
