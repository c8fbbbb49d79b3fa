"""Copies of argument structure: containers are copied, tensors are kept by reference.

Recompute must get what forward got. Tensors are guarded by their version; containers, caches and other plain
objects that forward may change are copied when forward starts, and recompute works on the copy. If forward turns
out to have changed such an object (a key-value cache), the tensors in those parts of it that forward left alone are
held weakly: recompute has no use for them, and holding them would keep every other layer's alive.

Known limit: an object that hides its state behind ``__slots__``, C code or a ``__del__`` is kept by reference.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

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
        tensors: Name and tensor, in order of first appearance.
        generators: Random generators.
        parts: Mutable things that were copied: name, original, copy.
    """

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
            self.tensors.append((name, value))
            return value
        found = self._memo.get(id(value))
        if found is not None:
            return found
        if kind is tuple:
            return tuple([self.copy(item, f"{name}[{i}]") for i, item in enumerate(value)])
        return self._copy_object(value, name, kind)

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


class Gone:
    """Stands for a tensor that nobody else held any more; whatever touches it fails by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self._name} was freed before recompute needed it (.{attribute})")


def loosen_unchanged(copier: Copier) -> list[tuple[Any, Any, str, weakref.ref[torch.Tensor]]]:
    """After forward: let go of tensors that forward cannot have used from objects that it changed.

    Returns:
        Places to put back before recompute: the copy, the place in it, its name, a weak reference to the tensor.
    """
    copies = {id(original): copied for _, original, copied in copier.parts}
    changed = [_is_changed(original, copied, copies) for _, original, copied in copier.parts]
    roots = {_root(name) for (name, _, _), is_changed in zip(copier.parts, changed, strict=True) if is_changed}
    loose: list[tuple[Any, Any, str, weakref.ref[torch.Tensor]]] = []
    for (name, _, copied), is_changed in zip(copier.parts, changed, strict=True):
        if is_changed or _root(name) not in roots:
            continue
        for key, item in _items(copied).items():
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                loose.append((copied, key, name, weakref.ref(item)))
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


def tighten(loose: list[tuple[Any, Any, str, weakref.ref[torch.Tensor]]]) -> None:
    """Before recompute: put back what `loosen_unchanged` let go of, as far as it still exists."""
    for copied, key, name, reference in loose:
        tensor = reference()
        _put(copied, key, Gone(f"{name}, {key[1]!r},") if tensor is None else tensor)
