"""A plan in the words of other libraries, and what is lost on the way.

Each form is worked out as regions that the other library can express, priced by the ledger on the same step, so that
what is lost is said in bytes and FLOPs. Where there is a choice (every how many layers, how many layers), it is the
cheapest that keeps the plan's budget, or else the one with the smallest peak.

What the other library's own runtime does beyond these regions (Megatron's layers are not those of the model here) is
not priced; the text says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from autoremat._errors import PlanMismatch, UsageError
from autoremat._export_torch import fsdp_source, torch_source
from autoremat._ledger import expand, peak_bytes
from autoremat._plan import Plan
from autoremat._planning import Planning, find_target
from autoremat._regions import resolve
from autoremat._replay import RegionSpec, replay
from autoremat._results import JsonResult
from autoremat._step_graph import StepGraph
from autoremat._units import format_bytes, format_percent
from autoremat.solve import classic_regions

ExportTarget = Literal["torch", "transformers", "megatron", "fsdp"]
Specs = tuple[RegionSpec, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Export(JsonResult):
    """A plan in another library's words.

    Attributes:
        to: Which library.
        text: What to use: Python for "torch" and "fsdp", JSON of training arguments for "transformers", command line
            arguments for "megatron".
        plan: The same, as a plan: what the exported form recomputes and stores, with its predicted peak. For "torch",
            ops that only stored outputs need run again besides.
        losses: What is lost against the plan that was exported, in words, with numbers.
    """

    to: str
    text: str
    plan: Plan
    losses: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def export(graph: StepGraph, plan: Plan, to: ExportTarget) -> Export:
    """Write a plan for other libraries, and say what is lost.

    Args:
        graph: The step that the plan is for.
        plan: The plan.
        to: "torch" (selective checkpointing, op call by op call, as a Python file with ``apply(model)``),
            "transformers" (``activation_checkpointing_kwargs`` with ``every_n_layers``), "megatron" (command line
            arguments), "fsdp" (``apply_activation_checkpointing`` with a function that says which modules).

    Returns:
        The text, the plan that it amounts to, and the losses.

    Raises:
        UsageError: If the form makes no sense for this model or plan.
        PlanMismatch: If the plan is not for this step.

    Example:
        >>> import torch, autoremat as ar
        >>> layers = [torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)]
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(32, 16, 8)
        >>> graph = ar.trace(model, batch, loss=lambda y: y.sum(), optimizer=None)
        >>> export(graph, ar.classic(graph, "every-block"), "megatron").text
        '--recompute-granularity full --recompute-method block --recompute-num-layers 3'
    """
    if to not in get_args(ExportTarget):
        raise UsageError(f"to={to!r}: a plan can be exported to {', '.join(get_args(ExportTarget))}.")
    if plan.model_signature and plan.model_signature != graph.model_signature:
        raise PlanMismatch(f"The plan was made for another model than this step of {graph.model}. Plan again.")
    if not plan.regions:
        raise UsageError("The plan recomputes nothing: there is nothing to export. Train without checkpointing.")
    return _Exporter(graph, plan).export(to)


class _Exporter:
    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.specs = tuple(resolve(graph, plan))
        self.planning = Planning(graph, find_target(None, plan.target or None, graph.device_kind), plan.objective)
        self.given = self.planning.make_plan(self.specs)
        self.budget_bytes = plan.budget_bytes

    def export(self, to: ExportTarget) -> Export:
        make = {
            "torch": self._torch,
            "transformers": self._transformers,
            "megatron": self._megatron,
            "fsdp": self._fsdp,
        }
        text, specs, lost = make[to]()
        found = self.planning.make_plan(specs)
        again = self._dead_flops(specs) if to == "torch" else 0
        losses = (*self._compare(found, again), *lost, *self._buffers(specs))
        return Export(to=to, text=text, plan=dataclasses.replace(found, budget_bytes=self.budget_bytes), losses=losses)

    def _torch(self) -> tuple[str, Specs, list[str]]:
        lost: list[str] = []
        specs = tuple(self._with_all_outputs(spec) for spec in self._single_calls(lost))
        plan = self.planning.make_plan(specs)
        return torch_source(_unnumbered(plan), self.graph.model), specs, lost

    def _fsdp(self) -> tuple[str, Specs, list[str]]:
        lost: list[str] = []
        specs = tuple(RegionSpec(spec.call, is_whole=True) for spec in self._single_calls(lost))
        num_saved = sum(len(spec.kept) for spec in self.specs)
        if num_saved:
            lost.append(f"None of the plan's {num_saved} stored outputs is stored: whole modules are recomputed.")
        plan = self.planning.make_plan(specs)
        return fsdp_source([region.path for region in _unnumbered(plan).regions], self.graph.model), specs, lost

    def _transformers(self) -> tuple[str, Specs, list[str]]:
        layers = self._layers()
        num_layers = max(len(step) for step in layers)

        def every(n: int) -> Specs:
            return tuple(spec for step in layers for spec in step[::n])

        n = self._cheapest((n, every(n)) for n in range(1, num_layers + 1))
        settings = {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"every_n_layers": n, "use_reentrant": False},
        }
        return json.dumps(settings), every(n), self._only_layers("every n-th layer, from the first")

    def _megatron(self) -> tuple[str, Specs, list[str]]:
        layers = self._layers()
        num_layers = max(len(step) for step in layers)
        forms: dict[tuple[str, int], Specs] = {
            ("block", n): tuple(spec for step in layers for spec in step[:n]) for n in range(1, num_layers + 1)
        }
        for n in range(1, num_layers + 1):
            if num_layers % n == 0:
                forms["uniform", n] = classic_regions(self.graph, f"uniform:{n}") or ()
        method, n = self._cheapest(forms.items())
        text = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {n}"
        lost = self._only_layers("the first layers of a pipeline stage, or all of them in chunks")
        lost.append(
            "Priced on this model and one pipeline stage: Megatron's own layers store other tensors. With several "
            "stages, --recompute-num-layers counts the layers of each."
        )
        return text, forms[method, n], lost

    def _layers(self) -> list[list[RegionSpec]]:
        """The repeated layers of the model, in order, by micro-step."""
        found: dict[int, list[RegionSpec]] = {}
        for spec in classic_regions(self.graph, "every-block") or ():
            found.setdefault(self.graph.calls[spec.call].micro_step, []).append(spec)
        if not found:
            raise UsageError(
                f"{self.graph.model} has no repeated layers, which is all that this form can name. Export to 'torch'."
            )
        return list(found.values())

    def _cheapest(self, forms: Iterable[tuple[T, Specs]]) -> T:
        """The form with the fewest FLOPs within the plan's budget, or its peak; else that with the smallest peak."""
        assert self.given.planned is not None
        limit = max(self.budget_bytes or 0, self.given.planned.peak_bytes)
        prices = []
        for form, specs in forms:
            peak = peak_bytes(self.graph, expand(self.graph, specs))
            flops = sum(replay(self.graph, spec).flops for spec in specs)
            prices.append((peak > limit, peak if peak > limit else flops, peak, form))
        return min(prices, key=lambda price: price[:3])[-1]

    def _single_calls(self, lost: list[str]) -> Specs:
        """Regions of one call each, without regions inside them."""
        found = tuple(part for spec in self.specs for part in self._split(spec))
        num_spans = sum(bool(spec.then) for spec in self.specs)
        num_nested = sum(bool(spec.children) for spec in self.specs)
        if num_spans:
            lost.append(f"{num_spans} spans become a region for each of their calls: what is passed on is stored.")
        if num_nested:
            lost.append(f"{num_nested} regions lose the nesting inside them.")
        return self._modules(found, lost)

    def _modules(self, specs: Specs, lost: list[str]) -> Specs:
        """Without the functions between modules, which no other library can name."""
        modules = tuple(spec for spec in specs if not self.graph.calls[spec.call].is_function)
        if not modules:
            raise UsageError(
                "The plan recomputes functions between modules only, and this form names modules. Use autoremat.apply, "
                "or plan with for_compile=True."
            )
        if len(modules) < len(specs):
            lost.append(f"{len(specs) - len(modules)} functions between modules are not recomputed: modules alone are.")
        return modules

    def _split(self, spec: RegionSpec) -> Iterator[RegionSpec]:
        parts = [child for child in spec.children if child.is_part_of(spec)]
        covered = {call for child in parts for call in child.calls}
        for child in parts:
            yield from self._split(child)
        for call in spec.calls:
            if call not in covered:
                yield RegionSpec(call, self._born_in(spec.kept, call), is_whole=spec.is_whole)

    def _born_in(self, kept: frozenset[int], call: int) -> frozenset[int]:
        span = self.graph.calls[call]
        return frozenset(s for s in kept if span.start <= self.graph.storages[s].born < span.end)

    def _with_all_outputs(self, spec: RegionSpec) -> RegionSpec:
        """Torch stores all outputs of an op or none."""
        ops = {self.graph.storages[s].born for s in spec.kept}
        outputs = {s for op in ops for s in self.graph.ops[op].outputs if self.graph.storages[s].born == op}
        return dataclasses.replace(spec, kept=spec.kept | outputs)

    def _dead_flops(self, specs: Specs) -> int:
        """FLOPs of ops that only stored outputs need: torch runs them again."""
        total = 0
        for spec in specs:
            work = replay(self.graph, spec)
            stored = {self.graph.storages[s].born for s in spec.kept}
            total += sum(self.graph.ops[i].flops for i in work.skipped if i < work.stop and i not in stored)
        return total

    def _compare(self, found: Plan, again: int) -> Iterator[str]:
        assert found.plain is not None
        assert found.planned is not None
        assert self.given.planned is not None
        more = found.planned.peak_bytes - self.given.planned.peak_bytes
        if more > 0:
            yield (
                f"The peak is {format_bytes(found.planned.peak_bytes)}, {format_bytes(more)} more than under the plan "
                f"({format_bytes(self.given.planned.peak_bytes)})."
            )
        budget_bytes = self.budget_bytes or found.planned.peak_bytes
        excess = found.planned.peak_bytes - budget_bytes
        if excess > 0:
            yield f"That is {format_bytes(excess)} over the budget of {format_bytes(budget_bytes)}: it may not fit."
        flops = found.planned.flops + again
        if flops > self.given.planned.flops:
            here, there = (n / max(1, found.plain.flops) - 1 for n in (self.given.planned.flops, flops))
            yield f"It costs {format_percent(there)} more FLOPs than the plain step, the plan {format_percent(here)}."
        if again:
            yield (
                f"Of these, {format_percent(again / max(1, found.plain.flops))} are of ops that only stored outputs "
                "need: torch runs them again."
            )

    def _only_layers(self, which: str) -> list[str]:
        lost = []
        num_saved = sum(len(spec.kept) for spec in self.specs)
        if num_saved:
            lost.append(f"None of the plan's {num_saved} stored outputs is stored: whole layers are recomputed.")
        layers = {spec.call for step in self._layers() for spec in step}
        others = sum(not set(spec.calls) <= layers for spec in self.specs)
        if others:
            lost.append(
                f"{others} of the plan's {len(self.specs)} regions are no layers; this form knows only {which}."
            )
        return lost

    def _buffers(self, specs: Specs) -> Iterator[str]:
        """Torch's checkpoint updates running statistics again in recompute."""
        changing = [
            self.graph.calls[spec.call].path
            for spec in specs
            for call in spec.calls
            for op in self.graph.ops[self.graph.calls[call].start : self.graph.calls[call].end]
            if any(self.graph.storages[s].cause == "buffer" for s in op.mutates)
        ]
        if changing:
            yield (
                f"Buffers (running statistics) in {len(set(changing))} regions, {changing[0]!r} first, are updated "
                "twice a step: torch's checkpoint repeats that. Gradients stay the same."
            )


def _unnumbered(plan: Plan) -> Plan:
    """The plan, if it names no single calls."""
    numbered = next((region for region in plan.regions if region.number is not None), None)
    if numbered is not None:
        raise UsageError(
            f"Region {numbered.name!r} is one call of a module that is called more often, and this form can only name "
            "modules. Use autoremat.apply."
        )
    return plan
