"""A region's recipe, and what one execution of it saw when its forward started."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from autoremat._errors import RecomputeError
from autoremat.runtime._ambient import (
    Flags,
    RandomStates,
    drawn_from,
    generator_state,
    read_flags,
    read_other_random,
    read_torch_random,
)
from autoremat.runtime._links import Link, Returned, links_in, shifted
from autoremat.runtime._module_state import ModuleState, ModuleWatch, version_of
from autoremat.runtime._op_table import OpTable
from autoremat.runtime._other_random import fingerprint
from autoremat.runtime._selective import Store, Stored
from autoremat.runtime._structure import Copier, loosen_unchanged
from autoremat.runtime._torch_compat import has_no_data

MAX_NOTED_CALLS = 64
"""How many executions `explain` looks at, where forward runs and runs without a backward."""


class Learned:
    """What earlier executions of the same code have shown.

    Attributes:
        is_checked: Whether recomputed values were compared once and agreed.
        other_random: Whether a call drew from Python's or NumPy's random numbers, by its position in the region;
            missing until one has ended.
        holds_all: Whether recompute was seen to read what forward left alone in an argument that it changed.
    """

    __slots__ = ("__weakref__", "holds_all", "is_checked", "other_random")

    def __init__(self) -> None:
        self.is_checked = False
        self.holds_all = False
        self.other_random: dict[int, bool] = {}

    def hold_all(self) -> None:
        """From now on hold everything in arguments that forward changes."""
        self.holds_all = True


class PlanOnModel(Protocol):
    """Puts a plan on a model, and takes it off."""

    def as_then(self) -> contextlib.AbstractContextManager[None]:
        """Have the plan on the model, and no other, while a forward that ran under it is run again."""


class CallCounter(Protocol):
    """Knows which call of its module comes next; recompute of a region around it must count as forward did."""

    def read_count(self) -> int:
        """How many calls came before in this forward of the model."""

    def write_count(self, count: int) -> None:
        """Go on counting from here."""


@contextlib.contextmanager
def counting_from(counters: list[CallCounter], counts: list[int]) -> Iterator[None]:
    """Run with the counters set to these counts, and put back what they were."""
    found = [counter.read_count() for counter in counters]
    for counter, count in zip(counters, counts, strict=True):
        counter.write_count(count)
    try:
        yield
    finally:
        for counter, count in zip(counters, found, strict=True):
            counter.write_count(count)


class Part:
    """One module call of a region.

    Attributes:
        path: Module path, "" for a function.
        watch: State of its module, None for a function that reaches none.
        position: Which of the region's calls it is.
        counters: Call counters of regions inside it that are for single calls.
    """

    __slots__ = ("counters", "path", "position", "watch")

    def __init__(self, path: str, watch: ModuleWatch | None, position: int = 0) -> None:
        self.path = path
        self.position = position
        self.watch = watch
        self.counters: list[CallCounter] = []

    def hook_dicts(self, *, with_own: bool) -> list[dict[int, Any]]:
        """The hooks of modules inside the call, with or without those of its own module."""
        return self.watch.hook_dicts(with_roots=with_own) if self.watch is not None else []


class Recipe:
    """What all executions of a region have in common.

    Attributes:
        name: For messages, ``"Region 'transformer.h.3' (GPT2Block)"``.
        parts: Its module calls: one, or those of a span.
        table: Planned op calls, None for a region that stores and skips none.
        check: Whether recomputed values are compared: "first", "always" or "never".
        preserve_rng_state: Whether recompute draws the random numbers that forward drew.
        early_stop: Whether recompute stops once the last saved tensor is back.
        runs_own_hooks: Whether hooks of the watched modules themselves are inside the region, as those below are.
        compares_shapes: Whether shapes and dtypes of recomputed tensors are compared.
        error: Makes what to raise if recompute comes out differently, from a message.
        on_error: Told what a recompute raises.
        plan: What puts the plan on a model that it is part of, None for a region by hand. Weak: it holds its recipes.
        num_calls: Executions in forward.
        num_recomputes: Executions in backward.
        num_ops_run: Ops that ran in recompute; counted in selective regions only.
        num_outputs_stored: Stored outputs handed out.
        num_ops_skipped: Ops left out.
        held: What executions held at the end of forward, as far as noted: address, bytes and name of each storage.
        matched_parts: Module calls that ran in one of these executions.
        matched: Planned op calls that ran in one of these executions: slot of the operator, occurrence.
    """

    __slots__ = (
        "__weakref__", "check", "compares_shapes", "early_stop", "error", "held", "learned", "matched",
        "matched_parts", "name", "num_calls", "num_ops_run", "num_ops_skipped", "num_outputs_stored",
        "num_recomputes", "on_error", "parts", "plan", "preserve_rng_state", "runs_own_hooks", "table",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        parts: list[Part],
        table: OpTable | None = None,
        *,
        check: str = "first",
        preserve_rng_state: bool = True,
        early_stop: bool = True,
        learned: Learned | None = None,
    ) -> None:
        self.name = name
        self.parts = parts
        self.table = table
        self.check = check
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.compares_shapes = True
        self.runs_own_hooks = False
        self.error: Callable[[str], RecomputeError] = RecomputeError
        self.on_error: Callable[[BaseException], None] | None = None
        self.plan: weakref.ref[PlanOnModel] | None = None
        self.learned = learned if learned is not None else Learned()
        self.reset_counts()

    def reset_counts(self) -> None:
        """Start counting anew."""
        self.num_calls = self.num_recomputes = 0
        self.num_ops_run = self.num_outputs_stored = self.num_ops_skipped = 0
        self.held: list[tuple[int, int, str]] = []
        self.matched: set[tuple[int, int]] = set()
        self.matched_parts: set[int] = set()

    def note(self, runs: Sequence[Run], store: Store | None) -> None:
        """Note what an execution holds, for `explain`."""
        if self.num_recomputes or self.num_calls > MAX_NOTED_CALLS:
            return
        self.matched_parts.update(run.part for run in runs)
        tensors: list[tuple[str, torch.Tensor]] = []
        for position, run in enumerate(runs):
            entry, part = run.entry, self.parts[run.part]
            if entry is None:
                continue
            where = f" of {part.path}" if position else ""
            self.held += [
                (id(state), state.nbytes, f"random state{where}")
                for *_, state in entry.random
                if hasattr(state, "nbytes")
            ]
            tensors += [(f"{name}{where}", t) for name, t in entry.copier.tensors if not isinstance(t, nn.Parameter)]
            if entry.modules is not None and part.watch is not None:
                tensors += [(f"{part.watch.label(slot)} from before", t) for slot, t in entry.modules.before.items()]
        if store is not None and self.table is not None:
            self.matched.update(store.records)
            names = {operator.slot: operator.name for operator in self.table.values() if operator is not None}
            for (slot, occurrence), record in store.records.items():
                tensors += [(f"{names[slot]} #{occurrence}", o.tensor) for o in record.outputs if isinstance(o, Stored)]
        for name, tensor in tensors:
            if tensor.layout == torch.strided and not has_no_data(tensor):
                storage = tensor.untyped_storage()
                self.held.append((storage._cdata, storage.nbytes(), name))


class Run:
    """One call of a region, executed once.

    Attributes:
        part: Index into `Recipe.parts`.
        fn: What recompute calls.
        entry: What forward saw when it started; None while a region around this one has to run it again first.
        source: Index of the same call among the executions of the region around this one; None if it is not one of
            that region's own calls.
        wraps_inputs: Whether backward hooks of its module run an op on the arguments that counts as its first.
    """

    __slots__ = ("entry", "fn", "part", "source", "wraps_inputs")

    def __init__(self, part: int, fn: Callable[..., Any] | None, source: int | None = None) -> None:
        self.part = part
        self.fn = fn
        self.entry: Entry | None = None
        self.source = source
        self.wraps_inputs = False


class Entry:
    """What forward saw when it started."""

    __slots__ = (
        "args",
        "copier",
        "counts",
        "fingerprint",
        "flags",
        "flaw",
        "kwargs",
        "loose",
        "modules",
        "part",
        "random",
        "versions",
    )

    def __init__(
        self,
        recipe: Recipe,
        part: Part,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Returned | None = None,
        *,
        is_rerun: bool = False,
        random: RandomStates | None = None,
    ) -> None:
        self.part = part
        self.copier = copier = Copier(cuts_graph=is_rerun)
        if returned is None:
            self.args = tuple([copier.copy(arg, f"argument {i}") for i, arg in enumerate(args)])
            self.kwargs = {key: copier.copy(arg, f"argument {key!r}") for key, arg in kwargs.items()}
        else:
            self.args = tuple([returned.link_or_copy(arg, f"argument {i}", copier) for i, arg in enumerate(args)])
            self.kwargs = {key: returned.link_or_copy(a, f"argument {key!r}", copier) for key, a in kwargs.items()}
        self.versions = [version_of(tensor) for _, tensor in copier.tensors]
        self.flags: Flags = read_flags()
        self.modules: ModuleState | None = part.watch.read() if part.watch is not None else None
        self.random: RandomStates = []
        self.loose: list[Any] = []
        self.counts = [counter.read_count() for counter in part.counters]
        self.flaw = ""
        self.fingerprint = fingerprint() if recipe.learned.other_random.get(part.position) is False else None
        if random is not None:
            self.random = random
        elif recipe.preserve_rng_state:
            placed = self.modules.fixed[:1] if self.modules is not None else []
            self.random = read_torch_random([tensor for _, tensor in copier.tensors] + placed)
            if recipe.learned.other_random.get(part.position) is not False:
                self.random += read_other_random()
            for generator in copier.generators:
                self.random += generator_state(generator)

    def differentiable_args(self) -> list[torch.Tensor]:
        """Arguments that take part in autograd."""
        return [tensor for _, tensor in self.copier.tensors if tensor.requires_grad]

    def finish(self, recipe: Recipe, *, is_rerun: bool = False) -> None:
        """When forward ends: keep only what recompute needs.

        Args:
            recipe: The region.
            is_rerun: Whether the region around it is being recomputed, which may leave out the ops that draw: what
                the first execution drew from is known.
        """
        if not is_rerun:
            self.random = drawn_from(self.random)
        learned = recipe.learned
        if self.fingerprint is None:
            learned.other_random[self.part.position] = learned.other_random.get(self.part.position, False) or any(
                not isinstance(state, torch.Tensor) for _, _, state in self.random
            )
        elif recipe.preserve_rng_state and self.fingerprint != fingerprint():
            learned.other_random[self.part.position] = True
            self.flaw = (
                "forward drew from Python's or NumPy's random numbers for the first time, so that their state from "
                "before is not known. Run the step again: from now on it is stored."
            )
        if self.modules is not None and self.part.watch is not None:
            self.part.watch.finish(self.modules)
        if self.copier.parts:
            self._loosen(hold_all=recipe.learned.holds_all)

    def _loosen(self, *, hold_all: bool) -> None:
        copier = self.copier
        self.loose = [] if hold_all else loosen_unchanged(copier)
        gone = {id(item.tensor()) for item in self.loose}
        kept = [i for i, (_, tensor) in enumerate(copier.tensors) if id(tensor) not in gone]
        self.versions = [self.versions[i] for i in kept]
        copier.tensors = [copier.tensors[i] for i in kept]
        copier.forget_originals()

    def check(self, recipe: Recipe) -> None:
        """Refuse arguments, parameters and buffers that are no longer what forward saw."""
        if self.flaw:
            raise RecomputeError(f"{recipe.name}: {self.flaw}")
        for (name, tensor), version in zip(self.copier.tensors, self.versions, strict=True):
            if version_of(tensor) != version:
                raise RecomputeError(
                    f"{recipe.name}: {name} has been modified by an inplace operation since the region's forward "
                    f"started (version {version}, now {version_of(tensor)}); recompute would use the new value. "
                    "Write the operation out of place, or take the region out of the plan."
                )
        if self.modules is not None and self.part.watch is not None:
            self.part.watch.check(self.modules, recipe.name)

    def links(self) -> Iterator[Link]:
        """Its arguments that earlier calls of the span returned."""
        return links_in((*self.args, *self.kwargs.values()))

    def inside(self, runs: dict[int, int], outputs: dict[int, list[torch.Tensor]]) -> Entry:
        """What a region sees that consists of some of the calls of a span: the same, but for what links the calls.

        Args:
            runs: Executions of the inner region, by those of the outer one.
            outputs: What the outer one's executions have returned this time.
        """
        entry = copy.copy(self)
        known = {id(t): version for (_, t), version in zip(self.copier.tensors, self.versions, strict=True)}
        entry.copier = copier = Copier()
        entry.args = tuple([copier.copy(shifted(a, runs, outputs), f"argument {i}") for i, a in enumerate(self.args)])
        entry.kwargs = {
            key: copier.copy(shifted(a, runs, outputs), f"argument {key!r}") for key, a in self.kwargs.items()
        }
        entry.versions = [known.get(id(tensor), version_of(tensor)) for _, tensor in copier.tensors]
        copier.forget_originals()
        return entry
