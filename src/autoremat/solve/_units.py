"""Inside one region: what recompute would run, as units of ops and the reads between them.

A unit is what is stored or run together: the op that allocates some storages, the ops that write them in place, and
every other storage that those ops write. Views cost nothing and belong to no unit. The rules of what runs are those
of `_replay.replay`, which has the last word on the cost of an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoremat._replay import Extent, RegionSpec, is_uncounted
from autoremat._step_graph import Op
from autoremat.solve._facts import Facts


@dataclass(slots=True)
class Unit:
    """Ops that run together.

    Attributes:
        ops: Their indices.
        storages: Storages that they write and that are born in the region.
        reads: Storages of other units that must be there before this one runs.
        needed: Storages of it that autograd saved.
        bytes_of: Its storages that autograd or another unit asks for, each with the bytes that storing it takes.
        unstorable: Those of them that cannot be stored without changing values.
        always_runs: Whether recompute runs it whatever is stored.
        cost: FLOPs or seconds.
        moved_bytes: Bytes that its ops move.
    """

    ops: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    needed: list[int] = field(default_factory=list)
    bytes_of: dict[int, int] = field(default_factory=dict)
    unstorable: set[int] = field(default_factory=set)
    always_runs: bool = False
    cost: float = 0.0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Inner:
    """How the storages of a region stand to the rest of the step.

    Attributes:
        calls: The module call, or the calls of a span.
        written: The same with modules in place of all calls that stand for them (see `_rows`): those of the plan.
        start: Clock at which the first starts.
        end: Clock at which the last ends.
        at: Clock of its recompute.
        needed: Storages born in it that autograd saved in it.
        deaths: When each storage born in it would die without those saved tensors.
        pinned: Storages born in it that stay alive for others well after it, until or into their backward.
    """

    calls: tuple[int, ...]
    written: tuple[int, ...]
    start: int
    end: int
    at: int
    needed: frozenset[int]
    deaths: dict[int, int]
    pinned: frozenset[int]

    def spec(self, kept: frozenset[int] = frozenset()) -> RegionSpec:
        """The region that stores these."""
        return RegionSpec(self.calls[0], kept, then=self.calls[1:])

    def is_free(self, storage: int) -> bool:
        """Whether keeping a storage takes no bytes that count."""
        return storage in self.pinned and (storage in self.needed or self.deaths[storage] >= self.at)


def moved(facts: Facts, source: Inner, target: Inner, kept: Iterable[int]) -> frozenset[int]:
    """The same stored outputs in an equal interval."""
    ops, shift = facts.graph.ops, target.start - source.start
    if not shift:
        return frozenset(kept)
    births = [(s, facts.graph.storages[s].born) for s in kept]
    return frozenset([ops[born + shift].outputs[ops[born].outputs.index(s)] for s, born in births])


def build_units(facts: Facts, inner: Inner, op_cost: Sequence[float]) -> list[Unit]:
    """Group the ops of a region that recompute may run.

    Args:
        facts: The step.
        inner: The region.
        op_cost: Cost of each op of the step.
    """
    graph = facts.graph
    stop = max((r.packed for r in facts.saved_in(*inner.calls)), default=inner.start)
    ops = [graph.ops[i] for i in Extent(graph, inner.calls).indices(stop) if not graph.ops[i].is_view]
    group = _group_storages(ops, inner)
    units: dict[int, Unit] = {}
    for op in ops:
        written = [s for s in dict.fromkeys((*op.outputs, *op.mutates)) if s in inner.deaths]
        always = op.reads_value or is_uncounted(graph, op)
        if not written and not always:
            continue
        unit = units.setdefault(group[written[0]] if written else -1 - op.index, Unit())
        unit.ops.append(op.index)
        unit.storages.extend(s for s in written if s not in unit.storages)
        unit.always_runs |= always
        unit.cost += op_cost[op.index]
        unit.moved_bytes += op.moved_bytes
    found = list(units.values())
    _connect(facts, inner, found)
    return found


def _group_storages(ops: Sequence[Op], inner: Inner) -> dict[int, int]:
    """Union-find: storages that one op writes are in one group."""
    parent = {s: s for s in inner.deaths}

    def find(s: int) -> int:
        while parent[s] != s:
            parent[s] = parent[parent[s]]
            s = parent[s]
        return s

    for op in ops:
        written = [s for s in (*op.outputs, *op.mutates) if s in parent]
        for s in written[1:]:
            parent[find(s)] = find(written[0])
    return {s: find(s) for s in parent}


def _connect(facts: Facts, inner: Inner, units: Sequence[Unit]) -> None:
    """Find what units read of each other, and what of a unit is asked for."""
    graph = facts.graph
    home = {s: position for position, unit in enumerate(units) for s in unit.storages}
    asked = set(inner.needed)
    for position, unit in enumerate(units):
        read = {s for index in unit.ops for s in graph.ops[index].inputs}
        unit.reads = {s for s in read if home.get(s, position) != position}
        asked |= unit.reads
    for unit in units:
        unit.needed = [s for s in unit.storages if s in inner.needed]
        for s in unit.storages:
            if s in asked:
                unit.bytes_of[s] = 0 if inner.is_free(s) else graph.storages[s].num_bytes
                if unit.always_runs or not can_be_stored(facts, inner.end, s):
                    unit.unstorable.add(s)


def can_be_stored(facts: Facts, end: int, storage: int) -> bool:
    """Whether a storage, in the state that it has when a region ends, can stand in for the op that made it."""
    graph = facts.graph
    birth = graph.storages[storage].born
    if storage not in graph.ops[birth].outputs:
        return False
    mutations = facts.mutated_at.get(storage, ())
    if not mutations:
        return True
    last = mutations[-1]
    if any(len({*graph.ops[index].outputs, *graph.ops[index].mutates}) > 1 for index in mutations if index < end):
        # Recompute may want the other result of such an op; running it would write the stored one a second time.
        return False
    early = (op for op in graph.ops[birth + 1 : min(last, end)] if not op.is_view and storage not in op.mutates)
    return last < end and not any(storage in op.inputs for op in early)
