"""A model's state, saved and put back: what verify and measure change is as it was when they return."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoremat._random import RandomState

_MODULE_TABLES = frozenset(vars(nn.Module()))
"""Attributes that `nn.Module` itself keeps: parameters, hooks and the like are handled on their own or not touched."""


class ModelState:
    """Values of parameters, buffers, gradients, plain attributes and random state at one moment.

    Holds a copy of every parameter and buffer.

    Args:
        model: Any module.
        parameters: False leaves the values of parameters out.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = True) -> None:
        self._model = model
        tensors = (*model.parameters(), *model.buffers()) if parameters else model.buffers()
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._buffers = [(m, dict(m._buffers)) for m in model.modules()]
        self._attributes = [(m, _plain_attributes(m)) for m in model.modules()]
        self._training = [(m, m.training) for m in model.modules()]
        self._random = RandomState.now()

    def restore(self) -> None:
        """Put everything back."""
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, attributes in self._attributes:
            for name in set(_plain_attributes(module)) - set(attributes):
                del module.__dict__[name]
            module.__dict__.update(_copy_containers(attributes))
        for module, training in self._training:
            module.training = training
        self._random.restore()


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[ModelState]:
    """Save a model's state, set its gradients to None, and put everything back on exit."""
    state = ModelState(model)
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield state
    finally:
        state.restore()


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    found = {name: value for name, value in vars(module).items() if name not in _MODULE_TABLES}
    return _copy_containers(found)


def _copy_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Containers as copies of their own (what they contain is shared), tensors as they are."""
    return {
        name: copy.copy(value) if isinstance(value, list | dict | set | deque) else value
        for name, value in attributes.items()
    }


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of modules, or in a list, tuple or dict that is, by name."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _MODULE_TABLES:
                continue
            items: list[tuple[str, Any]] = [("", value)]
            if isinstance(value, list | tuple | deque):
                items = [(f"[{i}]", v) for i, v in enumerate(value)]
            elif isinstance(value, dict):
                items = [(f"[{k!r}]", v) for k, v in value.items()]
            prefix = f"{path}.{name}" if path else name
            found.update({prefix + suffix: v for suffix, v in items if isinstance(v, Tensor)})
    return found
