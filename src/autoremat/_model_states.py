"""Optimizers around a step, by name: what they keep between steps and take during one comes from tracing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from autoremat._errors import UsageError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor")
_FUSABLE = frozenset({"adamw", "adam", "sgd", "sgd-momentum"})


def optimizer_factory(optimizer: str | OptimizerFactory | None, *, device_kind: str = "cpu") -> OptimizerFactory | None:
    """The factory for an optimizer's name, with the implementation that torch chooses on that kind of device.

    Args:
        optimizer: A name in `OPTIMIZERS`, with ``:foreach``, ``:fused`` or ``:loop`` behind it to choose the
            implementation; a function of the parameters; or None for no optimizer.
        device_kind: "cuda" takes the foreach implementation by default, as torch does; "cpu" the loop.

    Raises:
        UsageError: For an unknown name.
    """
    if optimizer is None or callable(optimizer):
        return optimizer
    name, _, variant = optimizer.partition(":")
    if name not in OPTIMIZERS or variant not in ("", "foreach", "fused", "loop"):
        raise UsageError(
            f"optimizer={optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)} (with ':foreach', ':fused' or "
            "':loop' behind it if you like), a function from parameters to an optimizer, or None."
        )
    variant = variant or ("foreach" if device_kind == "cuda" else "loop")
    options: dict[str, Any] = {"lr": 1e-3, "foreach": variant == "foreach"}
    if name in _FUSABLE:
        options["fused"] = variant == "fused"
    elif variant == "fused":
        raise UsageError(f"torch has no fused {name}. Use '{name}:foreach' or '{name}:loop'.")
    if name == "sgd-momentum":
        options["momentum"] = 0.9
    kind = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "sgd-momentum": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
    }[name]
    return lambda params: kind(params, **options)


def optimizer_name(optimizer: str | OptimizerFactory | None) -> str:
    """What a plan calls the optimizer."""
    if optimizer is None:
        return ""
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__qualname__", type(optimizer).__name__)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Every tensor of an optimizer's state, those in lists and dicts included: its parameter, its name, itself."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            for tensor in tree_iter(value):
                if isinstance(tensor, torch.Tensor):
                    yield parameter, key, tensor
