"""The module hooks that a plan hangs on: where calls of regions start and end, in forward and in compiled code.

They are module-level functions that look their region up by module, so that copies of a model can tell whether they
have a plan.

Known limits: a KeyboardInterrupt in the middle of forward leaves the region open as long as its traceback is held (in a
notebook, until the model runs again); when exported, with a warning, and under ``torch.func`` transforms regions run
plain. Compiled code goes to `_compiled`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from autoremat._errors import PlanError
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._attached import REGIONS, ROOTS, Attached, Levels
from autoremat.runtime._compiled import is_prepared
from autoremat.runtime._enter import enter, leave
from autoremat.runtime._functions import (
    FunctionCall,
    FunctionMode,
    OnCall,
    Watched,
    run_watched,
    stop_all_in,
    stop_watching,
)
from autoremat.runtime._stack import Active, active_regions, close_through, drop_spans, unwind

OFF: list[None] = []
"""Not empty while every region runs plain: `regions_off`."""


def start_region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
    """Forward pre-hook of a region's module."""
    if torch.compiler.is_compiling():
        meet_compiler(module, is_model=False)
        return None
    attached = REGIONS.get(module)
    if attached is None:
        return None
    levels = attached.next_levels()  # calls without gradients count, too
    is_plain = not levels or _runs_plain()
    if is_plain and not attached.functions:
        return None
    is_innermost = attached.is_innermost(module)
    active = None if is_plain or not is_innermost else _enter_levels(levels, 0, module, args, kwargs)
    mode = None
    if attached.functions:
        mode = FunctionMode(module, watched_functions(attached))
        mode.start()
    # What is returned here goes as soon as another pre-hook runs, and with it the mode.
    return OpenCall(active, mode, args, kwargs) if is_innermost else None


def _runs_plain() -> bool:
    """Whether what starts now is no region, whatever the plan says."""
    return bool(OFF) or not torch.is_grad_enabled() or compat.transforms_or_tracing_active()


def watched_functions(attached: Attached) -> Watched:
    """What a module's forward calls by itself that belongs to regions."""

    def watched(entry: Attached) -> Callable[[], OnCall | None]:
        def next_call() -> OnCall | None:
            levels = entry.next_levels()
            return partial(_run_inside, levels, 0) if levels and not _runs_plain() else None

        return next_call

    return {name: watched(entry) for name, entry in attached.functions.items()}


def _enter_levels(
    levels: Levels, first: int, module: nn.Module | FunctionCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Active:
    """Enter a call's regions, outermost first; returns the outermost."""
    entered = []
    for level in range(first, len(levels)):
        _, recipe, part = levels[level]
        if len(recipe.parts) > 1 and compat.is_sharded_unit(module):
            raise PlanError(
                f"{recipe.name}: {recipe.parts[part].path!r} is a unit of fully_shard, and recompute of several units "
                "at once would not gather them. Plan with parallel=Sharding(...), whose regions are single units."
            )
        is_last = level == len(levels) - 1
        fn = _forward_of(module) if is_last else partial(_run_inside, levels, level + 1, module)
        entered.append(enter(recipe, fn, module, args, kwargs, part=part, level=level))
    return entered[0]


def _forward_of(module: nn.Module | FunctionCall) -> Callable[..., Any]:
    """What recompute runs: forward, in which the functions that belong to regions are watched again."""
    attached = REGIONS.get(module) if isinstance(module, nn.Module) else None
    if attached is None or not attached.functions:
        return module.forward
    return partial(run_watched, module, watched_functions(attached))


def _run_inside(levels: Levels, first: int, module: nn.Module | FunctionCall, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call with the regions that have it among theirs, in recompute with those inside one around them."""
    try:
        _enter_levels(levels, first, module, args, kwargs)
        output = _forward_of(module)(*args, **kwargs)
    except (Exception, KeyboardInterrupt):
        leave(module, failed=True, level=first)
        raise
    leave(module, output, level=first)
    return output


class OpenCall(tuple[Any, ...]):  # noqa: SLOT001 (a tuple cannot have any)
    """What a pre-hook returns, and ``nn.Module`` holds as long as the call runs: then the region is over, in any case.

    An ``always_call`` hook sees to that after an Exception; nothing else does after a KeyboardInterrupt.
    """

    active: Active | None
    mode: FunctionMode | None

    def __new__(
        cls, active: Active | None, mode: FunctionMode | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Self:
        call = super().__new__(cls, (args, kwargs))
        call.active, call.mode = active, mode
        return call

    def __del__(self) -> None:
        if self.mode is not None:
            self.mode.stop()
        if self.active is not None and self.active.is_open:
            close_through(self.active)


def meet_compiler(module: nn.Module, *, is_model: bool) -> None:
    """What the hooks do in compiled code: see to it that the compiler finds the regions."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        warn_plain(type(module).__name__)
    elif is_model:
        prepare_model(module)
    elif torch.is_grad_enabled():
        check_prepared(module)


WARNED: set[str] = set()


@compat.runs_while_tracing
def warn_plain(name: str) -> bool:
    """Say once that a plan is on something that is being exported. The compiler needs something to be returned."""
    if not WARNED:
        WARNED.add(name)
        warnings.warn(
            f"{name} is exported with a plan applied to it: the exported program recomputes nothing. Take the plan off "
            "with remove() to export.",
            stacklevel=2,
        )
    return True


@compat.runs_while_tracing
def prepare_model(model: nn.Module) -> bool:
    """While the compiler traces the model's call: before it comes to the regions, make them ready for it."""
    root = ROOTS.get(model)
    if root is not None:
        if not is_prepared(model) and any(call.path == "" for region in root.plan.regions for call in region.calls):
            raise compat.refuse_compile(
                f"The whole {type(model).__name__} is a region of its plan and was compiled after it was applied: "
                "it would run plain, and the budget would not hold. Apply the plan to what torch.compile returns."
            )
        try:
            root.compiled.install(model, root.plan.regions)
        except PlanError as error:
            raise compat.refuse_compile(str(error)) from error
    return True


@compat.runs_while_tracing
def check_prepared(module: nn.Module) -> bool:
    """While the compiler traces a call of a region: refuse one that it would run plain."""
    if module in REGIONS and not is_prepared(module):
        raise compat.refuse_compile(
            f"{type(module).__name__} is a region of a plan and was compiled by itself after the plan was applied: it "
            "would run plain, and the budget would not hold. Take the plan off with remove(), compile, then apply the "
            "plan; or compile the whole model."
        )
    return True


def end_region(module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a region's module; runs after an exception, too."""
    if not torch.compiler.is_compiling():
        stop_watching(module)
        leave(module, output, failed=output is None)


def start_model(module: nn.Module, _args: tuple[Any, ...]) -> None:
    """Forward pre-hook of the model."""
    if torch.compiler.is_compiling():
        meet_compiler(module, is_model=True)
        return
    root = ROOTS.get(module)
    if root is not None:
        root.start_forward()
        if active_regions():
            abandon_stale_regions()
        if compat.function_modes():
            stop_all_in(module)


def end_model(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    """Forward hook of a model that has spans; runs after an exception, too."""
    if not torch.compiler.is_compiling() and module in ROOTS:
        drop_spans(ROOTS[module].spans)


@contextlib.contextmanager
def regions_off() -> Iterator[None]:
    """Forwards that start inside run plain; what has run before still recomputes in its backward."""
    OFF.append(None)
    try:
        yield
    finally:
        OFF.pop()


def drop_copied_hooks(module: nn.Module) -> None:
    """A copy of a model that had a plan has its hooks, which would start a region of the copy's own plan twice."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (start_model, end_model, start_region, end_region)]:
            del hooks[key]


def abandon_stale_regions() -> None:
    """Close regions that a KeyboardInterrupt left open: those whose module is not running any more."""
    running: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            running.add(id(frame.f_locals.get("self")))
        frame = frame.f_back
    for depth, active in enumerate(active_regions()):
        owner = getattr(active, "owner", None)
        if isinstance(owner, nn.Module) and id(owner) not in running:
            unwind(depth)
            return
