"""Put ops into a recorded step and change what its storages are: how steps on many devices are made from one.

What falls between two ops, at one clock, keeps an order: storages die, then the inserted ops run (in the order in which
they were inserted), then whatever was read at that clock is read. Pure data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat._step_graph import BEFORE_STEP, Cause, ModuleCall, Op, Phase, SavedTensor, StepGraph, Storage

Clock = Callable[[], int]
"""A clock of the new step, known once all ops are in place."""
Substitution = Callable[[Op, int], int]
"""For an op of the recorded step and a storage that it touches: the storage that it touches in the new one."""


@dataclass(slots=True, eq=False)
class Insert:
    """An op to put in.

    Attributes:
        clock: Clock of the recorded step at which it runs.
        name: Of the op.
        phase: Of the step.
        call: Module call that it belongs to; calls from this one on that start at the same clock start after it.
        inputs: Storages that it reads.
        outputs: Storages that it allocates.
        workspace_bytes: Bytes that it takes and returns.
        moved_bytes: Bytes that it reads and writes.
        index: Its index in the new step.
    """

    clock: int
    name: str
    phase: Phase
    call: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    workspace_bytes: int = 0
    moved_bytes: int = 0
    index: int = -1

    def before(self) -> int:
        """The clock before it, in the new step."""
        return self.index

    def after(self) -> int:
        """The clock after it, in the new step."""
        return self.index + 1


class Rewriting:
    """A step on its way to becoming another.

    Args:
        graph: The recorded step; it stays as it is.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._storages: list[Storage] = list(graph.storages)
        self._deaths: dict[int, Clock] = {}
        self._births: dict[int, Insert] = {}
        self._inserts: list[Insert] = []
        self._edges: list[int] = []

    def insert(self, clock: int, name: str, phase: Phase, call: int, **about: int) -> Insert:
        """Put in an op; of those at one clock the first comes first."""
        made = Insert(clock, name, phase, call, **about)  # type: ignore[arg-type]
        self._inserts.append(made)
        return made

    def allocate(self, by: Insert, num_bytes: int, cause: Cause, label: str, until: Clock | None = None) -> int:
        """A storage that an inserted op allocates, alive until a clock or to the end of the step."""
        index = self._add(num_bytes, cause, label)
        by.outputs += (index,)
        self._births[index] = by
        if until is not None:
            self._deaths[index] = until
        return index

    def keep(self, num_bytes: int, cause: Cause, label: str) -> int:
        """A storage that is there before the step and stays."""
        return self._add(num_bytes, cause, label)

    def _add(self, num_bytes: int, cause: Cause, label: str) -> int:
        index, end = len(self._storages), len(self.graph.ops)
        self._storages.append(Storage(index, num_bytes, cause, BEFORE_STEP, end, label))
        return index

    def resize(self, storage: int, num_bytes: int) -> None:
        """Give a storage another size."""
        self._storages[storage] = replace(self._storages[storage], num_bytes=num_bytes)

    def relabel(self, storage: int, cause: Cause, label: str) -> None:
        """Give a storage another cause and name."""
        self._storages[storage] = replace(self._storages[storage], cause=cause, label=label)

    def num_bytes(self, storage: int) -> int:
        """Bytes of a storage, resized or not."""
        return self._storages[storage].num_bytes

    def free(self, storage: int, at: Clock) -> None:
        """Say when the last reference to a storage that is not autograd's goes away."""
        self._deaths[storage] = at

    def at(self, clock: int) -> Clock:
        """A clock of the recorded step in the new one, before anything that was inserted at it."""
        return lambda: self._before(clock)

    def finish(self, parallel: str, substitute: Substitution) -> StepGraph:
        """The new step.

        Args:
            parallel: How it is spread over devices, in words.
            substitute: What ops touch instead of what they touched.
        """
        graph = self.graph
        self._inserts.sort(key=lambda made: made.clock)  # stable: equal clocks stay in order
        self._edges = [made.clock for made in self._inserts]
        for position, made in enumerate(self._inserts):
            made.index = made.clock + position
        ops = [self._moved_op(op, substitute) for op in graph.ops]
        ops += [_op_of(made) for made in self._inserts]
        return replace(
            graph,
            ops=tuple(sorted(ops, key=lambda op: op.index)),
            storages=tuple(self._moved_storage(storage) for storage in self._storages),
            saved=tuple(self._moved_saved(record) for record in graph.saved),
            calls=tuple(self._moved_call(call) for call in graph.calls),
            parallel=parallel,
            measured_s=(),  # times of the ops of one device, by position
        )

    def _before(self, clock: int) -> int:
        """A clock, before what was inserted at it; the end of the step is after everything."""
        if clock >= len(self.graph.ops):
            return len(self.graph.ops) + len(self._inserts)
        return clock + bisect_left(self._edges, clock)

    def _after(self, clock: int) -> int:
        """A clock, after what was inserted at it."""
        return clock + bisect_left(self._edges, clock + 1)

    def _after_own(self, clock: int, call: int) -> int:
        """A clock at which a call is running: after what was inserted at it for that call, one around it, or before."""
        position = clock + bisect_left(self._edges, clock)
        micro_step = self.graph.calls[call].micro_step
        for made in self._inserts[bisect_left(self._edges, clock) : bisect_left(self._edges, clock + 1)]:
            is_earlier = self.graph.calls[made.call].micro_step < micro_step
            if is_earlier or (made.phase == "forward" and made.call <= call):
                position = made.index + 1
        return position

    def _moved_op(self, op: Op, substitute: Substitution) -> Op:
        index = self._after(op.index)
        inputs, outputs, mutates = (
            tuple(dict.fromkeys(substitute(op, s) for s in group)) for group in (op.inputs, op.outputs, op.mutates)
        )
        return replace(op, index=index, inputs=inputs, outputs=outputs, mutates=mutates)

    def _moved_storage(self, storage: Storage) -> Storage:
        index = storage.index
        if index in self._births:
            born = self._births[index].index
        else:
            born = storage.born if storage.born == BEFORE_STEP else self._after(storage.born)
        death = self._deaths[index]() if index in self._deaths else self._before(storage.last_ref)
        return replace(storage, born=born, last_ref=death)

    def _moved_saved(self, record: SavedTensor) -> SavedTensor:
        unpacked = None if record.unpacked is None else self._after(record.unpacked)
        return replace(
            record,
            packed=self._after_own(record.packed, record.call),
            unpacked=unpacked,
            released=max(self._before(record.released), unpacked or 0),
        )

    def _moved_call(self, call: ModuleCall) -> ModuleCall:
        start = self._after_own(call.start, call.index)
        return replace(call, start=start, end=max(start, call.end + bisect_left(self._edges, call.end)))


def _op_of(made: Insert) -> Op:
    return Op(
        index=made.index,
        phase=made.phase,
        name=made.name,
        call=made.call,
        inputs=made.inputs,
        outputs=made.outputs,
        workspace_bytes=made.workspace_bytes,
        moved_bytes=made.moved_bytes,
    )
