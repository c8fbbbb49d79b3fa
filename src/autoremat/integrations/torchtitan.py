"""A policy with ``apply(model)``: where torchtitan and loops like it put activation checkpointing on a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from autoremat._enable import AUTO, enable
from autoremat._errors import UsageError
from autoremat._plan import Plan
from autoremat.runtime import apply


@dataclass(frozen=True, kw_only=True, slots=True)
class AutorematPolicy:
    """Activation checkpointing by a plan: one that was saved, or those that the training makes for itself.

    Attributes:
        plan: A plan or the path of one; what is applied is what was planned, at no cost at the start.
        budget: Without a plan: the budget of `autoremat.enable`, which plans at the first step.
        options: Without a plan: further options of `autoremat.enable`.

    Example:
        >>> from autoremat import Region
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> AutorematPolicy(plan=Plan((Region("0"),))).apply(model) is model
        True
    """

    plan: Plan | str | Path | None = None
    budget: int | str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def apply(self, model: nn.Module) -> nn.Module:
        """Put it on a model, in place.

        Raises:
            PlanMismatch: If the plan was made for another model.
            UsageError: If there is both a plan and a budget.
        """
        if self.plan is None:
            return enable(model, AUTO if self.budget is None else self.budget, **self.options)
        if self.budget is not None or self.options:
            raise UsageError("AutorematPolicy takes a plan, or a budget and options to make plans with, not both.")
        apply(model, self.plan if isinstance(self.plan, Plan) else Plan.load(self.plan))
        return model
