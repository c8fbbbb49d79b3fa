"""The ledger: the bytes that a schedule holds at every moment.

`_expand` knows who keeps what alive; this only adds. It is exact for everything that a dispatch mode can see; what
kernels take inside one op is `Op.workspace_bytes`, an estimate.

Known limit: memory held by an allocator's rounding and cache is not part of this number.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from autoremat._expand import expand
from autoremat._results import HighMoment, LiveItem, MemoryProfile, PointEvent
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import BEFORE_STEP, CAUSES, StepGraph

_RUNS = frozenset({Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD, Action.OPTIMIZER})
_MARKS = Action.DROP, Action.RECOMPUTE, Action.HOLD, Action.RELEASE, Action.SAVE
_NUM_ITEMS_AT_PEAK = 2_000
"""Enough for a hundred layers, so that like ones can be summed."""
_NUM_HIGH_MOMENTS = 8
_NEVER = -(1 << 62)
Bytes = npt.NDArray[np.int64]

__all__ = ["alive_at", "alive_at_turn", "expand", "moments", "peak_bytes", "place", "plain_bytes", "price"]


@dataclass(slots=True)
class _Live:
    """What is alive while a schedule is walked through."""

    graph: StepGraph
    total: int = 0
    by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    copies: Counter[int] = field(default_factory=Counter)
    saved_by: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

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
            passing = op.workspace_bytes
            for s in dict.fromkeys(op.outputs):
                if self.graph.storages[s].born == event.op:
                    if action is Action.RECOMPUTE and event.region in self.saved_by.get(s, ()):
                        passing += self.graph.storages[s].num_bytes  # made again, and the stored one taken instead
                    else:
                        self._add(s, 1)
            point = self.total + passing
            if action is not Action.RECOMPUTE:
                self._change(op.kept_bytes)
            return point
        if action is Action.DROP:
            self._add(event.storage, -1)
        elif action is Action.SAVE:
            self.saved_by[event.storage].add(event.region)
        else:
            self._change(event.num_bytes if action is Action.HOLD else -event.num_bytes)
        return None

    def _change(self, num_bytes: int) -> None:
        self.total += num_bytes
        self.by_cause["temporary"] += num_bytes


class Tally:
    """Adds up live bytes as `_Live.apply` does, without keeping who is alive: the planner asks all the time."""

    def __init__(self, graph: StepGraph) -> None:
        self._ops = graph.ops
        self._size = [storage.num_bytes for storage in graph.storages]
        self._new: list[set[int]] = [set() for _ in graph.ops]
        for storage in graph.storages:
            if storage.born != BEFORE_STEP and storage.index in graph.ops[storage.born].outputs:
                self._new[storage.born].add(storage.index)

    def run(self, events: Iterable[Event], total: int, saved: set[tuple[int, int]]) -> tuple[int, int]:
        """Let events happen.

        Args:
            events: In order.
            total: What is alive before them, bytes.
            saved: Pairs of storage and region that stores it; grows.

        Returns:
            Bytes at the highest moment, and after the last event. There may be no moment at all.
        """
        size, new = self._size, self._new
        drop, recompute, hold, release, save = _MARKS
        peak = _NEVER
        for action, index, storage, _, region, num_bytes in events:
            if action is drop:
                total -= size[storage]
            elif action is save:
                saved.add((storage, region))
            elif action is hold:
                total += num_bytes
            elif action is release:
                total -= num_bytes
            else:
                op, is_again = self._ops[index], action is recompute
                passing = op.workspace_bytes
                for s in new[index]:
                    if is_again and (s, region) in saved:
                        passing += size[s]
                    else:
                        total += size[s]
                if total + passing > peak:
                    peak = total + passing
                if not is_again:
                    total += op.kept_bytes
        return peak, total


def bytes_at_start(graph: StepGraph) -> int:
    """What is alive before the first op."""
    return sum(s.num_bytes for s in graph.storages if s.born == BEFORE_STEP) + graph.hidden_bytes


def peak_bytes(graph: StepGraph, schedule: Schedule) -> int:
    """Largest live bytes of a schedule.

    Args:
        graph: The step.
        schedule: What happens in it.

    Returns:
        Bytes, once per living copy of a storage, kernel workspace included.
    """
    start = bytes_at_start(graph)
    return max(start, Tally(graph).run(schedule.events, start, set())[0])


def plain_bytes(graph: StepGraph, deaths: Sequence[int]) -> tuple[Bytes, Bytes]:
    """Live bytes of the plain step while each op runs, and just before each op and at the end.

    Args:
        graph: The step.
        deaths: When each storage dies in it.
    """
    num_ops = len(graph.ops)
    born, dead = np.zeros((2, num_ops + 1), np.int64)
    for storage, death in zip(graph.storages, deaths, strict=True):
        # Slot 0 of `born` is "before the step", slot t + 1 is "op t".
        born[storage.born - BEFORE_STEP] += storage.num_bytes
        if death < num_ops:
            dead[death] += storage.num_bytes
    kept = np.cumsum([0, *(op.kept_bytes for op in graph.ops)])
    between = np.cumsum(born) - np.cumsum(dead) + kept + graph.hidden_bytes
    workspace = np.array([op.workspace_bytes for op in graph.ops], np.int64)
    return between[:num_ops] + born[1:] + workspace, between


def alive_at_turn(graph: StepGraph, schedule: Schedule) -> tuple[Counter[int], Counter[int]]:
    """What is alive when backward begins: copies of each storage, and bytes that regions hold besides, by region."""
    live, held = _Live(graph), Counter[int]()
    for event in schedule.events:
        if event.action is Action.BACKWARD:
            break
        live.apply(event)
        if event.action in (Action.HOLD, Action.RELEASE):
            held[event.region] += event.num_bytes if event.action is Action.HOLD else -event.num_bytes
    return live.copies, held


def moments(graph: StepGraph, schedule: Schedule) -> list[tuple[int, Event]]:
    """Live bytes while each op of a schedule runs, in order, with the event that runs it."""
    live = _Live(graph)
    return [(point, event) for event in schedule.events if (point := live.apply(event)) is not None]


def alive_at(graph: StepGraph, schedule: Schedule, moment: int) -> Counter[int]:
    """How many copies of each storage are alive at one of the `moments`."""
    live, seen = _Live(graph), -1
    for event in schedule.events:
        seen += live.apply(event) is not None
        if seen == moment:
            break
    return +live.copies


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
    points: list[tuple[int, Event]] = []
    peak, peak_point = -1, 0
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
            peak, peak_point, at_peak = point, len(seconds), Counter(live.copies)
        points.append((point, event))
        seconds.append(clock)
        for cause, values in by_cause.items():
            values.append(live.by_cause[cause])
        by_cause["temporary"][-1] += point - live.total  # the workspace, less what is kept from here on
    moments = _high_moments(graph, points, seconds)
    return MemoryProfile(
        peak_bytes=peak,
        peak_by_cause={cause: values[peak_point] for cause, values in by_cause.items()},
        peak_point=peak_point,
        peak_at=moments[0].at,
        static_bytes=graph.static_bytes,
        seconds=tuple(seconds),
        by_cause={cause: tuple(values) for cause, values in by_cause.items()},
        phases=tuple(phases),
        alive_at_peak=_items(graph, at_peak),
        recomputed_flops=recomputed,
        flops=flops,
        step_s=clock,
        high_moments=moments,
        events=tuple(_event(graph, event) for _, event in points),
    )


def _event(graph: StepGraph, event: Event) -> PointEvent:
    op = graph.ops[event.op]
    return PointEvent(event.action.value, graph.calls[op.call].path, op.name)


def _high_moments(
    graph: StepGraph, points: Sequence[tuple[int, Event]], seconds: Sequence[float]
) -> tuple[HighMoment, ...]:
    """The peak and the highest of the other local peaks, each place once; of a plateau, its start."""
    levels = [next(run) for _, run in groupby(range(len(points)), key=lambda index: points[index][0])]
    sizes = [-1, *(points[index][0] for index in levels), -1]
    tops = [
        index for position, index in enumerate(levels) if sizes[position] < sizes[position + 1] > sizes[position + 2]
    ]
    found: dict[str, HighMoment] = {}
    for index in sorted(tops, key=lambda i: -points[i][0]):
        at = place(graph, points[index][1])
        found.setdefault(at, HighMoment(at, points[index][0], seconds[index]))
        if len(found) == _NUM_HIGH_MOMENTS:
            break
    return tuple(found.values())


def place(graph: StepGraph, event: Event) -> str:
    """Phase, module and op of an event, in words."""
    found = _event(graph, event)
    return f"{found.action}, {found.module or 'the model itself'}, {found.op}"


def _items(graph: StepGraph, copies: Counter[int]) -> tuple[LiveItem, ...]:
    """Living storages summed by cause, module, maker and line; the largest few."""
    sums: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for index, count in copies.items():
        storage = graph.storages[index]
        if storage.born == BEFORE_STEP:
            key = (storage.cause, storage.label.rpartition(".")[0], storage.label, "")
        else:
            op = graph.ops[storage.born]
            key = (storage.cause, graph.calls[op.call].path, op.name, op.line)
        sums[key][0] += count * storage.num_bytes
        sums[key][1] += count
    largest = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))[:_NUM_ITEMS_AT_PEAK]
    return tuple(
        LiveItem(cause=cause, module=module, name=name, num_bytes=total, num_storages=count, line=line)
        for (cause, module, name, line), (total, count) in largest
        if total > 0
    )
