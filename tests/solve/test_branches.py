"""Steps of real models with branches and joins: what the table promises is what the ledger says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat.solve import Planner


def unit(channels_in: int, channels: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels, size, padding=size // 2), nn.BatchNorm2d(channels), nn.ReLU())


class Branches(nn.Module):
    """Three branches that are joined, as in Inception."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = unit(channels, channels // 4, 1)
        self.two = nn.Sequential(unit(channels, channels // 2, 1), unit(channels // 2, channels // 4, 3))
        self.three = nn.Sequential(unit(channels, channels // 2, 1), unit(channels // 2, channels // 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([self.one(x), self.two(x), self.three(x)], 1)


@pytest.fixture(scope="module")
def branches() -> ar.StepGraph:
    model = nn.Sequential(*(Branches(8) for _ in range(3)))
    return ar.trace(model, torch.ones(2, 8, 16, 16), loss=lambda out: out.square().mean(), optimizer=None)


def planner_of(graph: ar.StepGraph) -> Planner:
    cost = [float(op.flops) for op in graph.ops]
    return Planner(graph, op_cost=cost, price=lambda specs: peak_bytes(graph, expand(graph, specs)))


def test_what_the_table_says_fits_does_fit(branches: ar.StepGraph) -> None:
    """Ops of the loss between the turn and the first recompute see what the last region has dropped, no more."""
    planner = planner_of(branches)
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        limit = planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))
        found = planner._solve(limit)
        assert found is not None
        assert found.peak_bytes <= limit
