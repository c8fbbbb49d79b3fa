"""Run a training script under a budget, as it is: what ``autoremat run`` does.

The script runs in this process, as ``__main__``, with its own arguments. The first module that it calls in training,
and that has parameters of an optimizer, is the model: it is given to `enable` (or a plan is put on it) at that moment.

Known limits: a second model stays plain. A script that makes no optimizer of torch's is recognised at the second call
of the same module.
"""

from __future__ import annotations

import runpy
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat._device_memory import is_out_of_memory
from autoremat._enable import enable, enabled
from autoremat._enabled import Enabled
from autoremat._errors import AutorematError, UsageError
from autoremat._monitor import Monitor
from autoremat._plan import Plan
from autoremat._units import format_bytes, format_percent, format_seconds, parse_bytes
from autoremat.runtime import apply


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a run.

    Attributes:
        budget: Bytes for the whole step, or "auto".
        plan: A plan to put on the model instead of making some.
        save_plan: Where to write the plan of the largest step.
        monitor: Options of a `Monitor`; None for none.
    """

    budget: int | str
    plan: Plan | None = None
    save_plan: Path | None = None
    monitor: dict[str, Any] | None = None


class OutOfMemory(AutorematError):
    """The script ran out of memory under its budget."""


class ScriptFailed(Exception):
    """The script raised an exception, whose traceback has been printed."""


def check_script(script: Path, *, budget: str | None, plan_file: Path | None, save_plan: Path | None) -> None:
    """Refuse what cannot be run, before anything is.

    Raises:
        UsageError: For a script that is not there, a budget that cannot be read, options that exclude each other.
    """
    if not script.is_file():
        raise UsageError(f"No script {script}. Give the path of a Python file: autoremat run --budget 8GiB train.py")
    if plan_file is not None and budget is not None:
        raise UsageError("--plan and --budget exclude each other: the plan has its budget.")
    if plan_file is not None and save_plan is not None:
        raise UsageError("--plan and --save-plan exclude each other: with a plan, none is made.")
    if budget is not None and budget != "auto":
        parse_bytes(budget)
    if save_plan is not None and not save_plan.absolute().parent.is_dir():
        raise UsageError(f"Cannot write the plan to {save_plan}: {save_plan.parent} is no directory.")


class ModelFinder:
    """Waits for the model of a training to be called, and says so, once, before its hooks and forward run.

    A hook would come too late for hooks that are put on the model in it, so ``nn.Module.__call__`` is replaced, until
    the model is found.

    Args:
        found: Called with the model.
    """

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        self._found = found
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait as long as the block runs."""
        plain_init, plain_call = torch.optim.Optimizer.__init__, nn.Module.__call__

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(optimizer, *args, **kwargs)
            self._trained.add(optimizer)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if nn.Module.__call__ is call and module.training and torch.is_grad_enabled() and self._is_model(module):
                nn.Module.__call__ = plain_call  # type: ignore[method-assign]
                self._found(module)
            return plain_call(module, *args, **kwargs)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign,assignment]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.optim.Optimizer.__init__ = plain_init  # type: ignore[method-assign]
            nn.Module.__call__ = plain_call  # type: ignore[method-assign]

    def _is_model(self, module: nn.Module) -> bool:
        own = {id(p) for p in module.parameters() if p.requires_grad}
        trained = {id(p) for o in self._trained for group in o.param_groups for p in group["params"]}
        if own & trained:
            return True
        if not own or trained:
            return False
        is_second = module in self._seen  # no optimizer of torch's so far: maybe there is none to come
        self._seen.add(module)
        return is_second


class _Run:
    """One run of a script: what is put on its model, and taken off at the end."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.model: nn.Module | None = None
        self._enabled: Enabled | None = None
        self.monitor: Monitor | None = None
        self.refusal: AutorematError | None = None

    def take_charge(self, model: nn.Module) -> None:
        """The model is about to be called for the first time."""
        self.model = model
        wanted = self._wanted
        try:
            if wanted.plan is not None:
                apply(model, wanted.plan)
            else:
                enable(model, wanted.budget)
                self._enabled = enabled(model)
            if wanted.monitor is not None:
                self.monitor = Monitor(model, **wanted.monitor).__enter__()
        except AutorematError as error:
            self.refusal = error
            raise

    def finish(self) -> None:
        """Write what is to be written."""
        if self.monitor is not None:
            self.monitor.close()
        made = self._enabled.plans if self._enabled is not None else ()
        if made and self._enabled is not None:
            largest = max(made, key=lambda p: p.plain.peak_bytes if p.plain else 0)
            if self._wanted.save_plan is not None:
                largest.save(self._wanted.save_plan)
            sys.stderr.write(f"autoremat: {_in_words(largest, len(made), self._enabled)}\n")


def _in_words(largest: Plan, num_plans: int, state: Enabled) -> str:
    assert largest.plain is not None
    assert largest.planned is not None
    plans = "1 plan" if num_plans == 1 else f"{num_plans} plans"
    return (
        f"{plans} in {format_seconds(state.planning_s)}; the largest step takes "
        f"{format_bytes(largest.planned.peak_bytes)} of {format_bytes(state.budget_bytes or 0)} (predicted; plain "
        f"{format_bytes(largest.plain.peak_bytes)}), +{format_percent(largest.overhead_flops or 0)} FLOPs"
    )


def run_script(script: Path, arguments: list[str], wanted: Wanted) -> None:
    """Run a script under a budget, as ``python script.py ...`` would without one.

    Args:
        script: Its path.
        arguments: Its arguments.
        wanted: What is asked.

    Raises:
        AutorematError: If there is no plan for it, or it calls no model in training.
        OutOfMemory: If it runs out of memory.
        ScriptFailed: If it raises an exception; that has been printed.
        SystemExit: If it exits.
    """
    run = _Run(wanted)
    finder = ModelFinder(run.take_charge)
    before = (sys.argv, sys.path[:])
    sys.argv = [str(script), *arguments]
    sys.path[0:1] = [str(script.parent.resolve())]
    names: dict[str, Any] = {}
    try:
        with finder.waiting():
            names = runpy.run_path(str(script), run_name="__main__")
    except AutorematError:
        raise
    except SystemExit as stop:
        if run.model is not None or stop.code not in {None, 0}:
            raise
    except Exception as error:
        if run.refusal is not None:
            raise run.refusal from error
        if is_out_of_memory(error):
            notes = " ".join(getattr(error, "__notes__", []))
            raise OutOfMemory(f"{script} ran out of memory: {error} {notes}".strip()) from error
        print_as_python_would(error, script)
        raise ScriptFailed from error
    finally:
        sys.argv, sys.path[:] = before
        run.finish()
        names.clear()
    if run.model is None:
        raise UsageError(
            f"{script} ran, but called no module in training mode with gradients, so nothing was planned. Call the "
            "model itself (model(batch)), not its forward, after model.train()."
        )


def print_as_python_would(error: BaseException, script: Path) -> None:
    """Print an exception with the frames of the script and of what it calls, and none of ours around it."""
    path = str(script)
    frame: types.TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != path:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame or error.__traceback__)
