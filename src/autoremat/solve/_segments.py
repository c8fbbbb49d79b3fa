"""Which module calls may become regions, and how they follow one another.

Candidates form a forest (module calls nest), so a plan may take a block, or the attention inside it, or neither.
Structurally equal candidates form a class and are solved once.

Backward reads what it needs in reverse order of forward: eager autograd runs nodes by falling sequence number. A
candidate for which that does not hold is left out, the smallest ones first.

Known limits: regions are single module calls (no spans of siblings, no nesting of regions); the model's own call is
not a candidate, since recomputing everything at once frees nothing where it matters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autoremat._replay import gathers_units
from autoremat.solve._facts import Facts
from autoremat.solve._units import Inner

MIN_SHARE = 1 / 2000
"""Calls that hold a smaller share of what regions could drop are not worth a region."""
MIN_SHARE_OF_SIBLING = 0.1
"""Nor are calls that hold a smaller share than this of what the largest call beside them holds."""
MAX_OPS = 300
"""Larger calls are not solved as one region: their parts are."""
MAX_SHARE_IN_STACK = 0.4
"""A call that holds half of everything, in parts of which each holds less than this of it, is a stack: no region."""
_SLACK_OPS = 8
"""A storage that outlives its region by fewer ops (a local variable of the caller) counts as dropped with it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module call that may become a region, with its copies in later micro-steps.

    Attributes:
        members: One call for each micro-step.
        first: Position of the first leaf (candidate without candidates inside) that it covers.
        stop: One past the position of the last.
        kind: Equal candidates have the same.
    """

    members: tuple[Inner, ...]
    first: int
    stop: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Segments:
    """All candidates of a step.

    Attributes:
        candidates: In order of entry, parents before children.
        leaves: Candidates without candidates inside, in order of execution.
        shared: Storages that several candidates would hold for their recompute although the plain step frees them.
    """

    candidates: tuple[Candidate, ...]
    leaves: tuple[Candidate, ...]
    shared: frozenset[int]


def find_segments(facts: Facts) -> Segments:
    """Find the candidates of a step."""
    groups = _in_reverse_order(facts, _align(facts, _worthwhile(facts)))
    calls = sorted(groups)
    outlive = _entering(facts, [call for group in groups.values() for call in group])
    ends = {call: facts.graph.subtree(call).stop for call in calls}
    leaf_calls = [c for position, c in enumerate(calls) if bisect_left(calls, ends[c]) == position + 1]
    candidates = []
    for call in calls:
        members = tuple(_inner(facts, member, outlive) for member in groups[call])
        candidates.append(
            Candidate(
                members=members,
                first=bisect_left(leaf_calls, call),
                stop=bisect_left(leaf_calls, ends[call]),
                kind=_kind(facts, members[0]),
            )
        )
    by_call = {c.members[0].call: c for c in candidates}
    return Segments(
        candidates=tuple(candidates),
        leaves=tuple(by_call[call] for call in leaf_calls),
        shared=_shared_inputs(facts, candidates),
    )


def _worthwhile(facts: Facts) -> dict[int, int]:
    """Droppable bytes of each call of the first micro-step that is worth a region."""
    calls = facts.graph.calls
    sizes = _droppable_bytes(facts)
    children: dict[int, list[int]] = {call: [] for call in (-1, *sizes)}
    for call, size in sizes.items():
        children[calls[call].parent].append(size)
    total = sum(children[0])

    def is_worthwhile(call: int) -> bool:
        largest = max(children[calls[call].parent])
        is_large = sizes[call] >= max(1, MIN_SHARE * total, MIN_SHARE_OF_SIBLING * largest)
        parts = children[call]
        is_stack = sum(parts) > 0.9 * sizes[call] > 0.45 * total and max(parts) < MAX_SHARE_IN_STACK * sizes[call]
        return is_large and not is_stack and calls[call].end - calls[call].start <= MAX_OPS

    return {call: size for call, size in sizes.items() if call > 0 and is_worthwhile(call)}


def _droppable_bytes(facts: Facts) -> dict[int, int]:
    """Bytes saved in each call of the first micro-step, below the model's own, that are born in it."""
    graph = facts.graph
    droppable: dict[int, set[int]] = {call.index: set() for call in graph.calls if call.micro_step == 0}
    for record in graph.saved:
        call, born = record.call, graph.storages[record.storage].born
        while call > 0 and call in droppable:
            if graph.calls[call].start <= born < graph.calls[call].end:
                droppable[call].add(record.storage)
            call = graph.calls[call].parent
    return {call: sum(graph.storages[s].num_bytes for s in found) for call, found in droppable.items()}


def _align(facts: Facts, sizes: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Find each call of the first micro-step in the others; leave out what one of them does otherwise."""
    graph = facts.graph
    by_name = {(c.micro_step, c.path, c.number): c.index for c in graph.calls}
    groups = {}
    for call in sorted(sizes, key=lambda c: (-sizes[c], c)):
        named = graph.calls[call]
        group = [by_name.get((step, named.path, named.number)) for step in range(len(facts.spans))]
        found = tuple(member for member in group if member is not None)
        if len(found) == len(group) and all(_is_possible(facts, member) for member in found):
            groups[call] = found
    return groups


def _is_possible(facts: Facts, call: int) -> bool:
    """Whether recompute would find its inputs as forward did, and backward asks for anything at all."""
    graph, span = facts.graph, facts.graph.calls[call]
    until = facts.first_unpack(call)
    if until is None or until < span.end or gathers_units(graph, call):
        return False
    read = {s for op in graph.ops[span.start : span.end] for s in op.inputs if not _is_inside(facts, call, s)}
    return not any(
        facts.is_mutated(s, span.start, until) for s in read if graph.storages[s].cause not in ("buffer", "parameter")
    )


def _is_inside(facts: Facts, call: int, storage: int) -> bool:
    span = facts.graph.calls[call]
    return span.start <= facts.graph.storages[storage].born < span.end


def _in_reverse_order(facts: Facts, groups: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Keep candidates whose recomputes come in reverse order of their forwards, in every micro-step."""
    calls = facts.graph.calls
    clocks = {member: facts.first_unpack(member) or 0 for group in groups.values() for member in group}
    if all(_is_reversed(facts, [group[step] for group in groups.values()], clocks) for step in range(len(facts.spans))):
        return groups

    def fits(one: int, other: int) -> bool:
        early, late = (one, other) if calls[one].end <= calls[other].start else (other, one)
        if calls[early].end > calls[late].start:
            return True
        return all(clocks[a] > clocks[b] for a, b in zip(groups[early], groups[late], strict=True))

    kept: list[int] = []
    for call in groups:
        if all(fits(call, other) for other in kept):
            kept.append(call)
    return {call: groups[call] for call in sorted(kept)}


def _is_reversed(facts: Facts, members: Sequence[int], clocks: dict[int, int]) -> bool:
    """Whether whatever ends before another starts is also recomputed after it."""
    calls = facts.graph.calls
    ended = sorted(members, key=lambda c: calls[c].end)
    position, earliest = 0, len(facts.graph.ops) + 1
    for call in sorted(members, key=lambda c: calls[c].start):
        while position < len(ended) and calls[ended[position]].end <= calls[call].start:
            earliest = min(earliest, clocks[ended[position]])
            position += 1
        if clocks[call] >= earliest:
            return False
    return True


def _entering(facts: Facts, calls: Sequence[int]) -> dict[int, list[int]]:
    """Candidates that take a storage as an argument, by storage."""
    users: dict[int, list[int]] = {}
    for call in calls:
        for s in facts.graph.calls[call].inputs:
            users.setdefault(s, []).append(call)
    return users


def _inner(facts: Facts, call: int, users: dict[int, list[int]]) -> Inner:
    span, calls = facts.graph.calls[call], facts.graph.subtree(call)
    inside = facts.born_in(span.start, span.end)
    needed = frozenset(r.storage for r in facts.saved_in(call) if _is_inside(facts, call, r.storage))
    limit = min(span.end + _SLACK_OPS, _forward_end(facts, call))

    def is_pinned(storage: int) -> bool:
        if facts.graph.storages[storage].last_ref > limit or any(u not in calls for u in users.get(storage, ())):
            return True
        return any(r.call not in calls for r in facts.records_of.get(storage, ()))

    return Inner(
        call=call,
        at=facts.first_unpack(call) or 0,
        needed=needed,
        deaths={s: facts.death_without(s, calls) for s in inside},
        pinned=frozenset(filter(is_pinned, inside)),
    )


def _forward_end(facts: Facts, call: int) -> int:
    """Clock at which the model's own call around a module call returns."""
    while facts.graph.calls[call].parent >= 0:
        call = facts.graph.calls[call].parent
    return facts.graph.calls[call].end


def _shared_inputs(facts: Facts, candidates: Sequence[Candidate]) -> frozenset[int]:
    """Arguments that die early in the plain step and enter more than one candidate."""
    graph = facts.graph
    last_end: dict[int, int] = {}
    shared = set()
    for candidate in candidates:
        for member in candidate.members:
            span = graph.calls[member.call]
            for s in set(span.inputs):
                if facts.deaths[s] < member.at:
                    if last_end.get(s, span.end) <= span.start:
                        shared.add(s)
                    last_end[s] = min(last_end.get(s, span.end), span.end)
    return frozenset(shared)


def _kind(facts: Facts, inner: Inner) -> Hashable:
    """Everything about a call that its options depend on, free of absolute positions."""
    graph, span = facts.graph, facts.graph.calls[inner.call]
    names: dict[int, int] = {}
    rows: list[Hashable] = []

    def name(storage: int) -> int:
        return names.setdefault(storage, len(names))

    for op in graph.ops[span.start : span.end]:
        written = (tuple(map(name, op.outputs)), tuple(map(name, op.mutates)))
        flags = (op.is_random, op.is_view, op.reads_value)
        rows.append(
            (op.name, tuple(map(name, op.inputs)), *written, op.flops, op.moved_bytes, op.workspace_bytes, *flags)
        )
    for s, number in names.items():
        size, is_parameter = graph.storages[s].num_bytes, graph.storages[s].cause == "parameter"
        if s in inner.deaths:
            ends = [
                min(c, span.end) - span.start for c in (graph.storages[s].last_ref, inner.deaths[s], facts.deaths[s])
            ]
            later = (s in inner.pinned, s in inner.needed, inner.deaths[s] >= inner.at, facts.deaths[s] >= inner.at)
            rows.append((number, size, *ends, *later, facts.is_mutated(s, span.end, len(graph.ops))))
        else:
            rows.append((number, is_parameter))
    rows.append(tuple(r.packed - span.start for r in facts.saved_in(inner.call)))
    return tuple(rows)
