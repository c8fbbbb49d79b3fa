"""The roofline: what each term costs."""

import dataclasses

import pytest

from autoremat import get_target
from autoremat._cost import op_seconds
from autoremat._step_graph import Op


def op(**fields):
    return Op(index=0, phase="forward", name="aten.x.default", call=0, inputs=(), outputs=(), **fields)


@pytest.mark.parametrize("name", ["cpu", "rtx3090-24g", "h200-141g"])
def test_the_larger_of_compute_and_traffic_counts(name):
    target = get_target(name)
    compute = op(flops=10**12, moved_bytes=8, dtype="float32")
    traffic = op(flops=8, moved_bytes=10**12, dtype="float32")
    assert op_seconds(compute, target) == pytest.approx(10**12 / target.rate("float32"), rel=1e-3)
    assert op_seconds(traffic, target) == pytest.approx(10**12 / target.bandwidth, rel=1e-3)
    assert op_seconds(op(is_view=True), target) == 0
    assert op_seconds(op(), target) == target.launch_s


def test_random_numbers_take_time_on_a_serial_generator():
    target = dataclasses.replace(get_target("cpu"), random_number_s=1e-6)
    drawn = op_seconds(op(is_random=True, shape=(10, 100)), target) - op_seconds(op(shape=(10, 100)), target)
    assert drawn == pytest.approx(1e-3)


def test_half_precision_is_faster_where_the_device_has_it():
    a100 = get_target("a100-80g")
    assert op_seconds(op(flops=10**12, dtype="bfloat16"), a100) < op_seconds(op(flops=10**12, dtype="float32"), a100)
