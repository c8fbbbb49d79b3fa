"""The Schedule: a plan written out as the sequence of what happens in a step.

It is the contract between planner, ledger and runtime. A schedule speaks of the ops and storages of one `StepGraph`.
A storage can exist more than once over a step: *generation* 0 comes from forward, ``d + 1`` from recomputation of a
region with ``d`` regions around it; an op that runs in recompute reads the newest living generation of its inputs.

`tests/machine.py` executes schedules and checks that every event is legal; `_ledger.price` sums their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """What an event does."""

    FORWARD = "forward"
    """Run an op for the first time; its new storages come to life (generation 0)."""
    RECOMPUTE = "recompute"
    """Run an op of a region again; its new storages come to life once more: those that the region did SAVE only while
    it runs."""
    BACKWARD = "backward"
    """Run an op of the backward pass."""
    OPTIMIZER = "optimizer"
    """Run an op of the optimizer step."""
    SAVE = "save"
    """A region takes hold of the newest life of a storage until its recompute. Moves no bytes."""
    DROP = "drop"
    """The last reference to a living storage goes away; its bytes are free."""
    HOLD = "hold"
    """A region allocates bytes of its own (random state, copies of buffers)."""
    RELEASE = "release"
    """A region frees bytes of its own."""


class Event(NamedTuple):
    """One thing that happens.

    Attributes:
        action: What.
        op: Index of the op for the four that run one, else -1.
        storage: Index of the storage for SAVE and DROP, else -1.
        generation: Which life of the storage, for SAVE and DROP.
        region: Index into `Schedule.regions` for RECOMPUTE, SAVE, HOLD and RELEASE, else -1.
        num_bytes: For HOLD and RELEASE.
    """

    action: Action
    op: int = -1
    storage: int = -1
    generation: int = 0
    region: int = -1
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that happens in a step, in order.

    Attributes:
        events: In order. Storages of `BEFORE_STEP` are alive at the start.
        regions: The module calls (indices into `StepGraph.calls`) of each region; outer regions before inner ones.
    """

    events: tuple[Event, ...]
    regions: tuple[tuple[int, ...], ...] = ()

    def count(self, action: Action) -> int:
        """How many events do this."""
        return sum(event.action is action for event in self.events)
