"""The ledger: a plan written out as a schedule, and the bytes that the schedule holds at every moment.

`expand` knows who keeps what alive; `price` only adds. Both are exact for everything that a dispatch mode can see;
what kernels take inside one op is `Op.workspace_bytes`, an estimate.

Order of what falls between two ops: storages that die, then recomputes that the next backward op asks for, then what
the recompute let go of.

Known limits: regions do not nest yet; memory held by an allocator's rounding and cache is not part of this number.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoremat._replay import RegionSpec, Replay, random_states, replay, saved_in
from autoremat._results import LiveItem, MemoryProfile
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import BEFORE_STEP, CAUSES, Op, SavedTensor, StepGraph

_RUN = {"forward": Action.FORWARD, "backward": Action.BACKWARD, "optimizer": Action.OPTIMIZER}
_RUNS = frozenset({Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD, Action.OPTIMIZER})
_NUM_ITEMS_AT_PEAK = 2_000
"""Enough for a hundred layers, so that like ones can be summed."""


@dataclass(slots=True)
class _Region:
    """One region of the step, worked out."""

    position: int
    spec: RegionSpec
    work: Replay
    saved: list[SavedTensor]
    at: int | None
    """Clock of the recompute: the first time backward reads something saved in the region."""
    gone: int
    """Clock at which everything that belongs to it has been let go of."""
    held_bytes: int
    """Bytes of its own until its recompute: random states."""
    passing_bytes: int
    """Bytes of its own until its forward ends: the random state after a skipped op, in case another draws after it."""


def expand(graph: StepGraph, specs: Iterable[RegionSpec] = ()) -> Schedule:
    """Write a step with these regions as a schedule.

    Args:
        graph: The step.
        specs: Disjoint regions (no nesting).

    Returns:
        Every op, drop and recompute in order. Without regions: the plain step.
    """
    return _Expansion(graph, specs).schedule()


class _Expansion:
    """Works out when each storage dies, then writes the events clock by clock."""

    def __init__(self, graph: StepGraph, specs: Iterable[RegionSpec]) -> None:
        self.graph = graph
        self.regions = [
            self._region(position, spec)
            for position, spec in enumerate(sorted(specs, key=lambda spec: graph.calls[spec.call].start))
        ]
        self.region_of_call = {c: r for r in self.regions for c in graph.subtree(r.spec.call)}
        self.starts = _by_clock((graph.calls[r.spec.call].start, r) for r in self.regions)
        self.ends = _by_clock((graph.calls[r.spec.call].end, r) for r in self.regions)
        self.recomputes = _by_clock((r.at, r) for r in self.regions if r.at is not None)
        self.drops: dict[int, list[int]] = defaultdict(list)
        self.drops_after_recompute: dict[int, list[int]] = defaultdict(list)
        self.releases: dict[int, list[Event]] = defaultdict(list)
        self._find_deaths()

    def _region(self, position: int, spec: RegionSpec) -> _Region:
        graph = self.graph
        saved = saved_in(graph, spec.call)
        span = graph.calls[spec.call]
        unpacked = [s.unpacked for s in saved if s.unpacked is not None]
        work = replay(graph, spec.call, spec.kept, saved)
        num_states, num_passing = random_states(graph, spec.call, work)
        return _Region(
            position=position,
            spec=spec,
            work=work,
            saved=saved,
            at=min(unpacked, default=None),
            gone=max((s.released for s in saved), default=span.end),
            held_bytes=graph.rng_state_bytes * num_states,
            passing_bytes=graph.rng_state_bytes * num_passing,
        )

    def _find_deaths(self) -> None:
        """The first life of a storage ends when its last holder lets go."""
        graph = self.graph
        death = [s.last_ref for s in graph.storages]
        after = [False] * len(death)

        def hold(storage: int, clock: int, is_after: bool = False) -> None:
            if (clock, is_after) > (death[storage], after[storage]):
                death[storage], after[storage] = clock, is_after

        for record in graph.saved:
            region = self.region_of_call.get(record.call)
            if region is None or not self._is_dropped(region, record.storage):
                hold(record.storage, record.released)
        for region in self.regions:
            end = region.gone if region.at is None else region.at
            for storage in (*graph.calls[region.spec.call].inputs, *region.spec.kept):
                hold(storage, end, is_after=True)
        last = len(graph.ops)
        for index, clock in enumerate(death):
            if clock < last or after[index]:
                bucket = self.drops_after_recompute if after[index] else self.drops
                bucket[clock].append(index)

    def _is_dropped(self, region: _Region, storage: int) -> bool:
        return storage in region.work.needed and storage not in region.spec.kept

    def schedule(self) -> Schedule:
        """Write the events."""
        events: list[Event] = []
        recomputed_drops: dict[int, list[tuple[int, int]]] = defaultdict(list)
        kept_by = {s: r.position for r in self.regions for s in r.spec.kept}
        for clock in range(len(self.graph.ops) + 1):
            events.extend(Event(Action.DROP, storage=s) for s in self.drops.get(clock, ()))
            events.extend(
                Event(Action.DROP, storage=s, generation=generation)
                for s, generation in recomputed_drops.pop(clock, ())
            )
            events.extend(self.releases.pop(clock, ()))
            for region in self.recomputes.get(clock, ()):
                self._recompute(region, events, recomputed_drops)
            events.extend(
                Event(Action.DROP, storage=s, generation=generation)
                for s, generation in recomputed_drops.pop(clock, ())
            )
            events.extend(Event(Action.DROP, storage=s) for s in self.drops_after_recompute.get(clock, ()))
            for region in self.ends.get(clock, ()):
                if region.passing_bytes:
                    events.append(Event(Action.RELEASE, region=region.position, num_bytes=region.passing_bytes))
            for region in self.starts.get(clock, ()):
                if num_bytes := region.held_bytes + region.passing_bytes:
                    events.append(Event(Action.HOLD, region=region.position, num_bytes=num_bytes))
            if clock < len(self.graph.ops):
                self._run(self.graph.ops[clock], events, kept_by)
        return Schedule(events=tuple(events), regions=tuple(r.spec.call for r in self.regions))

    def _run(self, op: Op, events: list[Event], kept_by: dict[int, int]) -> None:
        events.append(Event(_RUN[op.phase], op=op.index))
        for storage in op.outputs:
            if storage in kept_by and self.graph.storages[storage].born == op.index:
                events.append(Event(Action.SAVE, storage=storage, region=kept_by[storage]))

    def _recompute(
        self, region: _Region, events: list[Event], recomputed_drops: dict[int, list[tuple[int, int]]]
    ) -> None:
        """Run a region again: transients die as in forward, what autograd saved stays until it is released."""
        graph, work = self.graph, region.work
        released: dict[int, int] = {}
        for record in region.saved:
            if self._is_dropped(region, record.storage):
                released[record.storage] = max(released.get(record.storage, 0), record.released)
        position = region.position
        own = graph.rng_state_bytes if region.held_bytes else 0
        if own:  # what the random state is outside, put back afterwards
            events.append(Event(Action.HOLD, region=position, num_bytes=own))
        self._copy_buffers(region, events)
        transient: dict[int, list[int]] = defaultdict(list)
        num_kept = 0
        for index in work.ops:
            for clock in [c for c in transient if c <= index]:
                events.extend(Event(Action.DROP, storage=s, generation=1) for s in transient.pop(clock))
            events.append(Event(Action.RECOMPUTE, op=index, region=position))
            num_kept += self._keep_numbers(region, index, events)
            for s in graph.ops[index].outputs:
                if graph.storages[s].born != index or s in region.spec.kept:
                    continue
                if s in released:
                    recomputed_drops[released[s]].append((s, 1))
                else:
                    transient[graph.storages[s].last_ref].append(s)
        for left in transient.values():
            events.extend(Event(Action.DROP, storage=s, generation=1) for s in left)
        if region.at is not None:
            events.extend(self.releases.pop(region.at, ()))
        if freed := num_kept + (own + region.held_bytes if own else 0):
            events.append(Event(Action.RELEASE, region=position, num_bytes=freed))

    def _keep_numbers(self, region: _Region, index: int, events: list[Event]) -> int:
        """The graph that recompute builds keeps numbers as forward's does, until recompute ends."""
        num_bytes = max(0, self.graph.ops[index].kept_bytes)
        if num_bytes:
            events.append(Event(Action.HOLD, region=region.position, num_bytes=num_bytes))
        return num_bytes

    def _copy_buffers(self, region: _Region, events: list[Event]) -> None:
        """Recompute runs on copies of the buffers that it changes; autograd keeps those that it saved there."""
        graph = self.graph
        span = graph.calls[region.spec.call]
        changed = {s for op in graph.ops[span.start : span.end] for s in op.mutates}
        for s in sorted(s for s in changed if graph.storages[s].cause == "buffer"):
            until = max((r.released for r in region.saved if r.storage == s), default=region.at or 0)
            num_bytes = graph.storages[s].num_bytes
            events.append(Event(Action.HOLD, region=region.position, num_bytes=num_bytes))
            self.releases[until].append(Event(Action.RELEASE, region=region.position, num_bytes=num_bytes))


def _by_clock(pairs: Iterable[tuple[int, _Region]]) -> dict[int, list[_Region]]:
    by_clock: dict[int, list[_Region]] = defaultdict(list)
    for clock, region in pairs:
        by_clock[clock].append(region)
    return by_clock


@dataclass(slots=True)
class _Live:
    """What is alive while a schedule is walked through."""

    graph: StepGraph
    total: int = 0
    by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    copies: Counter[int] = field(default_factory=Counter)
    saved_by: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for storage in self.graph.storages:
            if storage.born == BEFORE_STEP:
                self._add(storage.index, 1)
        self._change(self.graph.hidden_bytes)

    def _add(self, storage: int, copies: int) -> None:
        num_bytes = copies * self.graph.storages[storage].num_bytes
        self.copies[storage] += copies
        self.total += num_bytes
        self.by_cause[self.graph.storages[storage].cause] += num_bytes

    def apply(self, event: Event) -> int | None:
        """Let an event happen; bytes at its highest moment if it is one where memory can peak, else None."""
        action = event.action
        if action in _RUNS:
            op = self.graph.ops[event.op]
            for s in dict.fromkeys(op.outputs):
                if self.graph.storages[s].born == event.op and (
                    action is not Action.RECOMPUTE or self.saved_by.get(s) != event.region
                ):
                    self._add(s, 1)
            point = self.total + op.workspace_bytes
            if action is not Action.RECOMPUTE:
                self._change(op.kept_bytes)
            return point
        if action is Action.DROP:
            self._add(event.storage, -1)
        elif action is Action.SAVE:
            self.saved_by[event.storage] = event.region
        else:
            self._change(event.num_bytes if action is Action.HOLD else -event.num_bytes)
        return None

    def _change(self, num_bytes: int) -> None:
        self.total += num_bytes
        self.by_cause["temporary"] += num_bytes


def peak_bytes(graph: StepGraph, schedule: Schedule) -> int:
    """Largest live bytes of a schedule.

    Args:
        graph: The step.
        schedule: What happens in it.

    Returns:
        Bytes, once per living copy of a storage, kernel workspace included.
    """
    live = _Live(graph)
    return max([live.total, *(point for event in schedule.events if (point := live.apply(event)) is not None)])


def price(graph: StepGraph, schedule: Schedule, op_seconds: Sequence[float]) -> MemoryProfile:
    """Live bytes by cause over a step, and its FLOPs and predicted time.

    Args:
        graph: The step.
        schedule: What happens in it.
        op_seconds: Predicted time of each op, in the order of ``graph.ops``.

    Returns:
        The profile, with a point for each op that runs.
    """
    live = _Live(graph)
    clock = 0.0
    seconds: list[float] = []
    by_cause: dict[str, list[int]] = {cause: [] for cause in CAUSES}
    phases: list[tuple[str, int]] = []
    peak, peak_point, peak_event = -1, 0, schedule.events[0]
    at_peak: Counter[int] = Counter()
    flops = recomputed = 0
    for event in schedule.events:
        point = live.apply(event)
        if point is None:
            continue
        op = graph.ops[event.op]
        clock += op_seconds[event.op]
        flops += op.flops
        if event.action is Action.RECOMPUTE:
            recomputed += op.flops
        elif not phases or phases[-1][0] != op.phase:
            phases.append((op.phase, len(seconds)))
        if point > peak:
            peak, peak_point, peak_event, at_peak = point, len(seconds), event, Counter(live.copies)
        seconds.append(clock)
        for cause, values in by_cause.items():
            values.append(live.by_cause[cause])
        by_cause["temporary"][-1] += op.workspace_bytes
    return MemoryProfile(
        peak_bytes=peak,
        peak_by_cause={cause: values[peak_point] for cause, values in by_cause.items()},
        peak_point=peak_point,
        peak_at=_place(graph, peak_event),
        static_bytes=graph.static_bytes,
        seconds=tuple(seconds),
        by_cause={cause: tuple(values) for cause, values in by_cause.items()},
        phases=tuple(phases),
        alive_at_peak=_items(graph, at_peak),
        recomputed_flops=recomputed,
        flops=flops,
        step_s=clock,
    )


def _place(graph: StepGraph, event: Event) -> str:
    """Phase, module and op of an event, in words."""
    op = graph.ops[event.op]
    return f"{event.action.value}, {graph.calls[op.call].path or 'the model itself'}, {op.name}"


def _items(graph: StepGraph, copies: Counter[int]) -> tuple[LiveItem, ...]:
    """Living storages summed by cause, module and maker; the largest few."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for index, count in copies.items():
        storage = graph.storages[index]
        if storage.born == BEFORE_STEP:
            key = (storage.cause, storage.label.rpartition(".")[0], storage.label)
        else:
            op = graph.ops[storage.born]
            key = (storage.cause, graph.calls[op.call].path, op.name)
        sums[key][0] += count * storage.num_bytes
        sums[key][1] += count
    largest = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))[:_NUM_ITEMS_AT_PEAK]
    return tuple(
        LiveItem(cause=cause, module=module, name=name, num_bytes=total, num_storages=count)
        for (cause, module, name), (total, count) in largest
        if total > 0
    )
