"""What the regions of a model hold and recompute, as last seen: for people and for tests.

Storages are counted once, for the first region that holds them; parameters are nobody's. What a region inside another
holds comes and goes while the outer one is recomputed, and is not in the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autoremat._errors import PlanError
from autoremat._results import JsonResult
from autoremat._units import format_bytes
from autoremat.runtime._attached import attached_regions


@dataclass(frozen=True, slots=True)
class HeldStorage(JsonResult):
    """A storage that a region holds from forward to its recompute.

    Attributes:
        name: Argument, op call, buffer or random state.
        num_bytes: Size of the whole storage, bytes.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExplainedRegion(JsonResult):
    """One region as last seen.

    Attributes:
        path: Module path.
        number: Call number, None for every call.
        last: Path of the last call of a span, None for a region of one call.
        num_calls: Forward calls since `Applied.executed` was last read.
        num_recomputes: How many of them were recomputed.
        held: What it held at the end of forward, of what no earlier region held.
        held_bytes: Their bytes.
        unmatched: Planned op calls that did not run, whose work recompute does again, and calls of a span that did not.
    """

    path: str
    number: int | None
    last: str | None
    num_calls: int
    num_recomputes: int
    held: tuple[HeldStorage, ...]
    held_bytes: int
    unmatched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation(JsonResult):
    """All regions of a model.

    Attributes:
        regions: In the order of the model's modules.
        held_bytes: What they hold together between forward and backward, bytes, once per storage.
    """

    regions: tuple[ExplainedRegion, ...]
    held_bytes: int

    def __repr__(self) -> str:
        lines = [f"{len(self.regions)} regions hold {format_bytes(self.held_bytes)} between forward and backward"]
        for region in self.regions:
            number = "" if region.number is None else f" call {region.number}"
            last = "" if region.last is None else f" to {region.last}"
            line = (
                f"  {region.path}{number}{last}: {region.num_calls} calls, {region.num_recomputes} recomputed, "
                f"{format_bytes(region.held_bytes)}"
            )
            lines.append(line + (f", not matched: {', '.join(region.unmatched)}" if region.unmatched else ""))
        return "\n".join(lines)


def explain(model: nn.Module) -> Explanation:
    """Tell what each region of a model held and did, since `Applied.executed` was last read.

    Args:
        model: A model with a plan, after a forward pass.

    Raises:
        PlanError: If no plan is applied to the model.

    Example:
        >>> import torch
        >>> from autoremat._plan import Plan, Region
        >>> from autoremat.runtime import apply
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> with apply(model, Plan(regions=(Region("1"),))):
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     explain(model)
        1 regions hold 32 B between forward and backward
          1: 1 calls, 1 recomputed, 32 B
    """
    seen: set[int] = set()
    regions = []
    for region, recipe in attached_regions(model):
        held = []
        for address, num_bytes, name in recipe.held:
            if address not in seen:
                seen.add(address)
                held.append(HeldStorage(name, num_bytes))
        ran = recipe.table is not None and bool(recipe.matched_parts)  # regions inside others are not looked at
        unmatched = tuple(recipe.table.unmatched(recipe.matched)) if ran and recipe.table is not None else ()
        if recipe.matched_parts:
            missing = [part.path for i, part in enumerate(recipe.parts) if i not in recipe.matched_parts]
            unmatched = (*(f"call of {path}" for path in missing), *unmatched)
        regions.append(
            ExplainedRegion(
                region.path,
                region.number,
                region.then[-1].path if region.then else None,
                recipe.num_calls,
                recipe.num_recomputes,
                tuple(held),
                sum(storage.num_bytes for storage in held),
                unmatched,
            )
        )
    if not regions:
        raise PlanError(f"{type(model).__name__} has no regions. Apply a plan to it first: apply(model, plan).")
    return Explanation(tuple(regions), sum(region.held_bytes for region in regions))
