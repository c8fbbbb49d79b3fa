"""Run one training step and write down what happens: ops, storages, what autograd saves, module calls.

How the two kinds of reference are told apart: hooks take every saved tensor away from autograd and hand it a token
instead. A storage then dies in forward as soon as nobody but autograd would hold it (`Storage.last_ref`), and a
token dies when autograd would have let go (`SavedTensor.released`). When backward asks for a saved tensor it gets a
stand-in of the same geometry (fake) or a copy (real).

Known limits: what a kernel allocates inside one op is not seen; `Op.workspace_bytes` estimates it. On real tensors,
tracing holds a second copy of what autograd saves.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from autoremat._fake_kernels import READS_NUMBER, FakeKernels, with_positions
from autoremat._kernel_memory import kernel_memory
from autoremat._op_info import OpInfo, is_random_call, mutated_arguments, op_flops, op_info
from autoremat._source_line import source_line
from autoremat._step_graph import BEFORE_STEP, Cause, ModuleCall, Op, Phase
from autoremat._workspace import kept_number_bytes, workspace_bytes

_NEW_CONSTANT = frozenset({"aten.lift_fresh.default", "aten.lift_fresh_copy.default"})
OnOp = Callable[[Any, Any, Any], None]
_NOT_RECORDED = frozenset({"aten.detach.default", "prim.device.default"})


@dataclass(slots=True)
class StorageRecord:
    """A storage while it is being watched; see `Storage`."""

    index: int
    num_bytes: int
    born: int
    cause: Cause = "temporary"
    label: str = ""
    shape: tuple[int, ...] = ()
    last_ref: int | None = None


@dataclass(slots=True)
class SavedRecord:
    """A tensor that autograd saved; see `SavedTensor`."""

    storage: int
    call: int
    packed: int
    unpacked: int | None = None
    released: int | None = None


@dataclass(slots=True)
class NumberRecord:
    """A Python number that autograd saved as a tensor, where no hook sees it.

    Attributes:
        op: Index of the op that it was an operand of.
        num_bytes: Its size.
        last_op: Index of the backward op after which autograd lets go of it; None if backward did not come by.
    """

    op: int
    num_bytes: int
    last_op: int | None = None


@dataclass(slots=True)
class Recording:
    """Everything that was written down."""

    storages: list[StorageRecord] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    saved: list[SavedRecord] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    phase: Phase = "forward"
    micro_step: int = 0
    numbers: list[NumberRecord] = field(default_factory=list)

    @property
    def clock(self) -> int:
        """Ops recorded so far."""
        return len(self.ops)


class _Token:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "contents", "record")

    def __init__(self, record: SavedRecord, contents: Any) -> None:
        self.record = record
        self.contents = contents


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Enough of a fake tensor to make another one like it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Recorder(TorchDispatchMode):
    """Records every op that runs under it. Enter it together with `saved_tensors` and `record_calls`.

    Args:
        mode: Mode that the model's fake tensors belong to; None when everything is real.
        device_kind: Whose kernels the ops stand for; those of "cpu" have workspaces.
        on_op: Called with operator, arguments and keywords of each op that is recorded.
    """

    def __init__(self, mode: FakeTensorMode | None, *, device_kind: str = "cpu", on_op: OnOp | None = None) -> None:
        super().__init__()
        self._on_op = on_op
        self.fake_mode = mode
        self.without_memory: tuple[type, ...] = ()
        """Kinds of tensors that have no data: what is done to them is not recorded."""
        self._on_cpu = device_kind == "cpu"
        self._is_on = False
        self.recording = Recording()
        self._known: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._stack: list[int] = []
        self._returned: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], int]] = {}
        self._call = 0
        self._fake_kernels = None if mode is None else FakeKernels(mode)
        self._copies: dict[int, tuple[int, Any]] = {}
        self._wrapped: tuple[Tensor, NumberRecord] | None = None

    # -- storages ---------------------------------------------------------------------------------------------

    def register(self, tensor: Tensor, cause: Cause, label: str = "") -> None:
        """Make a tensor that is there before the step known."""
        index = self._storage_of(tensor, born=BEFORE_STEP)
        record = self.recording.storages[index]
        record.cause, record.label = cause, record.label or label

    def storage_index(self, tensor: Tensor) -> int | None:
        """Index of a tensor's storage, if it is known."""
        storage = _storage(tensor)
        return None if storage is None else self._known.get(storage._cdata)

    def __enter__(self) -> Self:
        self._is_on = True
        super().__enter__()
        return self

    def adopt(self, tensor: Tensor, name: str) -> None:
        """Write down a new tensor that was made where no dispatch mode sees it, as if an op of this name had made it.

        Args:
            tensor: New, in host memory.
            name: What the op is called.
        """
        if not self._is_on or not self._on_cpu:
            return
        index = self.recording.clock
        storage = self._storage_of(tensor, born=index)
        self.recording.ops.append(
            Op(index=index, phase=self.recording.phase, name=name, call=self._call, inputs=(), outputs=(storage,))
        )

    def _storage_of(self, tensor: Tensor, born: int) -> int:
        """Index of a tensor's storage; one that was never seen is new (or was made outside of the step)."""
        storage = _storage(tensor)
        if storage is None:
            return -1
        known = self._known.get(storage._cdata)
        if known is not None:
            return known
        record = StorageRecord(
            index=len(self.recording.storages), num_bytes=storage.nbytes(), born=born, shape=tuple(tensor.shape)
        )
        if born == BEFORE_STEP:
            record.cause = "buffer"
        self.recording.storages.append(record)
        self._watch(storage, record.index)
        return record.index

    def _watch(self, storage: Any, index: int, saved: SavedRecord | None = None, *, ends: bool = True) -> None:
        """Note when a storage dies: as its own end, or (a stand-in) as the end of autograd's hold on it, or as none."""
        key = storage._cdata
        recording = self.recording
        known, watchers = self._known, self._watchers

        def died(_: object) -> None:
            known.pop(key, None)
            watchers.pop(key, None)
            if saved is None and ends:
                recording.storages[index].last_ref = recording.clock
            elif saved is not None and saved.released is not None:
                saved.released = max(saved.released, recording.clock)

        self._known[key] = index
        self._watchers[key] = weakref.ref(storage, died)

    def close(self) -> None:
        """Stop watching: storages that are alive now are alive at the end of the step."""
        self._watchers.clear()

    def running_path(self) -> str:
        """Path of the innermost module call that has not returned."""
        return self.recording.calls[self._stack[-1]].path

    def running_call(self) -> int | None:
        """Index of the innermost module call that has not returned."""
        return self._stack[-1] if self._stack else None

    # -- ops --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if info.name in _NOT_RECORDED:
            return func(*args, **kwargs)
        self._follow_number()
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, self.without_memory) for x in tensors):
            return func(*args, **kwargs)
        if info.name in _NEW_CONSTANT and self.storage_index(tensors[0]) is None:
            inputs = []  # what `torch.tensor(number)` makes comes to light here, as the op's output
        else:
            inputs = [self._storage_of(x, born=BEFORE_STEP) for x in tensors]
        out = self._execute(func, info, args, kwargs, tensors)
        results = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        if tensors or results:
            self._record(func, info, args, kwargs, tensors, inputs, results, out)
            if self._on_op is not None:
                self._on_op(func, args, kwargs)
        return out

    def _execute(self, func: Any, info: OpInfo, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        is_fake = any(isinstance(x, FakeTensor) for x in tensors)
        if is_fake and info.name == READS_NUMBER and self.recording.phase == "optimizer":
            return 1.0  # optimizers read norms and step counts; no storage of theirs depends on the value
        if is_fake and self._fake_kernels is not None:
            return self._fake_kernels.run(func, info, args, kwargs)
        return func(*args, **kwargs)

    def _record(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        inputs: list[int],
        results: list[Tensor],
        out: Any,
    ) -> None:
        recording = self.recording
        index = recording.clock
        first_new = len(recording.storages)
        mutated = mutated_arguments(info, args, kwargs)
        mutates = [self._storage_of(x, born=BEFORE_STEP) for x in mutated]
        self._know_stand_ins(results if info.returns_written else [], mutated, mutates)
        outputs = [self._storage_of(x, born=index) for x in results]
        is_view = bool(results) and not mutates and all(0 <= s < first_new for s in outputs)
        if recording.phase == "forward" and torch.is_grad_enabled():
            self._note_number(info.name, args, results)
        flops = op_flops(info, args, kwargs, out)
        workspace = 0 if is_view else self._workspace(func, info, args, kwargs, results, outputs, flops)
        numeric = next((x for x in results if x.is_floating_point()), None)
        numeric = numeric if numeric is not None else next((x for x in tensors if x.is_floating_point()), None)
        recording.ops.append(
            Op(
                index=index,
                phase=recording.phase,
                name=info.name,
                call=self._call,
                inputs=_unique(inputs),
                outputs=tuple(s for s in outputs if s >= 0),
                mutates=_unique(mutates),
                flops=flops,
                moved_bytes=0 if is_view else sum(x.numel() * x.element_size() for x in (*tensors, *results)),
                workspace_bytes=workspace,
                is_random=is_random_call(info, args, kwargs),
                is_view=is_view,
                reads_value=bool(tensors) and not results and not mutates,
                dtype="" if numeric is None else str(numeric.dtype).removeprefix("torch."),
                shape=tuple(results[0].shape) if results else (),
                line=source_line() if recording.phase == "forward" else "",
            )
        )

    def _know_stand_ins(self, results: list[Tensor], mutated: list[Tensor], mutates: list[int]) -> None:
        """Where fake data is written into real memory torch returns a fake tensor, which takes no memory of its own."""
        for result, argument, storage in zip(results, mutated, mutates, strict=False):
            if isinstance(result, FakeTensor) and not isinstance(argument, FakeTensor) and storage >= 0:
                self._watch(_storage(result), storage, ends=False)

    def _workspace(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        results: list[Tensor],
        outputs: list[int],
        flops: int,
    ) -> int:
        """Bytes of a kernel's workspace; corrects the sizes of its outputs where fake kernels make them smaller."""
        if not self._on_cpu:
            return 0
        told = kernel_memory(func, with_positions(info, args), kwargs, flops=flops, is_random=info.is_random)
        if told is None:
            return workspace_bytes(info.name, args, results)
        recording = self.recording
        if len(told.output_bytes) == len(results):
            for storage, x, num_bytes in zip(outputs, results, told.output_bytes, strict=True):
                if isinstance(x, FakeTensor) and storage >= 0 and recording.storages[storage].born == recording.clock:
                    recording.storages[storage].num_bytes = max(recording.storages[storage].num_bytes, num_bytes)
        return told.workspace_bytes

    def _note_number(self, name: str, args: Any, results: list[Tensor]) -> None:
        """If autograd keeps a number of this op, remember the result: its node will say when backward comes by."""
        num_bytes = kept_number_bytes(name, args)
        if num_bytes:
            record = NumberRecord(op=self.recording.clock, num_bytes=num_bytes)
            self.recording.numbers.append(record)
            self._wrapped = (results[0], record)

    def _follow_number(self) -> None:
        """Autograd has made the node of the op before this one: ask to be told when it runs in backward."""
        if self._wrapped is None:
            return
        (result, record), self._wrapped = self._wrapped, None
        recording = self.recording
        if result.grad_fn is None:
            record.last_op = record.op
            return

        def runs(_: object) -> None:
            record.last_op = recording.clock  # the node's one op is the next

        result.grad_fn.register_prehook(runs)

    # -- what autograd saves ----------------------------------------------------------------------------------

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that take saved tensors away from autograd."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Token:
        self._follow_number()
        recording = self.recording
        index = self._storage_of(tensor, born=BEFORE_STEP)
        record = SavedRecord(storage=index, call=self._call, packed=recording.clock)
        recording.saved.append(record)
        token = _Token(record, self._take(tensor, index))

        def released(record: SavedRecord = record) -> None:
            record.released = recording.clock

        weakref.finalize(token, released).atexit = False
        return token

    def _take(self, tensor: Tensor, index: int) -> Any:
        """Keep what backward needs without keeping the storage alive."""
        if index < 0 or self.recording.storages[index].born == BEFORE_STEP:
            return tensor
        if isinstance(tensor, FakeTensor):
            return _Geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        with _disable_current_modes(), torch.no_grad():
            version, copied = self._copies.get(index, (-1, None))
            if version != tensor._version or copied is None:
                copied = tensor.untyped_storage().clone()
                self._copies[index] = (tensor._version, copied)
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                copied, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def _unpack(self, token: _Token) -> Tensor:
        record, contents = token.record, token.contents
        if record.unpacked is None:
            record.unpacked = self.recording.clock
        self._call = record.call
        if isinstance(contents, _Geometry):
            assert self.fake_mode is not None
            with _disable_current_modes(), self.fake_mode:
                contents = torch.empty_strided(
                    contents.size, contents.stride, dtype=contents.dtype, device=contents.device
                )
        storage = _storage(contents)
        if storage is not None and storage._cdata not in self._known:
            self._watch(storage, record.storage, saved=record)
        result: Tensor = contents
        return result

    # -- module calls -----------------------------------------------------------------------------------------

    def enter_call(self, class_name: str, path: str, number: int, arguments: Any) -> int:
        """A call of a module or of a function starts."""
        index = len(self.recording.calls)
        self.recording.calls.append(
            ModuleCall(
                index=index,
                path=path,
                number=number,
                micro_step=self.recording.micro_step,
                class_name=class_name,
                parent=self._stack[-1] if self._stack else -1,
                start=self.recording.clock,
                end=-1,
                inputs=self._storages_in(arguments),
                links=self._links_in(arguments),
            )
        )
        self._stack.append(index)
        self._call = index
        return index

    def leave_call(self, output: Any) -> None:
        """The innermost running call returns."""
        index = self._stack.pop()
        for x in _tensors_in(output):
            self._returned[id(x)] = (weakref.ref(x), (*self._sources_of(x), index), x._version)
        self.recording.calls[index] = dataclasses.replace(
            self.recording.calls[index], end=self.recording.clock, outputs=self._storages_in(output)
        )
        self._call = self._stack[-1] if self._stack else index

    def _storages_in(self, values: Any) -> tuple[int, ...]:
        found = [self.storage_index(x) for x in _tensors_in(values)]
        return _unique([s for s in found if s is not None])

    def _links_in(self, arguments: Any) -> tuple[tuple[int, int], ...]:
        """Arguments that earlier calls returned; all that share a storage, or none."""
        sources: dict[int, set[int]] = {}
        for x in _tensors_in(arguments):
            storage = self.storage_index(x)
            if storage is not None and storage >= 0:
                found = set(self._sources_of(x))
                sources[storage] = sources.get(storage, found) & found
        return tuple((s, source) for s, found in sources.items() for source in sorted(found))

    def _sources_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Calls that returned this tensor, unchanged since: one inside the other, or one that passed it on."""
        reference, sources, version = self._returned.get(id(tensor), (None, (), 0))
        return sources if reference is not None and reference() is tensor and version == tensor._version else ()


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor))


def _storage(tensor: Tensor) -> Any:
    """A tensor's storage, None where it has none (sparse layouts)."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def _unique(values: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(v for v in values if v >= 0))
