"""The command line: exit codes, tables, JSON, and errors without a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jsonschema
import pytest

import synthetic
from autoremat import Plan, get_target, plan_schema, target_names

BUDGET = "2200KB"


def test_export_writes_the_text_and_says_what_is_lost(run, models, tmp_path):
    output = tmp_path / "exported.py"
    code, out, err = run("export", f"{models}:chain", "--to", "torch", "--budget", BUDGET, "--output", str(output))
    assert (code, out) == (0, "")
    assert "Lost: " in err
    scope = {}
    exec(compile(output.read_text(), "exported.py", "exec"), scope)
    assert scope["REGIONS"]
    code, out, err = run("export", f"{models}:chain", "--to", "fsdp", "--budget", BUDGET, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["text"].startswith('"""Activation checkpointing of')


def test_plan_prints_a_table_and_writes_the_file(run, models, tmp_path):
    output = tmp_path / "plan.json"
    code, out, err = run("plan", f"{models}:chain", "--budget", BUDGET, "--output", str(output))
    assert (code, err) == (0, "")
    assert "fits" in out
    assert "too small by" in out
    plan = Plan.load(output)
    assert plan.regions
    assert plan.planned.peak_bytes <= plan.budget_bytes == 2_200_000
    assert plan.target == "cpu"


def test_plan_prints_json_and_nothing_else(run, models):
    code, out, err = run("plan", f"{models}:chain", "--budget", BUDGET, "--json", "--optimizer", "none")
    assert (code, err) == (0, "")
    jsonschema.validate(json.loads(out), plan_schema())
    assert Plan.from_json(out).optimizer == ""


def test_a_plan_for_compiled_code_has_no_regions_inside_regions(run, models):
    plans = [
        Plan.from_json(run("plan", f"{models}:chain", "--budget", "1600KB", "--json", *options)[1])
        for options in ((), ("--for-compile",))
    ]
    assert [any(region.children for region in plan.regions) for plan in plans] == [True, False]
    assert all(plan.regions and plan.planned.peak_bytes <= 1_600_000 for plan in plans)


def test_why_says_what_regions_are_for(run, models, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # words of a narrow table would be broken
    output = tmp_path / "plan.json"
    run("plan", f"{models}:chain", "--budget", BUDGET, "--output", str(output))
    code, out, err = run("why", f"{models}:chain", "--plan", str(output), "--step", "64KiB")
    assert (code, err) == (0, "")
    words = ("why", "peak without it", "other budgets", "what stops at", "No schedule whatever", "more would take")
    assert all(word in out for word in words)
    code, out, err = run("why", f"{models}:chain", "--budget", BUDGET, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["regions"]
    assert found["limit_bytes"] == 2_200_000 < max(region["peak_without_bytes"] for region in found["regions"])
    assert run("why", f"{models}:chain", "--plan", str(output), "--budget", BUDGET)[0] == 2


def test_frontier_prints_a_table_and_writes_the_curve(run, models, tmp_path):
    output = tmp_path / "curve.json"
    code, out, err = run("frontier", f"{models}:chain", "--points", "8", "--classic", "-o", str(output))
    assert (code, err) == (0, "")
    assert "schedules by name" in out
    assert "save:attention+" in out  # and matmuls, in the next line: numbers come first in 80 columns
    assert "no schedule within that peak costs less" in out
    curve = json.loads(output.read_text())
    assert 2 <= len(curve["points"]) <= 8
    assert curve["points"][0]["peak_bytes"] == curve["smallest_bytes"] < curve["plain_bytes"]


def test_frontier_is_drawn_into_pictures(run, models, tmp_path):
    output = tmp_path / "curve.svg"
    code, _, err = run("frontier", f"{models}:chain", "--points", "4", "-o", str(output))
    assert (code, err) == (0, "")
    assert "every-block" in output.read_text()
    code, _, err = run("frontier", f"{models}:chain", "--points", "4", "-o", str(tmp_path / "none" / "curve.png"))
    assert code == 2
    assert f"Cannot write to {tmp_path / 'none' / 'curve.png'}" in err


@pytest.mark.parametrize("command", ["plan", "frontier", "report", "export --to torch", "advise", "demo"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(run, monkeypatch, command):
    monkeypatch.setattr("autoremat._cli_support.building", None)
    name, *more = command.split()
    option = {"advise": "--picture", "demo": "--report"}.get(name, "--output")
    code, _, err = run(name, *([] if name == "demo" else ["gpt2"]), *more, option, "none/file.svg")
    assert code == 2
    assert "Cannot write to none/file.svg: none is no directory" in err


def test_frontier_prints_json_and_nothing_else(run, models):
    code, out, err = run("frontier", f"{models}:chain", "--points", "3", "--json", "--target", "rtx3090-24g")
    assert (code, err) == (0, "")
    assert json.loads(out)["objective"] == "time"


def test_a_budget_that_the_plain_step_meets_needs_no_regions(run, models):
    code, out, _ = run("plan", f"{models}:chain", "--budget", "1GiB")
    assert code == 0
    assert "nothing is recomputed" in out


def test_a_target_alone_gives_all_its_memory(run, models):
    code, out, _ = run("plan", f"{models}:chain", "--target", "rtx3090-24g", "--json")
    assert code == 0
    made = Plan.from_json(out)
    assert made.planned.reserved_bytes <= made.budget_bytes == get_target("rtx3090-24g").usable_bytes
    assert made.budget_is == "reserved", "all of a GPU's memory is what its allocator can reserve"
    code, out, _ = run("plan", f"{models}:chain", "--target", "rtx3090-24g", "--budget-is", "allocated", "--json")
    assert Plan.from_json(out).budget_is == "allocated"
    code, out, _ = run("plan", f"{models}:chain", "--target", "rtx3090-24g", "--budget", "1GiB", "--json")
    assert Plan.from_json(out).budget_is == "allocated"


def test_verify_finds_a_plan_equal(run, models):
    code, out, _ = run("verify", f"{models}:chain", "--budget", BUDGET)
    assert code == 0
    assert "equal to the bit" in out


def test_verify_reads_a_plan_and_prints_json(run, models, tmp_path):
    file = tmp_path / "plan.json"
    run("plan", f"{models}:chain", "--budget", BUDGET, "--output", str(file))
    code, out, err = run("verify", f"{models}:chain", "--plan", str(file), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["equal"]
    assert report["num_recomputed_regions"] > 0


def test_verify_exits_with_one_when_something_differs(run, models, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('{"regions": [{"path": "0"}, {"path": "1"}]}')
    code, out, _ = run("verify", f"{models}:twisted", "--plan", str(file))
    assert code == 1
    assert "difference" in out


def test_measure_compares_with_the_prediction(run, models):
    code, out, _ = run("measure", f"{models}:chain", "--budget", BUDGET, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["planned"]["peak_bytes"] <= 2_200_000 < report["plain"]["peak_bytes"]
    assert report["predicted_planned_bytes"] > 0


def test_measure_exits_with_one_when_the_peak_is_over_the_budget(run, models, monkeypatch):
    monkeypatch.setattr("autoremat._measure.measure", lambda *_, **__: synthetic.usage(budget_bytes=1))
    code, out, _ = run("measure", f"{models}:chain", "--budget", BUDGET)
    assert code == 1
    assert "OVER" in out


def test_targets_lists_all(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = run("targets", "--json")
    assert code == 0
    assert [target["name"] for target in json.loads(out)] == list(target_names())
    code, out, _ = run("targets")
    assert code == 0
    assert all(name in out for name in target_names())


def test_targets_are_listed_beside_a_calibration_that_cannot_be_read(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "autoremat").mkdir()
    (tmp_path / "autoremat" / "calibration-cpu-old-1.json").write_text('{"version": 0}')
    code, out, err = run("targets", "--json")
    assert code == 0
    assert {target["name"] for target in json.loads(out)} == set(target_names()) - {"here"}
    assert "autoremat calibrate" in err
    assert run("plan", "gpt2", "--budget", "8GiB", "--target", "here")[0] == 2


def test_presets_lists_all(run):
    code, out, _ = run("presets")
    assert code == 0
    assert "llama-3-8b" in out


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("chain", ("--budget", "24 Gigs"), "24GiB"),
        ("chain", ("--budget", "1MB"), "The smallest budget"),
        ("chain", (), "--budget"),
        ("chain", ("--budget", "1GiB", "--target", "rtx3090"), "rtx3090-24g"),
        ("chain", ("--budget", "1GiB", "--precision", "fp8"), "amp-bf16"),
        ("chain", ("--budget", "1GiB", "--optimizer", "adamm"), "adam"),
        ("chain", ("--budget", "1GiB", "--seq", "3"), "leave out --seq"),
        ("chain", ("--budget", "1GiB", "-o", "/nowhere/plan.json"), "/nowhere/plan.json"),
        ("without_loss", ("--budget", "1GiB"), "loss="),
        ("wrong_batch", ("--budget", "1GiB"), "does not fit Linear.forward"),
        ("missing", ("--budget", "1GiB"), "no function 'missing'"),
    ],
)
def test_a_mistake_is_one_message_with_a_remedy_and_exit_code_two(run, models, model, options, message):
    code, out, err = run("plan", f"{models}:{model}", *options)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("verb", ["verify", "measure"])
def test_a_plan_for_another_model_is_refused(run, models, tmp_path, verb):
    file = tmp_path / "plan.json"
    run("plan", f"{models}:chain", "--budget", BUDGET, "--output", str(file))
    code, _, err = run(verb, f"{models}:narrow", "--plan", str(file))
    assert code == 2
    assert err.startswith("error: ")
    code, _, err = run(verb, f"{models}:chain", "--plan", str(file), "--budget", BUDGET)
    assert code == 2
    assert "exclude each other" in err
    code, _, err = run(verb, f"{models}:chain", "--plan", str(tmp_path / "none.json"))
    assert code == 2
    assert "none.json" in err


def test_a_plan_that_reserves_more_than_the_device_has_is_pointed_out(capsys):
    from autoremat import _cli_support

    made = synthetic.plan()
    large = dataclasses.replace(made.planned, reserved_bytes=25 * 2**30)
    _cli_support.show_plan(dataclasses.replace(made, plain=large, planned=large), json=False, output=None)
    said = " ".join(capsys.readouterr().out.split())
    assert "reserve 25.0 GiB for this plan, and a step on rtx3090-24g can have 23.4 GiB" in said
    assert "--budget-is reserved" in said
    _cli_support.show_plan(made, json=False, output=None)
    assert "Note" not in capsys.readouterr().out


def test_report_writes_what_the_file_name_says(run, models, tmp_path):
    page = tmp_path / "report.html"
    code, out, err = run("report", f"{models}:chain", "--budget", BUDGET, "--output", str(page))
    assert (code, err) == (0, "")
    assert str(page) in out.replace("\n", "")
    text = page.read_text(encoding="utf-8")
    assert "Alive at the planned peak" in text
    assert "<dt>budget</dt><dd>2.10 MiB</dd>" in text
    assert all(f'data-draw="{what}"' in text for what in ("memory", "frontier", "layers"))
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("json", b"{")):
        code, _, err = run("report", f"{models}:chain", "--no-frontier", "-o", str(tmp_path / f"plain.{kind}"))
        assert (code, err) == (0, "")
        assert (tmp_path / f"plain.{kind}").read_bytes().startswith(start)
    found = json.loads((tmp_path / "plain.json").read_text())
    assert found["plan"] is None
    assert "frontier" not in found
    assert found["plain"]["peak_bytes"] == sum(found["plain"]["peak_by_cause"].values())
    assert "planned" not in found


def test_report_reads_a_plan(run, models, tmp_path):
    plan_file, output = tmp_path / "plan.json", tmp_path / "report.json"
    run("plan", f"{models}:chain", "--budget", BUDGET, "--output", str(plan_file))
    code, _, err = run("report", f"{models}:chain", "--plan", str(plan_file), "--output", str(output))
    assert (code, err) == (0, "")
    found = json.loads(output.read_text())
    assert found["planned"]["peak_bytes"] == found["plan"]["planned"]["peak_bytes"] <= 2_200_000
    assert found["frontier"]["points"][-1]["peak_bytes"] == found["plain"]["peak_bytes"]
    assert found["layers"]["layers"][0]["total"]["recomputed_flops"] == found["planned"]["recomputed_flops"]
    code, _, err = run("report", f"{models}:chain", "--plan", str(plan_file), "--budget", BUDGET)
    assert code == 2
    assert "exclude each other" in err
    code, _, err = run("report", f"{models}:chain", "-o", str(tmp_path / "report"))
    assert code == 2
    assert "--format" in err


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    from autoremat import _cli_support

    seen = []

    class Terminal(_cli_support.Console):
        def __init__(self, **options):
            super().__init__(force_terminal=True, file=__import__("io").StringIO(), **options | {"stderr": False})
            seen.append(self)

    monkeypatch.setattr(_cli_support, "Console", Terminal)
    with _cli_support.shown_progress(quiet=False) as report:
        report("counting", 0.5)
    assert "counting" in seen[-1].file.getvalue()
    with _cli_support.shown_progress(quiet=True) as report:
        report("counting", 0.5)
    assert seen[-1].file.getvalue() == ""


def test_plan_for_one_of_many_devices_shows_what_they_exchange(run, models):
    code, out, _ = run("plan", f"{models}:chain", "--budget", "2MiB", "--shard", "3:4", "--ema", "--scaler")
    assert code == 0
    assert "sharded, stage 3 over 4 devices" in " ".join(out.split())
    code, out, _ = run("plan", f"{models}:chain", "--budget", "3MiB", "--ddp")
    assert code == 0
    assert "communication" in out
    code, _, err = run("plan", f"{models}:chain", "--budget", "3MiB", "--ddp", "--shard", "3:4")
    assert (code, "exclude each other" in err) == (2, True)
    code, _, err = run("plan", f"{models}:chain", "--budget", "3MiB", "--shard", "zero")
    assert (code, "STAGE:DEVICES" in err) == (2, True)


def test_verify_and_measure_take_scaler_and_average(run, models):
    around = ("--scaler", "--ema", "--precision", "amp-fp16")
    code, out, _ = run("verify", f"{models}:chain", "--budget", BUDGET, "--against-fp32", *around)
    assert code == 0
    assert "gradients against fp32" in out
    assert "overflow, step left out" in out
    assert "x ema" in out
    code, out, _ = run("measure", f"{models}:chain", "--budget", BUDGET, *around, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["planned"]["peak_bytes"] <= found["predicted_planned_bytes"]


def test_advise_prints_the_table_and_json_and_draws(run, models, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ways.png"
    arguments = ("advise", f"{models}:chain", "--budget", BUDGET, "--no-sizes", "--effective-batch", "256")
    code, out, err = run(*arguments, "--picture", str(picture))
    assert (code, err) == (0, "")
    assert "Recommended: " in out
    assert "smaller batch" in out
    assert picture.stat().st_size > 0
    code, out, _ = run(*arguments, "--json")
    advice = json.loads(out)
    assert code == 0
    assert advice["budget_bytes"] == 2_200_000
    assert advice["fastest"]["micro_batch"] * advice["fastest"]["accumulate"] == 256


def test_calibrate_prints_what_it_measured(run, monkeypatch):
    monkeypatch.setattr("autoremat._calibrate.calibrate", lambda **_: synthetic.calibration())
    code, out, _ = run("calibrate")
    assert code == 0
    assert "100 GFLOP/s" in out
    code, out, _ = run("calibrate", "--json")
    assert json.loads(out)["num_threads"] == 1


def test_profile_shows_memory_by_cause_plain_planned_and_run_dry(run, models):
    code, out, err = run("profile", f"{models}:chain")
    assert (code, err) == (0, "")
    assert "optimizer state" in out
    assert "most in backward" in out
    assert "planned" not in out
    found = {}
    for dry in ((), ("--dry-run",)):
        code, out, _ = run("profile", f"{models}:chain", "--budget", BUDGET, "--json", *dry)
        assert code == 0
        found[bool(dry)] = json.loads(out)
    for one in found.values():
        assert one["planned"]["peak_bytes"] <= 2_200_000 < one["plain"]["peak_bytes"]
        assert sum(one["planned"]["peak_by_cause"].values()) == one["planned"]["peak_bytes"]
    assert found[True]["is_dry_run"]
    assert found[True]["planned"]["peak_bytes"] == found[False]["planned"]["peak_bytes"]
    code, _, err = run("profile", f"{models}:chain", "--dry-run")
    assert (code, "needs a plan" in err) == (2, True)


def test_measure_says_nothing_on_stderr_even_for_torch(models):
    command = [sys.executable, "-m", "autoremat", "measure", f"{models}:chain", "--budget", BUDGET, "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "USDT" not in done.stderr
