"""The StepGraph: one training step as plain data. No torch here.

A *clock* value is a number of ops that have run: an event at clock ``t`` happens after op ``t - 1`` and before op
``t``. Storages, not tensors, carry bytes: views share their base's storage.

Two kinds of reference keep a storage alive: autograd's (one `SavedTensor` each) and everybody else's (Python locals,
arguments, module attributes, grad buffers), whose end is `Storage.last_ref`. Capturing keeps the two apart, so that
a ledger can tell what would be freed if autograd did not hold it.

Known limit: memory that a kernel takes and returns within one op is an estimate (`Op.workspace_bytes`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]
Cause = Literal[
    "parameter",
    "buffer",
    "input",
    "gradient",
    "optimizer_state",
    "ema",
    "communication",
    "activation",
    "temporary",
]
CAUSES: tuple[Cause, ...] = (
    "parameter",
    "optimizer_state",
    "ema",
    "gradient",
    "buffer",
    "input",
    "communication",
    "activation",
    "temporary",
)
BEFORE_STEP = -1
FUNCTION = "function"
"""`ModuleCall.class_name` of what is no module."""


def function_path(path: str, name: str) -> str:
    """How a function is named that the forward of the module at a path calls by itself."""
    return f"{path}.{name}()" if path else f"{name}()"


def is_function(path: str) -> bool:
    """Whether a path names a function, see `function_path`."""
    return path.endswith("()")


def split_function(path: str) -> tuple[str, str]:
    """Path of the module and name of the function that a function's path consists of."""
    owner, _, name = path.rpartition(".")
    return owner, name.removesuffix("()")


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of device memory.

    Attributes:
        index: Its place in `StepGraph.storages`.
        num_bytes: Size of the whole storage, bytes.
        cause: What it is.
        born: Index of the op that allocated it, `BEFORE_STEP` if it is there when the step starts.
        last_ref: Clock at which the last reference that is not autograd's went away; ``len(ops)`` if none did.
        label: Parameter or buffer name where there is one; a gradient has its parameter's.
        shape: Shape of the first tensor seen on it; a parameter's own shape.
    """

    index: int
    num_bytes: int
    cause: Cause
    born: int
    last_ref: int
    label: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an ATen operator, as a dispatch mode sees it.

    Attributes:
        index: Its place in `StepGraph.ops`; also the clock at which it starts.
        phase: forward (loss included), backward or optimizer.
        name: Full name with overload, ``"aten.addmm.default"``.
        call: Index of the innermost module call around it; 0 is the model's own (in backward: of the forward op).
        inputs: Storages it reads or views, in order of first appearance.
        outputs: Storages of its tensor outputs; those with ``born == index`` are new.
        mutates: Storages it writes in place.
        flops: Floating point operations; 0 for elementwise work.
        moved_bytes: Bytes read plus bytes written by tensors (a view moves none).
        workspace_bytes: Bytes its kernel takes and returns while it runs.
        kept_bytes: Bytes that autograd keeps from this op on where no hook sees them (a Python number made into a
            tensor); negative where it lets go of such.
        is_random: Whether it draws random numbers.
        is_view: Whether it only makes views (no kernel runs).
        reads_value: Whether it hands a value to Python (``.item()``, ``if tensor:``).
        dtype: What it computes in, ``"float32"``; "" where no tensor is involved.
        shape: Shape of its first output, for display.
        line: File and line of the model's code that called it, in forward.
    """

    index: int
    phase: Phase
    name: str
    call: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    flops: int = 0
    moved_bytes: int = 0
    workspace_bytes: int = 0
    kept_bytes: int = 0
    is_random: bool = False
    is_view: bool = False
    reads_value: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    line: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that autograd stored in forward for backward.

    Attributes:
        storage: The storage it keeps alive.
        call: Index of the module call in which it was saved.
        packed: Clock at which it was saved: the index of its op for an input, one more for an output.
        unpacked: Clock at which backward first read it; None if it never did.
        released: Clock at which backward let go of it; ``len(ops)`` if it never did.
    """

    storage: int
    call: int
    packed: int
    unpacked: int | None
    released: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module's ``forward``. Calls nest; `StepGraph.calls` is in order of entry.

    A function that a large module's forward calls by itself, between its modules, is one as well (`is_function`).

    Attributes:
        index: Its place in `StepGraph.calls`; 0 is the model itself (first micro-step).
        path: Module path as in ``model.get_submodule(path)``; ``""`` is the model.
        number: How many calls of this path came before it in the same micro-step.
        micro_step: Which forward of the step (accumulation) it belongs to.
        class_name: Class of the module.
        parent: Index of the call around it; -1 for the model's own.
        start: Clock when it was entered.
        end: Clock when it returned: its ops are ``ops[start:end]``.
        inputs: Storages of the tensors among its arguments.
        outputs: Storages of the tensors that it returned.
        links: Arguments that are the very tensors which an earlier call returned, unchanged since: storage and index
            of that call; several for a storage where a call returned what one inside it had returned.
    """

    index: int
    path: str
    number: int
    micro_step: int
    class_name: str
    parent: int
    start: int
    end: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()

    @property
    def is_function(self) -> bool:
        """Whether it is no module's but a function's that its parent's forward calls by itself."""
        return is_function(self.path)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One whole training step: forward, loss, backward, optimizer.

    Attributes:
        ops: In order of execution.
        storages: All memory of the step, each once.
        saved: What autograd stored, in the order in which it did.
        calls: Module calls, in order of entry.
        model: Class name of the model.
        model_signature: Hash over parameter and buffer names, shapes and dtypes.
        input_signature: Readable: argument names, shapes and dtypes of the batch.
        accumulate: Micro-steps in an optimizer step; at most the first two are in `ops`.
        device_kind: "cpu" or "cuda": whose kernels the ops stand for.
        optimizer: Name of the optimizer, "" for none.
        precision: As given to ``trace``, "" for the model's own.
        parallel: How the step is spread over devices, in words; "" for one device. `static_bytes` and all storages are
            then those of one of them.
        around: What else stands around the model, in words: "scaler, ema"; "" for nothing.
        rng_state_bytes: Device bytes of one stashed random state.
        hidden_bytes: Bytes that no hook sees and that are there all through the step: on CUDA targets the workspaces
            of cuBLAS.
        measured_s: What each op takes by itself on this machine, seconds, None where it could not be measured; empty
            if nothing was.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[SavedTensor, ...]
    calls: tuple[ModuleCall, ...]
    model: str = ""
    model_signature: str = ""
    input_signature: str = ""
    accumulate: int = 1
    device_kind: str = "cpu"
    optimizer: str = ""
    precision: str = ""
    around: str = ""
    parallel: str = ""
    rng_state_bytes: int = 0
    hidden_bytes: int = 0
    measured_s: tuple[float | None, ...] = ()
    _stops: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    """For each call, the index behind the last call below it."""

    def __post_init__(self) -> None:
        stops = list(range(1, len(self.calls) + 1))
        for call in reversed(self.calls):
            if call.parent >= 0:
                stops[call.parent] = max(stops[call.parent], stops[call.index])
        object.__setattr__(self, "_stops", tuple(stops))

    @property
    def static_bytes(self) -> int:
        """Bytes of what is there before the step and stays: parameters, buffers, inputs, optimizer state."""
        end = len(self.ops)
        return sum(s.num_bytes for s in self.storages if s.born == BEFORE_STEP and s.last_ref == end)

    @property
    def flops(self) -> int:
        """FLOPs of the captured step, without recomputation."""
        return sum(op.flops for op in self.ops)

    def saved_between(self, start: int, end: int) -> tuple[SavedTensor, ...]:
        """What autograd stored from one clock to another, both included."""
        clock = attrgetter("packed")
        return self.saved[bisect_left(self.saved, start, key=clock) : bisect_right(self.saved, end, key=clock)]

    def module_of(self, call: int) -> ModuleCall:
        """A call, or that of the module which makes it if it is a function's."""
        found = self.calls[call]
        return self.calls[found.parent] if found.is_function else found

    def subtree(self, call: int) -> range:
        """Indices of a module call and of all calls below it (calls are in order of entry, so they are adjacent)."""
        return range(call, self._stops[call])

    def ancestors(self, call: int) -> Iterator[int]:
        """Indices of the calls that a module call is made in, innermost first."""
        parent = self.calls[call].parent
        while parent >= 0:
            yield parent
            parent = self.calls[parent].parent
