"""Regions in compiled code: each call goes to torch's selective checkpointing, with a policy by op call.

Dynamo puts a call of `torch.utils.checkpoint.checkpoint` into its graph as one node. AOTAutograd runs that node under a
dispatch mode, *before* decompositions, so that it sees the very ops that an eager region counts; what the policy
answers is noted on the nodes that an op becomes, and the partitioner stores or recomputes them. So a stored output is
found by operator and occurrence, as in eager mode; that the module which calls it is the plan's is checked while the
compiler traces. Ops that only stored outputs need are dead code in backward, which the compiler drops.

What a region hands on is stored, as in eager mode, where whoever takes it saves it. torch's partitioner means to do so
for the region's last op, but cannot if that is a view or has several outputs (a layer norm): then it would recompute a
region from the one before it, and so on to the first. So the op behind the output is marked here.

The calls of a span share one graph id: to the partitioner they are one region. A region that cannot be expressed is
refused by name: nested ones (the compiler recomputes each op once), single calls of a module that is called more often.

Known limits: with a backend that runs Dynamo's graph without AOTAutograd there is no partitioner, and the region is
refused; `Applied.executed` counts no calls in compiled code; what lies outside all regions is the compiler's to decide.
"""

from __future__ import annotations

import operator
import re
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from autoremat._errors import PlanError
from autoremat._plan import UNCOUNTED_OPS, Plan, Region, SavedOutput
from autoremat._step_graph import is_function, split_function
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._layout import find_module
from autoremat.runtime._stack import active_regions

_CASTS = "aten._to_copy.default"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_TAKEN_BY_CHECKPOINT = frozenset(
    {"function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"}
)


class CompiledRegions:
    """The regions of a plan that lie in compiled code, on their modules."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[nn.Module], CompiledForward]] = []
        self._known: set[int] = set()

    def install(self, model: nn.Module, regions: Iterable[Region]) -> None:
        """Put a ``forward`` on each region's modules that the compiler traces into a checkpoint and that is plain else.

        Args:
            model: The model that the regions' paths start from.
            regions: Which; those that are there already are passed over.

        Raises:
            PlanError: If one of them cannot be expressed; then none is put on.
        """
        new = [region for region in regions if id(region) not in self._known]
        for region in new:
            _refuse_inexpressible(region)
        for region in new:
            self._known.add(id(region))
            tracer = RegionTracer(region)
            for part, call in enumerate(region.calls):
                module = find_module(model, call.path)
                forward = CompiledForward(module, tracer, part)
                module.forward = forward
                self._entries.append((weakref.ref(module), forward))

    def remove(self) -> None:
        """Take them off again."""
        for reference, forward in self._entries:
            module = reference()
            if module is not None and module.__dict__.get("forward") is forward:
                del module.forward
                if forward.replaced is not None:
                    module.forward = forward.replaced
        self._entries.clear()
        self._known.clear()


def is_prepared(module: nn.Module) -> bool:
    """Whether the compiler traces calls of a module into a checkpoint."""
    return isinstance(module.__dict__.get("forward"), CompiledForward)


class CompiledForward:
    """A module's ``forward`` while its region is in compiled code. Copies and pickles of the module are plain."""

    def __init__(self, module: nn.Module, tracer: RegionTracer, part: int) -> None:
        self.original = module.forward
        self.replaced: Any = module.__dict__.get("forward")
        self.name = tracer.region.name

        def contexts() -> tuple[Any, Any]:
            return tracer.contexts(part)

        self.contexts = contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        check_traced(self.name, tuple(kwargs))
        function = compat.with_effects_in_forward_only
        return torch_checkpoint(function, self.original, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        function, module = self._parts()
        return self.original if module is None else _bind(function, memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _bind, self._parts()

    def _parts(self) -> tuple[Any, Any]:
        """Function and module of the plain ``forward``; the module is None where somebody had put in another one."""
        return getattr(self.original, "__func__", self.original), getattr(self.original, "__self__", None)


def _bind(function: Any, module: Any) -> Any:
    return function if module is None else types.MethodType(function, module)


@compat.runs_while_tracing
def check_traced(name: str, keywords: tuple[str, ...]) -> bool:
    """While the compiler traces a region's call: whether it can become a checkpoint."""
    if active_regions():
        raise compat.refuse_compile(
            f"Region {name!r} was entered outside of compiled code, and its forward is compiled by itself: the "
            "compiler gave up on what is around it. Compile with fullgraph=True to see where, or compile the region's "
            "module, and apply the plan after that."
        )
    if taken := _TAKEN_BY_CHECKPOINT.intersection(keywords):
        raise compat.refuse_compile(
            f"Region {name!r} is called with the keyword {min(taken)!r}, which torch's checkpoint takes for its own. "
            "Rename it, or drop the region."
        )
    return True


@dataclass(slots=True)
class Progress:
    """How far a region's ops have been seen in one pass of the compiler.

    Attributes:
        trace: What the compiler is tracing.
        part: Which call of the region is running.
        graph_id: What the partitioner knows the region by.
        counts: Op calls so far, by operator.
        found: Stored outputs found so far.
    """

    trace: object
    part: int = 0
    graph_id: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    found: set[tuple[str, int]] = field(default_factory=set)


class RegionTracer:
    """Answers for each op call of a region whether it is stored, and checks that all that are to be stored came by."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.saved = {(output.op, output.occurrence): output for output in region.saved}
        self._progress: Progress | None = None

    def contexts(self, part: int) -> tuple[Any, Any]:
        """The modes for forward and recompute of one of the region's calls."""
        self._check_compiler()
        trace = compat.current_trace()
        progress = self._progress
        if part == 0:
            progress = Progress(trace)
        elif progress is None or progress.trace is not trace or progress.part != part - 1:
            raise compat.refuse_compile(
                f"Region {self.region.name!r} is a span whose calls the compiler puts into different graphs. Compile "
                "all of it in one graph (fullgraph=True shows what breaks it), or plan without spans."
            )
        progress.part = part
        self._progress = progress
        return compat.selective_contexts(Policy(self, progress), lambda: self._finish(progress, part))

    def _check_compiler(self) -> None:
        name = self.region.name
        if compat.current_trace() is None:
            raise compat.refuse_compile(
                f"Region {name!r} cannot be recomputed as planned: there is a graph break inside it, or the backend "
                "does not partition graphs (backend='eager' does not). Compile with fullgraph=True to see where, use "
                "another backend, or drop the region."
            )
        if compat.activation_memory_budget() < 1:
            raise compat.refuse_compile(
                f"Region {name!r}: torch's activation_memory_budget is set to {compat.activation_memory_budget()} as "
                "well, and would decide again what the plan has decided. Set it to 1, or take the plan off."
            )
        if any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")):
            cast = next((o for o in self.region.saved if o.op == _CASTS), None)
            if cast is not None:
                raise compat.refuse_compile(
                    f"Region {name!r} stores a cast ({cast.op} #{cast.occurrence} of {cast.module!r}), and under "
                    "autocast the compiler casts parameters anew each time, so that it cannot be told which is meant. "
                    "Plan with another budget, or cast the model instead of using autocast."
                )

    def _finish(self, progress: Progress, part: int) -> None:
        if part < len(self.region.calls) - 1:
            return
        missing = sorted(set(self.saved) - progress.found)
        if missing:
            op, occurrence = missing[0]
            raise compat.refuse_compile(
                f"Region {self.region.name!r} stores {op} #{occurrence} (called by {self.saved[missing[0]].module!r}), "
                f"and the compiler's graph of it has {progress.counts[op]} calls of that operator. Make the plan on "
                "the same device, with the same inputs, and without code that asks whether it is being compiled."
            )
        _store_what_is_handed_on(progress.graph_id)


def _store_what_is_handed_on(graph_id: int | None) -> None:
    """Mark the ops that made what leaves a region as stored; called when its forward has been traced."""
    for node in compat.traced_nodes():
        if node.meta.get("ac_graph_id") == graph_id and _leaves_region(node):
            _store(node)


def _leaves_region(node: fx.Node) -> bool:
    """Whether nobody in its region takes an op's result; statistics that a normalization has beside it do not count."""
    if node.target is operator.getitem and node.args[1] != 0:
        return False
    is_tuple = any(user.target is operator.getitem for user in node.users)
    return not is_tuple and node.target not in _ALIASES and not _is_taken_inside(node)


def _is_taken_inside(node: fx.Node) -> bool:
    """Whether an op in its region takes a node's result. Selective checkpointing makes aliases of all, for nobody."""
    inside = [user for user in node.users if user.meta.get("ac_graph_id") == node.meta["ac_graph_id"]]
    return any(user.target not in _ALIASES or _is_taken_inside(user) for user in inside)


def _store(node: fx.Node) -> None:
    """Mark an op as stored: whole, if it has several outputs, and the one behind it, if it is a view."""
    graph_id = node.meta["ac_graph_id"]
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        behind = node.args[0]
        if not isinstance(behind, fx.Node) or behind.meta.get("ac_graph_id") != graph_id:
            return  # a view of what came into the region
        node = behind
    for part in (node, *(user for user in node.users if user.target is operator.getitem)):
        part.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class Policy:
    """A policy of torch's selective checkpointing that names op calls, not operators."""

    def __init__(self, tracer: RegionTracer, progress: Progress) -> None:
        self.tracer = tracer
        self.progress = progress

    def __call__(self, _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if name in UNCOUNTED_OPS:
            return CheckpointPolicy.MUST_RECOMPUTE
        call = name, self.progress.counts[name]
        self.progress.counts[name] += 1
        output = self.tracer.saved.get(call)
        if output is None:
            return CheckpointPolicy.MUST_RECOMPUTE
        _check_module(self.tracer.region, output)
        self.progress.found.add(call)
        return CheckpointPolicy.MUST_SAVE


def _check_module(region: Region, output: SavedOutput) -> None:
    """Refuse a stored output that another module calls than the plan says."""
    found = compat.traced_module()
    around = next((c.path for c in region.calls if _is_within(output.module, c.path)), None)
    if found is None or around is None:
        return
    expected = output.module.removeprefix(around).strip(".").split(".") if output.module != around else []
    parts = re.findall(r"\w+", found)
    if expected and parts[-len(expected) :] != expected:
        raise compat.refuse_compile(
            f"Region {region.name!r} stores {output.op} #{output.occurrence}, which {output.module!r} calls in eager "
            f"mode; in the compiler's graph {found} does. Make the plan on the same device and with the same inputs."
        )


def _is_within(path: str, around: str) -> bool:
    return path == around or not around or path.startswith(around + ".")


def _refuse_inexpressible(region: Region) -> None:
    function = next((call for call in region.calls if is_function(call.path)), None)
    if function is not None:
        raise PlanError(
            f"Region {region.name!r} has a function among its calls ({function.path!r}), and compiled code has none. "
            "Plan with autoremat.plan(..., for_compile=True), or run the model without torch.compile."
        )
    if region.children:
        raise PlanError(
            f"Region {region.name!r} has regions inside it ({region.children[0].name!r}), and compiled code recomputes "
            "each op once at most. Plan with autoremat.plan(..., for_compile=True), or run the model without "
            "torch.compile."
        )
    numbered = next((call for call in region.calls if call.number is not None), None)
    if numbered is not None:
        raise PlanError(
            f"Region {region.name!r} is call {numbered.number} of {numbered.path!r} alone, and compiled code cannot "
            "tell the calls of a module apart. Plan with autoremat.plan(..., for_compile=True), or run the model "
            "without torch.compile."
        )


def compiled_units(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of a model that ``torch.compile`` returned or that were compiled in place."""
    if _is_compiled(model):
        return [model]
    return [unit for child in model.children() for unit in compiled_units(child)]


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def in_compiled_code(model: nn.Module, plan: Plan) -> Iterator[Region]:
    """The regions of a plan that lie in compiled parts of a model.

    Raises:
        PlanError: If a region is partly in compiled code.
    """
    unit_of = {module: unit for unit in compiled_units(model) for module in unit.modules()}
    for region in plan.regions if unit_of else ():
        modules = [find_module(model, call.path) for call in region.calls if not is_function(call.path)]
        owners = [find_module(model, split_function(c.path)[0]) for c in region.calls if is_function(c.path)]
        units = {unit_of.get(module) for module in (*modules, *owners)}
        if units == {None}:
            inner = next((m for module in modules for m in module.modules() if m in unit_of), None)
            if inner is None:
                continue
            raise PlanError(
                f"Region {region.name!r} has compiled modules inside it ({type(inner).__name__}), and its ops cannot "
                "be told apart there. Compile the whole model, or plan regions no larger than what is compiled."
            )
        if len(units) > 1:
            raise PlanError(
                f"Region {region.name!r} is a span over modules that are compiled one by one, which no graph contains "
                "as a whole. Compile the whole model instead, or plan with a larger budget."
            )
        yield region
