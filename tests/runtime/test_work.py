"""How the work of planning and running grows with the number of layers, in lines of our own code that run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import autoremat as ar
from autoremat._plan import Plan
from autoremat._regions import describe_all, resolve
from autoremat.runtime import apply
from chains import ThinChain, nested, uniform

OURS = str(Path(ar.__file__).parent)
GROWTH = {"spans of 8": 4.4, "one span": 4.4, "recursive": 6.0}
"""Bounds for four times the layers: four times the work; where regions nest, in 7 levels after 5 (5.6)."""


def lines_run(function) -> int:
    """How many lines of our code run; every turn of a comprehension counts as one."""
    count = 0

    def local(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return local

    def is_ours(frame, _event, _argument):
        return local if frame.f_code.co_filename.startswith(OURS) else None

    found = sys.gettrace()
    sys.settrace(is_ours)
    try:
        function()
    finally:
        sys.settrace(found)
    return count


def regions(kind, num_blocks):
    if kind == "recursive":
        return nested(0, num_blocks - 1, 2)
    return uniform(num_blocks, 8 if kind == "spans of 8" else num_blocks)


def work(kind, num_blocks) -> dict[str, int]:
    """Lines run by each part of planning and running a step."""
    model, batch = ThinChain(num_blocks), (torch.ones(2, 4),)
    graph, plan = ar.trace(model, batch, optimizer=None), Plan(regions(kind, num_blocks))
    counts = {"resolve": lines_run(lambda: resolve(graph, plan))}
    specs = resolve(graph, plan)
    counts["describe"] = lines_run(lambda: describe_all(graph, specs))
    counts["profile"] = lines_run(lambda: ar.profile(graph, plan))
    counts["apply"] = lines_run(lambda: apply(model, plan).remove())
    with apply(model, plan):
        for step in ("first step", "later step"):
            counts[step] = lines_run(lambda: model(*batch).backward())
        counts["explain"] = lines_run(lambda: ar.explain(model))
    return counts


@pytest.mark.parametrize("kind", GROWTH)
def test_four_times_the_layers_are_little_more_than_four_times_the_work(kind):
    small, large = work(kind, 32), work(kind, 128)
    grown = {part: large[part] / small[part] for part in small}
    assert max(grown.values()) < GROWTH[kind], grown
