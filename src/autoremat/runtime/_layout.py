"""Which regions the calls of modules and functions belong to, and whether a plan's regions nest as they must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from autoremat._errors import PlanError, PlanMismatch
from autoremat._own_calls import NO_CALLS
from autoremat._plan import CallName, Plan, Region
from autoremat._step_graph import is_function, split_function


@dataclass(frozen=True, slots=True)
class Use:
    """A region's use of a module or function.

    Attributes:
        region: The region.
        ancestors: Regions around it, outermost first.
        part: Which of the region's calls.
        number: Which call of it, None for every call.
    """

    region: Region
    ancestors: tuple[Region, ...]
    part: int
    number: int | None

    @property
    def depth(self) -> int:
        """How many regions are around the region."""
        return len(self.ancestors)


@dataclass(slots=True)
class Layout:
    """Where a plan's regions lie in a model.

    Attributes:
        regions: All of them, outer ones before those inside them.
        uses: By module: the regions that have calls of it among theirs.
        functions: The same for functions that a module's forward calls by itself, by module and name.
    """

    regions: list[Region] = field(default_factory=list)
    uses: dict[nn.Module, list[Use]] = field(default_factory=dict)
    functions: dict[nn.Module, dict[str, list[Use]]] = field(default_factory=dict)

    def uses_of(self, module: nn.Module, function: str | None) -> list[Use]:
        """Where the uses of a module, or of a function that its forward calls, are kept."""
        if function is None:
            return self.uses.setdefault(module, [])
        return self.functions.setdefault(module, {}).setdefault(function, [])


def lay_out(model: nn.Module, plan: Plan) -> Layout:
    """Find a plan's modules in a model.

    Raises:
        PlanMismatch: If the model lacks a module.
        PlanError: If regions overlap without being nested.
    """
    layout = Layout()
    for region, ancestors in _all_regions(plan.regions, ()):
        layout.regions.append(region)
        if ancestors:
            _check_inside(region, ancestors[-1])
        for part, call in enumerate(region.calls):
            use = Use(region, ancestors, part, call.number)
            same = layout.uses_of(*_find(model, call))
            _refuse_second(use, call, same)
            same.append(use)
    _refuse_overlap(plan.regions)
    return layout


def _all_regions(
    regions: tuple[Region, ...], ancestors: tuple[Region, ...]
) -> Iterator[tuple[Region, tuple[Region, ...]]]:
    for region in regions:
        yield region, ancestors
        yield from _all_regions(region.children, (*ancestors, region))


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, without what ``torch.compile`` puts around it.

    Raises:
        AttributeError: If there is none.
    """
    module = model.get_submodule(path)
    return getattr(module, "_orig_mod", module)


def _find(model: nn.Module, call: CallName) -> tuple[nn.Module, str | None]:
    """The module of a call, and the function's name if it is one that the module's forward calls."""
    path, function = split_function(call.path) if is_function(call.path) else (call.path, None)
    if function in NO_CALLS:
        raise PlanError(
            f"The plan names the function {call.path!r}. What changes running statistics or runs backward is not "
            f"called again by itself: name the module around it ({path!r}) instead."
        )
    try:
        return find_module(model, path), function
    except AttributeError as error:
        raise PlanMismatch(
            f"The plan names the module {path!r}, which {type(model).__name__} does not have. "
            "Make a plan for this model with autoremat.plan."
        ) from error


def _refuse_second(use: Use, call: CallName, others: list[Use]) -> None:
    for other in others:
        is_same_call = other.number == use.number or None in (other.number, use.number)
        if is_same_call and not any(other.region is region for region in use.ancestors):
            raise PlanError(f"The plan names {call.path!r} twice for the same call. Keep one of them.")


def _check_inside(region: Region, parent: Region) -> None:
    """A child consists of calls of the region around it, or lies inside one of them."""
    own = {(call.path, call.number) for call in parent.calls}
    is_part = [(call.path, call.number) in own for call in region.calls]
    if all(is_part):
        if len(region.calls) == len(parent.calls):
            raise PlanError(
                f"Region {region.name!r} is a child of a region of the same calls: that costs a pass and frees "
                "nothing. Keep one of them."
            )
        return
    for call in region.calls:
        if not any(around.path == "" or call.path.startswith(around.path + ".") for around in parent.calls):
            raise PlanError(f"Region {call.path!r} is a child of {parent.path!r} and not inside it.")


def _refuse_overlap(regions: tuple[Region, ...]) -> None:
    paths = {call.path for region in regions for call in region.calls}
    for region in regions:
        for call in region.calls:
            parts = call.path.split(".") if call.path else []
            ancestors = {".".join(parts[:i]) for i in range(len(parts))}
            if shared := ancestors & paths:
                raise PlanError(
                    f"Region {call.path!r} lies inside region {min(shared)!r}, and is not listed as its child. "
                    "Make it a child, or drop one of them."
                )
        _refuse_overlap(region.children)
