"""Which calls of modules, and of functions between them, make up a step: writes them down while it is recorded."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any, Self

from torch import nn
from torch.overrides import TorchFunctionMode

from autoremat._capture import Recorder, Recording
from autoremat._own_calls import NO_CALLS, function_name, running_module, takes_part
from autoremat._step_graph import BEFORE_STEP, FUNCTION, ModuleCall, function_path

MIN_SHARE = 1 / 8
"""Functions count in modules that save at least this share of all saved tensors: smaller ones are regions whole."""


def record_calls(recorder: Recorder, model: nn.Module, *, only_root: bool = False) -> RecordCalls:
    """A context in which calls of a model and of all in it are written down, or only those of the model itself."""
    modules = [("", model)] if only_root else list(model.named_modules())
    return RecordCalls(recorder, modules, functions=not only_root)


class RecordCalls(TorchFunctionMode):
    """Writes down calls of modules, by hooks that are gone on exit, and those of functions that their forwards make."""

    def __init__(self, recorder: Recorder, modules: list[tuple[str, nn.Module]], *, functions: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.watched = modules
        self.functions = functions
        self.handles: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.running: list[nn.Module] = []

    def __enter__(self) -> Self:
        for path, module in self.watched:
            self.handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, prepend=True))
        if self.functions:
            super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.functions:
            super().__exit__(*exc)
        for handle in self.handles:
            handle.remove()

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if path == "":
                self.counts.clear()
            self.recorder.enter_call(type(module).__name__, path, self._count(path), (args, kwargs))
            self.running.append(module)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        self.recorder.leave_call(output)

    def _count(self, path: str) -> int:
        self.counts[path] += 1
        return self.counts[path] - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in NO_CALLS or not self._is_own(args, kwargs):
            return func(*args, **kwargs)
        recorder, output = self.recorder, None
        path = function_path(recorder.running_path(), name)
        recorder.enter_call(FUNCTION, path, self._count(path), (args, kwargs))
        try:
            output = func(*args, **kwargs)
        finally:
            recorder.leave_call(output if takes_part(output) else None)
        return output

    def _is_own(self, args: Any, kwargs: Any) -> bool:
        """Whether the forward that is running makes this call by itself."""
        if not self.running or self.recorder.recording.phase != "forward":
            return False
        return running_module() is self.running[-1] and takes_part((args, kwargs))


def drop_small_functions(recording: Recording) -> None:
    """Forget calls of functions that nobody gains anything from, or that cannot be regions.

    The first are those in modules that are small enough to be regions, and the only call of a module. The others return
    nothing that takes part in autograd, or change buffers: recompute puts back those of modules, not of functions.
    """
    calls, sizes = recording.calls, _num_saved(recording)
    roots: dict[int, int] = {}
    for call in calls:
        roots[call.index] = roots.get(call.parent, call.index)

    def is_region(call: ModuleCall) -> bool:
        is_large = sizes[call.parent] >= MIN_SHARE * sizes[roots[call.index]]
        return is_large and bool(call.outputs) and not _changes_state(recording, call)

    stays = [call for call in calls if not call.is_function or is_region(call)]
    siblings = Counter(call.parent for call in stays)
    _keep(recording, [call for call in stays if not call.is_function or siblings[call.parent] > 1])


def _keep(recording: Recording, kept: list[ModuleCall]) -> None:
    """Forget all other calls: what happened in them happened in those around them."""
    place = {-1: -1} | {call.index: position for position, call in enumerate(kept)}
    stays = set(place)
    for call in recording.calls:
        place.setdefault(call.index, place[call.parent])
    recording.calls = [
        dataclasses.replace(
            call,
            index=place[call.index],
            parent=place[call.parent],
            links=tuple((s, place[source]) for s, source in call.links if source in stays),
        )
        for call in kept
    ]
    recording.ops = [dataclasses.replace(op, call=place[op.call]) for op in recording.ops]
    for record in recording.saved:
        record.call = place[record.call]


def _changes_state(recording: Recording, call: ModuleCall) -> bool:
    changed = (s for op in recording.ops[call.start : call.end] for s in op.mutates)
    return any(recording.storages[s].born == BEFORE_STEP for s in changed)


def _num_saved(recording: Recording) -> Counter[int]:
    """How many storages autograd saved in each call and in those inside it: unlike bytes, the same for any batch."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for record in recording.saved:
        call = record.call
        while call >= 0 and record.storage >= 0 and recording.storages[record.storage].born != BEFORE_STEP:
            found[call].add(record.storage)
            call = recording.calls[call].parent
    return Counter({call: len(storages) for call, storages in found.items()})
