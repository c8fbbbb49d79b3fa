"""Executing plans: regions that drop their saved tensors after forward and recompute them in backward."""

from __future__ import annotations

from autoremat.runtime._attach import Applied, ExecutedRegion, apply
from autoremat.runtime._checkpoint import checkpoint, checkpoint_sequential
from autoremat.runtime._explain import ExplainedRegion, Explanation, HeldStorage, explain
from autoremat.runtime._hooks import replay_safe

__all__ = [
    "Applied",
    "ExecutedRegion",
    "ExplainedRegion",
    "Explanation",
    "HeldStorage",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "explain",
    "replay_safe",
]
