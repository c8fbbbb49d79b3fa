"""Which module calls of a model belong to which regions, while a plan is on it.

Kept beside the modules, by weak reference: a pickled or deep-copied model is simply plain.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from autoremat._plan import Plan, Region
from autoremat.runtime._compiled import CompiledRegions
from autoremat.runtime._recipe import Recipe
from autoremat.runtime._stack import drop_spans


class Root:
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
class Attached:
    """The regions of one module, or of a function that a module's forward calls by itself."""

    root: Root
    always: Levels = ()
    """For calls that no region names by number."""
    by_number: dict[int, Levels] = field(default_factory=dict)
    forward_index: int = -1
    num_calls: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)
    functions: dict[str, Attached] = field(default_factory=dict)
    """Of a module: those that its forward calls by itself, by name."""

    def with_functions(self) -> Iterator[Attached]:
        """This and those of its functions."""
        yield self
        yield from self.functions.values()

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

    def all_levels(self) -> tuple[Levels, ...]:
        """The regions of each of its calls."""
        return (self.always, *self.by_number.values())

    def next_levels(self) -> Levels:
        """The regions of the call that starts now."""
        if not self.by_number:
            return self.always
        number = self.read_count()
        self.write_count(number + 1)
        return self.by_number.get(number, self.always)

    def read_count(self) -> int:
        """How many calls came before in this forward of the model."""
        return self.num_calls if self.forward_index == self.root.forward_index else 0

    def write_count(self, count: int) -> None:
        """Go on counting from here."""
        self.forward_index, self.num_calls = self.root.forward_index, count


REGIONS: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
ROOTS: weakref.WeakKeyDictionary[nn.Module, Root] = weakref.WeakKeyDictionary()


def plan_on(model: nn.Module) -> Plan | None:
    """The plan that is on a model or on a module of it; None without one."""
    if not ROOTS:
        return None
    return next((ROOTS[module].plan for module in model.modules() if module in ROOTS), None)


def attached_regions(model: nn.Module) -> Iterator[tuple[Region, Recipe]]:
    """Every region of a model."""
    seen: set[Recipe] = set()
    for module in model.modules():
        attached = REGIONS.get(module)
        for entry in attached.with_functions() if attached is not None else ():
            for region, recipe, part in (level for levels in entry.all_levels() for level in levels):
                if part == 0 and recipe not in seen:
                    seen.add(recipe)
                    yield region, recipe
