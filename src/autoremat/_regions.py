"""Between a plan's readable names and the indices of a `StepGraph`."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autoremat._errors import PlanError, PlanMismatch
from autoremat._plan import CallName, OpCall, Plan, Region, SavedOutput
from autoremat._replay import Extent, RegionSpec, gathers_units, is_uncounted, replay
from autoremat._step_graph import ModuleCall, StepGraph

_CallsByPath = dict[str, list[ModuleCall]]
"""A step's calls of each module, in order."""


def op_names(graph: StepGraph, *calls: int) -> dict[int, OpCall]:
    """Name each op of a region by operator and occurrence; ops that are not counted have no name."""
    seen: Counter[str] = Counter()
    names: dict[int, OpCall] = {}
    for index in Extent(graph, calls).indices():
        op = graph.ops[index]
        if is_uncounted(graph, op):
            continue
        names[op.index] = OpCall(op=op.name, occurrence=seen[op.name])
        seen[op.name] += 1
    return names


def describe(graph: StepGraph, spec: RegionSpec) -> Region:
    """Write a region with names that a reader and the runtime understand."""
    names = op_names(graph, *spec.calls)
    work = replay(graph, spec)
    saved = []
    for index in Extent(graph, spec.calls).indices():
        op = graph.ops[index]
        for output, storage in enumerate(op.outputs):
            if storage in spec.kept and graph.storages[storage].born == op.index:
                saved.append(
                    SavedOutput(
                        op=op.name,
                        occurrence=names[op.index].occurrence,
                        output=output,
                        module=graph.module_of(op.call).path,
                        num_bytes=graph.storages[storage].num_bytes,
                    )
                )
    first, *then = [CallName(graph.calls[call].path, graph.calls[call].number) for call in spec.calls]
    return Region(
        path=first.path,
        number=first.number,
        then=tuple(then),
        saved=tuple(saved),
        skipped=tuple(names[i] for i in work.skipped if i in names),
        children=tuple(describe(graph, child) for child in spec.children),
    )


def describe_all(graph: StepGraph, specs: Iterable[RegionSpec]) -> tuple[Region, ...]:
    """Write the regions of a whole step; calls that are treated alike in every forward lose their numbers."""
    totals = Counter(call.path for call in graph.calls if call.micro_step == 0)
    first = [describe(graph, spec) for spec in specs if graph.calls[spec.call].micro_step == 0]
    alike: dict[Region, set[CallName]] = defaultdict(set)
    for region in (inner for outer in first for inner in _with_children(outer)):
        alike[_unnumbered(region)].update(region.calls)
    counts = {part: Counter(call.path for call in calls) for part, calls in alike.items()}
    found: dict[Region, None] = {}
    for region in first:
        common = _unnumbered(region)
        is_every_call = all(
            counts[part][path] == totals[path] for part in _with_children(common) for path in _paths(part)
        )
        found[common if is_every_call and not _calls_twice(common) else region] = None
    return tuple(found)


def _with_children(region: Region) -> Iterator[Region]:
    yield region
    for child in region.children:
        yield from _with_children(child)


def _unnumbered(region: Region) -> Region:
    return dataclasses.replace(
        region,
        number=None,
        then=tuple(CallName(call.path) for call in region.then),
        children=tuple(_unnumbered(child) for child in region.children),
    )


def _paths(region: Region) -> set[str]:
    """Modules called by a region itself."""
    return {call.path for call in region.calls}


def _calls_twice(region: Region) -> bool:
    """Whether a module is called more than once in a region or in one inside it."""
    return len(_paths(region)) < len(region.calls) or any(_calls_twice(child) for child in region.children)


def resolve(graph: StepGraph, plan: Plan) -> list[RegionSpec]:
    """Find a plan's regions in a step, in every micro-step.

    Raises:
        PlanMismatch: If a region or a stored output is not in the step; names it.
        PlanError: If the calls of a span are not made one after the other by one forward of the model, or a region
            has sharded units inside it: it can be applied, not priced.
    """
    by_path: _CallsByPath = defaultdict(list)
    for call in graph.calls:
        by_path[call.path].append(call)
    specs = [spec for region in plan.regions for spec in _resolve(graph, by_path, region)]
    return sorted(specs, key=lambda spec: graph.calls[spec.call].start)


def _resolve(
    graph: StepGraph, by_path: _CallsByPath, region: Region, within: Extent | None = None
) -> Iterator[RegionSpec]:
    """Each occurrence of a region in the step, or in one occurrence of the region around it."""
    names = region.calls
    first = _calls_named(by_path, names[0], within)
    if not first:
        raise PlanMismatch(
            f"The plan has a region {region.path!r} (call {region.number}) that this step of {graph.model} does "
            "not run. Plan again for this model and batch."
        )
    for call in first:
        calls = [call]
        for name in names[1:]:
            following = _calls_named(by_path, name, within)
            found = next((c for c in following if _follows(graph, c, calls[-1])), None)
            if found is None:
                raise PlanError(
                    f"Region {region.name!r}: no call of {name.path!r} follows that of {calls[-1].path!r} in the same "
                    f"forward of {graph.model}. A span consists of calls made one after the other."
                )
            calls.append(found)
        indices = tuple(c.index for c in calls)
        if gathers_units(graph, *indices):
            raise PlanError(
                f"Region {region.name!r} has sharded units inside it: recompute would gather all of them and keep them "
                "gathered, which is not predicted. Make the regions the units, or smaller."
            )
        extent = Extent(graph, indices)
        children = [spec for child in region.children for spec in _resolve(graph, by_path, child, extent)]
        yield RegionSpec(
            call=indices[0],
            kept=_find_kept(graph, indices, region.saved),
            then=indices[1:],
            children=tuple(sorted(children, key=lambda spec: graph.calls[spec.call].start)),
            is_whole=not region.saved and not region.skipped,
        )


def _follows(graph: StepGraph, call: ModuleCall, before: ModuleCall) -> bool:
    """Whether a call may be the next of a span: later, and in the same forward of every module around both."""
    if call.index not in range(graph.subtree(before.index).stop, len(graph.calls)):
        return False
    around, others = (set(graph.ancestors(c.index)) for c in (call, before))
    return {graph.calls[c].path for c in around - others}.isdisjoint(graph.calls[c].path for c in others - around)


def _calls_named(by_path: _CallsByPath, name: CallName, within: Extent | None) -> list[ModuleCall]:
    return [
        call
        for call in by_path.get(name.path, ())
        if name.number in (None, call.number) and (within is None or within.part_of_call(call.index) is not None)
    ]


def _find_kept(graph: StepGraph, calls: tuple[int, ...], saved: Sequence[SavedOutput]) -> frozenset[int]:
    if not saved:
        return frozenset()
    by_name = {(name.op, name.occurrence): index for index, name in op_names(graph, *calls).items()}
    kept = set()
    for output in saved:
        index = by_name.get((output.op, output.occurrence))
        if index is None or output.output >= len(graph.ops[index].outputs):
            raise PlanMismatch(
                f"Region {graph.calls[calls[0]].path!r} stores {output.op} #{output.occurrence}, which this step does "
                "not run there. Plan again for this model and batch."
            )
        kept.add(graph.ops[index].outputs[output.output])
    return frozenset(kept)
