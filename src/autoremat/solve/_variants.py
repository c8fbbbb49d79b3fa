"""Plans next to a plan with nests: a nest, or a region inside one, that stores one output more.

The table knows few sets of outputs that nests may store, and counts what they store as alive until their backward ends
(see `_nests`). The ledger knows better, so plans that the table cannot see are tried one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice

from autoremat._replay import RegionSpec, replay
from autoremat.solve._facts import Facts
from autoremat.solve._problem import Problem
from autoremat.solve._units import can_be_stored

MAX_OUTPUTS = 8
"""Outputs tried for one region, those that take most to make again first."""


def storable(problem: Problem) -> frozenset[int]:
    """Storages that some option or store set stores."""
    options = (option.kept for options in problem.options for option in options)
    return frozenset().union(*options, *(found for sets in problem.sets for found in sets))


def stores_more(
    facts: Facts, spec: RegionSpec, allowed: frozenset[int], op_cost: Sequence[float]
) -> Iterator[RegionSpec]:
    """A region as it is but for one more output that it, or one inside it, stores.

    Args:
        facts: The step.
        spec: The region.
        allowed: What may be stored.
        op_cost: Cost of each op.
    """
    work, end = replay(facts.graph, spec, facts.saved_in(*spec.calls)), facts.graph.calls[spec.calls[-1]].end
    makers = sorted((i for i in work.ops if op_cost[i] > 0), key=lambda i: (-op_cost[i], i))
    storages = facts.graph.storages
    made = (s for i in makers for s in dict.fromkeys(facts.graph.ops[i].outputs) if storages[s].born == i)
    outputs = (s for s in made if s in allowed and s not in spec.kept and can_be_stored(facts, end, s))
    for s in islice(outputs, MAX_OUTPUTS):
        yield dataclasses.replace(spec, kept=spec.kept | {s}, is_whole=False)
    for position, child in enumerate(spec.children):
        for other in stores_more(facts, child, allowed, op_cost):
            children = (*spec.children[:position], other, *spec.children[position + 1 :])
            yield dataclasses.replace(spec, children=children)
