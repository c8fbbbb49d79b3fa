"""Op by op inside a region: store outputs in forward, hand them out in recompute, leave ops out.

One dispatch mode is active inside a selective region, `Recorder` in forward and `Player` in recompute. Both walk the
same `OpTable`. Other ops run at once.

An op that recompute leaves out and whose output is not stored yields a `StandIn`: right metadata, no data. An op
that would read one is refused by name.

Known limit: generators passed to a skipped random op by hand are not followed, only torch's default ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoremat._errors import RecomputeError
from autoremat._op_info import is_random_call, op_info
from autoremat.runtime._ambient import RandomStates, read_torch_random
from autoremat.runtime._module_state import version_of
from autoremat.runtime._op_table import Operator, OpTable, Planned
from autoremat.runtime._stand_in import Origin, Shape, StandIn, shape_of
from autoremat.runtime._torch_compat import PLAIN_TENSORS, alias, shared_versions


@dataclass(slots=True)
class Stored:
    """An output that is stored, and its version when the region ended."""

    tensor: torch.Tensor
    version: int = 0


@dataclass(slots=True)
class Record:
    """What forward noted about one planned op call.

    Attributes:
        position: How many counted ops came before it in the region.
        outputs: For each output: `Stored`, `Shape`, or the value itself where it is no tensor; None if it was stored
            nowhere because the call returns its argument.
        container: Type of the op's result if it is a tuple or list.
    """

    position: int
    outputs: list[Any]
    container: type | None


class Store:
    """What forward leaves for recompute.

    Attributes:
        records: By slot of the operator and occurrence.
        random_after: Random states to set before a random op that follows skipped ones, by its position.
    """

    __slots__ = ("random_after", "records")

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], Record] = {}
        self.random_after: dict[int, RandomStates] = {}

    def stored(self) -> list[Stored]:
        """Every stored output."""
        return [o for record in self.records.values() for o in record.outputs if isinstance(o, Stored)]

    def seal(self) -> None:
        """At the end of the region: note the versions that stored outputs must keep."""
        for output in self.stored():
            output.version = version_of(output.tensor)


def _is_parameter_cast(args: tuple[Any, ...]) -> bool:
    return isinstance(args[0], torch.nn.Parameter)


def _draws(entry: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: attention without dropout does not."""
    return entry.is_random and is_random_call(op_info(func), args, kwargs)


def _note(output: Any, index: int, saved: tuple[int, ...], context: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    if index in saved:
        return Stored(alias(output, context))
    return shape_of(output)


_FIRST = (0,)


class _Mode(TorchDispatchMode):
    """A mode that torch does not wrap: the wrapper guards against torch.compile, under which no region runs."""

    by_id: dict[int, Operator | None]
    table: OpTable

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def pause(self) -> None:
        """Let ops pass that are no part of the user's program."""
        self.by_id = _ALL_UNCOUNTED

    def resume(self) -> None:
        """Count ops again."""
        self.by_id = self.table.by_id


class _AllUncounted(dict[int, "Operator | None"]):
    def __missing__(self, _operator: int) -> Operator:
        return _UNCOUNTED


_UNCOUNTED = Operator("", 0, {}, is_random=False, is_uncounted=True)
_ALL_UNCOUNTED = _AllUncounted()


class Recorder(_Mode):
    """Runs every op and notes the planned ones.

    Args:
        table: Planned op calls.
        store: Where it notes them.
        keeps: Whether outputs are stored; else ops are only counted and random states noted.
    """

    def __init__(self, table: OpTable, store: Store, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.table = table
        self.by_id = table.by_id
        self.context = shared_versions()
        self.store = store
        self.position = 0
        self.counts = [0] * (table.num_slots + 1)
        self.pending: RandomStates | None = None
        self.known: dict[int, RandomStates] = {}
        """What an earlier execution put into `Store.random_after`, where this one cannot know it."""
        self.around: Player | None = None
        """What recomputes a region around this one, while that runs it again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            entry = self.by_id[id(func)]
        except KeyError:
            entry = self.table.learn(func)
        if entry is not None:
            if entry.is_uncounted:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._planned(entry, func, args, kwargs or {})
        self.position += 1
        return func(*args, **kwargs) if kwargs else func(*args)

    def _planned(self, entry: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if entry.is_cast and _is_parameter_cast(args):
            return func(*args, **kwargs)
        position = self.position
        self.position = position + 1
        occurrence = self._count(entry.slot)
        call = entry.calls.get(occurrence)
        if call is None:
            if self.pending is not None and _draws(entry, func, args, kwargs):
                self.store.random_after[position] = self._state_before(position, self.pending)
                self.pending = None
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.keeps:
            self._keep(entry, call, (entry.slot, occurrence), position, result)
        if self.table.has_skipped_random and _draws(entry, func, args, kwargs):
            results = result if isinstance(result, (tuple, list)) else (result,)
            self.pending = read_torch_random([x for x in results if isinstance(x, torch.Tensor)])
        return result

    def _state_before(self, position: int, pending: RandomStates) -> RandomStates:
        """From what a draw draws that comes after skipped ones."""
        if position in self.known:
            return self.known[position]
        if self.around is not None and self.around.left_out_draws:
            raise RecomputeError(
                f"{self.around.region} leaves out random draws, and a region inside it draws again after some of them: "
                "from what is not known. Take one of the two out of the plan."
            )
        return pending

    def _count(self, slot: int) -> int:
        counts = self.counts
        while slot >= len(counts):
            counts.append(0)
        occurrence = counts[slot]
        counts[slot] = occurrence + 1
        return occurrence

    def _keep(self, entry: Operator, call: Planned, key: tuple[int, int], position: int, result: Any) -> None:
        container = None
        outputs: list[Any] = []
        if call.saved == _FIRST and isinstance(result, torch.Tensor):  # by far the most frequent
            outputs.append(Stored(alias(result, self.context)))
        elif entry.returns_argument is None or call.saved:
            container = type(result) if isinstance(result, (tuple, list)) else None
            num_tensors = 0
            for output in result if container is not None else (result,):
                outputs.append(_note(output, num_tensors, call.saved, self.context))
                num_tensors += isinstance(output, torch.Tensor)
        self.store.records[key] = Record(position, outputs, container)


class Player(_Mode):
    """Hands out stored outputs and leaves skipped ops out.

    Attributes:
        num_run: Ops that ran.
        num_stored: Stored outputs handed out.
        num_skipped: Ops left out.
        left_out_draws: Whether the call that runs has left out draws, so that the random state is not forward's.

    Args:
        table: Planned op calls.
        store: What forward left.
        region: For messages.
        lets_go: Whether a stored output may go as soon as the program lets go of it: nobody asks for it again.
    """

    def __init__(self, table: OpTable, store: Store, region: str, *, lets_go: bool) -> None:
        self.table = table
        self.by_id = table.by_id
        self.context = shared_versions()
        self.store = store
        self.region = region
        self.position = 0
        self.counts = [0] * (table.num_slots + 1)
        self.num_run = self.num_stored = self.num_skipped = 0
        self.lets_go = lets_go
        self.left_out_draws = False
        self.skipped_writes: dict[int, int] = {}
        """In-place ops that were left out, by storage; autograd counts their versions all the same."""
        self.handed: dict[int, tuple[ref[torch.Tensor], Stored]] = {}
        """Stored outputs that were handed out, by the identity of what stands for them in recompute."""
        self.changed: Stored | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            entry = self.by_id[id(func)]
        except KeyError:
            entry = self.table.learn(func)
        if entry is not None:
            if entry.is_uncounted:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._planned(entry, func, args, kwargs or {})
        self.position += 1
        self.num_run += 1
        return func(*args, **kwargs) if kwargs else func(*args)

    def _planned(self, entry: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if entry.is_cast and _is_parameter_cast(args):
            return func(*args, **kwargs)
        position = self.position
        if entry.mirror is not None and isinstance(args[0], StandIn) and not isinstance(args[1], StandIn):
            mirrored = self._turned_back(entry, position)
            if mirrored is not None:
                entry, func, args = mirrored, entry.mirror, args[::-1]
        self.position = position + 1
        counts = self.counts
        while entry.slot >= len(counts):
            counts.append(0)
        occurrence = counts[entry.slot]
        counts[entry.slot] = occurrence + 1
        call = entry.calls.get(occurrence)
        if call is None:
            states = self.store.random_after.get(position) if entry.is_random else None
            for write, _, state in states or ():
                write(state)
                self.left_out_draws = False
            self.num_run += 1
            return func(*args, **kwargs)
        record = self.store.records.get((entry.slot, occurrence))
        if record is None or record.position != position:
            self._refuse_order(entry, occurrence, position, record)
        self.left_out_draws = self.left_out_draws or _draws(entry, func, args, kwargs)
        return self._hand_out(entry, call, record, (func, args, kwargs))

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The stored output that this very tensor was handed out for."""
        handed, output = self.handed.get(id(tensor), (None, None))
        return output.tensor if output is not None and handed is not None and handed() is tensor else None

    def skip(self, num_ops: int, counts: tuple[int, ...]) -> None:
        """Count ops that forward ran and recompute does not, because no planned call is among them."""
        self.position += num_ops
        self.counts += [0] * (len(counts) - len(self.counts))
        for slot, count in enumerate(counts):
            self.counts[slot] += count

    def _turned_back(self, entry: Operator, position: int) -> Operator | None:
        """The comparison that forward saw here, if Python turned it round."""
        mirrored = self.table[entry.mirror]
        assert mirrored is not None
        record = self.store.records.get((mirrored.slot, self.counts[mirrored.slot]))
        return mirrored if record is not None and record.position == position else None

    def _hand_out(self, entry: Operator, call: Planned, record: Record, run: tuple[Any, Any, dict[str, Any]]) -> Any:
        func, args, kwargs = run
        if not record.outputs:
            self.num_skipped += 1
            argument = _argument(entry.returns_argument, func, args, kwargs)
            if type(argument) in PLAIN_TENSORS and argument.layout == torch.strided:
                storage = argument.untyped_storage()._cdata
                self.skipped_writes[storage] = self.skipped_writes.get(storage, 0) + 1
            return argument
        found = record.outputs
        if self.lets_go:
            record.outputs = []
        if len(found) == 1 and isinstance(found[0], Stored) and record.container is None:
            self.num_skipped += 1
            self.num_stored += 1
            return self._handed(found[0], entry)
        if not call.is_skipped and any(isinstance(output, Shape) for output in found):
            self.num_run += 1
            real = func(*args, **kwargs)
            fresh = list(real) if record.container is not None else [real]
            self.num_stored += len(call.saved)
            outputs = [
                self._handed(output, entry) if isinstance(output, Stored) else value
                for output, value in zip(found, fresh, strict=True)
            ]
        else:
            self.num_skipped += 1
            self.num_stored += len(call.saved)
            outputs = [self._handed(output, entry) for output in found]
        return outputs[0] if record.container is None else record.container(outputs)

    def _handed(self, output: Any, entry: Operator) -> Any:
        if isinstance(output, Stored):
            if version_of(output.tensor) != output.version:
                raise RecomputeError(
                    f"{self.region}: the stored output of {entry.name} has been modified by an inplace operation since "
                    "the region ended. Keep the operation inside the region, write it out of place, or plan again "
                    "without this saved output."
                )
            handed = alias(output.tensor, self.context)
            key = id(handed)
            self.handed[key] = ref(handed, partial(self._let_go, key) if self.lets_go else None), output
            return handed
        if isinstance(output, Shape):
            what = f"the output of {entry.name}, which the plan leaves out of recompute"
            return StandIn(output, Origin(what, self.region))
        return output

    def _let_go(self, key: int, _: ref[torch.Tensor]) -> None:
        """The program has let go of a stored output, as it did in forward."""
        _, output = self.handed.pop(key)
        if self._is_changed(output):
            self.changed = output
        if self.skipped_writes:
            storage = output.tensor.untyped_storage()._cdata
            others = (*(o for _, o in self.handed.values()), *self.store.stored())
            if all(o.tensor.untyped_storage()._cdata != storage for o in others):
                self.skipped_writes.pop(storage, None)  # another storage may get this address

    def _is_changed(self, output: Stored) -> bool:
        num_writes = version_of(output.tensor) - output.version
        return bool(num_writes) and num_writes != self.skipped_writes.get(output.tensor.untyped_storage()._cdata, 0)

    def finish(self) -> None:
        """After recompute: stored outputs must be as they were.

        Raises:
            RecomputeError: If an op that recompute ran has changed one.
        """
        left = (*(o for _, o in self.handed.values()), *self.store.stored())
        self.handed.clear()
        changed = self.changed or next(filter(self._is_changed, left), None)
        if changed is not None:
            raise RecomputeError(
                f"{self.region}: recompute changed a stored output ({changed.tensor.dtype}, "
                f"{list(changed.tensor.shape)}) in place. The plan must skip that operation; make it again."
            )
        for output in left:
            output.version = version_of(output.tensor)

    def _refuse_order(self, entry: Operator, occurrence: int, position: int, record: Record | None) -> NoReturn:
        found = "did not run in forward" if record is None else f"was op {record.position} of the region in forward"
        raise RecomputeError(
            f"{self.region}: recompute took another path: call {occurrence} of {entry.name} {found} and is op "
            f"{position} in recompute. Its forward depends on something that changes between forward and backward; "
            "take it out of the plan, or make the choice once and pass it in."
        )


def _argument(index: int | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if index is None:
        return None
    return args[index] if index < len(args) else kwargs[func._schema.arguments[index].name]
