"""Solvers: from a `StepGraph` and a budget to regions. Pure data; never imports torch."""

from autoremat.solve._classic import CLASSIC_NAMES, block_stacks, classic_regions
from autoremat.solve._planner import Planner, Price, Solution, frontier_regions, plan_regions

__all__ = [
    "CLASSIC_NAMES",
    "Planner",
    "Price",
    "Solution",
    "block_stacks",
    "classic_regions",
    "frontier_regions",
    "plan_regions",
]
