"""The table of devices, files that describe one, and the machine at hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

import synthetic
from autoremat import UsageError, get_target, load_target, target_names
from autoremat._targets import CONTEXT_BYTES

FIGURES = {"memory", "bandwidth", "host_link", "launch"}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def described():
    return [target for name in target_names() if (target := get_target(name)).device_kind == "cuda"]


def test_the_table_spans_small_to_large_cards():
    gpus = described()
    assert len(gpus) >= 20
    assert min(target.memory_bytes for target in gpus) == 8 * 2**30
    assert max(target.memory_bytes for target in gpus) >= 287 * 2**30
    assert [target.memory_bytes for target in gpus] == sorted(target.memory_bytes for target in gpus)
    assert target_names()[-2:] == ("cpu", "here")


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


def test_each_figure_has_a_source_and_says_whether_it_was_checked():
    for target in described():
        assert set(target.sources) == FIGURES | set(target.flops_per_s)
        assert all(target.sources.values())
        assert set(target.checked) <= set(target.sources)
        assert all(len(place) > 10 for place in target.checked.values()), "a place, not its short name"
    assert get_target("rtx3090-24g").checked["memory"]
    assert "launch" not in get_target("rtx3090-24g").checked
    assert "float16" not in get_target("rtx4060ti-16g").checked


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


OWN = {"title": "My card", "memory": "10GiB", "tflops": {"float32": 10, "bfloat16": 40}, "bandwidth_gb_per_s": 500}


def test_a_file_describes_a_device_of_your_own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(OWN | {"launch_us": 8, "usable": "9GiB", "source": "measured at home"}))
    target = get_target(str(file))
    assert target.name == "mine"
    assert target.memory_bytes == 10 * 2**30
    assert target.usable_bytes == 9 * 2**30
    assert target.launch_s == pytest.approx(8e-6)
    assert set(target.sources.values()) == {"measured at home"}
    toml = tmp_path / "MINE.toml"
    toml.write_text(
        'name = "home"\ntitle = "My card"\nmemory = "10GiB"\nbandwidth_gb_per_s = 500\n[tflops]\nfloat32 = 10\n'
    )
    assert load_target(toml).name == "home"
    assert load_target(toml).usable_bytes == 10 * 2**30 - CONTEXT_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "ten gigs"}, "memory: .*24GiB"),
        ({"tflops": {"bfloat16": 1}}, "tflops: .*at least float32"),
        ({"tflops": {"float32": -1}}, "float32: .*greater than 0"),
        ({"bandwidth": 3}, "bandwidth: "),
        ({"usable": "11GiB"}, "usable is more than memory"),
        ({"title": None}, "title: "),
    ],
)
def test_a_wrong_figure_is_named(tmp_path, change, message):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(OWN | change))
    with pytest.raises(UsageError, match=message):
        load_target(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml"):
        get_target(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[")
    with pytest.raises(UsageError, match="not valid TOML"):
        get_target(str(broken))


def test_the_machine_at_hand_is_as_it_was_calibrated():
    assert "not calibrated" in get_target("here").title
    synthetic.calibration().save()
    here = get_target("here")
    assert here.calibration == synthetic.calibration()
    assert here.rate("float32") == pytest.approx(1e11)
    assert here.memory_bytes == 2**34
    assert "calibration" not in here.to_dict()


def test_a_calibration_of_another_version_is_refused():
    path = synthetic.calibration().save()
    path.write_text(path.read_text().replace('"version": 2', '"version": 99'))
    with pytest.raises(UsageError, match="autoremat calibrate"):
        get_target("here")
