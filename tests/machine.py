"""The abstract schedule machine: executes a `Schedule` on a `StepGraph` and checks that every event is legal.

It knows nothing of planners, ledgers or torch. Besides life and death it follows *contents*: each storage has a hash
of how its present values came about, so a recompute that would hand backward other values than forward saved is
caught, for instance one that reads a stored tensor in its final state where forward read an earlier one.

Not modelled: the contents of parameters and buffers (restoring buffers is the runtime's business).
"""

from __future__ import annotations

from collections import defaultdict

from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import BEFORE_STEP, Op, StepGraph

_PHASE = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.OPTIMIZER: "optimizer"}
_CONSTANT = ("parameter", "buffer", "optimizer_state")


class Machine:
    """State of memory while a schedule is executed."""

    def __init__(self, graph: StepGraph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.clock = 0
        self.numbers = 0
        """Bytes that autograd keeps where no hook sees them."""
        self.passing = 0
        """Bytes of outputs that the last op made again although the region stores them."""
        self.alive: dict[int, dict[int, int]] = defaultdict(dict)
        """Content hash by storage and living generation."""
        self.saved_by: dict[int, set[int]] = defaultdict(set)
        self.held: dict[int, int] = defaultdict(int)
        self.packs: dict[int, list[int]] = defaultdict(list)
        self.unpacks: dict[int, list[int]] = defaultdict(list)
        self.packed: dict[int, int] = {}
        self.recomputed: set[tuple[int, int]] = set()
        for index, record in enumerate(graph.saved):
            self.packs[record.packed].append(index)
            if record.unpacked is not None:
                self.unpacks[record.unpacked].append(index)
        for storage in graph.storages:
            if storage.born == BEFORE_STEP:
                self.alive[storage.index][0] = hash(("before", storage.index))
        self._pack()

    def run(self) -> int:
        """Execute everything; returns the peak of living bytes (workspace left out) as a second opinion."""
        peak = self.live_bytes()
        for position, event in enumerate(self.schedule.events):
            try:
                self._apply(event)
            except AssertionError as error:
                raise AssertionError(f"event {position}, {event}: {error}") from error
            peak = max(peak, self.live_bytes() + self.passing) if event.op >= 0 else peak
            if event.op >= 0 and event.action is not Action.RECOMPUTE:
                self.numbers += self.graph.ops[event.op].kept_bytes
        self._check_end()
        return peak

    def live_bytes(self) -> int:
        """Bytes of all living generations and of what regions hold."""
        storages = self.graph.storages
        lives = sum(storages[s].num_bytes * len(found) for s, found in self.alive.items())
        return lives + sum(self.held.values()) + self.numbers

    def _apply(self, event: Event) -> None:
        self.passing = 0
        match event.action:
            case Action.FORWARD | Action.BACKWARD | Action.OPTIMIZER:
                self._run(event)
            case Action.RECOMPUTE:
                self._recompute(event)
            case Action.SAVE:
                assert self.alive[event.storage], "saves a storage that is not alive"
                self.saved_by[event.storage].add(event.region)
            case Action.DROP:
                self._drop(event)
            case Action.HOLD:
                assert event.num_bytes > 0, "holds nothing"
                self.held[event.region] += event.num_bytes
            case Action.RELEASE:
                self.held[event.region] -= event.num_bytes
                assert self.held[event.region] >= 0, "releases more than it holds"

    def _drop(self, event: Event) -> None:
        storage = self.graph.storages[event.storage]
        lives = self.alive[event.storage]
        assert event.generation in lives, "drops what is not alive"
        is_static = storage.born == BEFORE_STEP and storage.last_ref == len(self.graph.ops)
        assert not is_static, "drops static memory"
        del lives[event.generation]

    def _content(self, storage: int) -> int:
        if self.graph.storages[storage].cause in _CONSTANT:
            return hash(("constant", storage))
        lives = self.alive[storage]
        assert lives, f"storage {storage} is not alive"
        return lives[max(lives)]

    def _run(self, event: Event) -> None:
        assert event.op == self.clock, f"op {self.clock} is next"
        op = self.graph.ops[event.op]
        assert op.phase == _PHASE[event.action], "wrong phase"
        for index in self.unpacks[self.clock]:
            content = self._content(self.graph.saved[index].storage)
            assert content == self.packed[index], f"saved tensor {index} comes back with other values"
        content = self._compute(op)
        for position, s in enumerate(dict.fromkeys(op.outputs)):
            if self.graph.storages[s].born == op.index:
                assert not self.alive[s], f"storage {s} is born twice"
                self.alive[s][0] = hash((content, "out", position))
        self._mutate(op, content)
        self.clock += 1
        self._pack()

    def _compute(self, op: Op) -> int:
        return hash((op.index, tuple(self._content(s) for s in op.inputs)))

    def _mutate(self, op: Op, content: int) -> None:
        for s in op.mutates:
            lives = self.alive[s]
            assert lives, f"mutates storage {s}, which is not alive"
            if not op.is_view:
                lives[max(lives)] = hash((content, "mutated", s))

    def _pack(self) -> None:
        for index in self.packs[self.clock]:
            self.packed[index] = self._content(self.graph.saved[index].storage)

    def _recompute(self, event: Event) -> None:
        graph, op = self.graph, self.graph.ops[event.op]
        assert op.phase == "forward", "recomputes an op that is not of the forward"
        calls = self.schedule.regions[event.region]
        spans = [graph.calls[call] for call in calls]
        assert any(span.start <= op.index < span.end for span in spans), "recomputes an op outside its region"
        assert (event.region, op.index) not in self.recomputed, "recomputes twice"
        self.recomputed.add((event.region, op.index))
        for s in op.inputs:
            if _is_inside(graph, calls, s) and not _is_argument(graph, calls, s, op.index):
                mine = event.region in self.saved_by[s] or max(self.alive[s], default=0) > 0
                assert mine, f"reads storage {s}, which was neither stored nor recomputed"
        for s in op.mutates:
            is_fresh = _is_inside(graph, calls, s) and max(self.alive[s], default=0) > 0
            assert is_fresh or graph.storages[s].cause in _CONSTANT, f"changes storage {s} a second time"
        content = self._compute(op)
        for position, s in enumerate(dict.fromkeys(op.outputs)):
            if graph.storages[s].born == op.index and event.region in self.saved_by[s]:
                self.passing += graph.storages[s].num_bytes
            elif graph.storages[s].born == op.index:
                generation = self._depth(event.region) + 1
                assert generation not in self.alive[s], f"storage {s} is born twice"
                self.alive[s][generation] = hash((content, "out", position))
        self._mutate(op, content)

    def _depth(self, region: int) -> int:
        """How many regions are around this one: those before it whose calls contain its first."""
        first = self.schedule.regions[region][0]
        return sum(any(first in self.graph.subtree(call) for call in calls) for calls in self.schedule.regions[:region])

    def _check_end(self) -> None:
        end = len(self.graph.ops)
        assert self.clock == end, f"only {self.clock} of {end} ops ran"
        stays = {s.index for s in self.graph.storages if s.last_ref == end}
        stays |= {r.storage for r in self.graph.saved if r.released == end}
        left = {s for s, lives in self.alive.items() if lives and s not in stays}
        assert not left, f"never dropped: {sorted(left)}"
        gone = {s.index for s in self.graph.storages if s.last_ref == end and not self.alive[s.index]}
        assert not gone, f"dropped but still referenced: {sorted(gone)}"
        assert not any(self.held.values()), "a region still holds bytes of its own"


def _is_inside(graph: StepGraph, calls: tuple[int, ...], storage: int) -> bool:
    """Whether a storage is born in a region."""
    return any(graph.calls[c].start <= graph.storages[storage].born < graph.calls[c].end for c in calls)


def _is_argument(graph: StepGraph, calls: tuple[int, ...], storage: int, op: int) -> bool:
    """Whether an op of a span reads a stored argument: its call, or one before, got it from outside the span."""
    for position, call in enumerate(calls):
        span = graph.calls[call]
        is_linked = any(s == storage and source in calls[:position] for s, source in span.links)
        if span.start <= op and storage in span.inputs and not is_linked:
            return True
    return False


def run_schedule(graph: StepGraph, schedule: Schedule) -> int:
    """Execute a schedule; AssertionError with the event that is illegal. Returns peak bytes without workspace."""
    return Machine(graph, schedule).run()
