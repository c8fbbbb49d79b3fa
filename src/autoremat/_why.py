"""Why a plan is as it is: the ledger's answers for steps that differ in one region, the planner's for other budgets.

Nothing here is estimated: each region is taken out and the step without it is priced as a whole, so what two regions
do for one another shows in neither of them alone.

Known limit: of plans with more than `MAX_REGIONS` regions only those that cost most are looked at.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoremat._ledger import expand, moments, place
from autoremat._plan import Plan, Region
from autoremat._planning import Planning
from autoremat._reasons import OtherBudget, Reasons, RegionReason
from autoremat._regions import describe_all, resolve
from autoremat._replay import RegionSpec, replay
from autoremat._schedule import Action, Event
from autoremat._step_graph import StepGraph

MAX_REGIONS = 150
STEP_BYTES = 2**30
_STEPS = 16
"""A step of budget is a GiB, or the power of two that is at most this part of what plans can change."""
_RESOLUTION = 8
"""The next cheaper plan is looked for to this many halvings of what plans can change."""
_TINY = 1e-9
"""Costs that differ by a smaller share of the step are equal: they are sums in another order."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A step with some regions: live bytes op by op, and what it recomputes."""

    points: tuple[tuple[int, Event], ...]
    again: tuple[int, ...]
    """Ops that run again, as often as they do."""
    seconds: float
    """Predicted time of recomputation, regions themselves included."""

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes."""
        return max(num_bytes for num_bytes, _ in self.points)

    def by_op(self) -> dict[int, int]:
        """Live bytes while each op runs for the first time."""
        return {event.op: num_bytes for num_bytes, event in self.points if event.action is not Action.RECOMPUTE}


def why(planning: Planning, plan: Plan, *, step_bytes: int | None = None) -> Reasons:
    """Work out why a plan is as it is.

    Args:
        planning: All plans of its step.
        plan: The plan.
        step_bytes: How much more and less memory to look at; None for a step that suits the plan.
    """
    graph = planning.graph
    specs = [_specs(graph, plan, region) for region in plan.regions]
    everything = [spec for of_region in specs for spec in of_region]
    planned = _run(planning, everything)
    limit = plan.budget_bytes if plan.budget_bytes is not None and plan.budget_is == "allocated" else None
    limit = planned.peak_bytes if limit is None else limit
    chosen = _dearest_regions(planning, specs)
    reasons = [
        reason
        for index, region in enumerate(plan.regions)
        if index in chosen
        for reason in _reasons(planning, plan, region, specs[:index] + specs[index + 1 :], planned, limit)
    ]
    planner, total = planning.planner, planning.total_cost
    cost = planned.seconds if planning.objective == "time" else _flops(graph, planned.again)
    step = step_bytes or _step(planner.plain_bytes - planner.smallest_bytes)
    return Reasons(
        model=graph.model,
        limit_bytes=limit,
        peak_bytes=planned.peak_bytes,
        plain_bytes=planner.plain_bytes,
        objective=planning.objective,
        overhead=cost / total,
        bound=planner.bound(limit) / total,
        regions=tuple(reasons),
        num_left_out=len(plan.regions) - len(chosen),
        more=_more(planning, plan, cost, limit, step) if plan.regions else None,
        less=_other(planning, plan, limit - step) if limit - step >= planner.smallest_bytes else None,
        floor=planning.floor(),
    )


def _step(range_bytes: int) -> int:
    return min(STEP_BYTES, 1 << max(0, (range_bytes // _STEPS).bit_length() - 1))


def _specs(graph: StepGraph, plan: Plan, *regions: Region) -> list[RegionSpec]:
    return resolve(graph, dataclasses.replace(plan, regions=regions))


def _run(planning: Planning, specs: Sequence[RegionSpec]) -> _Run:
    schedule = expand(planning.graph, specs)
    again = tuple(event.op for event in schedule.events if event.action is Action.RECOMPUTE)
    seconds = sum(planning.op_seconds[op] for op in again) + planning.region_cost.total(specs)
    return _Run(tuple(moments(planning.graph, schedule)), again, seconds)


def _flops(graph: StepGraph, ops: Sequence[int]) -> int:
    return sum(graph.ops[op].flops for op in ops)


def _dearest_regions(planning: Planning, specs: Sequence[Sequence[RegionSpec]]) -> set[int]:
    if len(specs) <= MAX_REGIONS:
        return set(range(len(specs)))
    work = [sum(planning.op_cost[op] for spec in group for op in replay(planning.graph, spec).ops) for group in specs]
    return set(sorted(range(len(specs)), key=lambda index: (-work[index], index))[:MAX_REGIONS])


# -- regions ----------------------------------------------------------------------------------------------------


def _reasons(
    planning: Planning,
    plan: Plan,
    region: Region,
    others: Sequence[Sequence[RegionSpec]],
    planned: _Run,
    limit: int,
) -> Iterator[RegionReason]:
    """What a region is for, and each one inside it."""
    rest = [spec for group in others for spec in group]
    for name, inner, left in _each_left_out(region):
        specs = rest + (_specs(planning.graph, plan, left) if left is not None else [])
        yield _reason(planning, name, inner, planned, _run(planning, specs), limit)


def _each_left_out(region: Region) -> Iterator[tuple[str, Region, Region | None]]:
    """Name, the region, and what is left without it: first a region itself, then each inside it."""
    # Without a region that has others inside, those are outermost: nothing around them is dropped as a whole.
    yield region.name, region, None
    for index, child in enumerate(region.children):
        for name, inner, left in _each_left_out(child):
            children = (*region.children[:index], *([left] if left else []), *region.children[index + 1 :])
            yield f"{region.name} > {name}", inner, dataclasses.replace(region, children=children)


def _reason(planning: Planning, name: str, region: Region, planned: _Run, without: _Run, limit: int) -> RegionReason:
    graph = planning.graph
    with_it, without_it = planned.by_op(), without.by_op()
    breaks = next((event for num_bytes, event in without.points if num_bytes > limit), None)
    flops = _flops(graph, planned.again) - _flops(graph, without.again)
    seconds = planned.seconds - without.seconds
    return RegionReason(
        name=name,
        freed_bytes=max((without_it[op] - with_it[op] for op in with_it), default=0),
        peak_without_bytes=without.peak_bytes,
        breaks_at=None if breaks is None else place(graph, breaks),
        stored_bytes=sum(saved.num_bytes for saved in region.saved),
        flops=flops,
        seconds=seconds,
        overhead=(seconds if planning.objective == "time" else flops) / planning.total_cost,
        dearest=_dearest(planning, Counter(planned.again) - Counter(without.again)),
    )


def _dearest(planning: Planning, again: Counter[int]) -> str:
    """The kind of op that costs most of what runs again."""
    costs: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for index, times in again.items():
        op = planning.graph.ops[index]
        key = (op.name, planning.graph.calls[op.call].path)
        costs[key] += times * planning.op_cost[index]  # type: ignore[assignment]
        counts[key] += times
    if not costs:
        return ""
    (name, path), _ = max(costs.items(), key=lambda item: (item[1], item[0]))
    often = f" x{counts[name, path]}" if counts[name, path] > 1 else ""
    return f"{path or 'the model itself'}: {name}{often}"


# -- other budgets ----------------------------------------------------------------------------------------------


def _more(planning: Planning, plan: Plan, cost: float, limit: int, step: int) -> OtherBudget:
    """The plan for a step more; where that is no cheaper, the one for the least budget that has a cheaper plan."""
    planner = planning.planner
    low, high = limit + step, max(limit + step, planner.plain_bytes)
    if planner.plan(low).cost < cost - _TINY * planning.total_cost:
        return _other(planning, plan, low)
    resolution = max(1, (planner.plain_bytes - planner.smallest_bytes) >> _RESOLUTION)
    while high - low > resolution:
        middle = (low + high) // 2
        is_cheaper = planner.plan(middle).cost < cost - _TINY * planning.total_cost
        low, high = (low, middle) if is_cheaper else (middle, high)
    return _other(planning, plan, high)


def _other(planning: Planning, plan: Plan, budget_bytes: int) -> OtherBudget:
    found = planning.planner.plan(budget_bytes)
    priced = _run(planning, found.regions)
    graph = planning.graph
    regions = describe_all(graph, found.regions)
    now, then = set(plan.regions), set(regions)
    return OtherBudget(
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        overhead_flops=_flops(graph, priced.again) / max(1, graph.flops),
        overhead_s=priced.seconds / max(1e-30, sum(planning.op_seconds)),
        bound=found.bound / planning.total_cost,
        num_regions=len(regions),
        without=tuple(region.name for region in plan.regions if region not in then),
        instead=tuple(region.name for region in regions if region not in now),
    )
