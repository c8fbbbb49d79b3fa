"""Which module calls, and spans of calls, may become regions, and where they start and stop.

Candidates are intervals between *positions*: moments of forward at which a region may start or stop. A plan is a set of
disjoint intervals, so it may take a block, or the attention inside it, or what lies between two of its products.
*Nests* are calls and spans that may be dropped but for a store set (see `_nests`) and, when they come back, be dropped
in parts again, down to any level.

Backward reads what it needs in reverse order of forward: eager autograd runs nodes by falling sequence number. An
interval for which that does not hold is left out, the smallest ones first.

Known limits: a span has links throughout (each call gets a tensor that the one before returned), since anything else
is stored anyway; the model's own call is no region, since recomputing everything at once frees nothing where it
matters; long stacks nest between at most `MAX_CUTS` places; a nest stores one of few sets of outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations

from autoremat._replay import Extent
from autoremat.solve._facts import Facts
from autoremat.solve._rows import Calls, Row, Rows, find_rows
from autoremat.solve._units import Inner

MIN_SHARE = 1 / 2000
"""Intervals that hold a smaller share of what regions could drop are not worth a region."""
MIN_SHARE_OF_SIBLING = 0.1
"""Nor are calls that hold a smaller share than this of what the largest call beside them holds."""
MAX_OPS = 300
"""Larger intervals are not solved as one region: their parts are."""
MAX_CROSSING_OPS = 60
"""The same for spans that start in one module and stop in another, which are all different."""
MIN_TAKERS = 3
"""From how many modules on, one after the other, an argument of all of them counts as held throughout."""
MAX_SPAN = 8
MAX_SPANS = 400
"""Calls in a span whose stored outputs are chosen, and spans of one stack (shorter first); others are only nests."""
MAX_SHARE_IN_STACK = 0.4
"""A call that holds half of everything, in parts of which each holds less than this of it, is a stack: no region."""
MAX_CUTS = 36
"""Places between the calls of a stack at which nests may start or stop."""
LONG_ROW = 64
"""In rows of more calls nests of more than half of them store nothing: they serve where there is no memory for it. In
small steps there are none: a long nest in a long one runs all once more, and from there what is worth storing is not
found."""
SLACK_OPS = 8
"""A storage that outlives its region by fewer ops (a local variable of the caller) counts as dropped with it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An interval that may become a region, with its copies in later micro-steps.

    Attributes:
        members: One for each micro-step.
        start: Position at which it starts.
        stop: Position at which it stops.
        kind: Equal candidates have the same.
    """

    members: tuple[Inner, ...]
    start: int
    stop: int
    kind: int


@dataclass(frozen=True, slots=True)
class Nest:
    """An interval that may be dropped, but for what it stores, with regions inside.

    Attributes:
        members: Its calls in each micro-step.
        start: Position at which it starts.
        stop: Position at which it stops.
        rows: The row of calls that it is part of, in each micro-step.
    """

    members: tuple[Calls, ...]
    start: int
    stop: int
    rows: tuple[Calls, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """All candidates of a step.

    Attributes:
        candidates: In order of entry, longer ones first.
        nests: The same.
        clocks: Clock of each position, for each micro-step.
        rows: The rows that spans are part of.
        shared: Storages that several candidates would hold for their recompute although the plain step frees them.
    """

    candidates: tuple[Candidate, ...]
    nests: tuple[Nest, ...]
    clocks: tuple[tuple[int, ...], ...]
    rows: Rows
    shared: frozenset[int]


def find_segments(facts: Facts, *, flat: bool = False) -> Segments:
    """Find the candidates of a step.

    Args:
        facts: The step.
        flat: Only what compiled code can express: no nests, no functions, no single calls of modules called again.
    """
    rows = find_rows(facts, joined=not flat)
    sizes = _droppable_bytes(facts, functions=not flat)
    worthwhile = sorted(_worthwhile(facts, sizes), key=lambda c: (-sizes[c], c))
    intervals: list[Calls] = [rows.unfolded(call) for call in worthwhile]
    intervals += _spans(facts, rows.rows, sum(sizes[c] for c in sizes if facts.graph.calls[c].parent == 0))
    if flat:
        once = _only_called(facts)
        intervals = [calls for calls in intervals if all(facts.graph.calls[call].path in once for call in calls)]
    groups = _in_reverse_order(facts, _possible(facts, rows, intervals))
    nests = {} if flat else _nests(facts, rows, list(groups))
    boundaries = {b for calls in (*groups, *nests) for b in ((calls[0], False), (calls[-1], True))}
    clocks = [_clocks(facts, rows, boundaries, step) for step in range(len(facts.spans))]
    candidates = _candidates(facts, rows, groups, clocks[0])
    return Segments(
        candidates=tuple(candidates),
        nests=tuple(
            Nest(members, *_positions(facts, calls, clocks[0]), rows=rows.copies(row))
            for calls, (members, row) in sorted(nests.items())
        ),
        clocks=tuple(clocks),
        rows=rows,
        shared=_shared_inputs(facts, candidates),
    )


def _only_called(facts: Facts) -> frozenset[str]:
    """Modules that forward calls once."""
    times = Counter(call.path for call in facts.graph.calls if call.micro_step == 0)
    return frozenset(path for path, number in times.items() if number == 1)


def _worthwhile(facts: Facts, sizes: dict[int, int]) -> list[int]:
    """Single calls of the first micro-step that are worth a region."""
    calls = facts.graph.calls
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

    return [call for call in sizes if call > 0 and is_worthwhile(call)]


def _droppable_bytes(facts: Facts, *, functions: bool = True) -> dict[int, int]:
    """Bytes saved in each call of the first micro-step, below the model's own, that are born in it."""
    graph = facts.graph
    droppable: dict[int, set[int]] = {
        call.index: set() for call in graph.calls if call.micro_step == 0 and (functions or not call.is_function)
    }
    for record in graph.saved:
        call, born = record.call, graph.storages[record.storage].born
        while call > 0:
            if call in droppable and graph.calls[call].start <= born < graph.calls[call].end:
                droppable[call].add(record.storage)
            call = graph.calls[call].parent
    return {call: sum(graph.storages[s].num_bytes for s in found) for call, found in droppable.items()}


def _spans(facts: Facts, rows: Iterable[Row], total: int) -> list[Calls]:
    """Spans that drop more than the same span without its first or last call; the largest first."""
    graph = facts.graph
    found: dict[Calls, int] = {}
    for row in rows:
        gains: dict[Row, int] = {}
        for length in range(1, min(MAX_SPAN, len(row)) + 1):
            if length > 2 and length * len(row) > MAX_SPANS:
                break
            for first in range(len(row) - length + 1):
                part = row[first : first + length]
                calls = _joined(part)
                crosses = len(calls) == length and len({graph.calls[call].parent for call in calls}) > 1
                num_ops = graph.calls[calls[-1]].end - graph.calls[calls[0]].start
                if num_ops > (MAX_CROSSING_OPS if crosses else MAX_OPS):
                    continue
                gain = gains[part] = _gain(facts, calls)
                shorter = gains.get(part[1:], 0), gains.get(part[:-1], 0)  # nothing known of one that is too large
                if length > 1 and gain > max(*shorter, MIN_SHARE * total):
                    found[calls] = gain
    return sorted(found, key=lambda calls: (-found[calls], calls))


def _joined(row: Row) -> Calls:
    return tuple(chain.from_iterable(row))


def _gain(facts: Facts, calls: Calls) -> int:
    """Bytes that a region could drop less those that it would hold though the plain step frees them."""
    graph, extent, inside = facts.graph, Extent(facts.graph, calls), facts.subtree(calls)
    saved = {r.storage for r in facts.saved_in(*calls) if graph.storages[r.storage].born in extent}
    free = {s for s in saved if all(r.call in inside for r in facts.records_of[s])}
    at = facts.first_unpack(*calls) or 0
    held = [s for s in facts.held_inputs(*calls) if facts.deaths[s] < at]
    return sum(graph.storages[s].num_bytes for s in free) - sum(graph.storages[s].num_bytes for s in held)


def _possible(facts: Facts, rows: Rows, intervals: Iterable[Calls]) -> dict[Calls, tuple[Calls, ...]]:
    """Intervals that may be regions in every micro-step, with their copies."""
    found = {}
    for calls in intervals:
        if rows.twins.keys() >= set(calls):
            copies = rows.copies(calls)
            if all(is_possible(facts, copy) for copy in copies):
                found[calls] = copies
    return found


def is_possible(facts: Facts, calls: Calls) -> bool:
    """Whether recompute would find its inputs as forward did, and backward asks for anything at all."""
    graph = facts.graph
    start, end = graph.calls[calls[0]].start, graph.calls[calls[-1]].end
    until = facts.first_unpack(*calls)
    gathers_units = bisect_left(facts.gathers, start) < bisect_left(facts.gathers, end)
    if until is None or until < end or gathers_units:
        return False
    extent = Extent(graph, calls)
    held = facts.held_inputs(*calls) if len(calls) > 1 else {}
    if any(graph.storages[s].born in extent for s in held):
        return False
    suspects = {s for s in held if s in facts.changed}
    reads = facts.reads_changed(start, end, only_older=not extent.has_gaps)
    suspects |= {s for op, s in reads if graph.storages[s].born not in extent and op in extent}
    return not any(facts.is_mutated(s, start, until) for s in suspects)


def _in_reverse_order(facts: Facts, groups: dict[Calls, tuple[Calls, ...]]) -> dict[Calls, tuple[Calls, ...]]:
    """Keep intervals whose recomputes come in reverse order of their forwards, in every micro-step."""
    calls = facts.graph.calls
    clocks = {copy: facts.first_unpack(*copy) or 0 for copies in groups.values() for copy in copies}
    if all(
        _is_reversed(facts, [copies[step] for copies in groups.values()], clocks) for step in range(len(facts.spans))
    ):
        return dict(sorted(groups.items()))

    def fits(one: Calls, other: Calls) -> bool:
        early, late = (one, other) if calls[one[-1]].end <= calls[other[0]].start else (other, one)
        if calls[early[-1]].end > calls[late[0]].start:
            return True
        return all(clocks[a] > clocks[b] for a, b in zip(groups[early], groups[late], strict=True))

    kept: list[Calls] = []
    for group in groups:
        if all(fits(group, other) for other in kept):
            kept.append(group)
    return {group: groups[group] for group in sorted(kept)}


def _is_reversed(facts: Facts, members: Sequence[Calls], clocks: dict[Calls, int]) -> bool:
    """Whether whatever ends before another starts is also recomputed after it."""
    calls = facts.graph.calls
    ended = sorted(members, key=lambda c: calls[c[-1]].end)
    position, earliest = 0, len(facts.graph.ops) + 1
    for member in sorted(members, key=lambda c: calls[c[0]].start):
        while position < len(ended) and calls[ended[position][-1]].end <= calls[member[0]].start:
            earliest = min(earliest, clocks[ended[position]])
            position += 1
        if clocks[member] >= earliest:
            return False
    return True


def _nests(facts: Facts, rows: Rows, intervals: Sequence[Calls]) -> dict[Calls, tuple[tuple[Calls, ...], Calls]]:
    """Calls and spans with at least two candidates in a row inside: their copies, and the row that they are part of."""
    graph = facts.graph
    spans = sorted(((graph.calls[c[0]].start, graph.calls[c[-1]].end) for c in intervals), reverse=True)
    starts = [start for start, _ in reversed(spans)]
    ends = [*reversed(list(accumulate((end for _, end in spans), min))), len(graph.ops) + 1]
    """The earliest end of those that start with each or behind it."""

    def has_parts(calls: Calls) -> bool:
        first_end = ends[bisect_left(starts, graph.calls[calls[0]].start)]
        return ends[bisect_left(starts, first_end)] <= graph.calls[calls[-1]].end

    wanted: dict[Calls, Calls] = {}
    is_small = facts.is_small
    for row in rows.rows:
        cuts, whole = _cuts(facts, row), _joined(row)
        most = len(row) // 2 if is_small and len(row) > LONG_ROW else len(row)
        parts = [_joined(row[a:b]) for a, b in combinations(cuts, 2) if 1 < b - a <= most]
        for calls in (*parts, *row):
            wanted.setdefault(calls, whole)
    found = _in_reverse_order(facts, _possible(facts, rows, filter(has_parts, wanted)))
    return {calls: (copies, wanted[calls]) for calls, copies in found.items()}


def _cuts(facts: Facts, row: Row) -> list[int]:
    """Places of a row at which nests start and stop."""
    calls, step = facts.graph.calls, -(-len(row) // MAX_CUTS)
    # Nests of equal calls end alike, so that their parts of the table are equal but for their length.
    is_even = len({calls[part[-1]].end - calls[part[0]].start for part in row}) == 1
    first = len(row) % step if is_even else 0
    return [0, *range(first or step, len(row), step), len(row)]


def _clocks(facts: Facts, rows: Rows, boundaries: Iterable[tuple[int, bool]], step: int) -> tuple[int, ...]:
    """Clocks of the positions in one micro-step: the start of the step, then every boundary."""
    calls = facts.graph.calls
    by_clock = {}
    for c, is_end in boundaries:
        first = calls[c].end if is_end else calls[c].start
        twin = calls[rows.twins[c][step]]
        by_clock[first] = twin.end if is_end else twin.start
    return (facts.spans[step][0], *(by_clock[clock] for clock in sorted(by_clock)))


def _positions(facts: Facts, calls: Calls, clocks: Sequence[int]) -> tuple[int, int]:
    """Positions at which an interval of the first micro-step starts and stops."""
    start, end = facts.graph.calls[calls[0]].start, facts.graph.calls[calls[-1]].end
    return bisect_left(clocks, start, lo=1), bisect_left(clocks, end, lo=1)


def _candidates(
    facts: Facts, rows: Rows, groups: dict[Calls, tuple[Calls, ...]], clocks: Sequence[int]
) -> list[Candidate]:
    users = _entering(facts, [copy for copies in groups.values() for copy in copies])
    found: list[Candidate] = []
    numbers: dict[Hashable, int] = {}
    for calls, copies in groups.items():
        members = tuple(_inner(facts, copy, rows.short(copy), users) for copy in copies)
        start, stop = _positions(facts, calls, clocks)
        kind = numbers.setdefault(_kind(facts, members[0]), len(numbers))
        found.append(Candidate(members, start, stop, kind))
    return found


def _entering(facts: Facts, intervals: Sequence[Calls]) -> dict[int, list[int]]:
    """Calls that take a storage as an argument, by storage."""
    users: dict[int, list[int]] = {}
    for call in sorted({call for calls in intervals for call in calls}):
        for s in facts.graph.calls[call].inputs:
            users.setdefault(s, []).append(call)
    return users


def _inner(facts: Facts, calls: Calls, written: Calls, users: dict[int, list[int]]) -> Inner:
    graph, inside, extent = facts.graph, facts.subtree(calls), Extent(facts.graph, calls)
    start, end = graph.calls[calls[0]].start, graph.calls[calls[-1]].end
    born = extent.makes(facts.born_in(start, end))
    needed = frozenset(extent.makes(r.storage for r in facts.saved_in(*calls)))
    limit = min(end + SLACK_OPS, _forward_end(facts, calls[0]))
    deaths: dict[int, int] = {}
    pinned: set[int] = set()
    for s in born:
        last = graph.storages[s].last_ref
        others = [r.released for r in facts.records_of.get(s, ()) if r.call not in inside]
        deaths[s] = max(last, *others) if others else last
        if others or last > limit or not inside.issuperset(users.get(s, ())):
            pinned.add(s)
    return Inner(
        calls=calls,
        written=written,
        start=start,
        end=end,
        at=facts.first_unpack(*calls) or 0,
        needed=needed,
        deaths=deaths,
        pinned=frozenset(pinned),
    )


def _forward_end(facts: Facts, call: int) -> int:
    """Clock at which the model's own call around a module call returns."""
    *_, outermost = (call, *facts.graph.ancestors(call))
    return facts.graph.calls[outermost].end


def _shared_inputs(facts: Facts, candidates: Sequence[Candidate]) -> frozenset[int]:
    """Arguments that die early in the plain step and enter several modules one after the other.

    A bias that each layer gets counts as held throughout. What few would hold counts with each of them: mostly one of
    these is a region, or a larger one that makes it again.
    """
    takers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for member in (m for candidate in candidates for m in candidate.members if len(m.written) == 1):
        for s in facts.held_inputs(*member.calls):
            if facts.deaths[s] < member.at:
                takers[s].append((member.start, member.end))
    return frozenset(s for s, found in takers.items() if _num_outermost(found) >= MIN_TAKERS)


def _num_outermost(intervals: Iterable[tuple[int, int]]) -> int:
    """How many of some intervals, nested or disjoint, lie in no other."""
    num, last = 0, -1
    for start, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if start >= last:
            num, last = num + 1, end
    return num


def _kind(facts: Facts, inner: Inner) -> Hashable:
    """Everything about an interval that its options depend on, free of absolute positions."""
    graph, start, end = facts.graph, inner.start, inner.end
    names: dict[int, int] = {}
    used = facts.used[facts.first_use[start] : facts.first_use[end]]
    rows: list[Hashable] = [
        tuple((r.start - start, r.stop - start) for r in Extent(graph, inner.calls).ranges),
        facts.op_kinds[start:end],
        tuple([names.setdefault(s, len(names)) for s in used]),
        tuple([r.packed - start for r in facts.saved_in(*inner.calls)]),
    ]
    for s in names:
        storage = graph.storages[s]
        if s not in inner.deaths:
            rows.append(storage.cause == "parameter")
            continue
        ends = storage.last_ref, inner.deaths[s], facts.deaths[s]
        later = s in inner.pinned, s in inner.needed, ends[1] >= inner.at, ends[2] >= inner.at
        is_changed = s in facts.mutated_at and facts.is_mutated(s, end, len(graph.ops))
        rows.append((storage.num_bytes, *[(min(end, c)) - start for c in ends], *later, is_changed))
    return tuple(rows)
