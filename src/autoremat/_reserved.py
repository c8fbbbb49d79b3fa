"""A step's allocations in order, and what the CUDA caching allocator reserves for them.

Two steps are replayed, as a training starts: parameters, buffers and inputs are there; the optimizer makes its state at
the end of the first step; gradients are let go of between the steps. The second step finds the first one's cache, and
every later one repeats it.

What a ledger cannot see but the allocator serves: the workspace that torch gives each thread's cuBLAS handle at its
first matrix product and never takes back (``getNewWorkspace`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``); forward
and backward run on different threads.

Known limits: within one op, outputs come before the workspace; optimizers' step counts (8 bytes or less) are taken to
be in host memory, as torch has them unless fused or capturable. What a data loader holds is not known.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from autoremat._allocator import Allocate, Free, simulate
from autoremat._allocator_settings import DEFAULT_SETTINGS, AllocatorSettings
from autoremat._results import AllocatorUsage
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import BEFORE_STEP, Op, StepGraph

NUM_STEPS = 2
"""The second finds the cache of the first; a third would repeat it."""
_COUNT_BYTES = 8
_BLAS_OPS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "_scaled_mm", "_addmm_activation"}
)
_ON_AUTOGRAD_THREAD = frozenset({Action.BACKWARD, Action.RECOMPUTE})
_RUNS = frozenset({Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD, Action.OPTIMIZER})


def reserved(
    graph: StepGraph,
    schedule: Schedule,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    blas_workspace_bytes: int = 0,
    capacity_bytes: int | None = None,
) -> AllocatorUsage:
    """Bytes that the caching allocator takes for a step, once it has run twice.

    Args:
        graph: The step.
        schedule: What happens in it.
        settings: How the allocator is set up.
        blas_workspace_bytes: Workspace of each thread's cuBLAS handle; see `Target`.
        capacity_bytes: What the device can give; None for any amount.
    """
    events = step_allocations(graph, schedule, blas_workspace_bytes=blas_workspace_bytes)
    return simulate(events, settings, capacity_bytes=capacity_bytes)


def step_allocations(
    graph: StepGraph, schedule: Schedule, *, num_steps: int = NUM_STEPS, blas_workspace_bytes: int = 0
) -> Iterator[Allocate | Free]:
    """What a training asks of the allocator in its first steps, in order.

    Args:
        graph: The step.
        schedule: What happens in it.
        num_steps: How many times it runs.
        blas_workspace_bytes: As for `reserved`.
    """
    replay = _Replay(graph, blas_workspace_bytes)
    for _ in range(num_steps):
        yield from replay.step(schedule)


def with_blas_workspaces(graph: StepGraph, blas_workspace_bytes: int) -> StepGraph:
    """The step with the workspaces of its threads' cuBLAS handles, which are alive all through it.

    Args:
        graph: The step.
        blas_workspace_bytes: As for `reserved`.
    """
    threads = {op.phase == "backward" for op in graph.ops if _is_blas(op)}
    return dataclasses.replace(graph, hidden_bytes=graph.hidden_bytes + len(threads) * blas_workspace_bytes)


def _is_blas(op: Op) -> bool:
    return "." in op.name and op.name.split(".")[1] in _BLAS_OPS


class _Replay:
    """Which blocks are alive, by what they hold."""

    def __init__(self, graph: StepGraph, blas_workspace_bytes: int) -> None:
        self.graph = graph
        self.blas_workspace_bytes = blas_workspace_bytes
        self.blas_threads: set[bool] = set()
        self.live: dict[tuple[int, int], None] = {}
        self.has_state = False

    def step(self, schedule: Schedule) -> Iterator[Allocate | Free]:
        """One step, and the end of what it leaves behind."""
        generations = _generations(self.graph, schedule)
        saved_by: dict[int, set[int]] = defaultdict(set)
        held: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        for storage in self.graph.storages:
            if storage.born == BEFORE_STEP and (storage.cause != "optimizer_state" or self.has_state):
                yield from self._allocate_static(storage.index)
        for event in schedule.events:
            action = event.action
            if action in _RUNS:
                if action is Action.OPTIMIZER:
                    yield from self._make_state()
                yield from self._run(event, generations, saved_by)
            elif action is Action.DROP:
                yield from self._drop((event.storage, event.generation))
            elif action is Action.SAVE:
                saved_by[event.storage].add(event.region)
            elif action is Action.HOLD:
                held[event.region].append(((event.region, len(held[event.region]), "held"), event.num_bytes))
                yield Allocate(*held[event.region][-1])
            else:
                yield from _let_go(held[event.region], event.num_bytes)
        for blocks in held.values():
            yield from _let_go(blocks, sum(size for _, size in blocks))
        for key in [key for key in self.live if self.graph.storages[key[0]].born != BEFORE_STEP]:
            yield from self._drop(key)

    def _allocate_static(self, index: int) -> Iterator[Allocate]:
        storage = self.graph.storages[index]
        is_count = storage.cause == "optimizer_state" and storage.num_bytes <= _COUNT_BYTES
        on_host = is_count and ":fused" not in self.graph.optimizer
        if (index, 0) not in self.live and not on_host:
            self.live[index, 0] = None
            yield Allocate((index, 0), storage.num_bytes)

    def _make_state(self) -> Iterator[Allocate]:
        if self.has_state:
            return
        self.has_state = True
        for storage in self.graph.storages:
            if storage.born == BEFORE_STEP and storage.cause == "optimizer_state":
                yield from self._allocate_static(storage.index)

    def _run(self, event: Event, generations: list[int], saved_by: dict[int, set[int]]) -> Iterator[Allocate | Free]:
        op = self.graph.ops[event.op]
        recomputes = event.action is Action.RECOMPUTE
        generation = generations[event.region] if recomputes else 0
        passing = []
        for s in dict.fromkeys(op.outputs):
            storage = self.graph.storages[s]
            if storage.born == event.op:
                yield Allocate((s, generation), storage.num_bytes)
                if recomputes and event.region in saved_by[s]:
                    passing.append((s, generation))
                else:
                    self.live[s, generation] = None
        if self.blas_workspace_bytes and _is_blas(op):
            thread = event.action in _ON_AUTOGRAD_THREAD
            if thread not in self.blas_threads:
                self.blas_threads.add(thread)
                yield Allocate(("cublas", thread), self.blas_workspace_bytes)
        if op.workspace_bytes:
            yield Allocate("workspace", op.workspace_bytes)
            yield Free("workspace")
        for key in passing:
            yield Free(key)

    def _drop(self, key: tuple[int, int]) -> Iterator[Free]:
        if key in self.live:
            del self.live[key]
            yield Free(key)


def _generations(graph: StepGraph, schedule: Schedule) -> list[int]:
    """What lives are called that each region's recompute makes; see `Schedule`."""
    inside = [[graph.subtree(call) for call in calls] for calls in schedule.regions]
    return [
        1 + sum(any(calls[0] in span for span in spans) for spans in inside[:position])
        for position, calls in enumerate(schedule.regions)
    ]


def _let_go(blocks: list[tuple[Any, int]], num_bytes: int) -> Iterator[Allocate | Free]:
    """Free the newest blocks up to this many bytes; of a block that is freed in part, the rest is a new block."""
    while num_bytes > 0 and blocks:
        key, size = blocks.pop()
        yield Free(key)
        if size > num_bytes:
            blocks.append((key, size - num_bytes))
            yield Allocate(key, size - num_bytes)
        num_bytes -= size
