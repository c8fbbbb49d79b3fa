"""The planner: the cheapest regions that keep a whole step within a budget, for every budget.

All plans of a step are one binary tree of budgets between the smallest possible and the plain peak. The plan at a
budget in the middle of a cell is solved for, priced by the ledger and corrected until the two agree (the peak that is
promised is the ledger's); it is never dearer than the plan at the lower end of the cell, and one that is cheaper than
the plan at the upper end is left out. Where the bound leaves room, in the upper levels of the tree, the exact program
(`_general`) is asked as well if a step branches; in steps of up to a few hundred ops plans next to one with nests are
tried (`_variants`). In small steps the longest row is solved by stages (`_stages`), and plans around those of the table
are priced beforehand (`_nearby`), unless that row is all there is. A plan depends on the cells around it alone, so more
budget never costs more, the same budget gives the same plan, and both hold however many budgets were asked for before.

Known limits: those of `_segments` and `_chain`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from autoremat._expand import no_garbage_collection
from autoremat._regions import describe_all
from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve._bounds import Bound
from autoremat.solve._classic import CLASSIC_NAMES, block_stacks, classic_regions
from autoremat.solve._facts import collect_facts
from autoremat.solve._general import General, branches
from autoremat.solve._nearby import Nearby, explore
from autoremat.solve._options import RegionCost
from autoremat.solve._problem import FindWork, build_problem, costs_of
from autoremat.solve._segments import is_possible
from autoremat.solve._stages import Stages
from autoremat.solve._table import Table
from autoremat.solve._variants import storable, stores_more

MAX_ROUNDS = 5
"""How often the limit is corrected by what the ledger says."""
MAX_DROPS = 8
"""How often it is asked whether a plan that leaves budget over fits without one of its regions."""
SLACK_SHARE = 0.002
"""Budget left over that is not worth another round, as a share of what plans can change."""

NUM_STEPS = 1024
"""Steps in which limits move when a plan is over its budget, in what plans can change."""
NUM_SEEDS = 16
"""For how many limits plans of a small step are looked around (see `_nearby`)."""
NUM_TIGHTEST, TIGHTEST_STEPS = 6, 6
"""How many limits near the smallest are tried for the smallest peak, and how many steps apart."""
DEPTH = 10
"""Cells are halved this often: budgets that differ by less than 1 / 1024 of what plans can change are the same."""

GENERAL_LEVELS = 4
"""In how many levels of the tree of budgets the exact program is asked, where a step branches."""
GENERAL_GAP, GENERAL_GAIN = 0.01, 0.005
"""Gap above which it is asked, and what it has to gain, as shares of the cost of the step."""

STAGES_LEVELS, STAGES_GAIN = 6, 0.001
"""In how many levels a row is solved by stages, and what that may gain at least, as a share of the cost of the step."""
MAX_REFINEMENTS = 16
"""How many plans next to one with nests are tried, in small steps: a GPT-2 gains little."""

Price = Callable[[Sequence[RegionSpec]], int]
Regions = tuple[RegionSpec, ...]
IsAllowed = Callable[["_Priced"], bool]
Solve = Callable[[int, float], Regions | None]
"""The cheapest regions within a limit that cost less than something."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Regions for one budget.

    Attributes:
        regions: Disjoint regions of all captured micro-steps, in order of execution.
        cost: What their recomputes cost together, in the unit of the costs given (FLOPs or seconds).
        peak_bytes: Peak of the step with them, from ``price``. Above the budget if that is below `smallest_bytes`.
        smallest_bytes: Smallest budget that this planner can meet for the step.
        bound: Least cost of any schedule within the budget that runs the same forward and backward ops in the same
            order and recomputes ops alone or in any groups (see `_bounds`); at most `cost` if the budget is met.
    """

    regions: tuple[RegionSpec, ...]
    cost: float
    peak_bytes: int
    smallest_bytes: int
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class _Priced:
    regions: tuple[RegionSpec, ...]
    cost: float
    moved_bytes: float
    """What recompute moves: tells apart what costs the same."""
    peak_bytes: int

    @property
    def rank(self) -> tuple[float, float]:
        """Lower is cheaper."""
        return self.cost, self.moved_bytes


@dataclass(frozen=True, slots=True, order=True)
class _Cell:
    """Budgets between two for which plans are known: positions on the scale of `Planner._budget_at`."""

    low: int
    high: int
    lower: _Priced = field(compare=False)
    upper: _Priced = field(compare=False)

    @property
    def is_open(self) -> bool:
        """Whether another plan may lie between the two."""
        return self.high - self.low > 1 and self.lower.regions != self.upper.regions

    def is_in_upper(self, levels: int) -> bool:
        """Whether it is in one of so many upper levels of the tree."""
        return self.high - self.low > 1 << (DEPTH - levels)

    @property
    def area(self) -> float:
        """How much is unknown: the rectangle between the two plans."""
        return (self.upper.peak_bytes - self.lower.peak_bytes) * (self.lower.cost - self.upper.cost)


class Planner:
    """Solves one step for any number of budgets.

    Example:
        ``Planner(graph, op_cost=flops, price=price).plan(8 * 2**30)``
    """

    @no_garbage_collection()
    def __init__(
        self,
        graph: StepGraph,
        *,
        op_cost: Sequence[float],
        price: Price,
        region_cost: RegionCost | None = None,
        flat: bool = False,
        find_work: FindWork | None = None,
    ) -> None:
        self._flat = flat
        self._find_work = find_work
        self._facts = collect_facts(graph, op_cost)
        self._op_cost = op_cost
        self._region_cost = region_cost
        self._moved = [float(op.moved_bytes) for op in graph.ops]
        self._problem = build_problem(self._facts, op_cost, region_cost, flat=flat)
        self._table = Table(self._problem.chain)
        self._general = General(self._problem) if branches(self._facts) else None
        self._is_small = self._facts.is_small
        self._storable = storable(self._problem) if self._is_small else frozenset[int]()
        self._is_tiny = not flat and Nearby.is_for(self._problem)
        self._stages = Stages.of(self._problem, self._storable, op_cost) if self._is_tiny else None
        self._price = price
        self._known: dict[tuple[RegionSpec, ...], _Priced] = {}
        self._costs: dict[RegionSpec, tuple[float, float]] = {}
        self._nodes: dict[int, _Priced] = {}
        self.plain_bytes = self._priced(()).peak_bytes
        self._step = max(1, (self.plain_bytes - self._table.smallest_limit) // NUM_STEPS)
        self._others = self._price_classics()
        """Plans that do not come from the table."""
        self._smallest = self._find_smallest()
        self._bound = Bound(self._facts, op_cost, self._smallest.peak_bytes, self.plain_bytes)

    @property
    def smallest_bytes(self) -> int:
        """Smallest budget that can be met, bytes."""
        return self._smallest.peak_bytes

    @property
    def least_bytes(self) -> int:
        """No schedule of the same ops in the same order has a smaller peak, bytes: proved."""
        return self._bound.least_bytes

    def bound(self, budget_bytes: int) -> float:
        """Least cost of any schedule within a budget (see `Solution.bound`)."""
        return self._bound.at(budget_bytes)

    def _priced(self, regions: tuple[RegionSpec, ...]) -> _Priced:
        if regions not in self._known:
            cost, moved = self._rank_of(regions)
            self._known[regions] = _Priced(regions, cost, moved, self._price(regions))
        return self._known[regions]

    def _solve(self, limit_bytes: int) -> _Priced | None:
        picks = self._table.picks(limit_bytes)
        return None if picks is None else self._priced(self._problem.regions(picks))

    def _price_classics(self) -> list[_Priced]:
        """Schedules known by name: no plan is dearer than one of these that fits its budget."""
        found, stacks = [], block_stacks(self._facts.graph)
        possible = cache(lambda calls: is_possible(self._facts, calls))
        for name in CLASSIC_NAMES:
            regions = classic_regions(self._facts.graph, name, stacks) or ()
            nested = (region for spec in regions for region in spec.with_children())
            are_possible = all(possible(region.calls) for region in nested)
            if regions and are_possible and (not self._flat or self._is_flat(regions)):
                found.append(self._priced(regions))
        return found

    def _is_flat(self, regions: Sequence[RegionSpec]) -> bool:
        """Whether compiled code can express them: none has others inside or needs to say which call is meant."""
        return not any(region.children for region in regions) and _is_unnumbered(self._facts.graph, regions)

    def _find_smallest(self) -> _Priced:
        """Of the plans for the smallest limits of the table, the one whose peak is lowest by the ledger.

        Once a plan is within its limit, larger ones only serve as long as they cost less at the same peak.
        """
        is_met, lowest = False, self.plain_bytes
        for attempt in range(NUM_TIGHTEST):
            limit = self._table.smallest_limit + attempt * TIGHTEST_STEPS * self._step
            found = self._solve(limit)
            if found is None or (is_met and found.peak_bytes > lowest):
                break
            is_met, lowest = is_met or found.peak_bytes <= limit, min(lowest, found.peak_bytes)
        smallest = self._lowest()
        if self._is_tiny and not (self._stages and self._stages.is_exact):
            self._others += self._explored()
            smallest = self._lowest()
        return self._refined(smallest, smallest.peak_bytes, lambda found: True)

    @no_garbage_collection()
    def _explored(self) -> list[_Priced]:
        """The best that lie near plans of the table for all budgets."""
        low, width = self._table.smallest_limit, max(0, self.plain_bytes - self._table.smallest_limit)
        for part in range(NUM_SEEDS):
            self._solve(low + width * part // NUM_SEEDS)
        near, scale = Nearby(self._problem, self._storable), (sum(self._op_cost) or 1.0, self.plain_bytes)
        return explore(list(self._known.values()), near, self._rank_of, self._priced, scale=scale)

    def _lowest(self) -> _Priced:
        """The known plan with the smallest peak, or the one by stages, if that is lower or costs less."""
        smallest = min(self._known.values(), key=lambda p: (p.peak_bytes, p.rank))
        if self._stages is None:
            return smallest
        low = self._stages.least_bytes - 1
        while smallest.peak_bytes - low > self._step:
            middle = (low + smallest.peak_bytes) // 2
            regions = self._stages.solve(middle)
            if regions is not None and self._priced(regions).peak_bytes <= middle:
                smallest = self._priced(regions)
            else:
                low = middle
        return self._improved(smallest, smallest.peak_bytes, lambda found: True, self._stages.solve)

    def plan(self, budget_bytes: int) -> Solution:
        """The cheapest regions found for a budget.

        Args:
            budget_bytes: Budget for the whole step, bytes.

        Returns:
            A solution within the budget, or the one of the smallest peak if the budget cannot be met.
        """
        if budget_bytes < self._smallest.peak_bytes:
            return self._solution(self._smallest, budget_bytes)
        cell = self._root()
        while cell.upper.peak_bytes > budget_bytes and cell.is_open:
            lower, upper = self._halve(cell)
            cell = upper if self._budget_at(upper.low) <= budget_bytes else lower
        best = cell.upper if cell.upper.peak_bytes <= budget_bytes else cell.lower
        return self._solution(best, budget_bytes)

    @no_garbage_collection()
    def frontier(self, num_points: int = 32) -> list[Solution]:
        """Solutions from the smallest peak to no recompute, none beaten by another in both peak and cost.

        Args:
            num_points: Most solutions to find. Cells between solutions that are far apart are halved first.
        """
        found = {self._smallest.regions: self._smallest, (): self._known[()]}
        queue = [(0.0, self._root())]
        while queue and len(found) < num_points:
            _, cell = heapq.heappop(queue)
            if cell.is_open and cell.area > 0:
                for half in self._halve(cell):
                    found.setdefault(half.lower.regions, half.lower)
                    heapq.heappush(queue, (-half.area, half))
        curve: list[Solution] = []
        for known in sorted(found.values(), key=lambda p: (p.peak_bytes, p.cost)):
            solution = self._asked_for(known.peak_bytes)
            if not curve or solution.cost < curve[-1].cost:
                curve.append(solution)
        return curve

    def _asked_for(self, budget_bytes: int) -> Solution:
        """The solution for a budget, or for its peak where that is another: whoever asks for the peak gets it.

        The plan for a little more may have a peak that fits, and be one that the plan for less was not found to be.
        """
        solution = self.plan(budget_bytes)
        while solution.peak_bytes < budget_bytes:
            budget_bytes = solution.peak_bytes
            solution = self.plan(budget_bytes)
        return solution

    def _root(self) -> _Cell:
        return _Cell(0, 2**DEPTH, self._smallest, self._known[()])

    def _budget_at(self, position: int) -> int:
        low, high = self._smallest.peak_bytes, self.plain_bytes
        return low + ((high - low) * position >> DEPTH)

    def _halve(self, cell: _Cell) -> tuple[_Cell, _Cell]:
        """Find the plan at the middle of a cell."""
        middle = (cell.low + cell.high) // 2
        if middle not in self._nodes:
            self._nodes[middle] = self._between(cell, self._budget_at(middle))
        found = self._nodes[middle]
        return _Cell(cell.low, middle, cell.lower, found), _Cell(middle, cell.high, found, cell.upper)

    def _between(self, cell: _Cell, budget_bytes: int) -> _Priced:
        """The cheapest plan found for a budget inside a cell, between the costs at its ends."""
        if cell.upper.peak_bytes <= budget_bytes:
            return cell.upper
        fitting = [p for p in self._others if p.peak_bytes <= budget_bytes and p.rank >= cell.upper.rank]
        best = min([cell.lower, *fitting], key=lambda p: (p.rank, p.peak_bytes))
        slack = SLACK_SHARE * (self.plain_bytes - self._smallest.peak_bytes)
        limit, step, was_over = budget_bytes, self._step, False
        for _ in range(MAX_ROUNDS):
            found = self._solve(limit)
            if found is None:
                break
            left = budget_bytes - found.peak_bytes
            if left < 0:
                limit, step, was_over = limit - max(-left, step), 2 * step, True
                continue
            if self._is_in(cell, found):
                best = min(best, found, key=lambda p: (p.rank, p.peak_bytes))
            if was_over or left <= slack or found.rank <= cell.upper.rank:
                break
            limit += left
        allowed = partial(self._is_in, cell)
        if self._stages is not None and self._is_wide(cell, best):
            best = self._improved(best, budget_bytes, allowed, self._stages.solve)
        if self._general is not None and cell.is_in_upper(GENERAL_LEVELS) and self._leaves_room(best, budget_bytes):
            best = self._improved(best, budget_bytes, allowed, self._by_program, gain=GENERAL_GAIN * sum(self._op_cost))
        if self._is_small and self._leaves_room(best, budget_bytes):
            starts = dict.fromkeys((best, cell.lower))  # the one for less memory may be of nests, which can store more
            refined = [self._refined(p, budget_bytes, allowed) for p in starts]
            best = min(refined, key=lambda p: (p.rank, p.peak_bytes))
        return self._pruned(best, cell, budget_bytes)

    def _by_program(self, limit_bytes: int, below: float) -> Regions | None:
        """What the exact program finds, where a step branches."""
        return None if self._general is None else self._general.solve(limit_bytes, below=below).regions

    def _improved(
        self, best: _Priced, budget_bytes: int, is_allowed: IsAllowed, solve: Solve, *, gain: float = 0.0
    ) -> _Priced:
        """A plan that another solver finds and that costs less than the best, by so much at least."""
        limit, below = budget_bytes, best.cost - gain
        for _ in range(MAX_ROUNDS):
            regions = solve(limit, below)
            if regions is None:
                break
            found = self._priced(regions)
            if found.peak_bytes <= budget_bytes:
                return found if is_allowed(found) and found.rank < best.rank else best
            limit -= found.peak_bytes - budget_bytes
        return best

    def _is_wide(self, cell: _Cell, best: _Priced) -> bool:
        """Whether solving by stages may gain anything worth it in a cell."""
        return cell.is_in_upper(STAGES_LEVELS) and best.cost - cell.upper.cost > STAGES_GAIN * sum(self._op_cost)

    def _leaves_room(self, best: _Priced, budget_bytes: int) -> bool:
        """Whether the bound allows a much better plan."""
        room = GENERAL_GAP * sum(self._op_cost)
        return best.cost > room and best.cost > room + self._bound.at(budget_bytes)

    def _refined(self, best: _Priced, budget_bytes: int, is_allowed: IsAllowed) -> _Priced:
        """The plan with outputs stored in its nests that the table did not think of, the most gain first."""
        if not self._is_small:
            return best
        asked: set[tuple[RegionSpec, ...]] = set()
        for _ in range(MAX_REFINEMENTS):
            nearby = [regions for regions in self._nearby(best.regions) if regions not in asked]
            if not nearby:
                break
            regions = min(nearby, key=self._rank_of)
            asked.add(regions)
            if self._rank_of(regions) < best.rank:
                found = self._priced(regions)
                if found.peak_bytes <= budget_bytes and is_allowed(found):
                    best = found
        return best

    def _nearby(self, regions: tuple[RegionSpec, ...]) -> Iterator[tuple[RegionSpec, ...]]:
        """Plans in which one nest stores the outputs of one op more; not of nests with copies to change with them."""
        alone = {group[0] for group in self._by_name(regions) if len(group) == 1}
        for position, spec in enumerate(regions):
            if spec.children and spec in alone:
                for other in stores_more(self._facts, spec, self._storable, self._op_cost):
                    yield (*regions[:position], other, *regions[position + 1 :])

    def _pruned(self, best: _Priced, cell: _Cell, budget_bytes: int) -> _Priced:
        """The plan without regions, the dearest first, that the budget turns out not to need: what is inside stays.

        The table takes what one region does to another at its worst, so a plan of it may have some in vain.
        """
        slack = SLACK_SHARE * (self.plain_bytes - self._smallest.peak_bytes)
        queue: list[list[tuple[RegionSpec, ...]]] = []
        if budget_bytes - best.peak_bytes > slack:
            queue = _halves(sorted(self._by_name(best.regions), key=self._rank_of))
        for _ in range(MAX_DROPS):
            if not queue or budget_bytes - best.peak_bytes <= slack:
                break
            groups = queue.pop()
            dropped = {spec for group in groups for spec in group}
            rest = (spec.children if spec in dropped else (spec,) for spec in best.regions)
            found = self._priced(tuple(spec for specs in rest for spec in specs))
            if found.peak_bytes <= budget_bytes and self._is_in(cell, found) and found.rank < best.rank:
                best = found
            else:
                queue += _halves(groups)
        return best

    def _by_name(self, regions: Sequence[RegionSpec]) -> list[tuple[RegionSpec, ...]]:
        """Each region with its copies, in other micro-steps or of modules called again: what is alike stays alike."""
        groups: dict[tuple[str, ...], list[RegionSpec]] = defaultdict(list)
        for spec in regions:
            groups[tuple(self._facts.graph.calls[c].path for c in spec.calls)].append(spec)
        return list(map(tuple, groups.values()))

    def _rank_of(self, regions: Sequence[RegionSpec]) -> tuple[float, float]:
        """What recompute of regions costs, and the bytes that it moves."""
        for spec in regions:
            if spec not in self._costs:
                costs = self._op_cost, self._moved
                cost, moved = costs_of(self._facts, (spec,), costs, self._region_cost, self._find_work)
                self._costs[spec] = cost, moved
        found = [self._costs[spec] for spec in regions]
        return sum(cost for cost, _ in found), sum(moved for _, moved in found)

    def _is_in(self, cell: _Cell, found: _Priced) -> bool:
        """Whether a plan may stand in a cell: it is not cheaper than the plan for more budget.

        One with a peak below the smallest budget may not: nobody who asked for that peak would get it.
        """
        return found.rank >= cell.upper.rank and found.peak_bytes >= self.smallest_bytes

    def _solution(self, priced: _Priced, budget_bytes: int) -> Solution:
        return Solution(
            regions=priced.regions,
            cost=priced.cost,
            peak_bytes=priced.peak_bytes,
            smallest_bytes=self._smallest.peak_bytes,
            bound=self._bound.at(budget_bytes) if priced.cost > 0 else 0.0,
        )


def _is_unnumbered(graph: StepGraph, regions: Sequence[RegionSpec]) -> bool:
    """Whether all calls of a module are treated alike, so that regions need not say which is meant."""
    return all(call.number is None for region in describe_all(graph, regions) for call in region.calls)


def _halves(groups: list[tuple[RegionSpec, ...]]) -> list[list[tuple[RegionSpec, ...]]]:
    """Two lists of about half of a list each; nothing of a list of one."""
    middle = len(groups) // 2
    return [groups[:middle], groups[middle:]] if middle else []


def plan_regions(graph: StepGraph, *, budget_bytes: int, op_cost: Sequence[float], price: Price) -> Solution:
    """Choose regions for a budget.

    Args:
        graph: The step.
        budget_bytes: Budget for the whole step, bytes.
        op_cost: Cost of each op, in the order of ``graph.ops``: FLOPs or seconds.
        price: Peak bytes of the step with given regions, from the ledger.

    Returns:
        The solution. If its peak is above the budget, no plan of this planner meets the budget.
    """
    return Planner(graph, op_cost=op_cost, price=price).plan(budget_bytes)


def frontier_regions(
    graph: StepGraph, *, op_cost: Sequence[float], price: Price, num_points: int = 32
) -> list[Solution]:
    """Solutions from the smallest peak to no recompute.

    Args:
        graph: The step.
        op_cost: Cost of each op, in the order of ``graph.ops``.
        price: Peak bytes of the step with given regions.
        num_points: How many budgets to solve for.
    """
    return Planner(graph, op_cost=op_cost, price=price).frontier(num_points)
