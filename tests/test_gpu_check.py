"""The benchmark for GPUs, as far as it runs without one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoremat._allocator import Allocate, Free, _Allocator
from autoremat._allocator_settings import AllocatorSettings

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
MIB = 2**20


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def history(settings):
    """What torch would record of a few allocations, in the words of its trace entries."""
    allocator = _Allocator(AllocatorSettings.parse(settings), None)
    steps = (
        Allocate(1, 5 * MIB),
        Allocate(2, 30 * MIB),
        Free(1),
        Allocate(3, 25 * MIB),
        Free(2),
        Allocate(4, 29 * MIB),
    )
    entries = []
    for step in steps:
        before = allocator.reserved
        if isinstance(step, Free):
            allocator.free(step.key)
            entries.append({"action": "free_requested", "addr": step.key, "size": 0, "stream": 0})
            entries.append({"action": "free_completed", "addr": step.key, "size": 0, "stream": 0})
            continue
        assert allocator.allocate(step)
        if allocator.reserved > before:
            action = "segment_map" if "expandable" in settings else "segment_alloc"
            entries.append({"action": action, "addr": 0, "size": allocator.reserved - before, "stream": 0})
        entries.append({"action": "alloc", "addr": step.key, "size": step.num_bytes, "stream": 0})
    return {"device_traces": [entries]}, allocator


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_recorded_history_is_replayed_exactly(gpu_check, settings):
    snapshot, allocator = history(settings)
    found = gpu_check.check_snapshot(snapshot, settings)
    assert found["exact"]
    assert found["num_allocations"] == 4
    assert found["device_reserved_bytes"] == found["model_reserved_bytes"] == allocator.peak_reserved


def test_the_first_difference_is_named(gpu_check):
    snapshot, _ = history("")
    found = gpu_check.check_snapshot(snapshot, "expandable_segments:True")
    assert not found["exact"]
    assert found["first_difference"] == {"allocation": 2, "model_bytes": 40 * MIB, "device_bytes": 50 * MIB}


def test_broken_promises_are_named(gpu_check):
    usage = {"allocated_bytes": 1000, "requested_bytes": 990, "reserved_bytes": 1100}
    predicted = {"peak_bytes": 990, "step_s": 1.0, "allocator": usage}
    measured = {"allocated_bytes": 1010, "requested_bytes": 990, "reserved_bytes": 1110, "step_s": 2.0}
    row = gpu_check.compare(
        {"kind": "plain", "setting": "default", "measured": measured},
        predicted,
        measured | {"snapshot": {"exact": True}},
    )
    assert row["kept"] == {"allocated": False, "reserved": True, "snapshot": True}
    assert "NOT KEPT: allocated" in gpu_check.line("bert", row)
    entry = {
        "model": "bert",
        "prediction": {},
        "rows": [row],
        "verified": {"equal": False, "plain_repeats_itself": True},
    }
    assert gpu_check.broken_promises([entry]) == ["bert, plain, default: allocated", "bert: verify"]
    failed = entry | {"rows": [row | {"measured": {"error": "CUDA out of memory"}}], "verified": {"error": "x"}}
    assert gpu_check.broken_promises([failed]) == ["bert, plain, default: run", "bert: verify"]
    assert "FAILED: CUDA out of memory" in gpu_check.line("bert", failed["rows"][0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_it_says_so_and_succeeds(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 0
    assert "SKIPPED: no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_the_dry_run_goes_all_the_way(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--models", "llama", "--json", str(output)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(output.read_text())["models"]
    assert entry["verified"]["equal"]
    assert [row["kind"] for row in entry["rows"]] == ["plain", "planned"]
    assert all(0 <= row["allocated_error"] < 0.001 for row in entry["rows"])
    assert entry["rows"][1]["measured"]["allocated_bytes"] < entry["rows"][0]["measured"]["allocated_bytes"]
