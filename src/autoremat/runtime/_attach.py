"""Put a plan on a model, in place, and take it off again.

Everything hangs on module hooks: state_dict keys, ``repr`` and ``forward`` stay as they are. The hooks are two
module-level functions that look their region up by module, so that a pickled or deep-copied model is simply plain.

Known limits: a KeyboardInterrupt in the middle of forward leaves the region open as long as its traceback is held (in a
notebook, until the model runs again); when exported, with a warning, and under ``torch.func`` transforms regions run
plain. Compiled code goes to `_compiled`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoremat._errors import PlanError, PlanMismatch, UsageError
from autoremat._plan import Plan, Region
from autoremat._signature import model_signature
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._compiled import CompiledRegions, in_compiled_code, is_prepared
from autoremat.runtime._enter import enter, leave
from autoremat.runtime._layout import Use, find_module, lay_out
from autoremat.runtime._module_state import ModuleWatch
from autoremat.runtime._recipe import Part, Recipe
from autoremat.runtime._selective import OpTable
from autoremat.runtime._stack import Active, active_regions, close_through, drop_spans, unwind

Check = Literal["first", "always", "never"]


@dataclass(frozen=True, slots=True)
class ExecutedRegion:
    """What a region did since `Applied.executed` was last read.

    Attributes:
        path: Module path.
        number: Call number, None for every call.
        last: Path of the last call of a span, None for a region of one call.
        num_calls: Executions in forward; for a span, of all of it.
        num_recomputes: How many of them were recomputed.
        num_ops_run: Ops that ran in recompute; counted only where the region stores or skips ops.
        num_outputs_stored: Stored outputs handed out in recompute.
        num_ops_skipped: Ops that recompute left out.
    """

    path: str
    number: int | None
    last: str | None
    num_calls: int
    num_recomputes: int
    num_ops_run: int
    num_outputs_stored: int
    num_ops_skipped: int


class _Root:
    """One applied model: counts its forward passes, knows its spans, and holds what is compiled of it."""

    __slots__ = ("compiled", "forward_index", "plan", "spans")

    def __init__(self, plan: Plan) -> None:
        self.forward_index = 0
        self.plan = plan
        self.compiled = CompiledRegions()
        self.spans: tuple[Recipe, ...] = ()

    def start_forward(self) -> None:
        """Count module calls from 0 again."""
        self.forward_index += 1
        drop_spans(self.spans)


class Level(NamedTuple):
    """A region that a module call belongs to, and which of the region's calls it is."""

    region: Region
    recipe: Recipe
    part: int


Levels = tuple[Level, ...]
"""The regions that have a module call among theirs, outermost first."""


@dataclass(slots=True)
class _Attached:
    """The regions of one module."""

    root: _Root
    always: Levels = ()
    """For calls that no region names by number."""
    by_number: dict[int, Levels] = field(default_factory=dict)
    forward_index: int = -1
    num_calls: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)

    def is_innermost(self, module: nn.Module) -> bool:
        """Whether no hook of others runs between ours and forward; if one does, put ours next to forward again.

        Recompute calls forward without hooks, so what others do in between must stay outside the region. A pre-hook
        that comes after ours has not run yet in this call: then the call must run plain.
        """
        before, after = self.handles[0].id, self.handles[1].id
        pre_hooks: Any = module._forward_pre_hooks
        hooks: Any = module._forward_hooks
        if next(iter(hooks)) != after:
            hooks.move_to_end(after, last=False)
        if next(reversed(pre_hooks)) == before:
            return True
        pre_hooks.move_to_end(before)
        return False

    def next_levels(self) -> Levels:
        """The regions of the call that starts now."""
        if not self.by_number:
            return self.always
        number = self.read_count()
        self.write_count(number + 1)
        return self.by_number.get(number, self.always)

    def read_count(self) -> int:
        """How many calls of this module came before in this forward of the model."""
        return self.num_calls if self.forward_index == self.root.forward_index else 0

    def write_count(self, count: int) -> None:
        """Go on counting from here."""
        self.forward_index, self.num_calls = self.root.forward_index, count


_REGIONS: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()
_ROOTS: weakref.WeakKeyDictionary[nn.Module, _Root] = weakref.WeakKeyDictionary()
_OFF: list[None] = []
"""Not empty while every region runs plain: `regions_off`."""


def start_region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
    """Forward pre-hook of a region's module."""
    if torch.compiler.is_compiling():
        meet_compiler(module, is_model=False)
        return None
    attached = _REGIONS.get(module)
    if attached is None:
        return None
    levels = attached.next_levels()  # calls without gradients count, too
    if not levels or _OFF or not torch.is_grad_enabled() or compat.transforms_or_tracing_active():
        return None
    if not attached.is_innermost(module):
        return None
    return OpenCall(_enter_levels(levels, 0, module, args, kwargs), args, kwargs)


def _enter_levels(
    levels: Levels, first: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        fn = module.forward if is_last else partial(_run_inside, levels, level + 1, module)
        entered.append(enter(recipe, fn, module, args, kwargs, part=part, level=level))
    return entered[0]


def _run_inside(levels: Levels, first: int, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What recompute of an outer region runs for a call that inner regions have among theirs, too."""
    try:
        _enter_levels(levels, first, module, args, kwargs)
        output = module.forward(*args, **kwargs)
    except Exception:
        leave(module, failed=True, level=first)
        raise
    leave(module, output, level=first)
    return output


class OpenCall(tuple[Any, ...]):  # noqa: SLOT001 (a tuple cannot have any)
    """What a pre-hook returns, and ``nn.Module`` holds as long as the call runs: then the region is over, in any case.

    An ``always_call`` hook sees to that after an Exception; nothing else does after a KeyboardInterrupt.
    """

    active: Active

    def __new__(cls, active: Active, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        call = super().__new__(cls, (args, kwargs))
        call.active = active
        return call

    def __del__(self) -> None:
        if self.active.is_open:
            close_through(self.active)


def meet_compiler(module: nn.Module, *, is_model: bool) -> None:
    """What the hooks do in compiled code: see to it that the compiler finds the regions."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        warn_plain(type(module).__name__)
    elif is_model:
        prepare_model(module)
    elif torch.is_grad_enabled():
        check_prepared(module)


_WARNED: set[str] = set()


@compat.runs_while_tracing
def warn_plain(name: str) -> bool:
    """Say once that a plan is on something that is being exported. The compiler needs something to be returned."""
    if not _WARNED:
        _WARNED.add(name)
        warnings.warn(
            f"{name} is exported with a plan applied to it: the exported program recomputes nothing. Take the plan off "
            "with remove() to export.",
            stacklevel=2,
        )
    return True


@compat.runs_while_tracing
def prepare_model(model: nn.Module) -> bool:
    """While the compiler traces the model's call: before it comes to the regions, make them ready for it."""
    root = _ROOTS.get(model)
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
    if module in _REGIONS and not is_prepared(module):
        raise compat.refuse_compile(
            f"{type(module).__name__} is a region of a plan and was compiled by itself after the plan was applied: it "
            "would run plain, and the budget would not hold. Take the plan off with remove(), compile, then apply the "
            "plan; or compile the whole model."
        )
    return True


def end_region(module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a region's module; runs after an exception, too."""
    if not torch.compiler.is_compiling():
        leave(module, output, failed=output is None)


def start_model(module: nn.Module, _args: tuple[Any, ...]) -> None:
    """Forward pre-hook of the model."""
    if torch.compiler.is_compiling():
        meet_compiler(module, is_model=True)
        return
    root = _ROOTS.get(module)
    if root is not None:
        root.start_forward()
        if active_regions():
            abandon_stale_regions()


def end_model(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    """Forward hook of a model that has spans; runs after an exception, too."""
    if not torch.compiler.is_compiling() and module in _ROOTS:
        drop_spans(_ROOTS[module].spans)


@contextlib.contextmanager
def regions_off() -> Iterator[None]:
    """Forwards that start inside run plain; what has run before still recomputes in its backward."""
    _OFF.append(None)
    try:
        yield
    finally:
        _OFF.pop()


def plan_on(model: nn.Module) -> Plan | None:
    """The plan that is on a model or on a module of it; None without one."""
    if not _ROOTS:
        return None
    return next((_ROOTS[module].plan for module in model.modules() if module in _ROOTS), None)


def attached_regions(model: nn.Module) -> Iterator[tuple[Region, Recipe]]:
    """Every region of a model."""
    seen: set[Recipe] = set()
    for module in model.modules():
        attached = _REGIONS.get(module)
        for levels in (attached.always, *attached.by_number.values()) if attached is not None else ():
            for region, recipe, part in levels:
                if part == 0 and recipe not in seen:
                    seen.add(recipe)
                    yield region, recipe


class Applied:
    """A plan on a model. ``remove`` takes it off; leaving a ``with`` block does, too.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> with apply(model, Plan(regions=(Region("0"),))):
        ...     model(torch.ones(1, 2)).sum().backward()
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        recipes: list[tuple[Region, Recipe]],
        attached: dict[nn.Module, _Attached],
        root: _Root,
        compiled: tuple[Region, ...],
    ) -> None:
        self.plan = plan
        self._model = weakref.ref(model)
        self._recipes = recipes
        self._attached = weakref.WeakKeyDictionary(attached)
        self._root = root
        self._compiled = compiled
        self._handle: RemovableHandle | None = None
        self._end_handle: RemovableHandle | None = None
        self.put_on()

    @property
    def executed(self) -> tuple[ExecutedRegion, ...]:
        """What each region did since this was last read."""
        return tuple(self._take_counts())

    def _take_counts(self) -> Iterator[ExecutedRegion]:
        for region, recipe in self._recipes:
            yield ExecutedRegion(
                region.path, region.number, region.then[-1].path if region.then else None, recipe.num_calls,
                recipe.num_recomputes, recipe.num_ops_run, recipe.num_outputs_stored, recipe.num_ops_skipped,
            )  # fmt: skip
            recipe.reset_counts()

    @property
    def is_on(self) -> bool:
        """Whether the plan is on the model."""
        return self._handle is not None

    def put_on(self) -> None:
        """Put the plan on the model again after `remove`, in well under a millisecond; nothing is checked again.

        Raises:
            PlanError: If the model has another plan.
        """
        model = self._model()
        if self.is_on or model is None:
            return
        _refuse_second_plan(model, self._attached)
        self._root.compiled.install(model, self._compiled)
        self.start_forward()  # calls are counted anew, also where forward has started already
        _ROOTS[model] = self._root
        for module in (model, *self._attached):
            _drop_copied_hooks(module)
        self._handle = model.register_forward_pre_hook(start_model, prepend=True)
        if self._root.spans:
            self._end_handle = model.register_forward_hook(end_model, always_call=True)
        for module, entry in self._attached.items():
            entry.handles = [
                module.register_forward_pre_hook(start_region, with_kwargs=True),
                module.register_forward_hook(end_region, prepend=True, with_kwargs=True, always_call=True),
            ]
            _REGIONS[module] = entry

    def start_forward(self) -> None:
        """Count module calls from 0 again: for who runs the modules without calling the model itself."""
        self._root.start_forward()

    def remove(self) -> None:
        """Make the model plain again. Steps whose forward has run still recompute in backward."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._end_handle is not None:
            self._end_handle.remove()
            self._end_handle = None
        drop_spans(self._root.spans)
        self._root.compiled.remove()
        model = self._model()
        if model is not None:
            _ROOTS.pop(model, None)
        for module, entry in self._attached.items():
            for handle in entry.handles:
                handle.remove()
            if _REGIONS.get(module) is entry:
                del _REGIONS[module]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Applied: {len(self._recipes)} regions, {'on' if self.is_on else 'removed'}>"


def apply(model: nn.Module, plan: Plan, *, check: Check = "first") -> Applied:
    """Put a plan on a model, in place. Its state_dict keys, ``repr`` and own hooks stay as they are.

    Args:
        model: The model that the plan was made for, compiled or to be compiled or neither. In compiled code the plan
            goes to torch's selective checkpointing, op call by op call.
        plan: A plan; see `Plan`.
        check: When recomputed values are compared with those of forward, by checksum: in the "first" step, "always"
            or "never".

    Returns:
        A handle that takes the plan off again and tells what was executed.

    Raises:
        PlanMismatch: If the plan was made for another model, or names a module that is not there.
        PlanError: If the model has a plan already, or the plan contradicts itself, or cannot be expressed in compiled
            code; there, what only the compiler finds out is raised when it compiles.
        UsageError: If ``check`` is none of the three.
    """
    if check not in ("first", "always", "never"):
        raise UsageError(f"check is 'first', 'always' or 'never', not {check!r}.")
    is_compiled = isinstance(model, nn.Module) and hasattr(model, "_orig_mod")
    model = getattr(model, "_orig_mod", model)
    _check_model(model, plan)
    layout = lay_out(model, plan)
    _WARNED.clear()
    root = _Root(plan)
    compiled = tuple(plan.regions if is_compiled else in_compiled_code(model, plan))
    recipes = [(region, _recipe(region, model, check)) for region in layout.regions]
    root.spans = tuple(recipe for _, recipe in recipes if len(recipe.parts) > 1)
    of_region = {id(region): recipe for region, recipe in recipes}
    attached = {
        module: _attach_levels(root, [(use, of_region[id(use.region)]) for use in uses])
        for module, uses in layout.uses.items()
    }
    _link_counters(attached)
    return Applied(model, plan, recipes, attached, root, compiled)


def _attach_levels(root: _Root, uses: list[tuple[Use, Recipe]]) -> _Attached:
    def levels(number: int | None) -> Levels:
        found = [(use, recipe) for use, recipe in uses if use.number in (None, number)]
        found.sort(key=lambda pair: pair[0].depth)
        return tuple(Level(use.region, recipe, use.part) for use, recipe in found)

    numbers = {use.number for use, _ in uses if use.number is not None}
    return _Attached(root, levels(None), {number: levels(number) for number in sorted(numbers)})


def _link_counters(attached: dict[nn.Module, _Attached]) -> None:
    """Tell each call of a region which regions for single calls are inside it."""
    numbered = {module: entry for module, entry in attached.items() if entry.by_number}
    for module, entry in attached.items() if numbered else ():
        inside = [numbered[m] for m in module.modules() if m is not module and m in numbered]
        for levels in (entry.always, *entry.by_number.values()):
            for _, recipe, part in levels:
                recipe.parts[part].counters = list(inside)


def _recipe(region: Region, model: nn.Module, check: Check) -> Recipe:
    table = OpTable(region) if region.saved or region.skipped else None
    modules = [find_module(model, call.path) for call in region.calls]
    parts = [
        Part(call.path, ModuleWatch([(call.path, module)]), position)
        for position, (call, module) in enumerate(zip(region.calls, modules, strict=True))
    ]
    number = "" if region.number is None else f" call {region.number}"
    last = f" to {region.then[-1].path!r}" if region.then else ""
    return Recipe(f"Region {region.path!r}{number}{last} ({type(modules[0]).__name__})", parts, table, check=check)


def _check_model(model: nn.Module, plan: Plan) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"A plan is applied to a torch.nn.Module, not to {type(model).__name__}.")
    _refuse_second_plan(model, model.modules())
    if plan.model_signature and plan.model_signature != model_signature(model):
        raise PlanMismatch(
            f"The plan was made for {plan.model or 'another model'} with other parameters or buffers than this "
            f"{type(model).__name__} (signature {plan.model_signature}, here {model_signature(model)}). "
            "Make a plan for this model with autoremat.plan."
        )


def _drop_copied_hooks(module: nn.Module) -> None:
    """A copy of a model that had a plan has its hooks, which would start a region of the copy's own plan twice."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (start_model, end_model, start_region, end_region)]:
            del hooks[key]


def _refuse_second_plan(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    if model in _ROOTS or any(module in _REGIONS for module in modules):
        raise PlanError(
            f"{type(model).__name__} has a plan already. Call remove() on what the earlier apply returned, then apply."
        )


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
