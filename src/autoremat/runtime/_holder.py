"""What stands for a saved tensor in autograd's graph until backward needs it."""

from __future__ import annotations

from typing import Protocol

import torch

from autoremat._errors import RecomputeError
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._module_state import version_of
from autoremat.runtime._recipe import Recipe


class Source(Protocol):
    """Where a holder gets its tensor back from.

    Attributes:
        recipe: What region it is.
        is_kept: Whether the backward that recomputed it keeps the graph for another.
        group: The ``GraphExecGroup`` of that backward.
    """

    recipe: Recipe
    is_kept: bool
    group: object | None

    def recompute(self) -> None:
        """Fill the holders."""

    def forget(self) -> None:
        """Empty them again."""


class Holder:
    """Stands for one saved tensor in autograd's graph."""

    __slots__ = ("__weakref__", "frame", "is_read", "value", "version")

    def __init__(self, frame: Source) -> None:
        self.frame = frame
        self.value: torch.Tensor | None = None
        self.is_read = False
        self.version = 0

    def bring_back(self) -> torch.Tensor:
        """The value, recomputed."""
        frame = self.frame
        if self.is_read and frame.group is not None and frame.group is compat.graph_exec_group():
            raise frame.recipe.error(
                f"{frame.recipe.name}: Performing two backward calls that overlap is not allowed in a GraphExecGroup. "
                "Let them need different saved tensors, or leave the group in between."
            )
        frame.recompute()
        if self.value is None:
            raise RecomputeError(f"{frame.recipe.name}: recompute did not bring a saved tensor back.")
        return self.value

    def give_away(self) -> None:
        """Hold the value no longer, where the graph is kept and another backward may recompute it."""
        self.is_read = True
        self.value = None
        if not compat.in_backward():
            self.frame.forget()


def unpack(holder: Holder) -> torch.Tensor:
    """What autograd calls when backward needs a saved tensor."""
    value = holder.value
    if value is None:
        value = holder.bring_back()
    if holder.version != version_of(value):
        raise RecomputeError(
            f"{holder.frame.recipe.name}: one of the variables needed for gradient computation has been modified by an "
            "inplace operation inside the region. Plain autograd refuses this too; write the operation out of place."
        )
    if holder.frame.is_kept:
        holder.give_away()
    return value
