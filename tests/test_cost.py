"""What ops and regions cost: described, calibrated, measured."""

import contextlib
import dataclasses
import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autoremat as ar
import synthetic
from autoremat import UsageError, get_target
from autoremat._bench import Bench, Turns
from autoremat._calibrate import _elements, calibrate
from autoremat._calibrate_host import STEPS, _Steps, host_cost
from autoremat._calibrate_ops import COLUMNS, ROWS, element_calls
from autoremat._calibration import find_calibration, interpolate
from autoremat._cost import (
    CALIBRATED_ERROR,
    MEASURED_ERROR,
    REGION_S,
    RegionCost,
    launch_bound_share,
    op_seconds,
    relative_error,
    step_seconds,
)
from autoremat._measure_ops import CallLog, CallTimes, grouped, times_path
from autoremat._replay import RegionSpec, saved_in
from autoremat._step_graph import Op
from autoremat._targets import this_machine


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def op(**fields):
    named = {"index": 0, "phase": "forward", "name": "aten.x.default", "call": 0, "inputs": (), "outputs": ()}
    return Op(**named | fields)


def calibrated(**changes):
    return this_machine(calibration=synthetic.calibration(**changes))


@pytest.mark.parametrize("name", ["cpu", "rtx3090-24g", "h200-141g"])
def test_the_larger_of_compute_and_traffic_counts(name):
    target = get_target(name)
    compute = op(flops=10**12, moved_bytes=8, dtype="float32")
    traffic = op(flops=8, moved_bytes=10**12, dtype="float32")
    assert op_seconds(compute, target) == pytest.approx(10**12 / target.rate("float32"), rel=1e-3)
    assert op_seconds(traffic, target) == pytest.approx(10**12 / target.bandwidth, rel=1e-3)
    assert op_seconds(op(is_view=True), target) == 0
    assert op_seconds(op(), target) == target.launch_s


def test_a_launch_overlaps_with_the_kernel_on_a_gpu_and_not_on_a_cpu():
    work = op(flops=10**9, dtype="float32")
    gpu, cpu = get_target("rtx3090-24g"), get_target("cpu")
    assert op_seconds(work, gpu) == 10**9 / gpu.rate("float32")
    assert op_seconds(work, cpu) == pytest.approx(10**9 / cpu.rate("float32") + cpu.launch_s)


def test_random_numbers_take_time_on_a_serial_generator():
    target = dataclasses.replace(get_target("cpu"), random_number_s=1e-6)
    drawn = op_seconds(op(is_random=True, shape=(10, 100)), target) - op_seconds(op(shape=(10, 100)), target)
    assert drawn == pytest.approx(1e-3)


def test_half_precision_is_faster_where_the_device_has_it():
    a100 = get_target("a100-80g")
    assert op_seconds(op(flops=10**12, dtype="bfloat16"), a100) < op_seconds(op(flops=10**12, dtype="float32"), a100)


def test_curves_are_linear_over_the_logarithm_of_size():
    curve = ((1e3, 1.0), (1e5, 3.0))
    assert [interpolate(curve, size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == [1, 1, pytest.approx(2), 3, 3]


AROUND = 4e-6
"""What the synthetic calibration has around an op of forward."""


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"name": "aten.mm.default", "flops": 10**9}, 1e-2),
        ({"name": "aten.addmm.default", "flops": 10**6}, 1e6 / 5e10),
        ({"name": "aten.bmm.default", "flops": 10**9, "shape": (1000, 10, 10)}, 1e9 / 5e10),
        ({"name": "aten.mm.default", "flops": 10**9, "shape": (1000, 10)}, 1e-2),
        ({"name": "aten._scaled_dot_product_flash_attention_for_cpu.default", "flops": 10**6}, 1e6 / 2e10),
        ({"name": "aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "flops": 10**6}, 1e6 / 1e10),
        ({"name": "aten.convolution.default", "flops": 10**6, "moved_bytes": 10**6}, 1e-5 + 1e-4),
        ({"name": "aten.convolution_backward.default", "flops": 10**6, "moved_bytes": 10**6}, 2e-5 + 1e-4),
        ({"name": "aten.add.Tensor", "moved_bytes": 10**9}, 1e9 * 1e-10),
        ({"name": "aten.tanh.default", "moved_bytes": 10**6}, 1e6 * 1e-9),
        ({"name": "aten.tanh.default", "moved_bytes": 10**6, "dtype": "bfloat16"}, 1e6 * 1e-9),
        ({"name": "aten.empty.memory_format", "moved_bytes": 10**9}, 0.0),
        ({"is_view": True, "moved_bytes": 0}, 0.0),
    ],
)
def test_a_calibrated_op_costs_what_its_family_was_measured_to(fields, seconds):
    found = op_seconds(op(**{"dtype": "float32"} | fields), calibrated())
    assert found == pytest.approx(seconds + AROUND, rel=1e-6)


def test_large_new_storages_pay_for_fresh_pages_and_small_ones_do_not():
    kernel = op_seconds(op(), calibrated())
    assert op_seconds(op(), calibrated(), [2**25]) == pytest.approx(kernel + 2**25 * 1e-9)
    assert op_seconds(op(), calibrated(), [2**25 - 1]) == kernel


def test_rows_that_are_read_count_and_not_the_table_they_are_in():
    read = op(name="aten.embedding.default", moved_bytes=10**9, dtype="float32")
    assert op_seconds(read, calibrated(), [1000]) < AROUND + 1e-6


def test_a_measured_call_replaces_the_kernel():
    assert op_seconds(op(flops=10**12), calibrated(), (), 1e-3) == pytest.approx(1e-3 - 1e-6 + AROUND)
    assert op_seconds(op(flops=10**12), get_target("cpu"), (), 1e-3) > 1, "only the machine it was measured on"


def chain(width=32, num_blocks=3):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(num_blocks)]
    return nn.Sequential(*blocks)


def square(output):
    return output.square().mean()


def test_regions_cost_something_of_their_own():
    graph = ar.trace(chain(), torch.ones(4, 32), loss=square)
    calls = [call for call in graph.calls if call.parent == 0]
    plain = [RegionSpec(call.index) for call in calls]
    cost = RegionCost(graph, calibrated())
    assert cost.total([]) == 0
    num_saved = sum(len(saved_in(graph, call.index)) for call in calls)
    views = 2 * 3  # of weights: Python and autograd handle them again
    assert cost.total(plain) == pytest.approx(3 * 1e-4 + num_saved * 5e-6 + views * AROUND)
    kept = frozenset({graph.ops[calls[0].start + 1].outputs[0]})
    num_ops = calls[0].end - calls[0].start
    stored = cost.total([RegionSpec(calls[0].index, kept)])
    left_out = 1 * AROUND
    assert stored == pytest.approx(cost.total(plain[:1]) + num_ops * 1e-5 + left_out)
    assert RegionCost(graph, get_target("cpu")).total(plain) == pytest.approx(3 * REGION_S)


def test_plans_for_time_count_what_regions_cost():
    graph = ar.trace(chain(), torch.ones(64, 32), loss=square)
    smallest = ar.frontier(graph).smallest_bytes
    for target in (calibrated(), calibrated(region_s=1e-2, watched_op_s=0.0)):
        plan = ar.plan(graph, budget=smallest, target=target)
        assert plan.regions
        extra = plan.planned.seconds - plan.plain.seconds
        assert extra >= len(plan.regions) * target.calibration.region_s
        point = ar.frontier(graph, target=target).point(smallest)
        assert point.overhead_s == pytest.approx(plan.overhead_s)


def test_a_gpu_waits_for_the_host_only_where_launches_rule():
    gpu = get_target("a100-80g")
    graph = ar.trace(chain(), torch.ones(4, 32), loss=square, target="a100-80g")
    assert launch_bound_share(graph, gpu) > 0.9
    calls = [call for call in graph.calls if call.parent == 0]
    assert RegionCost(graph, gpu).total([RegionSpec(calls[0].index)]) > 1e-4
    large = ar.trace(chain(4096), torch.ones(4096, 4096), loss=square, target="a100-80g")
    assert launch_bound_share(large, gpu) < 0.05
    assert RegionCost(large, gpu).total([RegionSpec(calls[0].index)]) < 1e-5


def test_the_range_is_wide_where_nothing_was_measured():
    graph = ar.trace(chain(), torch.ones(4, 32), loss=square)
    measured = dataclasses.replace(graph, measured_s=(None,) * len(graph.ops))
    errors = [relative_error(graph, get_target("cpu")), relative_error(graph, calibrated())]
    errors.append(relative_error(measured, calibrated()))
    assert errors == sorted(errors, reverse=True)
    assert relative_error(measured, calibrated(error=0.5)) == 0.5
    assert ar.plan(graph, budget="1GiB", target=calibrated(error=0.5)).time_error == 0.5


def test_the_range_holds_every_step_of_the_benchmark():
    found = json.loads((Path(__file__).parents[1] / "benchmarks/results/cost_accuracy.json").read_text())["summary"]
    for cost, stated in (("roofline", CALIBRATED_ERROR), ("measured", MEASURED_ERROR)):
        assert found[f"error of step time, {cost}"]["largest"] <= stated


@pytest.fixture(scope="module")
def machine():
    return calibrate(dtypes=("float32",), rounds=1, save=False)


def test_calibrating_measures_this_machine(machine):
    assert 1e9 < machine.best_rates["float32"] < 1e14
    assert machine.traffic_s_per_byte == tuple(sorted(machine.traffic_s_per_byte))
    assert all(value > 0 for values in machine.op_s_per_byte.values() for value in values.values())
    assert all(seconds > 0 for seconds in machine.op_s.values())
    assert find_calibration() is None


def test_each_operator_keeps_its_own_seconds_for_a_byte(monkeypatch):
    aten = torch.ops.aten
    slow = {aten.tanh.default: 5e-3, aten.relu.default: 2e-3}
    monkeypatch.setattr(Bench, "kernels_s", lambda self, calls: [slow.get(call.func, 1e-3) for call in calls])
    found = _elements(Bench(torch.device("cpu")), {"float32": torch.float32})
    moved_bytes = 2 * ROWS * COLUMNS * 4
    assert found["aten.tanh.default"] == {"float32": 5e-3 / moved_bytes}
    assert found["aten.relu.default"] == {"float32": 2e-3 / moved_bytes}
    assert found["aten.neg.default"] == {"float32": 1e-3 / moved_bytes}


def test_a_clone_is_measured_where_it_changes_the_order_in_memory():
    call = next(c for c in element_calls(torch.randn, torch.float32) if c.operator is torch.ops.aten.clone.default)
    assert not call.arguments[0].is_contiguous()
    assert call.operator(*call.arguments, **call.keywords).is_contiguous()


class Clock(Bench):
    """Every look at it takes a microsecond, and every sweep of memory a second."""

    now = 0.0

    def clock(self):
        self.now += 1e-6
        return self.now


def test_host_cost_comes_from_pairs_and_leaves_sweeps_out(monkeypatch):
    seconds = {"none": 1.0, "one": 3.0, "each": 3.7, "watched": 4.4}
    order = []

    class Steps(_Steps):
        def run(self):
            kind = list(seconds)[len(order) // (STEPS + 1) % len(seconds)]
            order.append(kind)
            return 0.25 * seconds[kind], 0.75 * seconds[kind], 0.1

    monkeypatch.setattr("autoremat._calibrate_host._Steps", Steps)
    monkeypatch.setattr("autoremat._calibrate_host.apply", lambda *_, **__: contextlib.nullcontext())
    found = host_cost(Bench(torch.device("cpu")))
    assert found.region_s == pytest.approx(0.7 / 7), "eight regions instead of one"
    assert all(value > 0 for value in (found.saved_s, found.watched_op_s, *found.op_s.values()))
    bench = Clock(torch.device("cpu"))
    steps = _Steps(bench)
    monkeypatch.setattr(steps, "_memory", Swept(bench))
    assert max(steps.run()) < 1e-3


class Swept:
    def __init__(self, bench):
        self.bench = bench

    def __iadd__(self, other):
        self.bench.now += 1.0
        return self


def test_a_kept_calibration_is_found_by_its_threads(machine):
    machine.save()
    assert find_calibration() == find_calibration(machine.num_threads) == machine
    assert find_calibration(machine.num_threads + 1) is None


def test_calibrate_refuses_what_is_not_there():
    with pytest.raises(UsageError, match="float32"):
        calibrate(dtypes=("bfloat16",))
    with pytest.raises(UsageError, match="float33"):
        calibrate(dtypes=("float32", "float33"))
    with pytest.raises(UsageError, match="'cpu'"):
        calibrate(device="tpu")
    with pytest.raises(UsageError, match="rounds=0"):
        calibrate(rounds=0)


def test_measuring_ops_times_every_kernel_of_the_step(machine):
    machine.save()
    model = nn.Sequential(nn.Embedding(10, 32), chain(), nn.Dropout(0.1))
    graph = ar.trace(model, torch.arange(8) % 10, loss=square, target="here", cost="measured")
    missing = [op.name for op, s in zip(graph.ops, graph.measured_s, strict=True) if s is None and not op.is_view]
    assert missing == []
    again = ar.trace(model, torch.arange(8) % 10, loss=square, target="here", cost="measured")
    assert again.measured_s == graph.measured_s, "the second time they come from the file"
    target = this_machine(torch.get_num_threads())
    assert step_seconds(graph, target) != step_seconds(dataclasses.replace(graph, measured_s=()), target)
    plan = ar.plan(graph, budget="1GiB", target="here")
    assert plan.plain.seconds == pytest.approx(sum(step_seconds(graph, target)))


def test_calls_take_turns_and_keep_what_they_made_until_the_next(monkeypatch):
    order, alive = [], []

    class Made:
        pass

    def call(name):
        made = Made()
        order.append(name)
        alive.append(weakref.ref(made))
        return made

    bench = Bench(torch.device("cpu"), rounds=2)
    taken = bench.calls_s([partial(call, "a"), partial(call, "b")])
    assert order == ["a", "b"] * 3, "once to warm up, then in turns"
    assert len(taken) == 2
    turns = Turns(bench, [partial(call, "c")])
    for _ in range(2):
        turns.round()
    assert [ref() is not None for ref in alive[-3:]] == [False, False, True]
    ticks = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0, 17.0, 17.0, 20.0])
    monkeypatch.setattr(Bench, "clock", lambda self: next(ticks))
    timed = Turns(bench, [lambda: None])
    for _ in range(5):
        timed.round()
    assert timed.seconds() == [2.0], "of 5, 1, 2, 9 and 3 seconds"


def test_calls_that_fail_alone_have_no_time_and_groups_are_bounded(monkeypatch):
    log = CallLog()
    x = torch.ones(4, 4)
    log(torch.ops.aten.mm.default, (x, x), {})
    log(torch.ops.aten.mm.default, (x, torch.ones(3)), {})
    log(torch.ops.aten.add.Tensor, (x, x), {})
    bench = Bench(torch.device("cpu"), rounds=1)
    times = CallTimes(log.calls, bench)
    times.round()
    assert [seconds is None for seconds in times.seconds().values()] == [False, True, False]
    assert list(times.seconds()) == list(log.calls)
    monkeypatch.setattr("autoremat._measure_ops.GROUP_BYTES", 210)
    assert [len(group) for group in grouped(log.calls)] == [2, 1]


def test_calibrating_again_forgets_the_times_of_single_calls(machine, monkeypatch):
    monkeypatch.setattr("autoremat._calibrate._measure", lambda *_: machine)
    path = times_path(machine)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    calibrate(save=False)
    assert path.exists()
    calibrate()
    assert not path.exists()
    assert find_calibration() == machine


def test_measuring_ops_needs_a_calibrated_machine():
    with pytest.raises(UsageError, match="autoremat calibrate"):
        ar.trace(chain(), torch.ones(4, 32), loss=square, cost="measured")
    with pytest.raises(UsageError, match="'roofline' or 'measured'"):
        ar.trace(chain(), torch.ones(4, 32), loss=square, cost="guess")
