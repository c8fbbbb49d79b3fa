"""Solvers: from a `StepGraph` and a budget to regions. Pure data; never imports torch."""

from autoremat.solve._planner import Planner, Price, Solution, frontier_regions, plan_regions

__all__ = ["Planner", "Price", "Solution", "frontier_regions", "plan_regions"]
