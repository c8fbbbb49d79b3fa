"""What a region's modules hold: parameters, buffers, attributes and training flags.

Forward may change any of it, and so may others between forward and backward. Recompute runs on the state that
forward saw and puts back what it found. Parameters and buffers are guarded by identity and version.

BatchNorm updates its running statistics without counting versions, and never reads them in training: they are known
by the module's class. Other buffers and tensor attributes that a region changes are found out in its first call (by
value) and by version later; their values before the call are stored from then on.

Known limit: an attribute that is an object (not a tensor, list, dict, set or number) is kept by reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from autoremat._errors import RecomputeError
from autoremat.runtime._structure import CONTAINERS, Copier
from autoremat.runtime._torch_compat import has_no_data

_BASE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_NORM_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
Slot = tuple[int, str]
"""A parameter, buffer or tensor attribute: index of the module, name."""


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count (inference tensors)."""
    return 0 if tensor.is_inference() else tensor._version


def is_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


@dataclass(slots=True)
class ModuleState:
    """What the modules held when forward started.

    Attributes:
        attributes: For each module, its ``__dict__``, with containers copied.
        parameters: For each module, its parameters by name.
        buffers: For each module, its buffers by name.
        versions: Versions of parameters, buffers and tensor attributes.
        before: Values of tensors that forward changes, from before it did.
        changed: Which tensors forward changed, known when it ended.
        copier: Copies of the container attributes.
    """

    attributes: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    versions: dict[tuple[int, str], int]
    before: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    changed: set[tuple[int, str]] = field(default_factory=set)
    copier: Copier | None = None


class ModuleWatch:
    """Reads, compares and restores the state of a module and everything below it.

    Holds the modules' dictionaries, not the modules, so that it does not keep a model alive.

    Args:
        modules: Pairs of path and module.
    """

    __slots__ = ("_dicts", "_is_first", "_names", "_norms", "_shape", "changing")

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._is_first = True
        self.changing: set[Slot] = set()
        self._build(modules)

    def _build(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._names = [name for name, _ in modules]
        self._dicts = [module.__dict__ for _, module in modules]
        self._norms = [
            i for i, (_, module) in enumerate(modules) if getattr(type(module), "forward", None) in _NORM_FORWARDS
        ]
        self._shape = [tuple(d["_modules"].values()) for d in self._dicts]

    def _refresh(self) -> None:
        """Walk the modules again if one was added or replaced since."""
        for d, children in zip(self._dicts, self._shape, strict=True):
            if tuple(d["_modules"].values()) != children:
                break
        else:
            return
        found: list[tuple[str, dict[str, Any]]] = []
        todo = [(self._names[0], self._dicts[0])]
        seen: set[int] = set()
        while todo:
            name, d = todo.pop()
            if id(d) in seen:
                continue
            seen.add(id(d))
            found.append((name, d))
            todo += [
                (f"{name}.{key}" if name else key, m.__dict__) for key, m in d["_modules"].items() if m is not None
            ]
        modules = {id(m.__dict__): m for _, d in found for m in d["_modules"].values() if m is not None}
        self._names = [name for name, _ in found]
        self._dicts = [d for _, d in found]
        self._norms = [
            i
            for i, d in enumerate(self._dicts)
            if id(d) in modules and getattr(type(modules[id(d)]), "forward", None) in _NORM_FORWARDS
        ]
        self._shape = [tuple(d["_modules"].values()) for d in self._dicts]
        self.changing, self._is_first = set(), True

    def read(self) -> ModuleState:
        """The state now, at the start of forward."""
        self._refresh()
        attributes = [d.copy() for d in self._dicts]
        parameters = [d["_parameters"].copy() for d in attributes]
        buffers = [d["_buffers"].copy() for d in attributes]
        versions: dict[tuple[int, str], int] = {}
        for i, group in enumerate(parameters):
            for name, tensor in group.items():
                if tensor is not None:
                    versions[i, name] = version_of(tensor)
        for i, group in enumerate(buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    versions[i, name] = version_of(tensor)
        state = ModuleState(attributes, parameters, buffers, versions)
        self._read_attributes(state)
        self._store_values(state)
        return state

    def _read_attributes(self, state: ModuleState) -> None:
        for i, attributes in enumerate(state.attributes):
            for name, value in attributes.items():
                if name in _BASE_ATTRIBUTES:
                    continue
                if isinstance(value, torch.Tensor):
                    state.versions[i, name] = version_of(value)
                elif type(value) in CONTAINERS:
                    if state.copier is None:
                        state.copier = Copier()
                    attributes[name] = state.copier.copy(value, self.label(i, name))

    def _store_values(self, state: ModuleState) -> None:
        slots = self.changing
        if self._is_first:
            slots = {slot for slot in state.versions if slot[1] not in state.parameters[slot[0]]}
        for slot in slots:
            tensor = self._tensor(state, slot)
            if tensor is not None and not self._is_norm_statistic(state, slot):
                state.before[slot] = tensor.detach().clone()

    def _is_norm_statistic(self, state: ModuleState, slot: Slot) -> bool:
        return slot[0] in self._norms and slot[1] in state.buffers[slot[0]]

    def _tensor(self, state: ModuleState, slot: Slot) -> torch.Tensor | None:
        index, name = slot
        found = state.buffers[index].get(name)
        if found is None:
            found = state.attributes[index].get(name)
        return found if isinstance(found, torch.Tensor) else None

    def addresses(self, state: ModuleState) -> set[int]:
        """Where the values lie that need no comparison: parameters, which have versions, and norm statistics."""
        tensors = [p for group in state.parameters for p in group.values() if p is not None]
        tensors += [b for index in self._norms for b in state.buffers[index].values() if b is not None]
        return {tensor.data_ptr() for tensor in tensors if tensor.layout == torch.strided and not has_no_data(tensor)}

    def finish(self, state: ModuleState) -> None:
        """At the end of forward: find which tensors it changed, and drop the values of those that it did not."""
        for index in self._norms:
            if state.attributes[index]["training"]:
                state.changed.update((index, name) for name, t in state.buffers[index].items() if t is not None)
        for slot, version in state.versions.items():
            tensor = self._tensor(state, slot)
            if tensor is not None and slot[1] not in state.parameters[slot[0]] and version_of(tensor) != version:
                state.changed.add(slot)
        if self._is_first:
            state.changed.update(slot for slot, old in state.before.items() if self._differs(state, slot, old))
            self._is_first = False
        self.changing |= state.changed
        state.before = {slot: old for slot, old in state.before.items() if slot in state.changed}

    def _differs(self, state: ModuleState, slot: Slot, old: torch.Tensor) -> bool:
        tensor = self._tensor(state, slot)
        if tensor is None or has_no_data(tensor) or tensor.layout != torch.strided:
            return False
        return not torch.equal(tensor, old)

    def label(self, index: int, name: str) -> str:
        """Path of a parameter, buffer or attribute."""
        return f"{self._names[index]}.{name}" if self._names[index] else name

    def check(self, state: ModuleState, region: str) -> None:
        """Refuse to recompute with a parameter or buffer that changed since.

        Raises:
            RecomputeError: Naming it.
        """
        for slot, version in state.versions.items():
            index, name = slot
            parameter = state.parameters[index].get(name)
            tensor = parameter if parameter is not None else self._tensor(state, slot)
            if tensor is None:
                continue
            if slot in state.changed:
                if slot not in state.before and not self._is_norm_statistic(state, slot):
                    raise RecomputeError(
                        f"{region}: forward changed {self.label(*slot)} in place for the first time, so that its "
                        "value from before is not known. Run the step again: from now on it is stored."
                    )
            elif version_of(tensor) != version:
                kind = "parameter" if parameter is not None else "tensor"
                raise RecomputeError(
                    f"{region}: {kind} {self.label(*slot)} has been modified by an inplace operation between forward "
                    f"and backward (version {version}, now {version_of(tensor)}); recompute would use the new value. "
                    "Run backward before the optimizer step or whatever changes it."
                )

    @contextlib.contextmanager
    def restored(self, state: ModuleState, *, keep: bool) -> Iterator[None]:
        """Run with the modules as forward saw them, on copies of what it changes, and put back what was there."""
        found = [(d, d.copy(), d["_parameters"].copy(), d["_buffers"].copy()) for d in self._dicts]
        for d, wanted in zip(self._dicts, state.attributes, strict=True):
            _make(d, wanted)
        for d, parameters, buffers in zip(self._dicts, state.parameters, state.buffers, strict=True):
            _make(d["_parameters"], parameters)
            _make(d["_buffers"], buffers)
        for slot in state.changed:
            tensor = self._tensor(state, slot)
            assert tensor is not None
            value = state.before.get(slot) if keep else state.before.pop(slot, None)
            index, name = slot
            place = self._dicts[index]["_buffers"] if name in state.buffers[index] else self._dicts[index]
            place[name] = tensor.detach().clone() if value is None else value.clone() if keep else value
        try:
            yield
        finally:
            for d, attributes, parameters, buffers in found:
                _make(d, attributes)
                _make(d["_parameters"], parameters)
                _make(d["_buffers"], buffers)


def _make(target: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Give a dictionary these items, in this order; do nothing if it has them."""
    if (
        len(target) == len(wanted)
        and all(a is b for a, b in zip(target.values(), wanted.values(), strict=True))
        and target.keys() == wanted.keys()
    ):
        return
    target.clear()
    target.update(wanted)
