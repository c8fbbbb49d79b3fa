"""Put a plan on a model, in place, and take it off again.

Everything hangs on module hooks (`_module_hooks`): state_dict keys, ``repr`` and ``forward`` stay as they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from autoremat._errors import PlanError, PlanMismatch, UsageError
from autoremat._plan import Plan, Region
from autoremat._signature import model_signature
from autoremat._step_graph import FUNCTION, is_function
from autoremat.runtime._attached import REGIONS, ROOTS, Attached, Level, Levels, Root
from autoremat.runtime._compiled import in_compiled_code
from autoremat.runtime._layout import Layout, Use, find_module, lay_out
from autoremat.runtime._module_hooks import WARNED, drop_copied_hooks, end_model, end_region, start_model, start_region
from autoremat.runtime._module_state import ModuleWatch
from autoremat.runtime._op_table import OpTable
from autoremat.runtime._recipe import Part, Recipe
from autoremat.runtime._stack import drop_spans

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


class Applied:
    """A plan on a model. ``remove`` takes it off; leaving a ``with`` block does, too.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> with apply(model, Plan(regions=(Region("0"),))):
        ...     model(torch.ones(1, 2)).sum().backward()
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        recipes: list[tuple[Region, Recipe]],
        attached: dict[nn.Module, Attached],
        root: Root,
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
        self._is_back = False
        for _, recipe in recipes:
            recipe.plan = weakref.ref(self)
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
        ROOTS[model] = self._root
        for module in (model, *self._attached):
            drop_copied_hooks(module)
        self._handle = model.register_forward_pre_hook(start_model, prepend=True)
        if self._root.spans:
            self._end_handle = model.register_forward_hook(end_model, always_call=True)
        self._put_on_modules()

    def start_forward(self) -> None:
        """Count module calls from 0 again: for who runs the modules without calling the model itself."""
        self._root.start_forward()

    def on_error(self, callback: Callable[[BaseException], None]) -> None:
        """Have something told what a recompute raises, before backward raises it."""
        for _, recipe in self._recipes:
            recipe.on_error = callback

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
            ROOTS.pop(model, None)
        self._take_off_modules()

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Have the plan on the model, and no other, while a forward that ran under it is run again."""
        if self.is_on or self._is_back:
            yield
            return
        self._is_back, model = True, self._model()
        others = {m: REGIONS.pop(m) for m in (model.modules() if model is not None else ()) if m in REGIONS}
        self._put_on_modules()
        try:
            yield
        finally:
            self._take_off_modules()
            REGIONS.update(others)
            self._is_back = False

    def _put_on_modules(self) -> None:
        for module, entry in self._attached.items():
            entry.handles = [
                module.register_forward_pre_hook(start_region, with_kwargs=True),
                module.register_forward_hook(end_region, prepend=True, with_kwargs=True, always_call=True),
            ]
            REGIONS[module] = entry

    def _take_off_modules(self) -> None:
        for module, entry in self._attached.items():
            for handle in entry.handles:
                handle.remove()
            if REGIONS.get(module) is entry:
                del REGIONS[module]

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
    WARNED.clear()
    root = Root(plan)
    compiled = tuple(plan.regions if is_compiled else in_compiled_code(model, plan))
    recipes = [(region, _recipe(region, model, check)) for region in layout.regions]
    root.spans = tuple(recipe for _, recipe in recipes if len(recipe.parts) > 1)
    attached = _attach_all(root, layout, {id(region): recipe for region, recipe in recipes})
    _link_counters(attached)
    return Applied(model, plan, recipes, attached, root, compiled)


def _attach_all(root: Root, layout: Layout, of_region: dict[int, Recipe]) -> dict[nn.Module, Attached]:
    def attach(uses: list[Use]) -> Attached:
        return _attach_levels(root, [(use, of_region[id(use.region)]) for use in uses])

    attached = {module: attach(uses) for module, uses in layout.uses.items()}
    for module, functions in layout.functions.items():
        entry = attached.setdefault(module, Attached(root))
        entry.functions = {name: attach(uses) for name, uses in functions.items()}
    return attached


def _attach_levels(root: Root, uses: list[tuple[Use, Recipe]]) -> Attached:
    def levels(number: int | None) -> Levels:
        found = [(use, recipe) for use, recipe in uses if use.number in (None, number)]
        found.sort(key=lambda pair: pair[0].depth)
        return tuple(Level(use.region, recipe, use.part) for use, recipe in found)

    numbers = {use.number for use, _ in uses if use.number is not None}
    return Attached(root, levels(None), {number: levels(number) for number in sorted(numbers)})


def _link_counters(attached: dict[nn.Module, Attached]) -> None:
    """Tell each call of a region which regions for single calls are inside it."""
    for module, entry in attached.items():
        inside = [attached[m] for m in module.modules() if m is not module and m in attached]
        found = [one for other in inside for one in other.with_functions()] + list(entry.functions.values())
        counters = [one for one in found if one.by_number]
        for levels in entry.all_levels() if counters else ():
            for _, recipe, part in levels:
                recipe.parts[part].counters = list(counters)


def _recipe(region: Region, model: nn.Module, check: Check) -> Recipe:
    table = OpTable(region) if region.saved or region.skipped else None
    parts = [Part(call.path, _watch(model, call.path), position) for position, call in enumerate(region.calls)]
    number = "" if region.number is None else f" call {region.number}"
    last = f" to {region.then[-1].path!r}" if region.then else ""
    kind = FUNCTION if is_function(region.path) else type(find_module(model, region.path)).__name__
    return Recipe(f"Region {region.path!r}{number}{last} ({kind})", parts, table, check=check)


def _watch(model: nn.Module, path: str) -> ModuleWatch | None:
    return None if is_function(path) else ModuleWatch([(path, find_module(model, path))])


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


def _refuse_second_plan(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    if model in ROOTS or any(module in REGIONS for module in modules):
        raise PlanError(
            f"{type(model).__name__} has a plan already. Call remove() on what the earlier apply returned, then apply."
        )
