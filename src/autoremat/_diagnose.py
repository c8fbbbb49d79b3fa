"""What decides whether checkpointing helps a step, with numbers: states, loss, depth, room, launches.

Each rule looks at bytes that are alive at a predicted peak, or at predicted times. What would help instead is worked
out on the step itself where that can be (sharding, a fused optimizer), else on the step with storages of other sizes,
marked as an estimate.

Sources of the estimates: 8-bit states keep one byte for each and one float32 for each block of 256 (Dettmers et al.,
ICLR 2022; bitsandbytes); LoRA trains two thin factors for each weight matrix (Hu et al., ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat._advice import Diagnosis, Remedy
from autoremat._api import distribute
from autoremat._cost import launch_bound_share
from autoremat._errors import AutorematError
from autoremat._expand import expand
from autoremat._ledger import alive_at, moments, price
from autoremat._results import MemoryProfile
from autoremat._sharding import Sharding
from autoremat._step_graph import StepGraph, Storage
from autoremat._units import format_bytes, format_percent
from autoremat._ways import Way

STATES_SHARE = 0.6
"""Parameters, gradients and optimizer state are what matters from this share of the smallest peak on."""
LOSS_SHARE = 0.3
"""So are logits and their relatives, where they are that much of the highest moment at which the loss runs."""
LOSS_HEIGHT = 0.97
"""And that moment is about as high as the smallest peak: what plans store for nothing rises up to it."""
SHALLOW_SHARE = 0.1
"""Checkpointing that saves less than this share of the peak is not worth its time."""
LAUNCH_SHARE = 0.3
"""Launches rule from this share of the step's time on."""
LOSS_CHUNKS = 8
LORA_RANK = 16
_EIGHT_BIT = (1 + 4 / 256) / 4
_STATES = ("parameter", "gradient", "optimizer_state", "ema")
_DEVICES = (2, 4, 8, 16, 32, 64)
"""Over how many devices everything is sharded: the first three in any case, more until it fits."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at.

    Attributes:
        plain: The step as it was given, without regions.
        tightest: The way with the smallest peak: one sample in a forward, planned for as little as can be.
        planned: The batch as given, planned.
        every_block: The batch as given, each block checkpointed.
        budget_bytes: Memory for the whole step.
        fused: The tightest way with a fused optimizer, where there is one.
    """

    plain: Way
    tightest: Callable[[], Way]
    planned: Way
    every_block: Way
    budget_bytes: int
    fused: Callable[[], Way | None]


def diagnose(facts: Facts) -> tuple[Diagnosis, ...]:
    """Everything that applies, most telling first; where the plain step fits, nothing has to become smaller."""
    fits = facts.plain.least_bytes <= facts.budget_bytes
    dominant = [] if fits else [found for rule in (_states, _loss) if (found := rule(facts)) is not None]
    rules = (_roomy, _launches) if dominant else (_shallow, _roomy, _launches)  # what dominates explains the rest
    return (*dominant, *(found for rule in rules if (found := rule(facts)) is not None))


def _smallest(way: Way) -> MemoryProfile:
    """The profile of a way's smallest peak."""
    return price(way.graph, expand(way.graph, way.least_specs), way.op_seconds)


def _states(facts: Facts) -> Diagnosis | None:
    found = _smallest(facts.planned)
    at_optimizer = found.peak_at.startswith("optimizer")  # its temporaries are as large as what it updates
    causes = (*_STATES, "temporary") if at_optimizer else _STATES
    parts = {cause: found.peak_by_cause.get(cause, 0) for cause in causes}
    share = sum(parts.values()) / found.peak_bytes
    if share < STATES_SHARE:
        return None
    words = ", ".join(f"{cause.replace('_', ' ')} {format_bytes(size)}" for cause, size in parts.items() if size)
    text = (
        f"Parameters, gradients and optimizer are {format_percent(share)} of the smallest peak of this "
        f"batch ({format_bytes(found.peak_bytes)}: {words}). Checkpointing does not touch them."
    )
    return Diagnosis("states", text, share, _lighter_states(facts, facts.tightest()))


def _lighter_states(facts: Facts, tightest: Way) -> tuple[Remedy, ...]:
    graph, peak = tightest.graph, tightest.least_bytes
    remedies: list[Remedy] = []
    for devices in _DEVICES:
        if len(remedies) >= 3 and remedies[-1].fits:
            break
        try:
            sharded = distribute(graph, Sharding(stage=3, world_size=devices))
            least = Way(sharded, tightest.target, "planned", facts.budget_bytes).least_bytes
        except AutorematError:  # a step that cannot be sharded (spread over devices already, say)
            break
        remedies.append(_remedy(f"shard everything over {devices} devices", least, facts, is_estimate=False))
    if any(s.cause == "optimizer_state" for s in graph.storages):
        eight_bit = _shrunk(facts, tightest, lambda s: _EIGHT_BIT if s.cause == "optimizer_state" else 1)
        remedies.append(_remedy("8-bit optimizer state", eight_bit, facts))
    fused = facts.fused()
    if fused is not None and fused.least_bytes < peak:
        remedies.append(_remedy("fused optimizer", fused.least_bytes, facts, is_estimate=False))
    adapters = sum(4 * LORA_RANK * sum(s.shape) for s in graph.storages if s.cause == "parameter" and len(s.shape) == 2)
    weights = sum(s.num_bytes for s in graph.storages if s.cause == "parameter")
    if 0 < adapters < weights:
        trained = {s.index for s in graph.storages if s.cause in ("gradient", "optimizer_state")}
        trained |= {s.index for s in graph.storages if s.born >= 0 and graph.ops[s.born].phase == "optimizer"}
        lora = _shrunk(facts, tightest, lambda s: adapters / weights if s.index in trained else 1)
        remedies.append(_remedy(f"LoRA, rank {LORA_RANK}, on every matrix", lora + adapters, facts))
    return tuple(remedies)


def _shrunk(facts: Facts, way: Way, factor: Callable[[Storage], float]) -> int:
    """The smallest peak of a step in which storages have other sizes."""
    storages = tuple(replace(s, num_bytes=round(factor(s) * s.num_bytes)) for s in way.graph.storages)
    return Way(replace(way.graph, storages=storages), way.target, "planned", facts.budget_bytes).least_bytes


def _remedy(name: str, peak: int, facts: Facts, *, is_estimate: bool = True) -> Remedy:
    return Remedy(name=name, peak_bytes=peak, is_estimate=is_estimate, fits=peak <= facts.budget_bytes)


def _loss(facts: Facts) -> Diagnosis | None:
    graph = facts.planned.graph
    elements = max((_logit_elements(graph, index) for index in range(len(graph.ops))), default=0)
    if not elements:
        return None
    logits = {s.index for s in graph.storages if s.num_bytes in (2 * elements, 4 * elements)}
    schedule = expand(graph, facts.planned.least_specs)
    points = moments(graph, schedule)
    peak = max(point for point, _ in points)
    around = [(p, i) for i, (p, event) in enumerate(points) if logits & {*graph.ops[event.op].outputs}]
    highest, moment = max(around)
    held = sum(n * graph.storages[s].num_bytes for s, n in alive_at(graph, schedule, moment).items() if s in logits)
    share = held / highest
    if share < LOSS_SHARE or highest < LOSS_HEIGHT * peak:
        return None
    text = (
        f"Logits and what the loss makes of them are {format_bytes(held)}, {format_percent(share)} of the smallest "
        f"peak of this batch ({format_bytes(peak)}). No block of the model holds them: compute the loss in "
        "chunks of tokens, or with a fused linear cross-entropy."
    )
    chunked = _shrunk(facts, facts.planned, lambda s: 1 / LOSS_CHUNKS if s.index in logits else 1)
    return Diagnosis("loss", text, share, (_remedy(f"loss in {LOSS_CHUNKS} chunks", chunked, facts),))


def _logit_elements(graph: StepGraph, index: int) -> int:
    """Elements of what a softmax of a loss makes; 0 for other ops."""
    op = graph.ops[index]
    if op.phase != "forward" or not op.name.startswith("aten._log_softmax.") or not op.outputs:
        return 0
    width = 2 if op.dtype in ("bfloat16", "float16") else 4
    return graph.storages[op.outputs[0]].num_bytes // width


def _shallow(facts: Facts) -> Diagnosis | None:
    plain, least = facts.plain.least_bytes, facts.planned.least_bytes
    saved = (plain - least) / plain
    if saved >= SHALLOW_SHARE:
        return None
    activations = facts.plain.profile.peak_by_cause.get("activation", 0)
    text = (
        f"Checkpointing saves at most {format_bytes(plain - least)}, {format_percent(saved)} of the peak: activations "
        f"are {format_bytes(activations)} of it, and recomputing a region brings all of it back at once. With few "
        "layers, or small activations, a smaller micro-batch saves more."
    )
    return Diagnosis("shallow", text, saved)


def _roomy(facts: Facts) -> Diagnosis | None:
    plain = facts.plain.least_bytes
    if plain > facts.budget_bytes:
        return None
    gain = facts.every_block.seconds(1) / facts.plain.seconds(1) - 1
    left = facts.budget_bytes - plain
    text = (
        f"The plain step takes {format_bytes(plain)} and leaves {format_bytes(left)} free. You have room: if every "
        f"block is checkpointed now, switch it off and gain {format_percent(gain)}."
    )
    return Diagnosis("roomy", text, gain)


def _launches(facts: Facts) -> Diagnosis | None:
    share = launch_bound_share(facts.plain.graph, facts.plain.target)
    if share < LAUNCH_SHARE:
        return None
    text = (
        f"{format_percent(share)} of the step is launching ops, not computing: the batch is too small for this device. "
        "A larger batch, or compiling, gains more than anything in this table."
    )
    return Diagnosis("launches", text, share)
