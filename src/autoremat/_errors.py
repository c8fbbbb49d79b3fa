"""Every error that autoremat raises on purpose.

    AutorematError
    ├── UsageError              a wrong argument: nothing has been changed
    │   ├── BudgetError         a budget that cannot be read
    │   ├── BatchError          the batch does not fit the model's signature
    │   └── LossError           no scalar loss can be found in the model's output
    ├── BudgetInfeasible        no plan reaches the budget; carries the smallest that is feasible
    ├── TraceError              the step cannot be captured
    ├── PlanError               a plan cannot be used
    │   └── PlanMismatch        the plan was made for another model or input
    └── RecomputeError          recompute did not reproduce forward; gradients were not produced

Each message names the module and the cause and ends with what to do next.
"""

from __future__ import annotations


class AutorematError(Exception):
    """Base class of all errors raised by autoremat."""


class UsageError(AutorematError, ValueError):
    """An argument is wrong. Raised before any state changes."""


class BudgetError(UsageError):
    """A budget is not a number of bytes, such as ``"24GiB"``, ``"8GB"`` or an int."""


class BatchError(UsageError):
    """The batch does not fit the model's ``forward`` signature."""


class LossError(UsageError):
    """No scalar loss is found in the model's output and none was given."""


class BudgetInfeasible(AutorematError):
    """No executable plan keeps the peak within the budget.

    Attributes:
        budget_bytes: What was asked for, bytes for the whole step.
        smallest_bytes: The smallest budget that a plan of this planner reaches, bytes.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class TraceError(AutorematError):
    """The training step cannot be captured."""


class PlanError(AutorematError):
    """A plan file or plan object cannot be used."""


class PlanMismatch(PlanError):
    """A plan was made for another model, or for inputs of another shape."""


class RecomputeError(AutorematError, RuntimeError):
    """Recomputation did not reproduce what forward did; no gradient came out of it."""
