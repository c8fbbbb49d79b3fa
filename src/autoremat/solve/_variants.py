"""Plans next to a plan with nests: a nest, or a region inside one, that stores the outputs of one op more.

The table knows few sets of outputs that nests may store (see `_nests`); plans that it cannot see are tried one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice

from autoremat._replay import RegionSpec, replay
from autoremat.solve._facts import Facts
from autoremat.solve._problem import Problem
from autoremat.solve._units import can_be_stored

MAX_TRIED_OPS = 8
"""Ops whose outputs are tried for one region, those that take most to run again first."""


def storable(problem: Problem) -> frozenset[int]:
    """Storages that some option or store set stores."""
    options = (option.kept for options in problem.options for option in options)
    return frozenset().union(*options, *(found for sets in problem.sets for found in sets))


def stores_more(
    facts: Facts, spec: RegionSpec, allowed: frozenset[int], op_cost: Sequence[float]
) -> Iterator[RegionSpec]:
    """A region as it is but for the outputs of one more op that it, or one inside it, stores.

    Args:
        facts: The step.
        spec: The region.
        allowed: What may be stored.
        op_cost: Cost of each op.
    """
    work, end = replay(facts.graph, spec, facts.saved_in(*spec.calls)), facts.graph.calls[spec.calls[-1]].end
    makers = sorted((i for i in work.ops if op_cost[i] > 0), key=lambda i: (-op_cost[i], i))
    read = work.needed.union(*(facts.graph.ops[i].inputs for i in work.ops))

    def outputs(op: int) -> frozenset[int]:
        asked = (s for s in facts.graph.ops[op].outputs if facts.graph.storages[s].born == op and s in read)
        return frozenset(s for s in asked if s in allowed and can_be_stored(facts, end, s)) - spec.kept

    for found in islice(filter(None, map(outputs, makers)), MAX_TRIED_OPS):
        yield dataclasses.replace(spec, kept=spec.kept | found, is_whole=False)
    for position, child in enumerate(spec.children):
        for other in stores_more(facts, child, allowed, op_cost):
            children = (*spec.children[:position], other, *spec.children[position + 1 :])
            yield dataclasses.replace(spec, children=children)
