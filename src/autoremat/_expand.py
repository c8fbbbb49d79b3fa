"""A plan written out as a schedule: who keeps which storage alive, and until when.

A storage of a region lives more than once. Its *generation* says who made it: 0 is forward's, ``d + 1`` comes from the
recompute of the region at depth ``d`` around its op. A region inside another holds nothing in the first forward (but
random states, where the outer one leaves draws out); the recompute of the outer one runs it again, and from then on it
holds its arguments and stored outputs as any region.

Order of what falls between two ops: storages that die, then recomputes that the next backward op asks for, outer
regions first, each followed by what it let go of.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from autoremat._replay import (
    Extent,
    RegionSpec,
    Replay,
    held_inputs,
    is_from_argument,
    linked,
    random_states,
    replay,
    saved_in,
)
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import ModuleCall, Op, SavedTensor, StepGraph

_RUN = {"forward": Action.FORWARD, "backward": Action.BACKWARD, "optimizer": Action.OPTIMIZER}
Moment = tuple[int, int]
"""A clock, and a place among what falls between two ops there."""
_Life = tuple[int, int]
"""A storage and its generation."""
FIRST, LAST = 0, 1 << 60


@dataclass(slots=True)
class Region:
    """One region of the step, worked out."""

    spec: RegionSpec
    ancestors: tuple[Region, ...]
    """Regions around it, outermost first."""
    extent: Extent
    work: Replay
    saved: list[SavedTensor]
    inputs: dict[int, int]
    """Storages of arguments that it holds."""
    states: list[tuple[int, int]]
    """Bytes of random states for each of its calls: until recompute, and until the call ends."""
    children: list[Region] = field(default_factory=list)
    skips_draws: bool = False
    """Whether its recompute leaves out ops that draw random numbers."""
    position: int = -1
    at: int | None = None
    """Clock of the recompute: the first time backward reads something saved in the region."""
    end: Moment = (0, FIRST)
    """When it lets go of what it holds."""

    @property
    def depth(self) -> int:
        """How many regions are around it."""
        return len(self.ancestors)

    @property
    def shares_entry(self) -> bool:
        """Whether it consists of calls of the region around it, and shares what that one noted when they started."""
        return bool(self.ancestors) and self.spec.is_part_of(self.ancestors[-1].spec)

    @property
    def notes_draws(self) -> bool:
        """Whether it holds random states from its first execution on: a region around it leaves draws out."""
        return any(region.skips_draws for region in self.ancestors)

    @property
    def held_bytes(self) -> int:
        """Bytes of its own until its recompute: random states."""
        return sum(held for held, _ in self.states)


Boundaries = dict[int, list[tuple[Region, int]]]
"""By clock: calls of regions that start or end there, as region and position among its calls."""


def expand(graph: StepGraph, specs: Iterable[RegionSpec] = ()) -> Schedule:
    """Write a step with these regions as a schedule.

    Args:
        graph: The step.
        specs: Disjoint regions, each with the regions inside it.

    Returns:
        Every op, drop and recompute in order. Without regions: the plain step.
    """
    with no_garbage_collection():
        return Expansion(graph, specs).schedule()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For work that makes many objects, all of which stay: to look for cycles among them takes as long as the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Expansion:
    """Works out when each storage dies, then writes the events clock by clock.

    Args:
        graph: The step.
        specs: Disjoint regions, each with the regions inside it.
        is_alone: Look only at what these regions make, hold, and saw saved: for `_prices`.
        find_work: What recompute of a region does, from somebody who has it.
    """

    def __init__(
        self,
        graph: StepGraph,
        specs: Iterable[RegionSpec],
        *,
        is_alone: bool = False,
        find_work: Callable[[RegionSpec], Replay] | None = None,
    ) -> None:
        self.graph = graph
        self._find_work = find_work
        tops = [self._region(spec, ()) for spec in sorted(specs, key=self._start)]
        self.regions = [region for top in tops for region in _with_children(top)]
        for position, region in enumerate(self.regions):
            region.position = position
        self.innermost: dict[int, Region] = {}
        for region in self.regions:  # outer regions come first, so that inner ones overwrite them
            for call in region.spec.calls:
                self.innermost.update(dict.fromkeys(graph.subtree(call), region))
        self.recomputes: dict[int, list[Region]] = defaultdict(list)
        for region in self.regions:
            if region.at is not None:
                self.recomputes[region.at].append(region)
        for clock, group in self.recomputes.items():
            group.sort(key=lambda region: region.depth)
            for rank, region in enumerate(group, start=1):
                region.end = (clock, rank)
        self.drops: dict[Moment, list[_Life]] = defaultdict(list)
        self.releases: dict[int, list[Event]] = defaultdict(list)
        """By clock: copies of buffers that autograd lets go of."""
        self.ends: dict[_Life, Moment] = {}
        """When each life, a storage and its generation, ends at the earliest: the last holder found so far."""
        self.dropped: set[int] = set()
        """What autograd saved of forward's and gets from a recompute instead."""
        if not is_alone:
            self.ends = {(storage.index, 0): (storage.last_ref, FIRST) for storage in graph.storages}
        self._find_holders([r for top in tops for r in top.saved] if is_alone else graph.saved)

    def _start(self, spec: RegionSpec) -> int:
        return self.graph.calls[spec.call].start

    def _region(self, spec: RegionSpec, ancestors: tuple[Region, ...]) -> Region:
        graph = self.graph
        saved = saved_in(graph, *spec.calls)
        work = self._find_work(spec) if self._find_work else replay(graph, spec, saved)
        states = [random_states(graph, graph.calls[call], work) for call in spec.calls]
        region = Region(
            spec=spec,
            ancestors=ancestors,
            extent=Extent(graph, spec.calls),
            work=work,
            saved=saved,
            inputs=held_inputs(graph, spec),
            states=[(graph.rng_state_bytes * held, graph.rng_state_bytes * passing) for held, passing in states],
            skips_draws=any(graph.ops[i].is_random for i in work.skipped),
            at=min((s.unpacked for s in saved if s.unpacked is not None), default=None),
        )
        gone = max((s.released for s in saved), default=graph.calls[spec.calls[-1]].end)
        region.end = (gone, LAST if gone < len(graph.ops) else FIRST)
        inner = sorted(spec.children, key=self._start)
        region.children = [self._region(child, (*ancestors, region)) for child in inner]
        return region

    # -- who holds what ---------------------------------------------------------------------------------------

    def _find_holders(self, saved: Iterable[SavedTensor]) -> None:
        for record in saved:
            region = self.innermost.get(record.call)
            generation = 0
            if region is not None:
                generation = self._seen_in(record.call, record.storage, (*region.ancestors, region))
                if generation:
                    self.dropped.add(record.storage)
            self._hold((record.storage, generation), (record.released, FIRST))
        for region in self.regions:
            if region.saved or not region.ancestors:
                for s, part in region.inputs.items():
                    generation = self._seen_in(region.spec.calls[part], s, region.ancestors)
                    self._hold((s, generation), region.end)
                for s in region.spec.kept:
                    self._hold((s, self._made_by(s, region.ancestors)), region.end)

    def _hold(self, life: _Life, until: Moment) -> None:
        if until > self.ends.get(life, (-1, 0)):
            self.ends[life] = until

    def _made_by(self, storage: int, regions: Sequence[Region]) -> int:
        """Generation of a storage once these nested regions have been recomputed."""
        born = self.graph.storages[storage].born
        for region in reversed(regions):
            if born in region.extent and storage not in region.spec.kept:
                return region.depth + 1
        return 0

    def _seen_in(self, call: int, storage: int, regions: Sequence[Region]) -> int:
        """Generation of a storage that code in a module call sees when these nested regions have been recomputed."""
        for depth in range(len(regions), 0, -1):
            region = regions[depth - 1]
            if not is_from_argument(region.extent, region.inputs, storage, call):
                return self._made_by(storage, regions[:depth])
        return 0

    # -- events -----------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Write the events."""
        events: list[Event] = []
        kept = keepers(region for region in self.regions if not region.ancestors)
        opening, closing = self.boundaries(self.regions)
        num_ops = len(self.graph.ops)
        for life, moment in self.ends.items():
            if life[1] == 0 and moment != (num_ops, FIRST):
                self.drops[moment].append(life)
        for clock in range(num_ops + 1):
            self._drop(events, (clock, FIRST))
            events.extend(self.releases.pop(clock, ()))
            if clock in self.recomputes:
                for rank, region in enumerate(self.recomputes[clock], start=1):
                    self.recompute(region, events)
                    self._drop(events, (clock, rank))
            self._drop(events, (clock, LAST))
            self.cross(clock, opening, closing, events)
            if clock < num_ops:
                op = self.graph.ops[clock]
                events.append(Event(_RUN[op.phase], clock))
                if not kept.keys().isdisjoint(op.outputs):
                    self._save(op, events, kept)
        return Schedule(events=tuple(events), regions=tuple(region.spec.calls for region in self.regions))

    def cross(self, clock: int, opening: Boundaries, closing: Boundaries, events: list[Event]) -> None:
        """Calls of regions that end and start at a clock, in forward."""
        for region, part in closing.get(clock, ()):
            # A region inside another keeps of its first execution at most the random states.
            self._end_call(region, part, events, lets_go=bool(region.ancestors) and not region.notes_draws)
        for region, part in opening.get(clock, ()):
            self._start_call(region, part, events)

    def boundaries(self, regions: Iterable[Region]) -> tuple[Boundaries, Boundaries]:
        """Which calls of regions start and end at a clock."""
        opening: Boundaries = defaultdict(list)
        closing: Boundaries = defaultdict(list)
        for region in regions:
            if region.shares_entry:
                continue
            for part, call in enumerate(region.spec.calls):
                opening[self.graph.calls[call].start].append((region, part))
                closing[self.graph.calls[call].end].append((region, part))
        return opening, closing

    def _drop(self, events: list[Event], moment: Moment) -> None:
        if moment in self.drops:
            events += [Event(Action.DROP, -1, s, generation) for s, generation in self.drops.pop(moment)]

    def _save(self, op: Op, events: list[Event], kept: dict[int, list[int]]) -> None:
        for storage in dict.fromkeys(s for s in op.outputs if s in kept):
            if self.graph.storages[storage].born == op.index:
                events.extend(Event(Action.SAVE, storage=storage, region=region) for region in kept[storage])

    @staticmethod
    def _start_call(region: Region, part: int, events: list[Event]) -> None:
        """A call of a region starts: it notes the random state, and needs one more to compare."""
        if num_bytes := sum(region.states[part]):
            events.append(Event(Action.HOLD, region=region.position, num_bytes=num_bytes))

    @staticmethod
    def _end_call(region: Region, part: int, events: list[Event], *, lets_go: bool = False) -> None:
        held, passing = region.states[part]
        num_bytes = held + passing if lets_go else passing
        if num_bytes:
            events.append(Event(Action.RELEASE, region=region.position, num_bytes=num_bytes))

    def passing(self, region: Region, ending: Iterable[_Life]) -> list[_Life]:
        """Those of the lives that end with a recompute which a nest stores: they go once it has read them."""
        kept, ancestors = region.spec.kept if region.children else frozenset(), region.ancestors
        return [life for life in ending if life[0] in kept and life[1] == self._made_by(life[0], ancestors)]

    def recompute(self, region: Region, events: list[Event], passing: Iterable[_Life] = ()) -> None:
        """Write the events of a recompute.

        Args:
            region: The region.
            events: Where to.
            passing: Lives that go during it (see `passing`), besides those in `drops`.
        """
        ending = self.drops.pop(region.end, [])
        own = self.passing(region, ending)
        rerun = _Rerun(self, region, events, (*own, *passing))
        rerun.run()
        if ending:
            self.drops[region.end] = [life for life in ending if life not in own]
        if num_bytes := rerun.kept_bytes + region.held_bytes:
            events.append(Event(Action.RELEASE, region=region.position, num_bytes=num_bytes))
        for child in region.children:
            if child.shares_entry and child.saved and child.held_bytes:
                events.append(Event(Action.HOLD, region=child.position, num_bytes=child.held_bytes))


class _Rerun:
    """Runs a region again: transients die as in forward, what somebody holds stays until it is let go of.

    So does what a nest stores and nobody else holds.
    """

    def __init__(self, expansion: Expansion, region: Region, events: list[Event], passing: Iterable[_Life]) -> None:
        self.expansion = expansion
        self.graph = expansion.graph
        self.region = region
        self.events = events
        self.runs = frozenset(region.work.ops)
        children = [child for child in region.children if child.saved]
        self.kept = keepers(children)
        self.opening, self.closing = expansion.boundaries(children)
        self.dying: dict[int, list[_Life]] = defaultdict(list)
        self.linked_until = _linked_until(self.graph, region.spec)
        self.passing = dict(passing)
        """Generation of each stored output that only the region holds."""
        self.kept_bytes = 0
        """Numbers that the graph which recompute builds keeps, as forward's does, until recompute ends."""

    def run(self) -> None:
        """Write its events."""
        calls = [self.graph.calls[call] for call in self.region.spec.calls]
        stop = self.region.work.stop
        for part, call in enumerate(calls):
            if part and call.start >= stop and call.start not in self.opening:
                break
            held = self.region.states[part][0]
            own = self.graph.rng_state_bytes if held else 0  # what the random state is outside, put back afterwards
            self._hold(Action.HOLD, own)
            copied = self._copy_buffers(call)
            self._let_go([c for c in self.dying if c < call.start])
            last = min(call.end, stop)
            for clock in range(call.start, last + 1):
                if clock in self.dying:
                    self._let_go([clock])
                if clock in self.opening or clock in self.closing:
                    self._cross(clock, call.end)
                if clock < last:
                    self._run_op(clock, call.end)
            self._hold(Action.RELEASE, own + copied)
            if call.end > stop:
                break
        self._let_go(list(self.dying))
        self.events += [Event(Action.DROP, -1, s, generation) for s, generation in self.passing.items()]

    def _hold(self, action: Action, num_bytes: int) -> None:
        if num_bytes:
            self.events.append(Event(action, region=self.region.position, num_bytes=num_bytes))

    def _copy_buffers(self, call: ModuleCall) -> int:
        """Recompute runs on copies of the buffers that it changes; autograd keeps those that it saved there.

        Returns:
            Bytes of the others: they go when the call ends.
        """
        graph, region = self.graph, self.region
        changed = {s for op in graph.ops[call.start : call.end] for s in op.mutates}
        passing = 0
        for s in sorted(s for s in changed if graph.storages[s].cause == "buffer"):
            num_bytes = graph.storages[s].num_bytes
            self._hold(Action.HOLD, num_bytes)
            until = max((r.released for r in region.saved if r.storage == s), default=None)
            if until is None or until <= (region.at or 0):
                passing += num_bytes
            else:
                self.expansion.releases[until].append(
                    Event(Action.RELEASE, region=region.position, num_bytes=num_bytes)
                )
        return passing

    def _cross(self, clock: int, end: int) -> None:
        """Calls of inner regions that end and start here."""
        for child, part in self.closing.get(clock, ()):
            self._note_states(child, part, Action.RELEASE)
        if clock == end:
            return
        for child, part in self.opening.get(clock, ()):
            finishes = self.graph.calls[child.spec.calls[part]].end <= self.region.work.stop
            self._note_states(child, part, Action.HOLD, finishes=finishes)

    def _note_states(self, child: Region, part: int, action: Action, *, finishes: bool = True) -> None:
        """What a child that runs again notes; whether it draws is known, so that it needs no state to compare."""
        held, passing = child.states[part]
        if held:
            passing = max(0, passing - self.graph.rng_state_bytes) if finishes else 0
            own = held if action is Action.HOLD and not child.notes_draws else 0
            if num_bytes := own + passing:
                self.events.append(Event(action, region=child.position, num_bytes=num_bytes))

    def _run_op(self, index: int, end: int) -> None:
        op = self.graph.ops[index]
        if index in self.runs:
            self.events.append(Event(Action.RECOMPUTE, op=index, region=self.region.position))
            if op.kept_bytes > 0:
                self._hold(Action.HOLD, op.kept_bytes)
                self.kept_bytes += op.kept_bytes
        if index in self.runs or self.passing:
            for s in dict.fromkeys(op.outputs):
                if self.graph.storages[s].born != index:
                    continue
                if s in self.passing:
                    self.dying[self._last_use(s, end)].append((s, self.passing.pop(s)))
                elif index in self.runs and s not in self.region.spec.kept:
                    self._place(s, end)
        if self.kept and not self.kept.keys().isdisjoint(op.outputs):
            self.expansion._save(op, self.events, self.kept)

    def _place(self, storage: int, end: int) -> None:
        """Say when a storage that is alive again dies."""
        generation = self.region.depth + 1
        until = self.expansion.ends.get((storage, generation))
        if until is not None:
            self.expansion.drops[max(until, self.region.end)].append((storage, generation))
        else:
            self.dying[self._last_use(storage, end)].append((storage, generation))

    def _last_use(self, storage: int, end: int) -> int:
        """Clock at which the program lets go of what an op returned, in a call that ends then."""
        return min(self.graph.storages[storage].last_ref, max(end, self.linked_until.get(storage, 0)))

    def _let_go(self, clocks: list[int]) -> None:
        for clock in clocks:
            self.events += [Event(Action.DROP, -1, s, generation) for s, generation in self.dying.pop(clock, ())]


def keepers(regions: Iterable[Region]) -> dict[int, list[int]]:
    """Which regions store a storage."""
    kept: dict[int, list[int]] = defaultdict(list)
    for region in regions:
        for s in region.spec.kept:
            kept[s].append(region.position)
    return kept


def _linked_until(graph: StepGraph, spec: RegionSpec) -> dict[int, int]:
    """Clock at which the last call of a span that gets a storage from an earlier one ends."""
    return {s: graph.calls[call].end for call, links in linked(graph, spec).items() for s in links} if spec.then else {}


def _with_children(region: Region) -> Iterator[Region]:
    yield region
    for child in region.children:
        yield from _with_children(child)
