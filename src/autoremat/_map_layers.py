"""Makes the map of layers of a step from its graph and the schedules of the plain and the planned step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from autoremat._expand import expand
from autoremat._layer_map import LayerCost, LayerMap, LayerRow, OpRow, Treatment
from autoremat._ledger import alive_at_turn
from autoremat._replay import RegionSpec
from autoremat._schedule import Action
from autoremat._step_graph import BEFORE_STEP, StepGraph
from autoremat._units import format_bytes

_COSTS = tuple(f.name for f in fields(LayerCost))


def map_layers(graph: StepGraph, specs: Sequence[RegionSpec], op_seconds: Sequence[float]) -> LayerMap:
    """What each layer and each operator keeps, recomputes and costs.

    Args:
        graph: The step.
        specs: Regions of the planned step; none for the plain one.
        op_seconds: Predicted time of each op, in the order of ``graph.ops``.
    """
    counts = _Counts(graph)
    counts.add_ops(op_seconds)
    counts.add_bytes("plain_bytes", ())
    counts.add_bytes("planned_bytes", specs)
    counts.add_recompute(specs, op_seconds)
    ops = sorted(counts.ops.items(), key=lambda item: -item[1]["seconds"] - item[1]["recomputed_s"])
    return LayerMap(
        model=graph.model,
        layers=_rows(graph, specs, counts),
        ops=tuple(OpRow(name, counts.calls[name], counts.recomputed[name], _cost(found)) for name, found in ops),
    )


_Sums = dict[str, float]


def _zero() -> _Sums:
    return dict.fromkeys(_COSTS, 0)


@dataclass(slots=True)
class _Counts:
    """Sums by module path and by operator."""

    graph: StepGraph
    paths: defaultdict[str, _Sums] = field(default_factory=lambda: defaultdict(_zero))
    ops: defaultdict[str, _Sums] = field(default_factory=lambda: defaultdict(_zero))
    calls: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)

    def add_ops(self, op_seconds: Sequence[float]) -> None:
        """FLOPs and time of the plain step; the optimizer is no layer's."""
        for op in self.graph.ops:
            self.calls[op.name] += 1
            self._add(op.index, op_seconds, "flops", "seconds", in_layer=op.phase != "optimizer")
        for storage in self.graph.storages:
            if storage.cause == "parameter" and storage.born == BEFORE_STEP:
                self.paths[storage.label.rpartition(".")[0]]["parameter_bytes"] += storage.num_bytes

    def add_recompute(self, specs: Sequence[RegionSpec], op_seconds: Sequence[float]) -> None:
        """What the planned step runs again."""
        for event in expand(self.graph, specs).events:
            if event.action is Action.RECOMPUTE:
                self.recomputed[self.graph.ops[event.op].name] += 1
                self._add(event.op, op_seconds, "recomputed_flops", "recomputed_s")

    def _add(self, index: int, op_seconds: Sequence[float], flops: str, seconds: str, *, in_layer: bool = True) -> None:
        op = self.graph.ops[index]
        sums = [self.ops[op.name], self.paths[self.graph.calls[op.call].path]] if in_layer else [self.ops[op.name]]
        for found in sums:
            found[flops] += op.flops
            found[seconds] += op_seconds[index]

    def add_bytes(self, name: str, specs: Sequence[RegionSpec]) -> None:
        """What is alive when backward begins, for the layer that saved it first."""
        graph = self.graph
        schedule = expand(graph, specs)
        copies, held = alive_at_turn(graph, schedule)
        savers: dict[int, int] = {}
        for saved in graph.saved:
            savers.setdefault(saved.storage, saved.call)
        for index, count in copies.items():
            storage = graph.storages[index]
            if storage.born == BEFORE_STEP:
                continue
            maker = graph.ops[storage.born]
            saver = savers.get(index, maker.call)
            self.paths[graph.calls[saver].path][name] += count * storage.num_bytes
            self.ops[maker.name][name] += count * storage.num_bytes
        for region, num_bytes in held.items():
            self.paths[graph.calls[schedule.regions[region][0]].path][name] += num_bytes


def _rows(graph: StepGraph, specs: Sequence[RegionSpec], counts: _Counts) -> tuple[LayerRow, ...]:
    places: dict[str, int] = {}
    parents: list[int] = []
    for call in graph.calls:
        if call.path not in places:
            places[call.path] = len(places)
            parents.append(-1 if call.parent < 0 else places[graph.calls[call.parent].path])
    for path in [path for path in counts.paths if path not in places]:  # parameters of modules that are never called
        counts.paths[_nearest(path, places)]["parameter_bytes"] += counts.paths.pop(path)["parameter_bytes"]
    own = [counts.paths[path] for path in places]
    total = [dict(sums) for sums in own]
    for place in range(len(parents) - 1, 0, -1):  # a layer comes after the one that calls it
        for name, value in total[place].items():
            total[parents[place]][name] += value
    num_calls = Counter(call.path for call in graph.calls)
    classes = {call.path: call.class_name for call in graph.calls}
    treated = _treatments(graph, specs)
    return tuple(
        LayerRow(path, classes[path], parents[i], num_calls[path], *treated.get(path, ("", "")), *map(_cost, pair))
        for (path, i), pair in zip(places.items(), zip(own, total, strict=True), strict=True)
    )


def _nearest(path: str, places: dict[str, int]) -> str:
    """The closest module around a path that is called."""
    while path and path not in places:
        path = path.rpartition(".")[0]
    return path


def _treatments(graph: StepGraph, specs: Iterable[RegionSpec]) -> dict[str, tuple[Treatment, str]]:
    """By path: what a plan does to a layer's calls; a region counts more than being inside one."""
    found: dict[str, tuple[Treatment, str]] = {}
    for spec in specs:
        for call in spec.calls:
            for inner in graph.subtree(call):
                found.setdefault(graph.calls[inner].path, ("inside", ""))
        found |= _treatments(graph, spec.children)
        for call in spec.calls:
            found[graph.calls[call].path] = ("region", _note(graph, spec))
    return found


def _note(graph: StepGraph, spec: RegionSpec) -> str:
    size = sum(graph.storages[s].num_bytes for s in spec.kept)
    count = len(spec.kept)
    parts = [f"stores {count} output{'s' if count > 1 else ''}, {format_bytes(size)}" if count else "stores its inputs"]
    if spec.then:
        first, last = (graph.calls[call].path for call in (spec.calls[0], spec.calls[-1]))
        parts.insert(0, f"span {first} to {last}")
    if spec.children:
        parts.append(f"{len(spec.children)} region{'s' if len(spec.children) > 1 else ''} inside")
    return "; ".join(parts)


def _cost(sums: _Sums) -> LayerCost:
    values = {name: value if name in ("seconds", "recomputed_s") else int(value) for name, value in sums.items()}
    return LayerCost(**values)  # type: ignore[arg-type]
