"""The chain problem: a step as positions, and the regions that lead from one to another.

A plan is a path through the positions of forward: an edge leads over an interval that is a region with one option, or
over one that is none (*plain*), or over a *nest*, which is dropped but for what it stores and, when backward comes to
it, is run again and then treated as a step of its own. What nests may store is one of a few *store sets*, each a set
of forward's results; a nest stores those of a set that are born in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoremat.solve._facts import Bytes

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edge:
    """A candidate as a way from one position to a later one.

    Attributes:
        candidate: Which candidate it makes a region.
        stop: Position that it reaches.
        forward: For each store set, memory that each option demands in forward if nothing is freed before, bytes, less
            what of the set is born by then.
        backward: The same in backward, its recompute included; no set matters there.
        saved: Bytes that each option frees; negative if it holds more than the plain step.
        cost: Cost of each option.
        ready: For each option, cost of all that forward runs before a nest around may stop because of it.
    """

    candidate: int
    stop: int
    forward: Bytes
    backward: Bytes
    saved: Bytes
    cost: Costs
    ready: Costs


@dataclass(frozen=True, slots=True)
class NestEdge:
    """An interval that is dropped but for one store set, with regions inside.

    Attributes:
        number: -1 - n for the n-th nest.
        stores: Which store set.
        stop: Position that it reaches.
        forward: For each store set, memory that its first run demands, less what of the set is born by then, bytes.
        saved: Bytes that it frees.
        held: Bytes of arguments that it holds until its recompute although the plain step frees them.
        cost: Cost of running it again, without what is recomputed inside.
        ready: Cost of all that forward runs before a nest around may stop because of it.
    """

    number: int
    stores: int
    stop: int
    forward: Bytes
    saved: int
    held: int
    cost: float
    ready: float


@dataclass(frozen=True, slots=True)
class Chain:
    """The problem, by position.

    While a nest runs again, what it stores is alive until the program has let go of it, as in forward: what forward
    demands inside is more by what is yet to come of its store set, and what backward demands is no more.

    Attributes:
        edges: Candidates that start at each position.
        nests: Nests that start at each position.
        forward: For each store set, what the plain step demands from each position to the next in forward, less what
            of the set is born by then, bytes. The first set is empty.
        backward: The same in backward; no set matters there.
        shift: How much more is alive when backward reaches a position than when forward did, in the plain step.
        required: What the turn from forward to backward demands.
        stored: For each store set, its bytes that are born before each position.
        work: Cost of all that forward runs before each position.
        tail: The same before the last tensor that backward needs of a nest which ends at the position.
        reach: Position behind the call which saves that tensor.
    """

    edges: tuple[tuple[Edge, ...], ...]
    nests: tuple[tuple[NestEdge, ...], ...]
    forward: Bytes
    backward: Bytes
    shift: Bytes
    required: int
    stored: Bytes
    work: Costs
    tail: Costs
    reach: Bytes

    def late(self, stop: Bytes, ready: Costs, end: int) -> Costs:
        """What a nest that stores nothing costs more, or less, because of a region inside that reaches its tail."""
        found: Costs = np.where((stop >= self.reach[end]) & (ready > -np.inf), ready - self.tail[end], 0.0)
        return found

    @property
    def last(self) -> int:
        """The last position."""
        return len(self.forward[0])

    def highest(self) -> int:
        """Memory with which nothing is demanded in vain."""
        shift = max(0, int(self.shift.max(initial=0))) + int(self.stored.max(initial=0))
        demands = [self.required, int(self.forward.max(initial=0)) + shift, int(self.backward.max(initial=0))]
        for edge in (edge for edges in self.edges for edge in edges):
            demands += [int(edge.forward.max()) + shift, int(edge.backward.max())]
        return max(demands)


class Ways:
    """Everything that leads on, as arrays: by the position that it starts from, then by the one that it reaches.

    Attributes:
        first: For each position, and for the last, the first way from there: the plain step.
        start: Position that each way starts from.
        stop: Position reached.
        number: Candidate, or -1 - nest; for the plain step `PLAIN`.
        option: Option of the candidate, or store set of the nest.
        forward: For each store set, memory demanded in forward, bytes.
        backward: Memory demanded in backward; 0 for nests.
        saved: Bytes freed.
        held: Bytes that a nest holds.
        cost: Cost, of nests without what is inside.
        ready: For regions, cost of all that forward runs before a nest around may stop because of them.
        nests: Which of the ways are nests.
    """

    __slots__ = (
        "backward",
        "cost",
        "first",
        "forward",
        "held",
        "nests",
        "number",
        "option",
        "ready",
        "saved",
        "start",
        "stop",
    )

    def __init__(self, chain: Chain) -> None:
        num = chain.last
        edges = [(start, edge) for start in range(num) for edge in chain.edges[start]]
        nests = [(start, nest) for start in range(num) for nest in chain.nests[start]]
        sizes = [len(edge.cost) for _, edge in edges]
        plain, none = np.arange(num), np.zeros(num, np.int64)

        def column(of_plain: Bytes | Costs, of_edges: Sequence[Bytes | Costs], of_nests: Sequence[float]) -> Any:
            return np.concatenate([of_plain, *of_edges, np.array(of_nests, of_plain.dtype)])

        def repeated(numbers: Sequence[int]) -> list[Bytes]:
            return [np.repeat(np.array(numbers, np.int64), sizes)]

        start = column(plain, repeated([at for at, _ in edges]), [at for at, _ in nests])
        stop = column(plain + 1, repeated([edge.stop for _, edge in edges]), [nest.stop for _, nest in nests])
        # The plain step, which comes first of all, stays first of those that stop where it does.
        order = np.lexsort((stop, start))
        self.first = np.searchsorted(start[order], np.arange(num + 1))
        self.start, self.stop = start[order], stop[order]
        numbers = [edge.candidate for _, edge in edges], [nest.number for _, nest in nests]
        self.number = column(np.full(num, PLAIN), repeated(numbers[0]), numbers[1])[order]
        options = [np.arange(size) for size in sizes]
        self.option = column(none, options, [nest.stores for _, nest in nests])[order]
        of_nests = (nest.forward[:, None] for _, nest in nests)
        self.forward = np.concatenate([chain.forward, *(e.forward for _, e in edges), *of_nests], axis=1)[:, order]
        self.backward = column(chain.backward, [e.backward for _, e in edges], [0] * len(nests))[order]
        self.saved = column(none, [e.saved for _, e in edges], [nest.saved for _, nest in nests])[order]
        self.held = column(none, repeated([0] * len(edges)), [nest.held for _, nest in nests])[order]
        self.cost = column(np.zeros(num), [e.cost for _, e in edges], [nest.cost for _, nest in nests])[order]
        never = np.full(num, -np.inf)
        self.ready = column(never, [e.ready for _, e in edges], [nest.ready for _, nest in nests])[order]
        self.nests = np.flatnonzero((self.number < 0) & (self.number != PLAIN))


PLAIN = -(1 << 62)
"""Number of the way on which the next step is no region."""
