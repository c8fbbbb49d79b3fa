"""Copies of argument structure: containers are copied, tensors are kept by reference.

Recompute must get what forward got. Tensors are guarded by their version; containers, caches and other plain
objects that forward may change are copied when forward starts, and recompute works on the copy. If forward turns
out to have changed such an object (a key-value cache), the tensors in those parts of it that forward left alone are
held weakly: recompute hardly has a use for them, and holding them would keep every other layer's alive. If it reads one
that is gone all the same, that is refused once, and from then on the region holds them all.

Known limit: an object that hides its state behind ``__slots__``, C code or a ``__del__`` is kept by reference.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from autoremat.runtime._stand_in import Origin, Shape, StandIn, shape_of
from autoremat.runtime._torch_compat import PLAIN_TENSORS, cut

ATOMIC: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type,
        torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
        types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType,
    }
)  # fmt: skip
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
CONTAINERS: frozenset[type] = frozenset({list, set, deque, dict, OrderedDict, defaultdict})


@dataclass(slots=True)
class Copier:
    """Copies structures that may share parts, and lists what it met.

    Attributes:
        cuts_graph: Whether tensors lose the graph that made them, which would live as long as the copy.
        tensors: Name and tensor, in order of first appearance.
        generators: Random generators.
        parts: Mutable things that were copied: name, original, copy.
    """

    cuts_graph: bool = False
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    parts: list[tuple[str, Any, Any]] = field(default_factory=list)
    _memo: dict[int, Any] = field(default_factory=dict)

    def copy(self, value: Any, name: str) -> Any:
        """The value with new containers and the same tensors.

        Args:
            value: Anything.
            name: What to call it in messages.
        """
        kind = type(value)
        if kind in ATOMIC:
            return value
        if isinstance(value, torch.Tensor):
            if self.cuts_graph and not value.is_leaf:
                known = self._memo.get(id(value))
                if known is None:
                    known = self._memo[id(value)] = cut(value, requires_grad=value.requires_grad)
                value = known
            self.tensors.append((name, value))
            return value
        found = self._memo.get(id(value))
        if found is not None:
            return found
        if kind is tuple:
            return tuple([self.copy(item, f"{name}[{i}]") for i, item in enumerate(value)])
        return self._copy_object(value, name, kind)

    def forget_originals(self) -> None:
        """Let go of the things that were copied, once forward is over."""
        self.parts = []
        self._memo = {}

    def _copy_object(self, value: Any, name: str, kind: type) -> Any:
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return value
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*[self.copy(item, f"{name}.{key}") for key, item in zip(kind._fields, value, strict=True)])
        if not _is_plain(value, kind):
            return value
        copied = _empty_like(value, kind)
        self._memo[id(value)] = copied
        self.parts.append((name, value, copied))
        self._fill(value, copied, name)
        return copied

    def _fill(self, value: Any, copied: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(copied, key, self.copy(item, f"{name}[{key!r}]"))
        elif isinstance(value, (list, deque)):
            copied.extend([self.copy(item, f"{name}[{i}]") for i, item in enumerate(value)])
        elif isinstance(value, set):
            copied.update(value)
        attributes = getattr(value, "__dict__", None)
        if attributes:
            target = copied.__dict__
            for key, item in attributes.items():
                target[key] = self.copy(item, f"{name}.{key}")


def _is_plain(value: Any, kind: type) -> bool:
    """Whether the object is data that can be copied by its parts."""
    if kind in CONTAINERS:
        return True
    if isinstance(value, (nn.Module, Enum, types.CodeType, weakref.ref)) or kind.__module__.split(".")[0] == "torch":
        return False
    if isinstance(value, (list, dict, set, deque)):
        return _pickles_plainly(kind) or isinstance(value, dict)
    return (
        kind.__flags__ & (1 << 9) != 0  # a class made by Python code
        and hasattr(value, "__dict__")
        and _pickles_plainly(kind)
        and not hasattr(kind, "__del__")
        and not any(base.__dict__.get("__slots__") for base in kind.__mro__)
        and not callable(value)
    ) or kind is types.SimpleNamespace


def _pickles_plainly(kind: Any) -> bool:
    """Whether the class says nothing of its own about how it is copied."""
    return kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def _empty_like(value: Any, kind: Any) -> Any:
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory)
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    copied = kind.__new__(kind)
    if kind in _MAPPINGS or isinstance(value, OrderedDict):
        copied.__init__()
    return copied


def _items(value: Any) -> dict[Any, Any]:
    """The places of a mutable thing and what is in them."""
    items: dict[Any, Any] = {}
    if isinstance(value, dict):
        items.update({("item", key): item for key, item in value.items()})
    elif isinstance(value, (list, deque)):
        items.update({("item", i): item for i, item in enumerate(value)})
    elif isinstance(value, set):
        items[("item", None)] = frozenset(value)
    items.update({("attribute", key): item for key, item in getattr(value, "__dict__", {}).items()})
    return items


def _is_changed(original: Any, copied: Any, copies: dict[int, Any]) -> bool:
    now, then = _items(original), _items(copied)
    if now.keys() != then.keys():
        return True
    for key, item in now.items():
        entry = then[key]
        if item is entry or copies.get(id(item)) is entry:
            continue
        if type(item) in ATOMIC and type(entry) in ATOMIC and item == entry:
            continue
        if isinstance(item, (tuple, frozenset)):
            continue  # rebuilt by copying; its parts are looked at on their own
        return True
    return False


@dataclass(slots=True)
class Loose:
    """A tensor that is held weakly: where in the copy it belongs, and what it looks like."""

    copied: Any
    place: tuple[str, Any]
    name: str
    tensor: weakref.ref[torch.Tensor]
    shape: Shape


def loosen_unchanged(copier: Copier) -> list[Loose]:
    """After forward: let go of tensors that it left alone in objects that it changed.

    Returns:
        What to put back before recompute.
    """
    copies = {id(original): copied for _, original, copied in copier.parts}
    changed = [_is_changed(original, copied, copies) for _, original, copied in copier.parts]
    roots = {_root(name) for (name, _, _), is_changed in zip(copier.parts, changed, strict=True) if is_changed}
    loose: list[Loose] = []
    for (name, _, copied), is_changed in zip(copier.parts, changed, strict=True):
        if is_changed or _root(name) not in roots:
            continue
        for key, item in _items(copied).items():
            if type(item) in PLAIN_TENSORS and item.layout == torch.strided:
                loose.append(Loose(copied, key, f"{name}, {key[1]!r}", weakref.ref(item), shape_of(item)))
                _put(copied, key, None)
    return loose


def _root(name: str) -> str:
    return name.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]


def _put(copied: Any, key: tuple[str, Any], item: Any) -> None:
    kind, place = key
    if kind == "attribute":
        copied.__dict__[place] = item
    elif isinstance(copied, dict):
        dict.__setitem__(copied, place, item)
    else:
        copied[place] = item


def tighten(loose: list[Loose], region: str, on_read: Callable[[], None]) -> None:
    """Before recompute: put back what `loosen_unchanged` let go of; what is gone is refused when it is read.

    Args:
        loose: What it returned.
        region: Name of the region, for messages.
        on_read: Called if recompute reads what is gone.
    """
    remedy = "Run the step again: from now on everything in that argument is held."
    for item in loose:
        tensor: torch.Tensor | None = item.tensor()
        if tensor is None:
            what = f"{item.name}, which forward left alone and nobody holds any more"
            tensor = StandIn(item.shape, Origin(what, region, remedy, on_read))
        _put(item.copied, item.place, tensor)
