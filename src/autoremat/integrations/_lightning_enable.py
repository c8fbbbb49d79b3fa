"""Plans in a training by Lightning.

What is planned is the module's ``training_step``, loss and all. It is traced on a copy of the module that has no
trainer: a ``training_step`` that reads ``self.trainer`` cannot be traced, ``self.log`` can.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn

from autoremat._enable import AUTO, make_enabled
from autoremat._enabled import Enabled
from autoremat._errors import UsageError
from autoremat._found_optimizer import factory_like
from autoremat._prepared import PlanOptions
from autoremat.integrations._lightning import Callback

_PRECISIONS = {"bf16-mixed": "amp-bf16", "16-mixed": "amp-fp16"}


class TrainingStep(nn.Module):
    """The training step of a LightningModule as a module: what a plan is made for."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def forward(self, batch: Any, batch_idx: int) -> Any:
        """Run it."""
        return self.module.training_step(batch, batch_idx) if self.takes_index else self.module.training_step(batch)


class AutorematCallback(Callback):
    """Keeps a training by Lightning's Trainer within a budget.

    Precision, accumulation and gradient clipping are the Trainer's arguments, as ever, and are counted.

    Args:
        budget: As for `autoremat.enable`.
        **options: As for `autoremat.enable`, without ``loss``: the training step returns it.

    Example:
        >>> from autoremat.integrations.lightning import AutorematCallback
        >>> callback = AutorematCallback("24GiB")  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, budget: int | str = AUTO, **options: Any) -> None:
        self._budget = budget
        self._reserve = options.pop("reserve", None)
        self._background = options.pop("background", False)
        plan_options = ("target", "objective", "budget_is", "allocator", "dry_run")
        self._plan_options = {name: options.pop(name) for name in plan_options if name in options}
        self._trace_options = options
        self._enabled: Enabled | None = None
        self._step: TrainingStep | None = None

    @property
    def enabled(self) -> Enabled | None:
        """The plans, after the training, too; None before it."""
        return self._enabled

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Get ready to plan."""
        self._disable()
        if not pl_module.automatic_optimization:
            raise UsageError(
                f"{type(pl_module).__name__} optimizes by hand (automatic_optimization=False), so its training step "
                "has no loss to plan for. Call autoremat.enable(...) on the network inside it instead."
            )
        found: dict[str, Any] = {"precision": _PRECISIONS.get(trainer.precision)}
        found["scaler"] = found["precision"] == "amp-fp16"
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            found["clip_grad_norm"] = float(trainer.gradient_clip_val)
        self._step = TrainingStep(pl_module)
        self._enabled = make_enabled(
            self._step,
            self._budget,
            optimizer=factory_like(trainer.optimizers, self._step),
            reserve=self._reserve,
            holds_output=False,
            background=self._background,
            options=PlanOptions(**self._plan_options, trace_options={**found, **self._trace_options}),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put the plan for this batch on the module."""
        assert self._enabled is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*self.trainer.* reference is not registered")
            # Lightning sets gradients to None between forward and backward: in forward they are there.
            self._enabled.before_forward((batch, batch_idx), {}, has_gradients=True)
        self._enabled.start_forward()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate plain."""
        if self._enabled is not None:
            self._enabled.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take everything off the module."""
        self._disable()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say what was alive if memory ran out; take everything off the module."""
        if self._enabled is not None:
            self._enabled.note_out_of_memory(exception)
        self._disable()

    def _disable(self) -> None:
        if self._enabled is not None:
            self._enabled.disable()
