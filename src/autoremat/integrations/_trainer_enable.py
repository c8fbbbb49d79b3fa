"""Plans in a training by Transformers' Trainer."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import TrainerCallback

from autoremat._enable import AUTO, enable, enabled
from autoremat._enabled import Enabled
from autoremat._errors import PlanError
from autoremat._retry import retry_step


class AutorematCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a training by the Trainer, or by a trainer made from it (TRL), within a budget.

    Accumulation, bf16 or fp16 and gradient clipping are the Trainer's arguments, as ever, and are counted.
    ``gradient_checkpointing=True`` (``activation_checkpointing=True``) is refused: layers would be recomputed twice.
    TRL's ``SFTConfig`` sets it by default.

    Args:
        budget: As for `autoremat.enable`.
        **options: As for `autoremat.enable`.

    Example:
        >>> from autoremat.integrations.transformers import AutorematCallback
        >>> callback = AutorematCallback("24GiB")  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, budget: int | str = AUTO, **options: Any) -> None:
        self._budget = budget
        self._options = options
        self._enabled: Enabled | None = None
        self._model: nn.Module | None = None

    @property
    def enabled(self) -> Enabled | None:
        """The plans, after the training, too; None before it."""
        return self._enabled

    def retry(self, trainer: Any) -> None:
        """Have a trainer run a step again under a tighter plan if memory runs out, as `autoremat.retry_step` does.

        With accumulation only the micro-step that ran out is run again. What the trainer counts while it computes a
        loss (TRL's metrics) is counted in both runs.

        Args:
            trainer: The trainer that has this callback, before ``trainer.train()``.

        Example:
            ``callback.retry(trainer)`` between ``trainer = Trainer(..., callbacks=[callback])`` and ``trainer.train()``
        """
        training_step = trainer.training_step

        @functools.wraps(training_step)
        def run(*args: Any, **kwargs: Any) -> Any:
            step = training_step if self._model is None else retry_step(self._model)(training_step)
            return step(*args, **kwargs)

        trainer.training_step = run

    def on_init_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Refuse arguments that would checkpoint twice before anything is loaded."""
        _refuse_twice(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enable the model."""
        _refuse_twice(args)
        self._disable()
        model: nn.Module = kwargs["model"]
        optimizer = kwargs.get("optimizer")
        found = {
            "holds_output": False,
            "clip_grad_norm": args.max_grad_norm or None,
            "scaler": bool(args.fp16),
        }
        if optimizer is not None:
            found["optimizer"] = getattr(optimizer, "optimizer", optimizer)
        enable(model, self._budget, **{**found, **self._options})
        self._enabled, self._model = enabled(model), model

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Take everything off the model."""
        self._disable()

    def _disable(self) -> None:
        self._model = None
        if self._enabled is not None:
            self._enabled.disable()


def _refuse_twice(args: Any) -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, False):
            raise PlanError(
                f"AutorematCallback and {name}=True would each recompute the layers. Set {name}=False in the training "
                "arguments (TRL sets it by default), or leave out the callback."
            )
