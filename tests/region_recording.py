"""Plans written by observation: record the ops of each region call, choose outputs to keep, derive what to skip.

Independent of the planner on purpose: it looks at a real run with its own dispatch mode and its own rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from autoremat._plan import UNCOUNTED_OPS, OpCall, Region, SavedOutput


@dataclass
class RecordedOp:
    name: str
    occurrence: int
    inputs: list[int]
    outputs: list[int]  # one entry for each tensor output
    born: list[int]  # storages it allocated
    mutates: list[int]
    is_random: bool


@dataclass
class Recording(TorchDispatchMode):
    """Ops of one region call; storages are numbered in order of appearance."""

    def __post_init__(self):
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.packed: list[int] = []
        self.counts: dict[str, int] = {}
        self.storages: dict[int, int] = {}
        self.alive = []
        self.bytes: dict[int, int] = {}

    __hash__ = object.__hash__
    placeholder: int = field(default=0)

    def storage(self, tensor):
        if tensor.layout != torch.strided:
            self.alive.append(tensor)
            return self.storages.setdefault(-id(tensor), len(self.storages))
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = len(self.storages)
            self.alive.append(storage)  # so that no address is used twice
            self.bytes[self.storages[key]] = storage.nbytes()
        return self.storages[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        is_cast = name == "aten._to_copy.default" and isinstance(args[0], torch.nn.Parameter)
        inputs = [self.storage(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        known = len(self.storages)
        out = func(*args, **kwargs)
        outputs = [self.storage(t) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if name in UNCOUNTED_OPS or is_cast:
            return out
        mutates = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                mutates.append(self.storage(value))
        occurrence = self.counts.get(name, 0)
        self.counts[name] = occurrence + 1
        born = [s for s in outputs if s >= known]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.ops.append(RecordedOp(name, occurrence, inputs, outputs, born, mutates, is_random))
        return out

    def pack(self, tensor):
        self.packed.append(self.storage(tensor))
        return tensor


def record(model, path, run):
    """Record the first call of a region while ``run(model)`` runs forward."""
    module = model.get_submodule(path)
    forward = type(module).forward
    recordings = []

    def recorded(*args, **kwargs):
        if recordings:
            return forward(module, *args, **kwargs)
        recording = Recording()
        recordings.append(recording)
        with torch.autograd.graph.saved_tensors_hooks(recording.pack, lambda t: t), recording:
            return forward(module, *args, **kwargs)

    module.forward = recorded
    try:
        run(model)
    finally:
        del module.forward
    return recordings[0]


def keepable(recording):
    """Storages that may be stored: made by a single op and not read before their last change in place."""
    maker = {s: i for i, op in enumerate(recording.ops) for s in op.born}
    result = []
    for storage, start in maker.items():
        changes = [i for i, op in enumerate(recording.ops) if storage in op.mutates]
        last = max(changes, default=start)
        readers = [i for i in range(start + 1, last) if storage in recording.ops[i].inputs and i not in changes]
        others = [i for i in changes if any(s != storage for s in recording.ops[i].born)]
        if not readers and not others and storage not in recording.ops[start].mutates:
            result.append(storage)
    return result


def region(path, recording, keep, **kwargs):
    """The region that stores these storages and skips whatever recompute can then do without."""
    keep = set(keep)
    needed = set(recording.packed) - keep
    skipped, saved = [], []
    for op in reversed(recording.ops):
        run = bool(needed.intersection([*op.born, *op.mutates])) or not op.outputs
        is_view = op.outputs and not op.born and not op.mutates
        if is_view and (needed | keep).intersection(op.outputs):
            run = True
        if op.mutates and keep.issuperset(op.mutates) and not needed.intersection(op.born):
            run = False
        if run:
            needed.update(s for s in op.inputs if s not in keep)
        else:
            skipped.append(OpCall(op.name, op.occurrence))
        saved += [
            SavedOutput(op.name, op.occurrence, i, path, recording.bytes[s])
            for i, s in enumerate(op.outputs)
            if s in keep and s in op.born
        ]
    return Region(path, saved=tuple(reversed(saved)), skipped=tuple(reversed(skipped)), **kwargs)
