"""Where forward enters and leaves the calls of regions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._frame import Frame, Replay, identity
from autoremat.runtime._holder import unpack
from autoremat.runtime._hooks import HookLog, hook_dicts
from autoremat.runtime._recipe import Entry, Recipe, Run
from autoremat.runtime._selective import Recorder, Store
from autoremat.runtime._stack import STACK, Active, end_call, num_saved, unwatched


def enter(
    recipe: Recipe,
    fn: Callable[..., Any],
    owner: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    part: int = 0,
    level: int = 0,
) -> Active:
    """Start a call of a region; `leave` must follow, whatever happens in between.

    Args:
        recipe: The region.
        fn: What recompute calls.
        owner: Whose call it is, for `leave`.
        args: Arguments of the call.
        kwargs: Its keyword arguments.
        part: Which call of the region.
        level: How many regions around this one have the same call among theirs.
    """
    items = STACK.items
    top = items[-1] if items else None
    if isinstance(top, Replay):
        repeat = top.next_child(recipe, part)
        active = (
            Active(None, owner, level, leave) if repeat is None
            else Active(repeat.frame, owner, level, leave, repeat.first, repeat.run)
        )  # fmt: skip
    elif top is not None and (top.first is not None or top.frame is None):
        active = Active(None, owner, level, leave)
    else:
        frame = _open(recipe, part, top.frame if top is not None else None)
        source = top.run if top is not None and level and top.owner is owner else None
        frame.runs.append(Run(part, fn, source))
        active = Active(frame, owner, level, leave, run=len(frame.runs) - 1)
    if active.frame is not None:
        _start(active, active.frame, fn, args, kwargs)
    elif isinstance(top, Replay) and not top.is_inline:
        compat.push_hooks(_keep, identity)
        active.has_hooks = True
    items.append(active)
    if isinstance(top, Replay) and recipe.table is None:
        top.stop_if_satisfied()
    return active


def _open(recipe: Recipe, part: int, parent: Frame | None) -> Frame:
    """The frame that a call belongs to: that of the earlier calls of its span, or a new one."""
    spans = parent.spans if parent is not None else STACK.spans
    frame = spans.get(recipe) if part else None
    if frame is not None and not frame.is_closed and frame.runs and frame.runs[-1].part < part and frame.is_intact():
        return frame
    frame = Frame(recipe, parent)
    if parent is not None:
        parent.children.append(weakref.ref(frame))
    if len(recipe.parts) > 1:
        spans[recipe] = frame
    recipe.num_calls += 1
    if recipe.check == "always" or (recipe.check == "first" and not recipe.learned.is_checked):
        frame.sums = []
    return frame


def _start(active: Active, frame: Frame, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recipe, run, first = frame.recipe, frame.runs[active.run], active.first
    frame.is_running = True
    if first is not None:
        frame.is_inline = True
        known = first.runs[active.run]
        if not first.shares_entries:
            known.fn, known.entry = fn, _entry(frame, run, args, kwargs, first)
            if known.entry.modules is not None:
                known.entry.modules.changed |= first.changed[active.run]
        run.fn, run.entry = known.fn, known.entry
    elif run.source is None:
        run.entry = _entry(frame, run, args, kwargs)
    if frame.sums is not None:
        frame.constants = _constants(frame, run.entry)
    compat.push_hooks(frame.pack, unpack)
    active.has_hooks = True
    hooked = hook_dicts(recipe.parts[run.part].hook_dicts(with_own=recipe.runs_own_hooks)) if first is None else []
    # In the first forward of a region inside another, ops are only counted, for hooks that recompute will leave out and
    # for random states that the region around it will not come by.
    keeps = first is not None or frame.parent is None
    if recipe.table is not None and (keeps or hooked or frame.notes_draws):
        if active.run == 0 or frame.store is None or frame.recorder is None:
            frame.store = Store()
            frame.recorder = Recorder(recipe.table, frame.store, keeps=keeps)
        if first is not None:
            first.store = frame.store
            frame.recorder.known = first.random_inside
            top = STACK.items[-1]
            frame.recorder.around = top.mode if isinstance(top, Replay) else None
        active.mode = frame.recorder
        run.wraps_inputs = active.level == 0 and compat.has_backward_hooks(active.owner)
        compat.push_dispatch_mode(active.mode)
    if first is not None:
        frame.hooks = first.hooks
        known.wraps_inputs = run.wraps_inputs
    elif hooked:
        frame.hooks = frame.hooks or HookLog()
        active.swap = frame.hooks.observe(hooked, end_call, active.mode, lambda: active.is_open, num_saved)


def _entry(frame: Frame, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], first: Frame | None = None) -> Entry:
    part = frame.recipe.parts[run.part]
    with unwatched():
        if first is None:
            return Entry(frame.recipe, part, args, kwargs, frame.returned)
        index = len(frame.runs) - 1
        known = first.random[index] if first.draws[index] else []
        return Entry(frame.recipe, part, args, kwargs, frame.returned, is_rerun=True, random=known)


def _constants(frame: Frame, entry: Entry | None) -> Collection[int]:
    """Addresses of values that need no checksum in the call that starts now."""
    if entry is None:
        return frame.parent.constants if frame.parent is not None else ()
    return entry.part.watch.addresses(entry.modules) if entry.part.watch and entry.modules else ()


def leave(owner: object, output: Any = None, *, failed: bool = False, level: int = 0) -> None:
    """End the innermost calls of this owner.

    Args:
        owner: What `enter` was given.
        output: What forward returned.
        failed: Whether forward raised an exception.
        level: The level of the outermost of these calls.
    """
    items = STACK.items
    while items:
        active = items[-1]
        if not isinstance(active, Active) or active.owner is not owner or active.level < level:
            return
        items.pop()
        active.close()
        _end(active, output, failed=failed)
        if active.level == level:
            return


def _end(active: Active, output: Any, *, failed: bool) -> None:
    frame, items = active.frame, STACK.items
    if frame is None:
        return
    if failed:
        active.abandon()
        return
    run = frame.runs[active.run]
    if frame.returned is not None:
        frame.returned.note(output, active.run)
    if run.entry is not None and (active.first is None or not active.first.shares_entries):
        with unwatched():
            run.entry.finish(frame.recipe, is_rerun=active.first is not None)
    if frame.store is not None:
        frame.store.seal()
    if frame.recorder is not None:
        frame.recorder.pending = None  # the next call of a span notes the random state itself
    if active.first is None:
        _finish(frame, run)
    elif run.part == len(frame.recipe.parts) - 1:
        frame.close()
    if items and isinstance(items[-1], Replay):
        items[-1].stop_if_satisfied()


def _finish(frame: Frame, run: Run) -> None:
    """After a call of the first forward."""
    recipe, entry = frame.recipe, run.entry
    frame.constants = ()
    if frame.parent is not None:
        modules = entry.modules if entry is not None else None
        frame.changed.append(modules.changed if modules is not None else set())
        frame.draws.append(entry is None or bool(entry.random))
        frame.random.append(entry.random if entry is not None and frame.parent.leaves_out_draws() else None)
        if frame.notes_draws and frame.store is not None:
            frame.random_inside = frame.store.random_after  # its next call goes on from here
        else:
            frame.store = None  # the region around it runs it again
        run.entry = None
    if run.part < len(recipe.parts) - 1:
        return
    frame.close()
    if not frame.holders and not frame.children:
        frame.release()


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd calls in an inner region that is not recomputed, while the outer one is."""
    return tensor if tensor.is_leaf else tensor.detach()
