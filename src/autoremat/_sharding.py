"""A step whose states are sharded over devices (ZeRO 1 to 3, FSDP2), made from the step of one device.

Stage 3 is what torch's ``fully_shard`` does (2.13), read from its sources and compared with its memory: every parameter
is cut along its first dimension, padded to equal pieces. Before a unit's forward, a flat buffer of all its pieces is
gathered and copied out into whole parameters; the buffer lives until the next unit has been copied out. After forward
the whole parameters go (the root's stay). In backward the same, with the next unit's gather issued ahead. After the
backward of a unit its gradients are copied into the input of a reduce-scatter, which lives until the next one's turn;
what comes out is the gradient of the pieces. Stage 2 keeps whole parameters and does the rest; stage 1 cuts only what
the optimizer keeps and takes.

Known limits: numbers are those of the first device, which holds the largest pieces. Optimizer state that does not have
its parameter's shape (Adafactor's rows and columns) counts whole. A unit is called once in a forward. In stages 1 and 2
updated pieces are gathered in place. What a communication library takes (gloo makes copies, NCCL does not) is not
counted, and communication takes no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from autoremat._arrivals import arrivals
from autoremat._errors import UsageError
from autoremat._gathering import Unit, UnitCall, gather_and_reduce
from autoremat._rewrite import Rewriting
from autoremat._step_graph import ModuleCall, Op, StepGraph, Storage

_ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Sharding:
    """How states are sharded over devices.

    Attributes:
        stage: 1: optimizer state. 2: gradients too. 3: parameters too, as ``fully_shard`` does.
        world_size: Number of devices.
        units: Module paths of what is gathered and reduced at a time (what ``fully_shard`` is called on); the rest of
            the model is one more. "auto" takes the repeated blocks.
        reshard_after_forward: Whether units let go of whole parameters between forward and backward; the root does not.
        prefetch: How many units ahead are gathered in backward.
        parameter_dtype: Dtype that pieces of parameters, their gradients and the optimizer's state are kept in, "fp32",
            where it is not the one that the model computes in (``MixedPrecisionPolicy(param_dtype=...)``).
        reduce_dtype: Dtype in which gradients are reduced; None for the one that they are computed in.

    Example:
        >>> Sharding(stage=2, world_size=4).describe()
        'sharded, stage 2 over 4 devices'
    """

    stage: Literal[1, 2, 3] = 3
    world_size: int = 8
    units: tuple[str, ...] | Literal["auto"] = "auto"
    reshard_after_forward: bool = True
    prefetch: int = 1
    parameter_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise UsageError(f"stage={self.stage!r}: use 1 (optimizer state), 2 (and gradients) or 3 (and parameters).")
        if self.world_size < 2 or self.prefetch < 0:
            raise UsageError(f"world_size={self.world_size}, prefetch={self.prefetch}: use at least 2 and 0.")
        for name in ("parameter_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *_ITEMSIZES):
                raise UsageError(f"{name}={getattr(self, name)!r}: use one of {', '.join(_ITEMSIZES)}, or None.")

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Read "STAGE:DEVICES" or "STAGE:DEVICES:DTYPE", such as "3:8" or "3:8:fp32"; the dtype is that of the pieces.

        Raises:
            UsageError: If the text is something else.
        """
        stage, _, rest = text.partition(":")
        world_size, _, dtype = rest.partition(":")
        if not (stage.isdigit() and world_size.isdigit()):
            raise UsageError(f"{text!r} does not say how to shard. Write STAGE:DEVICES, such as 3:8, or 3:8:fp32.")
        return cls(stage=int(stage), world_size=int(world_size), parameter_dtype=dtype or None)  # type: ignore[arg-type]

    def describe(self) -> str:
        """In words."""
        pieces = f", pieces in {self.parameter_dtype}" if self.parameter_dtype else ""
        return f"sharded, stage {self.stage} over {self.world_size} devices{pieces}"

    def piece(self, shape: Sequence[int]) -> int:
        """Elements of the first device's piece of a tensor."""
        return -(-shape[0] // self.world_size) * prod(shape[1:])


def shard(graph: StepGraph, how: Sharding) -> StepGraph:
    """The step of one of many devices that share the states.

    Args:
        graph: The step of one device.
        how: What is sharded, and over how many.

    Returns:
        The step of the first device: its pieces, and with stage 3 the units that are gathered (whole parameters count
        as "parameter", buffers on their way as "communication").

    Raises:
        UsageError: If the step cannot be sharded so; names the module or parameter.
    """
    if graph.parallel:
        raise UsageError(f"The step is spread over devices already ({graph.parallel}); give the step of one device.")
    parameters = [s for s in graph.storages if s.cause == "parameter"]
    scalar = next((s.label for s in parameters if not s.shape), None)
    if scalar is not None:
        raise UsageError(f"Parameter {scalar!r} has no dimension to cut along. Give it one, of size 1.")
    rewriting = Rewriting(graph)
    _cut_states(graph, how, rewriting, parameters)
    gathered = {} if how.stage == 1 else _units(graph, how, rewriting, parameters)

    def substitute(op: Op, storage: int) -> int:
        for start, stop, other in gathered.get(storage, ()):
            if start <= op.index < stop:
                return other
        if how.stage == 3 and storage in names and op.phase != "optimizer":
            raise UsageError(
                f"Module {graph.module_of(op.call).path!r} reads parameter {names[storage]!r} while its unit is not "
                "gathered. Put all that share it into one unit: Sharding(units=...)."
            )
        return storage

    names = {s.index: s.label for s in parameters}
    return rewriting.finish(how.describe(), substitute)


def _itemsize(storage: Storage) -> int:
    return storage.num_bytes // max(1, prod(storage.shape))


def _cut_states(graph: StepGraph, how: Sharding, rewriting: Rewriting, parameters: list[Storage]) -> None:
    """Resize parameters, optimizer state, averages, and what the optimizer takes on the way, if shaped so."""
    shapes = {s.shape for s in parameters}
    kept = _ITEMSIZES[how.parameter_dtype] if how.parameter_dtype else 0
    first = next((op.index for op in graph.ops if op.phase == "optimizer"), len(graph.ops))
    whole = {"parameter", "ema"} if how.stage < 3 else set()
    for storage in graph.storages:
        is_state = storage.cause in ("parameter", "optimizer_state", "ema") or storage.born >= first
        if not is_state or storage.shape not in shapes or storage.cause in whole:
            continue
        computes_in = {_itemsize(p) for p in parameters if p.shape == storage.shape}
        itemsize = kept if kept and _itemsize(storage) in computes_in else _itemsize(storage)
        rewriting.resize(storage.index, how.piece(storage.shape) * itemsize)
    if how.stage < 3 and kept and any(_itemsize(p) != kept for p in parameters):
        pieces = sum(how.piece(p.shape) for p in parameters)
        rewriting.keep(pieces * kept, "optimizer_state", f"parameters in {how.parameter_dtype}")


def _units(
    graph: StepGraph, how: Sharding, rewriting: Rewriting, parameters: list[Storage]
) -> dict[int, list[tuple[int, int, int]]]:
    """Gather and reduce unit by unit; what ops touch instead of whole parameters and gradients, by clocks."""
    roots = [call for call in graph.calls if call.parent == -1]
    paths = repeated_blocks(graph) if how.units == "auto" else how.units
    unknown = [path for path in paths if not any(call.path == path for call in graph.calls)]
    if unknown:
        raise UsageError(f"Unit {unknown[0]!r} is no module that the step calls. Name modules as in named_modules().")
    by_depth = sorted((p for p in paths if p), key=len, reverse=True)
    members: dict[str, list[Storage]] = defaultdict(list)
    for parameter in parameters:
        owner = next((p for p in by_depth if parameter.label.startswith(f"{p}.")), "")
        members[owner].append(parameter)
    parameter_item = {s.label: _itemsize(s) for s in parameters}
    units = [
        Unit(
            path=path,
            parameters={s.label: s.index for s in owned},
            numel={s.label: how.piece(s.shape) for s in owned},
            is_padded={s.label: s.shape[0] % how.world_size != 0 for s in owned},
            itemsize=max(parameter_item[s.label] for s in owned),
            kept_itemsize=_ITEMSIZES[how.parameter_dtype] if how.parameter_dtype else _itemsize(owned[0]),
            reduce_itemsize=_ITEMSIZES[how.reduce_dtype] if how.reduce_dtype else _itemsize(owned[0]),
        )
        for path, owned in members.items()
    ]
    calls = [UnitCall(unit, _calls_of(graph, unit.path, root)) for root in roots for unit in units]
    return gather_and_reduce(graph, rewriting, [c for c in calls if c.call is not None], arrivals(graph), how)


def _calls_of(graph: StepGraph, path: str, root: ModuleCall) -> ModuleCall | None:
    """The call of a module in a micro-step; None if it is not called."""
    found = [graph.calls[c] for c in graph.subtree(root.index) if graph.calls[c].path == path]
    if len(found) > 1:
        raise UsageError(f"Unit {path!r} is called {len(found)} times in one forward; a unit is called once.")
    return found[0] if found else None


def repeated_blocks(graph: StepGraph) -> tuple[str, ...]:
    """Outermost modules that are numbered and have a sibling of the same class: ``h.0``, ``h.1``."""
    classes: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for call in graph.calls:
        parent, _, name = call.path.rpartition(".")
        if name.isdigit():
            classes[parent, call.class_name][call.path] = None
    found = [path for paths in classes.values() if len(paths) > 1 for path in paths]
    return tuple(p for p in found if not any(p.startswith(f"{other}.") for other in found))
