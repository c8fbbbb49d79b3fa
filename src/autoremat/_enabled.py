"""What `enable` puts on a model: for each training step the plan of its kind and size, made when it is first needed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoremat._device_memory import budget_left, explain_out_of_memory, is_out_of_memory
from autoremat._errors import AutorematError, UsageError
from autoremat._found_optimizer import factory_like, find_optimizers
from autoremat._memory_meter import unique_bytes
from autoremat._model_states import OptimizerFactory
from autoremat._observed import HEADROOM, Observed, as_batch, batch_bytes, observe, resized
from autoremat._plan import Plan
from autoremat._planned_loss import PlannedLoss
from autoremat._prepared import PlanOptions, Prepared
from autoremat._step import Batch, LossFunction
from autoremat._units import format_bytes

FIND = "find"
"""In place of an optimizer: look for it at the first step."""
_OURS = "autoremat:"
_AUTOCAST = {torch.bfloat16: "amp-bf16", torch.float16: "amp-fp16"}
SMALL_TENSORS_BYTES = 64 * 2**10
"""Part of every budget that is left for what a loop keeps besides its step: running losses, metrics, scalars."""
SMALLER_BUCKET = 0.5
"""A step of at most this share of the size that its plan was made for may get a plan of its own, a cheaper one."""
WORTH_A_PLAN = 3
"""After so many such steps."""
MAX_PLANNING_SHARE = 0.02
"""And from the third plan on only if planning, this one included, takes at most this share of the run so far."""
FAR = (Fraction(8), Fraction(4), Fraction(2))
"""Where sizes grow, how far ahead to plan, the first that looks cheap; a trace takes the same time at any size."""
FAR_OVER_BUDGET = 2
"""It looks cheap if the plain step takes at most so many budgets: a plan for more recomputes much, in every step."""
TIGHTEN = 0.9
"""Budget after running out of memory, as a share of the smaller of what was allowed and what the plan promised."""


class Enabled:
    """Automatic plans on a model, as `enable` put them there and `enabled` returns them.

    Example:
        >>> import autoremat as ar
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> model = ar.enable(model, budget="1GiB", optimizer=None, loss=torch.mean)
        >>> model(torch.ones(4, 8)).mean().backward()
        >>> ar.enabled(model).plan.planned.peak_bytes < ar.enabled(model).budget_bytes
        True
        >>> ar.enabled(model).disable()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int | None,
        reserve_bytes: int | None,
        options: PlanOptions,
        loss: LossFunction | None,
        optimizer: str | OptimizerFactory | Optimizer | None,
        holds_output: bool,
        background: bool,
        on_disable: Callable[[], None] = lambda: None,
    ) -> None:
        self._reference = weakref.ref(model)
        self._budget_bytes, self._reserve_bytes = budget_bytes, reserve_bytes
        self._options = options
        self._loss = PlannedLoss(loss, holds_output=holds_output)
        self._optimizer = optimizer
        self._background = background
        self._on_disable = on_disable
        self._parameters = list(model.parameters())
        self._device_kind = next((p.device.type for p in self._parameters), "cpu")
        self._prepared: list[Prepared] = []
        self._chosen: dict[Observed, Prepared] = {}
        self._wanted: Counter[Observed] = Counter()
        self._bounded: set[Hashable] = set()
        self._reached: dict[Hashable, Observed] = {}
        self._pending: tuple[Prepared, threading.Thread] | None = None
        self._current: Prepared | None = None
        self._started_s: float | None = None
        self._said: set[str] = set()

    @property
    def _model(self) -> nn.Module:
        model = self._reference()
        if model is None:
            raise UsageError("The model that was enabled is gone. Enable the one that you train.")
        return model

    # -- what a user asks -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest training step; None before the first."""
        return self._current.plan if self._current is not None else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan that was made, one for each kind and size of step, in order."""
        return tuple(p.plan for p in self._prepared if p.plan is not None)

    @property
    def budget_bytes(self) -> int | None:
        """The budget; of "auto", what it came to at the first step, and None before."""
        return self._budget_bytes

    @property
    def planning_s(self) -> float:
        """Seconds that planning has taken, traces and dry runs included."""
        return sum(p.seconds for p in self._prepared)

    def disable(self) -> None:
        """Take everything off the model: it is as it was before `enable`."""
        self._switch(None)
        self._on_disable()

    def tighten(self) -> bool:
        """Lower the budget, for all steps from now on, after the device ran out of memory.

        Returns:
            Whether there is a tighter plan.
        """
        plan = self.plan
        if plan is None or plan.planned is None or self._budget_bytes is None or self._current is None:
            return False
        smallest = self._current.smallest_bytes
        outside = self._budget_bytes - (plan.budget_bytes or self._budget_bytes)
        target = int(TIGHTEN * min(plan.planned.peak_bytes, self._budget_bytes - outside))
        target = max(target, smallest)
        if target >= plan.planned.peak_bytes:
            return False
        self._budget_bytes = target + outside
        self._chosen.clear()
        self._switch(None)
        for prepared in self._prepared:
            if prepared.plan and prepared.plan.planned and prepared.plan.planned.peak_bytes > target:
                prepared.plan = None
        return True

    def explain_out_of_memory(self) -> str:
        """What was alive, by cause, and what to do about it."""
        plan = self.plan
        if plan is not None and self._current is not None:
            plan = dataclasses.replace(plan, smallest_bytes=self._current.smallest_bytes)
        return explain_out_of_memory(self._model, plan, self._held())

    def note_out_of_memory(self, error: BaseException) -> None:
        """Have an error say once what was alive, if it says that memory ran out."""
        if is_out_of_memory(error) and not any(_OURS in note for note in getattr(error, "__notes__", ())):
            with contextlib.suppress(Exception):  # the user's error matters more than what is said about it
                error.add_note(self.explain_out_of_memory())

    def __repr__(self) -> str:
        budget = "auto" if self._budget_bytes is None else format_bytes(self._budget_bytes)
        made = f"{len(self._prepared)} plans made, now {self.plan!r}" if self._prepared else "no plan yet"
        return f"<Enabled: budget {budget}, {made}>"

    # -- what happens at each forward ---------------------------------------------------------------------------

    def before_forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, has_gradients: bool | None = None
    ) -> None:
        """Put the right plan on the model for the call that starts; none outside of training.

        Args:
            args: What the model is called with.
            kwargs: Its keyword arguments.
            has_gradients: Whether gradients are there during forward; None looks.

        Raises:
            AutorematError: If there is no plan for it. Weights, buffers and random state have not been touched.
        """
        if not self._model.training or not torch.is_grad_enabled():
            self._switch(None)
            return
        if self._started_s is None:
            self._started_s = time.perf_counter()
        observed = observe(
            args,
            kwargs,
            surroundings=(self._precision(), tuple([p.requires_grad for p in self._parameters])),
            has_gradients=any(p.grad is not None for p in self._parameters) if has_gradients is None else has_gradients,
        )
        if self._pending is not None:
            self._adopt(observed, args, kwargs)
        prepared = self._chosen.get(observed)
        self._switch(self._choose(observed, args, kwargs) if prepared is None else prepared)

    def pause(self) -> None:
        """Take the plan off until the next training step."""
        self._switch(None)

    def start_forward(self) -> None:
        """Say that a forward starts, where the model itself is not called; after `before_forward`."""
        if self._current is not None:
            self._current.start_forward()

    def _switch(self, prepared: Prepared | None) -> None:
        if self._current is not None and self._current is not prepared:
            self._current.switch_off()
        if prepared is not None:
            if not prepared.is_on:
                prepared.switch_on()
            self._current = prepared

    def _choose(self, observed: Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
        """The plan for a step: the one for the smallest sizes that are no smaller, or a new one."""
        batch = as_batch(self._model, args, kwargs)
        reached = self._reached.get(observed.kind)
        self._reached[observed.kind] = observed if reached is None else observed.with_largest(reached)
        serving = [p for p in self._prepared if p.observed.serves(observed)]
        if not serving:
            chosen = self._prepare_larger(observed, batch)
        else:
            chosen = max(
                serving, key=lambda p: (observed.share_of(p.observed), p.observed.sizes[-1] == observed.sizes[-1])
            )
            if chosen.plan is None:
                self._finish(chosen, batch)
            chosen = self._prepare_smaller(observed, chosen, batch)
        if not chosen.is_rough and not self._may_get_smaller(observed, chosen):
            self._chosen[observed] = chosen
        return chosen

    # -- making plans --------------------------------------------------------------------------------------------

    def _prepare_larger(self, observed: Observed, batch: Batch) -> Prepared:
        """A plan that is needed: for these sizes, or for larger ones if sizes have been seen to grow."""
        known = [p for p in self._prepared if p.observed.kind == observed.kind]
        far = self._far(observed, known, batch)
        for factor in (*far, HEADROOM):
            roomy = observed.with_headroom([p.observed for p in known], factor)
            if roomy != observed:
                try:
                    return self._prepare(roomy, batch, far_ahead=factor in far)
                except AutorematError:  # larger than the model takes, or than the budget allows
                    self._bounded.add(observed.kind)
        return self._prepare(observed, batch)

    def _far(self, observed: Observed, known: list[Prepared], batch: Batch) -> list[Fraction]:
        """How far ahead to plan, at most once: growth that goes on would ask for plan after plan."""
        on_copy = self._options.trace_options.get("fake") is False  # whose activations would take memory
        if not known or observed.kind in self._bounded or on_copy:
            return []
        largest, budget_bytes = max(known, key=lambda p: p.plain_bytes), self._within(batch)
        if not observed.serves(largest.observed):
            return []
        for factor in FAR:
            far = observed.with_headroom([p.observed for p in known], factor)
            # Planning makes a batch of that size.
            held = largest.planning.graph.static_bytes + batch_bytes(batch) * (factor + 1)
            if held <= budget_bytes and largest.guess_plain_bytes(far) <= FAR_OVER_BUDGET * budget_bytes:
                return [factor]
        return []

    def _may_get_smaller(self, observed: Observed, chosen: Prepared) -> bool:
        assert chosen.plan is not None
        return bool(chosen.plan.regions) and self._smaller(observed, chosen) != chosen.observed

    def _smaller(self, observed: Observed, serving: Prepared) -> Observed:
        """The sizes for which a cheaper plan would be made; those of the plan itself if none would."""
        if observed.share_of(serving.observed) <= SMALLER_BUCKET:
            return serving.observed.halved(observed)
        if serving.is_far_ahead:  # growth may have ended long before
            reached = serving.observed.up_to(self._reached[observed.kind])
            if reached.share_of(serving.observed) <= 1 / HEADROOM:
                return reached
        return serving.observed

    def _prepare_smaller(self, observed: Observed, serving: Prepared, batch: Batch) -> Prepared:
        """A cheaper plan for a step that is much smaller than its plan was made for, once that is worth its time."""
        if self._pending is not None or not self._may_get_smaller(observed, serving):
            return serving
        smaller = self._smaller(observed, serving)
        self._wanted[smaller] += 1
        if self._wanted[smaller] < WORTH_A_PLAN or not self._is_affordable(serving, smaller):
            return serving
        self._wanted[smaller] = -(10**9)  # if it fails, it is not tried again
        try:
            return self._prepare(smaller, batch)
        except AutorematError:
            return serving

    def _is_affordable(self, like: Prepared, smaller: Observed) -> bool:
        assert self._started_s is not None
        if len(self._prepared) < 2:
            return True
        plain_fits = like.guess_plain_bytes(smaller) <= (self._budget_bytes or 0)
        spent_s = sum(p.seconds for p in self._prepared[2:]) + (like.trace_s if plain_fits else like.seconds)
        return spent_s <= MAX_PLANNING_SHARE * (time.perf_counter() - self._started_s)

    def _prepare(self, observed: Observed, batch: Batch, *, far_ahead: bool = False) -> Prepared:
        """Trace a step, and have a plan for it; in the background the one that bridges the time.

        Args:
            observed: Kind and sizes of the step.
            batch: Of any sizes.
            far_ahead: The sizes are far beyond the batch's. A model that cannot be traced on fake tensors is refused
                then: a real copy would take memory for its step.
        """
        self._switch(None)
        batch = resized(batch, observed.sizes)
        options = self._options
        step: dict[str, Any] = {
            "optimizer": self._planned_optimizer(),
            "gradients": "kept" if observed.has_gradients else "fresh",
            "precision": options.trace_options.get("precision", self._precision()),
        }
        step |= {"fake": True} if far_ahead else {}
        prepared = Prepared(self._model, batch, observed, options, self._loss, self.note_out_of_memory, **step)
        prepared.is_far_ahead = far_ahead
        if self._loss.stands_in:
            self._say_once(
                f"{type(self._model).__name__} returns no loss, so the plan counts a cross-entropy over the last "
                "dimension of its output in its place. Give autoremat.enable(..., loss=), a function of the output, to "
                "count yours."
            )
        in_background = self._background and self._pending is None and not prepared.plain_fits(self._within(batch))
        if not in_background or not self._bridge(prepared, batch):
            self._finish(prepared, batch)
        self._prepared.append(prepared)
        return prepared

    def _finish(self, prepared: Prepared, batch: Batch) -> None:
        self._switch(None)
        batch = resized(batch, prepared.observed.sizes)
        prepared.finish(batch, self._within(batch))

    def _bridge(self, prepared: Prepared, batch: Batch) -> bool:
        """Run under a plan that is there already, and have the planner at work beside the training steps."""
        budget_bytes = self._within(batch)
        if not prepared.bridge(budget_bytes, [p.plan for p in reversed(self._prepared) if p.plan is not None]):
            return False
        thread = threading.Thread(
            target=prepared.solve_ahead, args=(budget_bytes,), name="autoremat planner", daemon=True
        )
        thread.start()
        self._pending = prepared, thread
        return True

    def _adopt(self, observed: Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take over what was planned in the background, at a step of the same kind."""
        assert self._pending is not None
        prepared, thread = self._pending
        if thread.is_alive() or observed.kind != prepared.observed.kind:
            return
        self._pending = None
        self._finish(prepared, as_batch(self._model, args, kwargs))

    def _within(self, batch: Batch) -> int:
        """The budget for the step itself: a loader may hold the next batch, and a loop some numbers of its own."""
        if self._budget_bytes is None:
            self._budget_bytes = budget_left(self._model, sum(self._held().values()), self._reserve_bytes)
        return max(1, self._budget_bytes - batch_bytes(batch) - SMALL_TENSORS_BYTES)

    def _planned_optimizer(self) -> str | OptimizerFactory | None:
        if isinstance(self._optimizer, Optimizer):
            return factory_like([self._optimizer], self._model)
        if self._optimizer != FIND:
            return self._optimizer
        found = find_optimizers(self._model)
        if found:
            return factory_like(found, self._model)
        self._say_once(
            f"No optimizer that holds parameters of {type(self._model).__name__} exists yet; the plan counts AdamW. "
            "Make the optimizer before the first step, or give autoremat.enable(..., optimizer=) its name."
        )
        return "adamw"

    def _precision(self) -> str | None:
        """The autocast that the step runs under, as `trace` calls it."""
        kind = self._device_kind
        if not torch.is_autocast_enabled(kind):
            return None
        return _AUTOCAST.get(torch.get_autocast_dtype(kind))

    def _held(self) -> dict[str, int]:
        """Bytes that are there all through a step, by cause, as they are now."""
        kinds = (*find_optimizers(self._model),) if self._optimizer is not None else ()
        states = [x for o in kinds for s in o.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        return {
            "parameters": unique_bytes(self._parameters),
            "buffers": unique_bytes(self._model.buffers()),
            "gradients": unique_bytes(p.grad for p in self._parameters if p.grad is not None),
            "optimizer state": unique_bytes(states),
        }

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=2)
