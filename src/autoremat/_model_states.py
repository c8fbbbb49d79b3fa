"""What stands around the model in a step: optimizer, gradient scaler, running average of the weights.

What each keeps between steps and takes during one comes from running it, in tracing as in measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_iter

from autoremat._errors import UsageError
from autoremat._step_graph import Cause

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
EmaFactory = Callable[[nn.Module], nn.Module]
"""From a model to a module with parameters of its own and ``update_parameters(model)``, as `AveragedModel` has."""
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


@dataclass(slots=True)
class States:
    """What stands around one model.

    Attributes:
        optimizer: Steps at the end.
        scaler: Scales the loss, unscales the gradients, leaves out the step where one of them overflowed.
        ema: Running average of the weights, updated after the optimizer.
    """

    optimizer: torch.optim.Optimizer | None = None
    scaler: GradScaler | None = None
    ema: nn.Module | None = None

    def tensors(self, model: nn.Module) -> Iterator[tuple[Cause, str, Tensor]]:
        """Every tensor that is kept between steps, with its cause and a name."""
        if self.optimizer is not None:
            names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
            for owner, key, tensor in _optimizer_state(self.optimizer):
                yield "optimizer_state", f"{names.get(owner, key)}.{key}", tensor
        if self.scaler is not None:
            for key, value in vars(self.scaler).items():
                if isinstance(value, Tensor):
                    yield "optimizer_state", f"scaler.{key.strip('_')}", value
        if self.ema is not None:
            for name, tensor in (*self.ema.named_parameters(), *self.ema.named_buffers()):
                yield "ema", f"ema.{name}", tensor

    def end_step(self, model: nn.Module, *, clip_grad_norm: float | None = None) -> None:
        """Clip gradients, step the optimizer (or not, after an overflow) and whatever follows it."""
        if clip_grad_norm is not None:
            if self.optimizer is not None and self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        if self.optimizer is not None and self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.optimizer is not None:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(model)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class StatesFactory:
    """How to make the `States` around a model."""

    optimizer: OptimizerFactory | None = None
    scaler: bool | GradScaler = False
    ema: bool | EmaFactory = False

    @classmethod
    def parse(
        cls,
        optimizer: str | OptimizerFactory | None,
        *,
        scaler: bool | GradScaler = False,
        ema: bool | EmaFactory = False,
        precision: str | None = None,
        device_kind: str = "cpu",
    ) -> StatesFactory:
        """Check what a caller asked for.

        Raises:
            UsageError: For an unknown optimizer, or states that cannot stand together.
        """
        factory = optimizer_factory(optimizer, device_kind=device_kind)
        enabled = scaler.is_enabled() if isinstance(scaler, GradScaler) else scaler
        if factory is None and (enabled or ema):
            raise UsageError("scaler= and ema= stand around an optimizer step: give optimizer=, or leave them out.")
        if enabled and precision == "fp16":
            raise UsageError(
                "torch's GradScaler does not unscale fp16 gradients. Use precision='amp-fp16', which keeps parameters "
                "and gradients in fp32, or leave out scaler=."
            )
        return cls(factory, scaler if enabled else False, ema)

    def build(self, model: nn.Module) -> States:
        """The states around a model, as new: the first step makes what they keep."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        states = States(self.optimizer(parameters) if self.optimizer is not None else None)
        if self.scaler:
            states.scaler = _new_scaler(self.scaler, parameters[0].device.type if parameters else "cpu")
        if self.ema:
            states.ema = self.ema(model) if callable(self.ema) else _new_average(model)
        return states

    def describe(self) -> str:
        """The scaler and the average in words, "" for neither."""
        return ", ".join(["scaler"] * bool(self.scaler) + ["ema"] * bool(self.ema))


def _new_scaler(like: bool | GradScaler, device: str) -> GradScaler:
    if not isinstance(like, GradScaler):
        return GradScaler(device)
    state = like.state_dict()
    return GradScaler(
        device,
        init_scale=state["scale"],
        growth_factor=state["growth_factor"],
        backoff_factor=state["backoff_factor"],
        growth_interval=state["growth_interval"],
    )


def _new_average(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Every tensor of an optimizer's state, those in lists and dicts included: its parameter, its name, itself."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield parameter, key, value
                continue
            for index, leaf in enumerate(tree_iter(value)):
                if isinstance(leaf, Tensor):
                    yield parameter, f"{key}[{index}]", leaf
