"""One size of step, traced, with all its plans: what `enable` keeps for each bucket of shapes."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from autoremat._allocator_settings import AllocatorSettings
from autoremat._api import trace
from autoremat._dry_run import dry_run, keep_budget
from autoremat._errors import AutorematError, PlanError
from autoremat._expand import expand
from autoremat._ledger import peak_bytes
from autoremat._observed import Observed
from autoremat._plan import Plan
from autoremat._planned_loss import PlannedLoss
from autoremat._planning import BudgetKind, Objective, Planning, choose_objective, find_target, read_allocator
from autoremat._regions import resolve
from autoremat._step import Batch
from autoremat._targets import Target
from autoremat.runtime import Applied, apply

T = TypeVar("T")
_SAFE = "every-block"
"""The schedule that a step runs under while its plan is being made, where the ledger says that it fits."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How steps are planned; as for `plan`.

    Attributes:
        target: Device whose speed gives the times.
        objective: What is minimised.
        budget_is: Which bytes the budget is for.
        allocator: Settings of the caching allocator.
        dry_run: Whether plans run dry before they are used.
        trace_options: What else `trace` is told.
    """

    target: str | Target | None = None
    objective: Objective | None = None
    budget_is: BudgetKind = "allocated"
    allocator: str | AllocatorSettings | None = None
    dry_run: bool = True
    trace_options: dict[str, Any] = field(default_factory=dict)


class Prepared:
    """A traced step of one kind and size, its planner, and the plan that is in use.

    Args:
        model: Not changed before `switch_on`.
        batch: As for `trace`.
        observed: Kind and sizes of the batch.
        options: How to plan.
        loss: What the step is planned with.
        on_error: Told what a recompute raises.
        **step: What the step has besides: optimizer, gradients, precision.

    Attributes:
        plan: The plan; None until it is made.
        is_rough: Whether `plan` only bridges the time until the planner is done.
        seconds: What has been spent on it.
        trace_s: What of that the trace took.
        is_far_ahead: Whether it is for sizes far beyond those that came.
        plain_bytes: Peak of the step without a plan.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        observed: Observed,
        options: PlanOptions,
        loss: PlannedLoss,
        on_error: Callable[[BaseException], None] = lambda _: None,
        **step: Any,
    ) -> None:
        self.observed = observed
        self.plan: Plan | None = None
        self.is_rough = self.is_far_ahead = False
        self.seconds = 0.0
        self._applied: Applied | None = None
        self._reference, self._loss = weakref.ref(model), loss
        self._options, self._on_error = options, on_error
        self._step = {**options.trace_options, **step, "loss": loss}
        with self._timed():
            graph = aside(lambda: trace(model, batch, target=options.target, **self._step))
            self.planning = Planning(
                graph,
                find_target(model, options.target, graph.device_kind),
                choose_objective(graph, options.target, options.objective),
                read_allocator(options.allocator),
            )
            self.plain_bytes = peak_bytes(graph, expand(graph))
        self.trace_s = self.seconds
        loss.forget()

    @property
    def _model(self) -> nn.Module:
        model = self._reference()
        assert model is not None, "only a step of the model comes here"
        return model

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def solve_ahead(self, budget_bytes: int) -> None:
        """Have the planner's answer ready for `finish`. Touches no tensor, so that another thread may do it."""
        with self._timed(), contextlib.suppress(AutorematError):  # finish() asks again, and raises
            self._solve(budget_bytes)

    def _solve(self, budget_bytes: int) -> Plan:
        if self._options.budget_is == "reserved":
            return self.planning.plan_reserved(budget_bytes)
        return self.planning.plan(budget_bytes)

    def finish(self, batch: Batch, budget_bytes: int) -> None:
        """Make the plan for a budget, and run it dry.

        Args:
            batch: One of the sizes that were traced. None is held: its memory would count.
            budget_bytes: The budget.

        Raises:
            BudgetInfeasible: If no plan fits.
        """
        with self._timed():
            made = aside(lambda: self._make(batch, budget_bytes))
        self._loss.forget()
        self.use(made)

    def plain_fits(self, budget_bytes: int) -> bool:
        """Whether nothing has to be recomputed: then the planner has nothing to do, and its setup is the work."""
        return self._options.budget_is == "allocated" and self.plain_bytes <= budget_bytes

    def guess_plain_bytes(self, observed: Observed) -> float:
        """About what the plain step of other sizes has at its peak, if all but what it holds anyway is in proportion.

        Args:
            observed: Sizes that are all no smaller, or all no larger.
        """
        is_smaller = self.observed.serves(observed)
        ratio = observed.share_of(self.observed) if is_smaller else 1 / max(1e-9, self.observed.share_of(observed))
        static_bytes = self.planning.graph.static_bytes
        return static_bytes + (self.plain_bytes - static_bytes) * ratio

    @property
    def smallest_bytes(self) -> int:
        """Smallest budget that a plan can meet, bytes; takes the planner's setup if there was no need for it yet."""
        return self.planning.planner.smallest_bytes

    def _make(self, batch: Batch, budget_bytes: int) -> Plan:
        if self.plain_fits(budget_bytes):
            return self.planning.make_plan((), budget_bytes, 0.0)
        options, model = self._options, self._model
        if not options.dry_run or options.budget_is == "reserved" or self._step.get("parallel") is not None:
            return self._solve(budget_bytes)
        step = {name: value for name, value in self._step.items() if name not in ("parallel", "cost")}
        return keep_budget(
            self._solve, budget_bytes, lambda found: dry_run(model, batch, found, target=options.target, **step)
        )

    def bridge(self, budget_bytes: int, others: list[Plan]) -> bool:
        """Use a plan that is there without solving anything, if the ledger finds one that fits.

        Args:
            budget_bytes: The budget.
            others: Plans for other sizes of the step, those that should be tried first in front.
        """
        with self._timed():
            for make in (lambda: Plan(()), *(lambda p=p: p for p in others), lambda: self.planning.classic(_SAFE)):
                priced = self._priced(make, budget_bytes)
                if priced is not None:
                    self.use(priced, is_rough=True)
                    return True
        return False

    def _priced(self, make: Callable[[], Plan], budget_bytes: int) -> Plan | None:
        try:
            found = self.planning.make_plan(resolve(self.planning.graph, make()), budget_bytes)
        except PlanError:  # it names calls that this step does not make
            return None
        assert found.planned is not None
        return found if found.planned.peak_bytes <= budget_bytes else None

    def use(self, plan: Plan, *, is_rough: bool = False) -> None:
        """Have a plan ready for `switch_on`."""
        self.switch_off()
        self._applied = None
        self.plan, self.is_rough = plan, is_rough

    @property
    def is_on(self) -> bool:
        """Whether the plan is on the model; one that recomputes nothing always is."""
        return self.plan is not None and (not self.plan.regions or (self._applied is not None and self._applied.is_on))

    def switch_on(self) -> None:
        """Put the plan on the model; after the first time that is a matter of microseconds."""
        assert self.plan is not None
        if self._applied is not None:
            self._applied.put_on()
        elif self.plan.regions:
            self._applied = apply(self._model, self.plan)
            self._applied.on_error(self._on_error)

    def start_forward(self) -> None:
        """Say that a forward starts, where the model itself is not called."""
        if self._applied is not None:
            self._applied.start_forward()

    def switch_off(self) -> None:
        """Take the plan off."""
        if self._applied is not None:
            self._applied.remove()


class _Planning(threading.local):
    """Whether this thread is one that plans."""

    is_on = False


_planning = _Planning()


def is_planning() -> bool:
    """Whether the thread that asks traces a step or runs one dry: optimizers that step there are not the training's."""
    return _planning.is_on


def aside(work: Callable[[], T]) -> T:
    """Run work on a thread of its own, and wait for it.

    Autocast, gradient mode, dispatch modes, hooks on saved tensors and profilers belong to a thread: there, none of
    those of the training step reach into a trace, nor does the trace show up in them.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    device = torch.get_default_device()
    on_gpu = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else contextlib.nullcontext()

    def run() -> None:
        _planning.is_on = True
        try:
            with on_gpu, contextlib.nullcontext() if device.type == "cpu" else device:
                found.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again where it belongs
            failed.append(error)

    thread = threading.Thread(target=run, name="autoremat planning", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed.pop()
    return found.pop()
