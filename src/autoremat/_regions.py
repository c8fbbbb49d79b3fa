"""Between a plan's readable names and the indices of a `StepGraph`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autoremat._errors import PlanError, PlanMismatch
from autoremat._plan import OpCall, Plan, Region, SavedOutput
from autoremat._replay import RegionSpec, gathers_units, is_uncounted, replay
from autoremat._step_graph import StepGraph


def op_names(graph: StepGraph, call: int) -> dict[int, OpCall]:
    """Name each op of a module call by operator and occurrence; ops that are not counted have no name."""
    span = graph.calls[call]
    seen: Counter[str] = Counter()
    names: dict[int, OpCall] = {}
    for op in graph.ops[span.start : span.end]:
        if is_uncounted(graph, op):
            continue
        names[op.index] = OpCall(op=op.name, occurrence=seen[op.name])
        seen[op.name] += 1
    return names


def describe(graph: StepGraph, spec: RegionSpec, number: int | None = None) -> Region:
    """Write a region with names that a reader and the runtime understand."""
    names = op_names(graph, spec.call)
    call = graph.calls[spec.call]
    work = replay(graph, spec.call, spec.kept)
    saved = []
    for op in graph.ops[call.start : call.end]:
        for output, storage in enumerate(op.outputs):
            if storage in spec.kept and graph.storages[storage].born == op.index:
                saved.append(
                    SavedOutput(
                        op=op.name,
                        occurrence=names[op.index].occurrence,
                        output=output,
                        module=graph.calls[op.call].path,
                        num_bytes=graph.storages[storage].num_bytes,
                    )
                )
    skipped = tuple(names[i] for i in work.skipped if i in names)
    return Region(path=call.path, number=number, saved=tuple(saved), skipped=skipped)


def describe_all(graph: StepGraph, specs: Iterable[RegionSpec]) -> tuple[Region, ...]:
    """Write the regions of a whole step; calls of one module that are treated alike become one region."""
    totals = Counter(call.path for call in graph.calls if call.micro_step == 0)
    first = [spec for spec in specs if graph.calls[spec.call].micro_step == 0]
    by_path: dict[str, list[Region]] = {}
    for spec in first:
        call = graph.calls[spec.call]
        by_path.setdefault(call.path, []).append(describe(graph, spec, call.number))
    regions: list[Region] = []
    for path, group in by_path.items():
        alike = {(region.saved, region.skipped) for region in group}
        if len(group) == totals[path] and len(alike) == 1:
            regions.append(Region(path=path, saved=group[0].saved, skipped=group[0].skipped))
        else:
            regions.extend(group)
    return tuple(regions)


def resolve(graph: StepGraph, plan: Plan) -> list[RegionSpec]:
    """Find a plan's regions in a step, in every micro-step.

    Raises:
        PlanMismatch: If a region or a stored output is not in the step; names it.
        PlanError: If a region has regions or sharded units inside it: they can be applied, not priced.
    """
    by_path: dict[str, list[int]] = {}
    for call in graph.calls:
        by_path.setdefault(call.path, []).append(call.index)
    specs: list[RegionSpec] = []
    for region in plan.regions:
        if region.children:
            raise PlanError(
                f"Region {region.path!r} has regions inside it. Such a plan can be applied and measured, but its peak "
                "cannot be predicted yet; leave the inner regions out."
            )
        calls = [c for c in by_path.get(region.path, []) if region.number in (None, graph.calls[c].number)]
        if not calls:
            raise PlanMismatch(
                f"The plan has a region {region.path!r} (call {region.number}) that this step of {graph.model} does "
                "not run. Plan again for this model and batch."
            )
        if any(gathers_units(graph, c) for c in calls):
            raise PlanError(
                f"Region {region.path!r} has sharded units inside it: recompute would gather all of them and keep them "
                "gathered, which is not predicted. Make the regions the units, or smaller."
            )
        specs.extend(RegionSpec(call=c, kept=_find_kept(graph, c, region.saved)) for c in calls)
    return sorted(specs, key=lambda spec: graph.calls[spec.call].start)


def _find_kept(graph: StepGraph, call: int, saved: Sequence[SavedOutput]) -> frozenset[int]:
    by_name = {(name.op, name.occurrence): index for index, name in op_names(graph, call).items()}
    kept = set()
    for output in saved:
        index = by_name.get((output.op, output.occurrence))
        if index is None or output.output >= len(graph.ops[index].outputs):
            raise PlanMismatch(
                f"Region {graph.calls[call].path!r} stores {output.op} #{output.occurrence}, which this step does not "
                "run there. Plan again for this model and batch."
            )
        kept.add(graph.ops[index].outputs[output.output])
    return frozenset(kept)
