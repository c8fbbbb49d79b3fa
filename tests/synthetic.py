"""Results made up for tests of renderers: no model is run."""

from autoremat._calibration import Calibration
from autoremat._frontier import Frontier, FrontierPoint, NamedPoint
from autoremat._layer_map import LayerCost, LayerMap, LayerRow, OpRow
from autoremat._plan import OpCall, Plan, Prediction, Region, SavedOutput
from autoremat._report_data import ReportSection
from autoremat._results import (
    AllocatorUsage,
    Difference,
    HighMoment,
    LiveItem,
    MeasuredStep,
    MemoryProfile,
    PointEvent,
    TrainedRuns,
    UsageReport,
    VerifyReport,
)

GIB = 2**30


def profile(*, num_blocks: int = 24, block_bytes: int = GIB, num_regions: int = 0) -> MemoryProfile:
    """A step of a chain of blocks: activations grow in forward and shrink in backward."""
    static = {"parameter": GIB, "optimizer_state": 2 * GIB, "buffer": GIB // 64, "input": GIB // 256}
    kept = block_bytes // (8 if num_regions else 1)
    grow = [kept * i for i in range(num_blocks + 1)]
    activation = [*grow, *reversed(grow), 0, 0]
    temporary = [GIB // 4 if i % 2 else 0 for i in range(len(activation))]
    if num_regions:
        temporary = [t + (block_bytes if i > num_blocks else 0) for i, t in enumerate(temporary)]
    gradient = [
        max(0, i - num_blocks) * GIB // num_blocks if i < len(activation) - 1 else GIB for i in range(len(activation))
    ]
    by_cause = {
        **{cause: (value,) * len(activation) for cause, value in static.items()},
        "gradient": tuple(gradient),
        "activation": tuple(activation),
        "temporary": tuple(temporary),
    }
    totals = [sum(values) for values in zip(*by_cause.values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    return MemoryProfile(
        peak_bytes=totals[peak],
        peak_by_cause={cause: values[peak] for cause, values in by_cause.items()},
        peak_point=peak,
        peak_at="forward, cls.predictions.decoder: aten.addmm",
        static_bytes=sum(static.values()),
        seconds=tuple(0.01 * i for i in range(len(totals))),
        by_cause=by_cause,
        phases=(("forward", 0), ("backward", num_blocks + 1), ("optimizer", len(totals) - 2)),
        alive_at_peak=alive(),
        recomputed_flops=10**12 if num_regions else 0,
        flops=10**13 + (10**12 if num_regions else 0),
        step_s=0.01 * len(totals),
        high_moments=(
            HighMoment("forward, cls.predictions.decoder: aten.addmm", totals[peak], 0.01 * peak),
            HighMoment("backward, bert.pooler, aten.mm.default", totals[peak] - GIB, 0.5),
        ),
        events=tuple(
            PointEvent("forward" if i <= num_blocks else "backward", f"bert.encoder.layer.{i % num_blocks}", "aten.mm")
            for i in range(len(totals))
        ),
    )


def usage_of_allocator() -> AllocatorUsage:
    return AllocatorUsage(
        requested_bytes=26 * GIB,
        allocated_bytes=27 * GIB,
        reserved_bytes=29 * GIB,
        unused_bytes=GIB,
        largest_free_bytes=GIB // 2,
        num_segments=321,
        num_device_allocs=400,
        num_device_frees=0,
        num_retries=0,
    )


def alive() -> tuple[LiveItem, ...]:
    """Activations of 24 layers, a temporary of the loss, parameters of a module."""
    layers = [
        LiveItem("activation", f"bert.encoder.layer.{i}.mlp", "aten._softmax.default", GIB // 2, 2) for i in range(24)
    ]
    return (
        *layers,
        LiveItem("temporary", "", "aten.nll_loss_backward.default", GIB, 1),
        LiveItem("parameter", "bert.pooler", "bert.pooler.weight", GIB // 4, 1),
    )


def plan(*, num_regions: int = 24) -> Plan:
    saved = SavedOutput(
        op="aten._scaled_dot_product_flash_attention.default",
        occurrence=0,
        output=0,
        module="attention.self",
        num_bytes=GIB // 8,
    )
    return Plan(
        regions=tuple(
            Region(path=f"bert.encoder.layer.{i}", saved=(saved,), skipped=(OpCall(saved.op, 0),))
            for i in range(num_regions)
        ),
        budget_bytes=12 * GIB,
        plain=_prediction(profile()),
        planned=_prediction(profile(num_regions=num_regions)),
        smallest_bytes=7 * GIB,
        static_bytes=3 * GIB,
        model="BertForMaskedLM",
        optimizer="adamw",
        target="rtx3090-24g",
        bound=0.09,
    )


def _prediction(of: MemoryProfile) -> Prediction:
    return Prediction(
        peak_bytes=of.peak_bytes, peak_by_cause=of.peak_by_cause, peak_at=of.peak_at, flops=of.flops, seconds=of.step_s
    )


def usage(*, budget_bytes: int = 12 * GIB) -> UsageReport:
    def step(of: MemoryProfile) -> MeasuredStep:
        totals = tuple(sum(values) for values in zip(*of.by_cause.values(), strict=True))
        return MeasuredStep(
            peak_bytes=of.peak_bytes,
            static_bytes=of.static_bytes,
            step_s=of.step_s,
            all_step_s=(of.step_s,),
            loss=1.25,
            curve_s=of.seconds,
            curve_bytes=totals,
        )

    plain, planned = profile(), profile(num_regions=24)
    return UsageReport(
        plain=step(plain),
        planned=step(planned),
        predicted_plain_bytes=plain.peak_bytes,
        predicted_planned_bytes=planned.peak_bytes,
        budget_bytes=budget_bytes,
        judge="profiler memory events",
    )


def verified(*, equal: bool = True) -> VerifyReport:
    differences = () if equal else (Difference("gradient", "layer.<0>.weight", "0.5", "0.25"),)
    return VerifyReport(
        equal=equal,
        num_compared={"loss": 1, "gradient": 199, "buffer": 2},
        differences=differences,
        loss=1.25,
        planned_loss=1.25,
        num_recomputed_regions=24,
    )


def trained(*, num_equal: int = 12) -> TrainedRuns:
    losses = tuple(5.5 - 0.1 * i for i in range(12))
    planned = tuple(loss if i < num_equal else loss + 1e-7 for i, loss in enumerate(losses))
    return TrainedRuns(plain_losses=losses, planned_losses=planned, plain_step_s=0.5, planned_step_s=0.55)


def calibration(**changes) -> Calibration:
    """A machine with round figures."""
    fields = {
        "device": "Test CPU",
        "device_kind": "cpu",
        "num_threads": 1,
        "memory_bytes": 2**34,
        "torch_version": "2.13",
        "made_at": "2026-11-29",
        "flops_per_s": {
            "matmul": {"float32": ((1e6, 5e10), (1e9, 1e11))},
            "attention": {"float32": ((1e6, 2e10),)},
            "attention_backward": {"float32": ((1e6, 1e10),)},
        },
        "fitted_s": {
            "convolution": {"float32": (1e-11, 1e-10)},
            "convolution_backward": {"float32": (2e-11, 1e-10)},
        },
        "traffic_s_per_byte": ((1e3, 1e-11), (1e9, 1e-10)),
        "op_s_per_byte": {"aten.tanh.default": {"float32": 1e-9}},
        "fault_s_per_byte": 1e-9,
        "fault_from_bytes": 2**25,
        "launch_s": 1e-6,
        "op_s": {"forward": 4e-6, "backward": 3e-6, "optimizer": 2e-6},
        "region_s": 1e-4,
        "saved_s": 5e-6,
        "watched_op_s": 1e-5,
        "error": 0.02,
    }
    return Calibration(**fields | changes)


def frontier() -> Frontier:
    """Peaks from 7 to 27 GiB; one schedule by name is on the curve, one far above it."""
    return Frontier(
        points=tuple(
            FrontierPoint((7 + 4 * i) * GIB, (5 - i) * 0.05, (5 - i) * 0.06, 0.04 * (5 - i), i) for i in range(6)
        ),
        plain_bytes=27 * GIB,
        smallest_bytes=7 * GIB,
        static_bytes=3 * GIB,
        model="BertForMaskedLM",
        target="rtx3090-24g",
        classics=(NamedPoint("every-block", 11 * GIB, 0.25, 0.3), NamedPoint("recursive", 8 * GIB, 3.5, 3.0)),
    )


def layer_map(*, num_layers: int = 24) -> LayerMap:
    """Layers of which each has two others inside; the first layers keep least."""
    rows, total = [], LayerCost()
    for i in range(num_layers):
        inner = LayerCost(GIB // 64, (i + 1) * GIB // 64, GIB // 128, 10**9 * (num_layers - i), 10**8, 0.001, 0.0001)
        both = _sum(inner, inner)
        total = _sum(total, both)
        place = len(rows) + 1
        path = f"bert.encoder.layer.{i}"
        rows.append(LayerRow(path, "BertLayer", 0, 1, "region", "stores 1 output, 128 MiB", LayerCost(), both))
        rows += [LayerRow(f"{path}.{name}", "Linear", place, 1, "inside", "", inner, inner) for name in ("up", "down")]
    root = LayerRow("", "BertForMaskedLM", -1, 1, "", "", LayerCost(), total)
    ops = (OpRow("aten.mm.default", 48, 24, total), OpRow("aten.gelu.default", 24, 0, LayerCost(seconds=0.5)))
    return LayerMap("BertForMaskedLM", (root, *rows), ops)


def section() -> ReportSection:
    """All that a report can show of a model."""
    return ReportSection(
        title="A <b>model</b>",
        text="Words & figures",
        plain=profile(),
        planned=profile(num_regions=24),
        plan=plan(),
        frontier=frontier(),
        layers=layer_map(),
        verified=verified(),
        usage=usage(),
        trained=trained(num_equal=11),
    )


def _sum(one: LayerCost, other: LayerCost) -> LayerCost:
    return LayerCost(*(a + b for a, b in zip(one.to_dict().values(), other.to_dict().values(), strict=True)))
