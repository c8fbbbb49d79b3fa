"""Functions that a module's forward calls by itself, as calls of regions: seen by a function mode while forward runs.

Recompute calls such a function again, with its arguments: those that calls of the same region returned are made again,
all others are stored. Arguments are taken apart first, so that tensors in lists (``torch.cat``) count, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoremat._own_calls import function_name, running_module, runs_forward, takes_part
from autoremat.runtime import _torch_compat as compat


class FunctionCall:
    """One call of a function. Has a ``forward`` like a module, which takes what the arguments consist of."""

    __slots__ = ("_function", "_structure")

    def __init__(self, function: Callable[..., Any], structure: pytree.TreeSpec) -> None:
        self._function = function
        self._structure = structure

    def forward(self, *leaves: Any) -> Any:
        """Call the function."""
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self._function(*args, **kwargs)


OnCall = Callable[..., Any]
"""Runs a `FunctionCall`, which it gets with what the arguments consist of."""
Watched = Mapping[str, Callable[[], OnCall | None]]
"""By name: what says how the next call of that name is to be run; None for one like any other."""


class FunctionMode(TorchFunctionMode):
    """Runs the functions that a module's forward calls by itself as a plan has it.

    Args:
        owner: The module.
        watched: The functions of the plan.
    """

    def __init__(self, owner: nn.Module, watched: Watched) -> None:
        super().__init__()
        self.owner = owner
        self._watched = watched
        self._covers: list[FunctionMode] = []
        self._is_covered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)  # of a module that is compiled by itself
        next_call = None if self._is_covered else self._watched.get(function_name(func))
        if next_call is None or running_module() is not self.owner:
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        on_call = next_call() if takes_part(leaves) else None
        if on_call is None:
            return func(*args, **kwargs)
        return on_call(FunctionCall(func, structure), *leaves)

    def start(self) -> None:
        """The forward starts. One of the same module that is running, or was left by a KeyboardInterrupt, waits."""
        self._covers = [mode for mode in _running() if mode.owner is self.owner and not mode._is_covered]
        for mode in self._covers:
            mode._is_covered = True
        compat.push_function_mode(self)

    def stop(self) -> None:
        """The forward is over. Modes that it has left behind stay."""
        modes = compat.function_modes()
        if any(mode is self for mode in modes):
            compat.replace_function_modes(tuple(mode for mode in modes if mode is not self))
        for mode in self._covers:
            mode._is_covered = False


@runs_forward
def run_watched(self: nn.Module, watched: Watched, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, with these functions watched."""
    mode = FunctionMode(self, watched)
    mode.start()
    try:
        return self.forward(*args, **kwargs)
    finally:
        mode.stop()


def stop_watching(module: nn.Module) -> None:
    """The innermost forward of this module is over."""
    mode = next((mode for mode in reversed(_running()) if mode.owner is module), None)
    if mode is not None:
        mode.stop()


def stop_all_in(model: nn.Module) -> None:
    """A forward of this model starts: what watches its modules was left by a KeyboardInterrupt."""
    modes = _running()
    modules = set(model.modules()) if modes else ()
    for mode in modes:
        if mode.owner in modules:
            mode.stop()


def _running() -> list[FunctionMode]:
    return [mode for mode in compat.function_modes() if isinstance(mode, FunctionMode)]
