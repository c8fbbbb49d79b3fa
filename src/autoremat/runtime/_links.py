"""What links the calls of a span: arguments that are the very tensors which an earlier call returned.

Recompute makes such an argument again, so the span need not store it. Only identity counts: a view of an output, a
copy, or an output changed in place since is stored like any other argument, and correctness never depends on a link.
Looked for among arguments and in tuples of them; what lists, dictionaries and objects hold is stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autoremat.runtime._module_state import version_of
from autoremat.runtime._structure import Copier
from autoremat.runtime._torch_compat import cut


class Link:
    """Stands for an argument that an earlier call of the span returned.

    Attributes:
        run: Which of the region's executions returned it.
        place: Which of the tensors that it returned.
        requires_grad: Whether it required a gradient when it was passed on.
    """

    __slots__ = ("place", "requires_grad", "run")

    def __init__(self, run: int, place: int, *, requires_grad: bool) -> None:
        self.run = run
        self.place = place
        self.requires_grad = requires_grad


class Returned:
    """Tensors that the calls of a span have returned so far, held weakly."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int]] = {}

    def note(self, output: Any, run: int) -> None:
        """An execution has returned this."""
        for place, tensor in enumerate(tensors_in(output)):
            self._known[id(tensor)] = (weakref.ref(tensor), run, place, version_of(tensor))

    def link_or_copy(self, value: Any, name: str, copier: Copier) -> Any:
        """An argument with links in place of tensors that are known."""
        if isinstance(value, torch.Tensor):
            reference, run, place, version = self._known.get(id(value), (None, 0, 0, 0))
            if reference is not None and reference() is value and version == version_of(value):
                return Link(run, place, requires_grad=value.requires_grad)
        elif type(value) is tuple:
            return tuple([self.link_or_copy(item, f"{name}[{i}]", copier) for i, item in enumerate(value)])
        return copier.copy(value, name)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Tensors of a module's output, in a fixed order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from tensors_in(item)


def links_in(values: Iterable[Any]) -> Iterator[Link]:
    """Links among copied arguments."""
    for value in values:
        if type(value) is Link:
            yield value
        elif type(value) is tuple:
            yield from links_in(value)


def relinked(value: Any, outputs: dict[int, list[torch.Tensor]]) -> Any:
    """An argument with what the earlier executions have returned this time in place of links."""
    kind = type(value)
    if kind is tuple:
        return tuple([relinked(item, outputs) for item in value])
    if kind is not Link:
        return value
    tensor = outputs[value.run][value.place]
    if tensor.requires_grad != value.requires_grad:
        tensor = cut(tensor, requires_grad=value.requires_grad)
    return tensor


def shifted(value: Any, runs: dict[int, int], outputs: dict[int, list[torch.Tensor]]) -> Any:
    """An argument of a span as a region inside it sees it.

    Args:
        value: The argument, with the links of the outer span.
        runs: Executions of the inner region, by those of the outer one.
        outputs: What the outer one's executions have returned this time; a link to one outside the inner region
            becomes the tensor.
    """
    if type(value) is tuple:
        return tuple([shifted(item, runs, outputs) for item in value])
    if type(value) is not Link:
        return value
    if value.run in runs:
        return Link(runs[value.run], value.place, requires_grad=value.requires_grad)
    return cut(outputs[value.run][value.place], requires_grad=value.requires_grad)
