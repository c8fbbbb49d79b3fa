"""Functions that a module's forward calls by itself, between the calls of modules: ``torch.cat``, ``x + y``, a ReLU.

Each is a call like those of modules, so that a region can begin, end or go on there. It is known by the path of the
module, the function's name and how many calls of that path came before: ``"up.0.cat()"``, call 2. Only those count that
take a tensor which requires a gradient.

Known limit: only functions that PyTorch lets a function mode see, which a custom ``torch.autograd.Function`` is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

NO_CALLS = frozenset({"batch_norm", "instance_norm", "grad", "backward"})
"""Functions that are no calls: their kernels may change running statistics, or they run backward."""
_FORWARDS: set[CodeType] = {nn.Module._call_impl.__code__}


def runs_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose local variable ``self`` is a module, the forward of which it runs."""
    _FORWARDS.add(function.__code__)
    return function


def running_module() -> object:
    """The module whose forward is running, the innermost; None outside of all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _FORWARDS:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def function_name(function: Any) -> str:
    """What a function is known by: ``"add"`` for ``x + y``."""
    name = getattr(function, "__name__", "")
    return name if isinstance(name, str) else ""


def takes_part(arguments: Any) -> bool:
    """Whether a call of a function takes part in autograd, so that it counts."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_iter(arguments))
