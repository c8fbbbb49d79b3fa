"""Rows: calls that follow one another, each of which gets a tensor that the one before returned.

Spans are parts of rows. The calls that one module makes are rows; so are calls of several modules where these do
nothing but pass a tensor through a row of their own (``nn.Sequential``): then spans may start in one such module and
stop in another. For the solver the calls in such a module stand for it, or regions could overlap without being nested;
once regions are chosen, whole ones are written as the module again (`Rows.folded`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve._facts import Facts

Calls = tuple[int, ...]
Row = tuple[Calls, ...]
"""What a span of it starts and stops between: single calls, or the calls that stand for one module."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step.

    Attributes:
        graph: The step.
        rows: In the first micro-step.
        twins: Each module call of the first micro-step with its copies in the others; only those that all have.
        inner: By module call: the calls that stand for it.
        modules: By the first of them, in all micro-steps: modules with the calls that stand for them, longest first.
    """

    graph: StepGraph
    rows: tuple[Row, ...]
    twins: dict[int, Calls]
    inner: dict[int, Calls]
    modules: dict[int, list[tuple[int, Calls]]]

    def unfolded(self, call: int) -> Calls:
        """A call, or those that stand for it."""
        return self.inner.get(call, (call,))

    def copies(self, calls: Calls) -> tuple[Calls, ...]:
        """The same calls in each micro-step."""
        later = range(1, len(self.twins[calls[0]]))
        return (calls, *(tuple([self.twins[call][step] for call in calls]) for step in later))

    def short(self, calls: Calls) -> Calls:
        """Calls with modules in place of all calls that stand for them."""
        found: list[int] = []
        start = 0
        while start < len(calls):
            here = ((m, c) for m, c in self.modules.get(calls[start], ()) if calls[start : start + len(c)] == c)
            module, inner = next(here, (calls[start], calls[start : start + 1]))
            found.append(module)
            start += len(inner)
        return tuple(found)

    def folded(self, spec: RegionSpec, *, as_is: bool = False) -> RegionSpec:
        """The same region with modules in place of all calls that stand for them, where what is inside allows it.

        Args:
            spec: The region.
            as_is: Only in what is inside it.
        """
        if not self.modules:
            return spec
        calls = spec.calls if as_is else self.short(spec.calls)
        if any(not self._fits(child, calls) for child in spec.children):
            calls = spec.calls
        children = tuple(self.folded(c, as_is=calls == spec.calls and c.is_part_of(spec)) for c in spec.children)
        return dataclasses.replace(spec, call=calls[0], then=calls[1:], children=children)

    def _fits(self, child: RegionSpec, calls: Calls) -> bool:
        """Whether a region consists of some of these calls, or lies in one of them."""
        if set(self.short(child.calls)) <= set(calls):
            return True
        around = (self.graph.subtree(call) for call in calls)
        return any(child.calls[0] in inside and child.calls[-1] in inside for inside in around)


def find_rows(facts: Facts, *, joined: bool = True) -> Rows:
    """Find the rows of a step.

    Args:
        facts: The step.
        joined: Whether rows go on from one module to the next, and with functions between modules.
    """
    twins = _twins(facts)
    siblings: dict[int, list[int]] = defaultdict(list)
    for call in twins if joined else [c for c in twins if not facts.graph.calls[c].is_function]:
        siblings[facts.graph.calls[call].parent].append(call)
    inner: dict[int, Calls] = {}

    def unfolded(calls: Sequence[int]) -> list[Calls]:
        return [inner.get(call, (call,)) for call in calls]

    for parent in sorted(siblings, reverse=True) if joined else ():  # inner calls come after those around them
        if parent in twins and _passes_through(facts, twins, parent, siblings[parent]):
            inner[parent] = tuple(call for part in unfolded(siblings[parent]) for call in part)
    found: dict[Row, None] = {}
    for parent, calls in siblings.items():
        parts = unfolded(calls)
        found |= dict.fromkeys(_linked(facts, twins, parts))
        if parent not in inner and any(len(part) > 1 for part in parts):
            found |= dict.fromkeys(_linked(facts, twins, [(call,) for part in parts for call in part]))
    modules: dict[int, list[tuple[int, Calls]]] = defaultdict(list)
    for call in sorted(inner):  # those around others come first
        for module, *stand_ins in zip(twins[call], *(twins[c] for c in inner[call]), strict=True):
            modules[stand_ins[0]].append((module, tuple(stand_ins)))
    return Rows(facts.graph, tuple(found), twins, inner, dict(modules))


def _twins(facts: Facts) -> dict[int, Calls]:
    calls, num_steps = facts.graph.calls, len(facts.spans)
    by_name = {(c.micro_step, c.path, c.number): c.index for c in calls}
    found: dict[int, Calls] = {}
    for call in calls:
        if call.micro_step == 0 and call.parent >= 0:
            group = [by_name.get((step, call.path, call.number)) for step in range(num_steps)]
            same = tuple(member for member in group if member is not None)
            if len(same) == num_steps:
                found[call.index] = same
    return found


def _passes_through(facts: Facts, twins: dict[int, Calls], around: int, inside: Sequence[int]) -> bool:
    """Whether a module's forward consists of one row of calls that get nothing else, in every micro-step."""
    calls = facts.graph.calls
    steps = zip(twins[around], *(twins[call] for call in inside), strict=True)
    return all(
        calls[first].inputs == calls[module].inputs
        and calls[rest[-1] if rest else first].outputs == calls[module].outputs
        and all(_is_all_of(facts, before, call) for before, call in pairwise((first, *rest)))
        for module, first, *rest in steps
    )


def _is_all_of(facts: Facts, before: int, call: int) -> bool:
    """Whether a call gets what the one before returned and nothing else: no mask, no residual."""
    return facts.graph.calls[call].inputs == facts.graph.calls[before].outputs and _feeds(facts, before, call)


def _feeds(facts: Facts, before: int, call: int) -> bool:
    return any(source == before for _, source in facts.graph.calls[call].links)


def _linked(facts: Facts, twins: dict[int, Calls], parts: Sequence[Calls]) -> Iterator[Row]:
    """The longest rows of these calls."""
    row = [parts[0]]
    for before, part in pairwise(parts):
        if all(_feeds(facts, b, c) for b, c in zip(twins[before[-1]], twins[part[0]], strict=True)):
            row.append(part)
            continue
        yield tuple(row)
        row = [part]
    yield tuple(row)
