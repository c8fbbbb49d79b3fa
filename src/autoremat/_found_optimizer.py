"""The optimizer that trains a model: found among those that exist, and made again for a copy of the model.

A model does not know its optimizer. At the first training step it exists, as a rule: it is looked up among all living
objects, once, which takes a fraction of a second and changes nothing.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoremat._model_states import OptimizerFactory


def find_optimizers(model: nn.Module) -> list[Optimizer]:
    """Every living optimizer that has a trained parameter of the model; wrappers around optimizers are left out.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> find_optimizers(model) == [optimizer]
        True
    """
    own = {id(p) for p in model.parameters() if p.requires_grad}
    # type(), since isinstance() asks __class__, which lazy stand-ins of other packages answer by importing things.
    gc.collect()  # dead optimizers in reference cycles would be found, too
    living = [x for x in gc.get_objects() if issubclass(type(x), Optimizer) and "param_groups" in vars(x)]
    training = [x for x in living if any(id(p) in own for group in x.param_groups for p in group["params"])]
    # Lightning's wrapper is an optimizer that shares the state of the one inside.
    training.sort(key=lambda x: -len(type(x).__mro__))
    return list({id(x.state): x for x in training}.values())


def factory_like(optimizers: Sequence[Optimizer], model: nn.Module) -> OptimizerFactory:
    """A function that makes such optimizers, without state, for the trained parameters of a copy of the model.

    Args:
        optimizers: At least one.
        model: The model that they train.
    """
    positions = {id(p): i for i, p in enumerate(p for p in model.parameters() if p.requires_grad)}

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        copies = list(parameters)
        of = {key: copies[i] for key, i in positions.items()}
        made = [_made_again(optimizer, of) for optimizer in optimizers]
        return made[0] if len(made) == 1 else _Together(made)

    make.__qualname__ = " and ".join(dict.fromkeys(type(o).__name__ for o in optimizers))
    return make


def _made_again(optimizer: Optimizer, of: dict[int, nn.Parameter]) -> Optimizer:
    """The same optimizer for other parameters. Constructors differ too much to be called."""
    made = optimizer.__class__.__new__(optimizer.__class__)
    own = {name: value for name, value in vars(optimizer).items() if not _is_attached(name, value)}
    groups = [
        {**group, "params": [of[id(p)] for p in group["params"] if id(p) in of]} for group in optimizer.param_groups
    ]
    state = {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups}
    made.__dict__.update(own)
    made.__setstate__(state)
    return made


def _is_attached(name: str, value: Any) -> bool:
    """What others have put on the optimizer: hooks, and methods that a scheduler has wrapped."""
    return "hook" in name or callable(value)


class _Together(Optimizer):
    """Several optimizers that step one after the other."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        super().__init__([{"params": list(dict.fromkeys(_parameters(optimizers)))}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all of them; their states together are this one's."""
        for optimizer in self._optimizers:
            optimizer.step()
            self.state.update(optimizer.state)


def _parameters(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
