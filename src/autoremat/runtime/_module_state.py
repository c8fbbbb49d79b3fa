"""What a region's modules hold: parameters, buffers, attributes and training flags.

Forward may change any of it, and so may others between forward and backward. Recompute runs on the state that
forward saw and puts back what it found. Parameters and buffers are guarded by identity and version.

BatchNorm updates its running statistics without counting versions, and never reads them in training: they are known
by the module's class. Other buffers and tensor attributes that a region changes are found out in its first call (by
value) and by version later; their values before the call are stored from then on.

Known limits: an attribute that is an object (not a tensor, list, dict, set or number) is kept by reference. Parameters
that are replaced by DTensors, or DTensors that are replaced, are left to FSDP, which does that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from autoremat._errors import RecomputeError
from autoremat.runtime._structure import ATOMIC, CONTAINERS, Copier
from autoremat.runtime._torch_compat import has_no_data

_BASE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_NORM_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
Slot = tuple[int, str]
"""A parameter, buffer or tensor attribute: index of the module, name."""
Tensors = dict[str, Any]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count (inference tensors)."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


@dataclass(slots=True)
class ModuleState:
    """What the modules held when forward started.

    Attributes:
        attributes: For each module, its ``__dict__``, with containers copied.
        parameters: Module index and parameters by name, of the modules that have any.
        buffers: The same for buffers.
        fixed: Parameters.
        fixed_versions: Their versions.
        slots: Where buffers and tensor attributes are.
        tensors: Buffers and tensor attributes.
        versions: Their versions.
        before: Values of tensors that forward changes, from before it did.
        changed: Which tensors forward changed, known when it ended.
        copier: Copies of the container attributes.
        dicts: The modules' own dictionaries.
    """

    attributes: list[dict[str, Any]]
    parameters: list[tuple[int, Tensors]]
    buffers: list[tuple[int, Tensors]]
    fixed: list[torch.Tensor]
    fixed_versions: list[int]
    slots: list[Slot]
    tensors: list[torch.Tensor]
    versions: list[int] = field(default_factory=list)
    before: dict[Slot, torch.Tensor] = field(default_factory=dict)
    changed: set[Slot] = field(default_factory=set)
    copier: Copier | None = None
    dicts: list[dict[str, Any]] = field(default_factory=list)

    def again(self) -> ModuleState:
        """The same state for one more recompute, which may change the container attributes that it is given."""
        if self.copier is None:
            return self
        copier = Copier()
        attributes = [
            {
                name: copier.copy(value, name) if type(value) in CONTAINERS and name not in _BASE_ATTRIBUTES else value
                for name, value in module.items()
            }
            for module in self.attributes
        ]
        return dataclasses.replace(self, attributes=attributes, copier=copier)


class ModuleWatch:
    """Reads, compares and restores the state of modules and everything below them.

    Holds the modules' dictionaries, not the modules, so that it does not keep a model alive.

    Args:
        roots: Pairs of path and module.
    """

    __slots__ = ("_dicts", "_extras", "_hooks", "_is_first", "_names", "_norms", "_roots", "_shapes", "changing")

    def __init__(self, roots: list[tuple[str, nn.Module]]) -> None:
        self._roots = [(name, module.__dict__, _is_norm(module)) for name, module in roots]
        self._walk()

    def _walk(self) -> None:
        self._is_first = True
        self.changing: set[Slot] = set()
        self._names: list[str] = []
        self._dicts: list[dict[str, Any]] = []
        self._norms: list[int] = []
        todo, seen = list(reversed(self._roots)), set()
        while todo:
            name, d, is_norm = todo.pop()
            if id(d) in seen:
                continue
            seen.add(id(d))
            if is_norm:
                self._norms.append(len(self._dicts))
            self._names.append(name)
            self._dicts.append(d)
            todo += [
                (f"{name}.{key}" if name else key, module.__dict__, _is_norm(module))
                for key, module in reversed(d["_modules"].items())
                if module is not None
            ]
        roots = {id(d) for _, d, _ in self._roots}
        self._hooks: tuple[list[Any], list[Any]] = [], []
        for d in self._dicts:
            self._hooks[id(d) in roots].extend((d["_forward_pre_hooks"], d["_forward_hooks"]))
        self._shapes = [(d, tuple(d["_modules"].values())) for d in self._dicts]
        self._extras: list[tuple[int, str, list[str]]] = [(0, "", [])] * len(self._dicts)

    def is_of(self, modules: list[nn.Module]) -> bool:
        """Whether this watches exactly these modules."""
        return len(modules) == len(self._roots) and all(
            module.__dict__ is d for module, (_, d, _) in zip(modules, self._roots, strict=True)
        )

    def hook_dicts(self, *, with_roots: bool) -> list[dict[int, Any]]:
        """The dictionaries of forward hooks and forward pre-hooks, of what is below the roots or of all."""
        below, own = self._hooks
        return own + below if with_roots else below

    def take_back_hooks(self, first: int) -> None:
        """Remove the hooks on modules and parameters that torch has given this number or a higher one."""
        for d in self._dicts:
            dicts = [hooks for name, hooks in d.items() if name.endswith("_hooks") and isinstance(hooks, dict)]
            for hooks in dicts + [hooks for p in d["_parameters"].values() if p is not None for hooks in hooks_of(p)]:
                drop_from(hooks, first)

    def read(self) -> ModuleState:
        """The state now, at the start of forward."""
        for d, children in self._shapes:
            if tuple(d["_modules"].values()) != children:
                self._walk()
                break
        attributes = [d.copy() for d in self._dicts]
        parameters = [(i, d["_parameters"].copy()) for i, d in enumerate(attributes) if d["_parameters"]]
        buffers = [(i, d["_buffers"].copy()) for i, d in enumerate(attributes) if d["_buffers"]]
        fixed = [p for _, group in parameters for p in group.values() if p is not None]
        found = [((i, name), b) for i, group in buffers for name, b in group.items() if b is not None]
        state = ModuleState(
            attributes, parameters, buffers, fixed, _versions(fixed), [slot for slot, _ in found], [t for _, t in found]
        )
        state.dicts = self._dicts
        self._read_attributes(state)
        state.versions = _versions(state.tensors)
        if self._is_first or self.changing:
            self._store_values(state)
        return state

    def _read_attributes(self, state: ModuleState) -> None:
        for i, attributes in enumerate(state.attributes):
            size, last, names = self._extras[i]
            newest = next(reversed(attributes))
            if size != len(attributes) or last != newest:
                names = [name for name in attributes if name not in _BASE_ATTRIBUTES]
                self._extras[i] = len(attributes), newest, names
            for name in names:
                value = attributes[name]
                kind = type(value)
                if kind in ATOMIC:
                    continue
                if isinstance(value, torch.Tensor):
                    state.slots.append((i, name))
                    state.tensors.append(value)
                elif kind in CONTAINERS:
                    state.copier = state.copier or Copier()
                    attributes[name] = state.copier.copy(value, self.label((i, name)))

    def _store_values(self, state: ModuleState) -> None:
        for slot, tensor in zip(state.slots, state.tensors, strict=True):
            if (self._is_first or slot in self.changing) and not self._is_norm_statistic(slot):
                state.before[slot] = tensor.detach().clone()

    def _is_norm_statistic(self, slot: Slot) -> bool:
        return slot[0] in self._norms and slot[1] in self._dicts[slot[0]]["_buffers"]

    def addresses(self, state: ModuleState) -> set[int]:
        """Where the values lie that need no comparison: parameters, which have versions, and norm statistics."""
        tensors = state.fixed + [
            t for slot, t in zip(state.slots, state.tensors, strict=True) if self._is_norm_statistic(slot)
        ]
        return {tensor.data_ptr() for tensor in tensors if tensor.layout == torch.strided and not has_no_data(tensor)}

    def finish(self, state: ModuleState) -> None:
        """At the end of forward: find which tensors it changed, and drop the values of those that it did not."""
        if state.tensors and (state.before or self._norms or _versions(state.tensors) != state.versions):
            training = {i for i in self._norms if state.attributes[i]["training"]}
            for slot, tensor, version in zip(state.slots, state.tensors, state.versions, strict=True):
                if (
                    (slot[0] in training and self._is_norm_statistic(slot))
                    or version_of(tensor) != version
                    or (slot in state.before and _differs(tensor, state.before[slot]))
                ):
                    state.changed.add(slot)
            self.changing |= state.changed
        self._is_first = False
        if state.before:
            state.before = {slot: old for slot, old in state.before.items() if slot in state.changed}

    def label(self, slot: Slot) -> str:
        """Path of a parameter, buffer or attribute."""
        name = self._names[slot[0]] if slot[0] < len(self._names) else ""
        return f"{name}.{slot[1]}" if name else slot[1]

    def check(self, state: ModuleState, region: str) -> None:
        """Refuse to recompute with a parameter or buffer that changed since.

        Raises:
            RecomputeError: Naming it.
        """
        if _versions(state.fixed) != state.fixed_versions:
            slots = [(i, name) for i, group in state.parameters for name, p in group.items() if p is not None]
            for slot, parameter, version in zip(slots, state.fixed, state.fixed_versions, strict=True):
                self._check_version(region, f"parameter {self.label(slot)}", parameter, version)
        for slot, tensor, version in zip(state.slots, state.tensors, state.versions, strict=True):
            if slot not in state.changed:
                self._check_version(region, f"tensor {self.label(slot)}", tensor, version)
            elif slot not in state.before and not self._is_norm_statistic(slot):
                raise RecomputeError(
                    f"{region}: forward changed {self.label(slot)} in place for the first time, so that its value from "
                    "before is not known. Run the step again: from now on it is stored."
                )

    @staticmethod
    def _check_version(region: str, what: str, tensor: torch.Tensor, version: int) -> None:
        if version_of(tensor) != version:
            raise RecomputeError(
                f"{region}: {what} has been modified by an inplace operation between forward and backward (version "
                f"{version}, now {version_of(tensor)}); recompute would use the new value. Run backward before the "
                "optimizer step or whatever changes it."
            )

    @contextlib.contextmanager
    def restored(self, state: ModuleState, *, keep: bool) -> Iterator[None]:
        """Run with the modules as forward saw them, on copies of what it changes, and put back what was there.

        Args:
            state: What `read` returned.
            keep: Whether the state will be needed again.
        """
        dicts = state.dicts
        found = [d.copy() for d in dicts]
        groups = [(d["_parameters"], d["_parameters"].copy()) for d in dicts if d["_parameters"]]
        groups += [(d["_buffers"], d["_buffers"].copy()) for d in dicts if d["_buffers"]]
        for d, wanted in zip(dicts, state.again().attributes if keep else state.attributes, strict=True):
            _make(d, wanted)
        for i, wanted in state.parameters:
            _make(dicts[i]["_parameters"], wanted)
        for i, wanted in state.buffers:
            _make(dicts[i]["_buffers"], wanted)
        for slot in state.changed:
            self._place_copy(state, slot, keep=keep)
        try:
            yield
        finally:
            for d, attributes in zip(dicts, found, strict=True):
                _make(d, attributes)
            for group, tensors in groups:
                _make(group, tensors)

    def _place_copy(self, state: ModuleState, slot: Slot, *, keep: bool) -> None:
        index, name = slot
        value = state.before.get(slot) if keep else state.before.pop(slot, None)
        if value is None:
            value = state.tensors[state.slots.index(slot)].detach().clone()
        elif keep:
            value = value.clone()
        buffers = state.dicts[index]["_buffers"]
        if name in buffers:
            buffers[name] = value
        else:
            state.dicts[index][name] = value


def hooks_of(tensor: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """A tensor's hooks, by torch's numbers."""
    return tensor._backward_hooks or {}, getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def drop_from(hooks: dict[int, Any], first: int) -> None:
    """Remove what has this number or a higher one."""
    for number in [number for number in hooks if number >= first]:
        del hooks[number]


def _is_norm(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) in _NORM_FORWARDS


def _differs(tensor: torch.Tensor, old: torch.Tensor) -> bool:
    return not has_no_data(tensor) and tensor.layout == torch.strided and not torch.equal(tensor, old)


def _make(target: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Give a dictionary these items, in this order; do nothing if it has them."""
    if (
        len(target) == len(wanted)
        and all(map(operator.is_, target.values(), wanted.values()))
        and target.keys() == wanted.keys()
    ) or _are_resharded(target, wanted):
        return
    target.clear()
    target.update(wanted)


def _are_resharded(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether FSDP has gathered parameters or given them back in between: it keeps its own account of that."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(
        a is not b and (isinstance(a, tensor.DTensor) or isinstance(b, tensor.DTensor))
        for a, b in zip(first.values(), second.values(), strict=False)
    )
