"""Watch a training run: peak, time, recomputation, gradients, and how far they are from what the plan promised.

Steps are seen by hooks: the first forward of the model with gradients starts one, its optimizer's ``step`` ends it.
Forwards in between are micro-steps. A step whose gradients are gone before an optimizer took them was left out by a
gradient scaler. Records are handed out at the start of the next step, on a GPU once it has come to their numbers, so
that nobody waits for them.

Known limits: a module that is compiled in place shows no forwards; its steps then reach from one optimizer step to the
next. On a GPU, times are those at which the host gives its orders, which in a steady training add up to the same.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoremat._errors import UsageError
from autoremat._monitor_check import ForwardCopy, check_gradients, gradient_norm
from autoremat._monitor_clock import RecomputeClock
from autoremat._monitor_outputs import ConsoleOutput, JsonLinesOutput, Output, TensorBoardOutput
from autoremat._monitor_peak import PeakReader, When
from autoremat._monitor_results import GradientCheck, MonitorResults, StepRecord, ThroughputWarning, median
from autoremat._monitor_step import Step
from autoremat._plan import Plan
from autoremat._slow import WINDOW, Expected, find_slow
from autoremat._step import describe_batch
from autoremat._targets import get_target
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._attached import attached_regions, plan_on
from autoremat.runtime._clock import clocks
from autoremat.runtime._links import tensors_in
from autoremat.runtime._recipe import Recipe

NUM_WARM_UP = 3
"""Steps that no median counts: planning, first allocations, kernels that are chosen by trial."""
MAX_WAITING = 4
"""Records that may wait for a GPU."""


class Monitor:
    """Watches a training loop that runs inside its ``with`` block.

    Args:
        model: The model that is trained, with a plan on it or without.
        optimizer: Its optimizer, or what wraps one; None for whichever has parameters of the model.
        plan: What to compare with; None for the plan that is on the model.
        console_every: Steps from one line on the console (stderr) to the next; None for none.
        jsonl: File for a line of JSON for each step.
        tensorboard: Directory for TensorBoard's scalars.
        peak: "auto" meters the peak as often as costs a hundredth of the time (on CUDA, where it costs nothing, in
            every step), "always" in every step, "never" leaves it out.
        check_every: Every so many steps, gradients with checkpointing are compared with those without, bit for bit, on
            the same batch and from the same random state; nothing of the training changes. It takes two forwards and
            backwards more, and the memory of one without checkpointing. None for never.
        warn: Whether to warn where throughput falls short of what the plan predicts (for the device that runs), or of
            the first steps.

    Raises:
        UsageError: If an argument is out of range, an output cannot be written, or the model is watched already.

    Example:
        >>> import autoremat as ar
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ar.Monitor(model, console_every=None) as monitor:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(4, 8)).mean().backward()
        ...         optimizer.step()
        >>> len(monitor.results.records), monitor.results.records[0].gradient_norm > 0
        (3, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        plan: Plan | None = None,
        console_every: int | None = 10,
        jsonl: str | Path | None = None,
        tensorboard: str | Path | None = None,
        peak: When = "auto",
        check_every: int | None = None,
        warn: bool = True,
    ) -> None:
        _check_arguments(model, console_every=console_every, peak=peak, check_every=check_every)
        self._model = model
        self._optimizer = _innermost_optimizer(optimizer)
        self._given_plan = plan
        self._check_every = check_every
        self._warn = warn
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._own_ids = {id(p) for p in model.parameters()}
        self._peak = PeakReader(model, self._device, peak)
        self._clock = RecomputeClock(self._device)
        self._outputs: list[Output] = []
        if console_every is not None:
            self._outputs.append(ConsoleOutput(console_every))
        if tensorboard is not None:
            self._outputs.append(TensorBoardOutput(tensorboard))
        if jsonl is not None:
            self._outputs.append(JsonLinesOutput(jsonl))
        self._handles: list[RemovableHandle] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._records: list[StepRecord] = []
        self._checks: list[GradientCheck] = []
        self._warnings: list[ThroughputWarning] = []
        self._waiting: deque[Step] = deque()
        self._step: Step | None = None
        self._num_steps = 0
        self._depth = 0
        self._is_away = False
        self._awaits_end = False
        self._last_end: float | None = None
        self._seen: weakref.WeakKeyDictionary[Recipe, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._recipes: list[Recipe] = []
        self._plan_then: Plan | None = None
        self._prediction: tuple[Plan | None, float | None] = (None, None)
        self._budget: int | None = plan.budget_bytes if plan is not None else None

    def __enter__(self) -> Self:
        if self._model in _WATCHED:
            raise UsageError(f"{type(self._model).__name__} is watched already. Leave the other monitor's block first.")
        _WATCHED.add(self._model)
        for module in _entries(self._model):
            _MONITORS[module] = self
            self._handles += [
                module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True),
                module.register_forward_hook(after_forward, always_call=True),
            ]
        self._handles += [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        clocks.append(self._clock)
        self._take_counts()
        self._last_end = time.perf_counter()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, hand out what is left, and close the outputs."""
        if self._model not in _WATCHED:
            return
        _WATCHED.discard(self._model)
        for module in _entries(self._model):
            _MONITORS.pop(module, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        clocks.remove(self._clock)
        self._peak.cancel()
        if self._step is not None and self._step.ended is not None:
            self._waiting.append(self._step)
        self._step = None
        self._hand_out(everything=True)
        results = self.results
        for output in self._outputs:
            output.close(results)

    @property
    def results(self) -> MonitorResults:
        """What has been seen so far."""
        return MonitorResults(
            model=type(self._model).__name__,
            device=str(self._device),
            budget_bytes=self._budget,
            records=tuple(self._records),
            checks=tuple(self._checks),
            warnings=tuple(self._warnings),
            num_warm_up=NUM_WARM_UP,
        )

    @property
    def plan(self) -> Plan | None:
        """What the training is compared with."""
        return self._given_plan or plan_on(self._model)

    def begin(self) -> None:
        """A step, or a micro-step of it, starts. Called by hooks; call it in a loop that they do not see."""
        now = time.perf_counter()
        step = self._step
        if step is not None and step.ended is None and step.num_micro_steps and self._gradients_are_gone():
            step.is_skipped = True
            self._end_step(step, step.backward_ended or now)
        if step is not None and step.ended is not None:
            self._waiting.append(step)
            self._hand_out()
            step = self._step = None
        if step is None:
            self._num_steps += 1
            self._step = step = Step(self._num_steps, now, now - (self._last_end or now))
            self._clock.take()
        elif step.backward_ended is not None:
            step.wait_s += now - step.backward_ended
            step.away_s += now - step.backward_ended
            step.backward_ended = None

    def before_update(self) -> None:
        """Gradients are complete, and no parameter has changed yet: check them if that is due. Called by hooks.

        A loop that hands a closure to the optimizer calls it at the end of the closure.
        """
        step = self._step
        if step is not None and step.forward is not None:
            started = time.perf_counter()
            self._check(step)
            step.away_s += time.perf_counter() - started

    def step(self) -> None:
        """A step is over. Called by hooks; call it in a loop without an optimizer of torch's."""
        if self._step is None:
            self.begin()
        if self._step is not None:
            self._end_step(self._step, time.perf_counter())

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: a step may start. Called by a hook."""
        if self._is_away:
            return
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or not self._model.training:
            return
        self.begin()
        step = self._step
        assert step is not None
        if not step.is_metered and not self._is_check_due(step):
            step.is_metered = True
            self._peak.start(step.number, (args, kwargs), self._optimizers)
        if module is self._model and step.shapes is None and not (args and kwargs):
            step.shapes = describe_batch(kwargs or args)
        if self._is_check_due(step):
            step.forward = ForwardCopy(self._model, module, args, kwargs)

    def _is_check_due(self, step: Step) -> bool:
        return self._check_every is not None and step.number % self._check_every == 0

    def after_forward(self, module: nn.Module, output: Any) -> None:
        """The call is over; with an output of None, it may have failed. Called by a hook."""
        if self._is_away or not self._depth:
            return  # with a depth of 0: it was running when the monitor came
        self._depth -= 1
        step = self._step
        if self._depth or step is None or not torch.is_grad_enabled():
            return
        found = [t for t in tensors_in(output) if t.requires_grad]
        self._peak.hold(found)
        for tensor in found:
            tensor.register_hook(self._in_backward)
        if step.forward is not None and step.forward.module is module:
            step.forward.watch(output)

    def _in_backward(self, _gradient: Tensor) -> None:
        """Backward has come to an output: ask to be told when it is over; several outputs count once."""
        if self._step is not None and not self._is_away and not self._awaits_end:
            self._awaits_end = True
            compat.at_end_of_backward(self._after_backward)

    def _after_backward(self) -> None:
        self._awaits_end = False
        if self._step is not None and self._step.ended is None:
            self._step.num_micro_steps += 1
            self._step.backward_ended = time.perf_counter()

    def _is_ours(self, optimizer: Any) -> bool:
        if self._optimizer is not None:
            return optimizer is self._optimizer
        return optimizer in self._optimizers or any(
            id(p) in self._own_ids for group in optimizer.param_groups for p in group["params"]
        )

    def _before_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._is_away or not self._is_ours(optimizer):
            return
        self._optimizers.add(optimizer)
        if self._step is None or self._step.ended is not None:
            return  # a second optimizer of the same step, or one without a forward
        self._take_norm(self._step, optimizer)
        self.before_update()

    def _take_norm(self, step: Step, optimizer: Any) -> None:
        norm = gradient_norm([p.grad for group in optimizer.param_groups for p in group["params"]])
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer divides by itself
        norm = norm if scale is None else norm / scale.to(norm.device)
        step.norm = float(norm) if norm.device.type == "cpu" else norm

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._is_away or not self._is_ours(optimizer):
            return
        if self._step is None:
            self._num_steps += 1  # no forward was seen: the model is compiled in place
            self._step = Step(self._num_steps, self._last_end or time.perf_counter(), 0.0)
        if self._step.norm is None and self._step.ended is None:
            self._take_norm(self._step, optimizer)  # forward and backward ran inside the optimizer's step
        self._end_step(self._step, time.perf_counter())

    def _end_step(self, step: Step, now: float) -> None:
        first_time = step.ended is None
        step.ended = self._last_end = now
        if not first_time:
            return
        self._count(step)
        step.plan = self._given_plan or self._plan_then
        step.taken = self._clock.take()
        if step.cpu_started is not None and self._device.type == "cpu":
            wall_s = max(1e-9, now - step.started)
            step.cpu_share = (time.process_time() - step.cpu_started) / wall_s / torch.get_num_threads()
        step.peak_bytes, step.retries = self._peak.stop(step.number, now - step.started)
        step.already = self._peak.already
        self._last_end = time.perf_counter()  # what the monitor itself took is no wait

    def _gradients_are_gone(self) -> bool:
        return all(p.grad is None for p in self._model.parameters() if p.requires_grad)

    def _count(self, step: Step) -> None:
        calls, recomputes = self._take_counts()
        step.num_calls += calls
        step.num_recomputes += recomputes

    def _take_counts(self) -> tuple[int, int]:
        """Region calls and recomputes since this was last called. Finds the regions anew if another plan is on."""
        plan = plan_on(self._model)
        if plan is not self._plan_then:
            self._plan_then = plan
            self._recipes = [recipe for _, recipe in attached_regions(self._model)]
        calls = recomputes = 0
        for recipe in self._recipes:
            now, before = (recipe.num_calls, recipe.num_recomputes), self._seen.get(recipe, (0, 0))
            if now[0] < before[0]:
                before = (0, 0)  # reading `Applied.executed` starts the counts anew
            calls += now[0] - before[0]
            recomputes += now[1] - before[1]
            self._seen[recipe] = now
        return calls, recomputes

    def _check(self, step: Step) -> None:
        assert step.forward is not None
        self._is_away = True
        self._count(step)
        clocks.remove(self._clock)
        try:
            check = check_gradients(step.forward, step.number)
        finally:
            self._is_away = False
            step.forward = None
            clocks.append(self._clock)
            self._take_counts()  # those of the check are nobody's
        self._checks.append(check)
        for output in self._outputs:
            output.check(check)
        if check.equal is False:
            warnings.warn(
                f"Gradients of step {step.number} differ with checkpointing: {', '.join(check.differences[:5])}. "
                "Take the plan off, and see which region it is with autoremat.verify.",
                stacklevel=2,
            )

    # What is handed out

    def _hand_out(self, *, everything: bool = False) -> None:
        while self._waiting:
            step = self._waiting[0]
            is_known = step.taken is None or step.taken.is_known()
            if not (everything or is_known or len(self._waiting) > MAX_WAITING):
                return
            self._waiting.popleft()
            if step.plan is not None and step.plan.budget_bytes is not None:
                self._budget = step.plan.budget_bytes
            self._publish(step.record(self._predicted_s(step.plan)))

    def _predicted_s(self, plan: Plan | None) -> float | None:
        """The plan's step time, where it was made for a device like this one."""
        if plan is not self._prediction[0]:
            is_known = plan is not None and plan.planned is not None and _is_for(plan, self._device)
            self._prediction = (plan, plan.planned.seconds if is_known and plan and plan.planned else None)
        return self._prediction[1]

    def _publish(self, record: StepRecord) -> None:
        self._records.append(record)
        for output in self._outputs:
            output.record(record)
        if self._warn:
            self._look_for_slowness()

    def _look_for_slowness(self) -> None:
        expected = self._expected()
        if expected is None:
            return
        warning = find_slow(self._records[NUM_WARM_UP:], expected)
        if warning is None or any(w.kinds == warning.kinds for w in self._warnings):
            return
        if self._warnings and warning.step < self._warnings[-1].step + WINDOW:
            return
        self._warnings.append(warning)
        for output in self._outputs:
            output.warn(warning)
        warnings.warn(warning.message, stacklevel=2)

    def _expected(self) -> Expected | None:
        plan = self._given_plan or self._plan_then
        is_cpu = self._device.type == "cpu"
        capacity = None
        if self._device.type == "cuda":
            capacity = torch.cuda.get_device_properties(self._device).total_memory
        share = None
        predicted_s = self._predicted_s(plan)
        if predicted_s is not None and plan is not None and plan.plain is not None:
            share = 1 - plan.plain.seconds / predicted_s
            return Expected(predicted_s, "the plan's prediction", plan.time_error or 0.0, share, capacity, is_cpu)
        first = self._records[NUM_WARM_UP : NUM_WARM_UP + WINDOW]
        if len(first) < WINDOW:
            return None
        return Expected(
            median(r.step_s + r.wait_s for r in first),
            "the first steps",
            recompute_share=median(r.recompute_share for r in first),
            capacity_bytes=capacity,
            is_cpu=is_cpu,
        )


_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_MONITORS: weakref.WeakKeyDictionary[nn.Module, Monitor] = weakref.WeakKeyDictionary()
"""By the modules that have its hooks. They look their monitor up here, so that a copy of a model is not watched."""


def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a watched model."""
    monitor = None if torch.compiler.is_compiling() else _MONITORS.get(module)
    if monitor is not None:
        monitor.before_forward(module, args, kwargs)


def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a watched model."""
    monitor = None if torch.compiler.is_compiling() else _MONITORS.get(module)
    if monitor is not None:
        monitor.after_forward(module, output)


def _check_arguments(model: nn.Module, *, console_every: int | None, peak: str, check_every: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"A monitor watches a torch.nn.Module, not {type(model).__name__}.")
    if peak not in ("auto", "always", "never"):
        raise UsageError(f"peak={peak!r}: use 'auto', 'always' or 'never'.")
    for name, value in (("console_every", console_every), ("check_every", check_every)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: use a number of steps, or None for never.")


def _entries(model: nn.Module) -> list[nn.Module]:
    """What a loop calls. Lightning calls ``training_step``, which is no forward: then it is the modules inside."""
    if not hasattr(model, "training_step"):
        return [model]
    return [model, *(child for child in model.children() if next(child.parameters(), None) is not None)]


def _innermost_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch's in those that Accelerate and Lightning wrap around it."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            raise UsageError(f"optimizer= is a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        optimizer = inner
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_for(plan: Plan, device: torch.device) -> bool:
    """Whether a plan's times are those of a device like this one; those of a CPU only if it has been measured."""
    with contextlib.suppress(UsageError, OSError):
        target = get_target(plan.target)
        return target.device_kind == device.type and (device.type != "cpu" or target.calibration is not None)
    return False
