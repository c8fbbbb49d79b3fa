"""Run a training step again, under a tighter plan, after memory ran out in it.

What can be run again: forward, loss and backward, any number of times, as long as no optimizer has stepped. Random
states, buffers and plain attributes of modules are put back, half-made gradients are dropped, and what was added to
gradients that were there before is added once, so that the second run computes what the first would have. What a step
does besides (draw from an iterator, write to a file) happens again: take the batch before it.
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

from autoremat._added_gradients import AddedGradients
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

    The function must leave the optimizer's step and the next batch to its caller; otherwise the error is raised as it
    is. With accumulation, it may be one micro-step: gradients of earlier ones are kept, and added to once. Either way
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
            before = ModelState(model, parameters=False)
            has_gradients = any(p.grad is not None for p in model.parameters())
            added = AddedGradients(model) if has_gradients else None
            for _ in range(MAX_TIGHTER):
                with _counted_steps() as steps, added.watched() if added else contextlib.nullcontext():
                    try:
                        return function(*args, **kwargs)
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        state.note_out_of_memory(error)
                        are_known = added is None or added.are_known
                        if steps or not are_known or not state.tighten():
                            error.add_note(_why_not(steps=bool(steps), are_known=are_known))
                            raise
                # Only here, with the exception gone, is what its frames held free.
                before.restore()
                if added:
                    added.put_back()
                _free_memory()
            with added.watched() if added else contextlib.nullcontext():
                return function(*args, **kwargs)

        return run

    return decorate


def _why_not(*, steps: bool, are_known: bool) -> str:
    if steps:
        return "autoremat: not run again, since an optimizer has stepped: call its step() outside of the function."
    if not are_known:
        return (
            "autoremat: not run again, since gradients that were there before were changed by something else than "
            "backward (a hook, zero_grad() inside the function): set gradients to None before it."
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
