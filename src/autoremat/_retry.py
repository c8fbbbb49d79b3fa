"""Run a training step again, under a tighter plan, after memory ran out in it.

What can be run again: forward, loss and backward, any number of times, as long as no optimizer has stepped and there
were no gradients before. Random states, buffers and plain attributes of modules are put back, and half-made gradients
are dropped, so that the second run computes what the first would have. What a step does besides (draw from an iterator,
write to a file) happens again: take the batch before it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoremat._device_memory import is_out_of_memory
from autoremat._enable import enabled
from autoremat._prepared import is_planning
from autoremat._state import ModelState

P = ParamSpec("P")
R = TypeVar("R")
MAX_TIGHTER = 20
"""Each time the budget shrinks by a tenth, so that this many cover all that a plan can save."""


def retry_step(model: nn.Module) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate forward and backward of a training step: if memory runs out, they run again under a tighter plan.

    The function must leave the optimizer's step and the next batch to its caller, and there must be no gradients before
    it: with accumulation, decorate all micro-steps together. Otherwise the error is raised as it is. Either way
    the error says what was alive, by cause.

    Args:
        model: A model that `enable` was called with.

    Returns:
        The decorator.

    Raises:
        UsageError: If the model is not enabled.

    Example:
        >>> from autoremat import enable
        >>> model = enable(nn.Linear(4, 1), budget="1GiB", optimizer=None, loss=lambda y: y.square().mean())
        >>> @retry_step(model)
        ... def step(batch):
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     return loss.detach()
        >>> step(torch.zeros(2, 4)).shape
        torch.Size([])
    """
    state = enabled(model)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            has_gradients = any(p.grad is not None for p in model.parameters())
            before = ModelState(model, parameters=False)
            for _ in range(MAX_TIGHTER):
                with _counted_steps() as steps:
                    try:
                        return function(*args, **kwargs)
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        if not getattr(error, "__notes__", None):
                            error.add_note(state.explain_out_of_memory())
                        if steps or has_gradients or not state.tighten():
                            error.add_note(_why_not(steps=bool(steps), has_gradients=has_gradients))
                            raise
                # Only here, with the exception gone, is what its frames held free.
                before.restore()
                _free_memory()
            return function(*args, **kwargs)

        return run

    return decorate


def _why_not(*, steps: bool, has_gradients: bool) -> str:
    if steps:
        return "autoremat: not run again, since an optimizer has stepped: call its step() outside of the function."
    if has_gradients:
        return (
            "autoremat: not run again, since there were gradients before, which it has added to: decorate all "
            "micro-steps together, or set gradients to None first. With Transformers' Trainer: give a smaller budget."
        )
    return "autoremat: not run again, since there is no tighter plan."


@contextlib.contextmanager
def _counted_steps() -> Iterator[list[object]]:
    """Whether an optimizer steps meanwhile."""
    steps: list[object] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_planning():
            steps.append(type(optimizer))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield steps
    finally:
        handle.remove()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
