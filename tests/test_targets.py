"""The table of devices."""

from __future__ import annotations

import dataclasses

import pytest

from autoremat import UsageError, get_target, target_names


def test_the_table_spans_small_to_large_cards_each_with_a_source():
    targets = [get_target(name) for name in target_names()]
    gpus = [target for target in targets if target.device_kind == "cuda"]
    assert len(gpus) >= 20
    assert min(target.memory_bytes for target in gpus) == 8 * 2**30
    assert max(target.memory_bytes for target in gpus) >= 287 * 2**30
    assert [target.memory_bytes for target in gpus] == sorted(target.memory_bytes for target in gpus)
    assert all(target.source for target in targets)


@pytest.mark.parametrize("name", target_names())
def test_each_target_is_plausible(name):
    target = get_target(name)
    assert 0 < target.usable_bytes <= target.memory_bytes
    assert target.rate("float32") > 0
    assert target.rate("bfloat16") >= target.rate("float32")
    assert target.host_link_bytes_per_s <= target.bandwidth_bytes_per_s
    # No device does fewer than one or more than a thousand float32 operations in the time that it moves a byte.
    assert 1 < target.rate("float32") / target.bandwidth < 1000
    if target.device_kind == "cuda":
        size = int(name.rsplit("-", 1)[1].removesuffix("g"))
        assert 0.93 * size * 2**30 < target.memory_bytes < 1.03 * size * 2**30


def test_a_dtype_that_a_device_lacks_runs_at_the_rate_of_float32():
    assert get_target("t4-16g").rate("torch.bfloat16") == get_target("t4-16g").rate("float32")


def test_names_are_found_in_any_case():
    assert get_target(" RTX3090-24G ").name == "rtx3090-24g"


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UsageError, match=r"rtx3090-24g.*autoremat targets"):
        get_target("rtx3090")
    with pytest.raises(UsageError, match=r"h100-80g"):
        get_target("???")


def test_targets_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_target("cpu").memory_bytes = 1
