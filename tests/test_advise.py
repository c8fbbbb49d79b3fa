"""Advice: the rows are what planning and pricing say, sizes are exact, and six situations get the right answer."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import autoremat as ar
from autoremat._advice_tables import advice_cells, advice_lines, advice_tables
from autoremat._expand import expand
from autoremat._ledger import peak_bytes
from autoremat._resize import batch_size, resize, sequence_length
from autoremat._scaling import interpolate_steps, multiply_steps, same_bytes, same_ops, with_kept_gradients
from autoremat._sizes import largest_that_fits, verified_size
from autoremat._ways import Setting, Steps, Way, every_block

MIB = 2**20
GPU = "rtx3090-24g"


def square(output):
    return output.square().mean()


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + torch.softmax(q @ k.transpose(1, 2), -1) @ v


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width, num_blocks, block=Block):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        arguments = (width,) if block is Attention else (width, 2 * width)
        self.blocks = nn.Sequential(*[block(*arguments) for _ in range(num_blocks)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def deep(num_blocks=8):
    return nn.Sequential(*[Block(128, 512) for _ in range(num_blocks)])


def advise(model, batch, budget=None, **options):
    loss = None if isinstance(model, LanguageModel) else square
    return ar.advise(model, batch, loss=loss, budget=budget, **{"target": GPU, "sizes": False} | options)


def test_optimizer_bound_states_are_to_shrink():
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    advice = advise(model, torch.ones(4, 512), 30 * MIB)
    assert advice.action == "shrink states"
    found = advice.diagnosis("states")
    assert found.share > 0.6
    peaks = [remedy.peak_bytes for remedy in found.remedies if remedy.name.startswith("shard")]
    assert len(peaks) == 3
    assert peaks == sorted(peaks, reverse=True)
    names = " ".join(remedy.name for remedy in found.remedies)
    assert all(word in names for word in ("8-bit", "fused", "LoRA"))
    left = {remedy.name.split(",")[0]: remedy.peak_bytes for remedy in found.remedies}
    weights = sum(p.nbytes for p in model.parameters())
    hidden = ar.trace(model, torch.ones(1, 512), loss=square, target=GPU).hidden_bytes
    temporaries = weights  # of an optimizer that is not fused
    assert left["8-bit optimizer state"] - hidden == pytest.approx(2.5 * weights + temporaries, rel=0.02)
    assert weights < left["LoRA"] - hidden < 1.5 * weights
    assert all(remedy.name in advice.reason for remedy in found.remedies if remedy.fits)
    assert advice.diagnosis("shallow") is None, "what dominates explains it"


def test_more_devices_are_tried_until_everything_fits_on_each():
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    advice = advise(model, torch.ones(4, 512), 23 * MIB)
    shards = [remedy for remedy in advice.diagnosis("states").remedies if remedy.name.startswith("shard")]
    assert [remedy.fits for remedy in shards] == [False] * 3 + [True]
    assert shards[-1].name == "shard everything over 16 devices"
    assert advice.action == "shrink states"


def test_where_the_plain_step_fits_nothing_has_to_become_smaller():
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    advice = advise(model, torch.ones(4, 512), 1024 * MIB)
    assert advice.action == "plain"
    assert advice.diagnosis("states") is None
    assert advice.diagnosis("roomy") is not None


def test_logits_bound_the_loss_is_to_chunk():
    advice = advise(LanguageModel(20_000, 64, 4), torch.arange(512).view(1, 512), 120 * MIB)
    assert advice.action == "chunk the loss"
    found = advice.diagnosis("loss")
    logits = 512 * 20_000 * 4
    assert found.share * advice.row("best checkpointing").peak_bytes == pytest.approx(3 * logits, rel=0.02)
    assert found.remedies[0].fits


def test_shallow_a_smaller_batch_is_what_helps():
    advice = advise(nn.Sequential(Block(64, 2048)), torch.ones(64, 64, 64), 40 * MIB)
    assert advice.action == "accumulate"
    assert advice.diagnosis("shallow").share < 0.1
    assert not advice.row("best checkpointing").fits
    row = advice.row("smaller batch, accumulated")
    assert (row.fits, row.effective_batch, row.numerics) == (True, 64, "another order of sums")


def test_roomy_checkpointing_is_to_switch_off():
    advice = advise(deep(), torch.ones(8, 256, 128))
    assert advice.action == "plain"
    blocks, plain = advice.row("every block checkpointed"), advice.row("plain")
    assert advice.diagnosis("roomy").share == pytest.approx(blocks.step_s / plain.step_s - 1)
    assert "switch it off and gain" in advice.diagnosis("roomy").text
    assert advice.row("best checkpointing").step_s == plain.step_s


@pytest.fixture(scope="module")
def activation_bound():
    return advise(deep(), torch.ones(1, 8192, 128), 120 * MIB)


def test_activation_bound_checkpointing_is_the_answer(activation_bound):
    advice = activation_bound
    assert advice.action == "checkpoint"
    best, blocks = advice.row("best checkpointing"), advice.row("every block checkpointed")
    assert best.fits
    assert best.step_s <= blocks.step_s
    assert best.numerics == "same bits"
    assert not advice.row("plain").fits
    assert advice.diagnosis("states") is None


def test_hopeless_is_said_with_numbers():
    advice = advise(deep(), torch.ones(1, 8192, 128), 8 * MIB)
    assert advice.action == "nothing fits"
    assert not any(row.fits for row in advice.rows)
    assert advice.fastest is None
    smallest = min(row.peak_bytes for row in advice.rows)
    assert ar._units.format_bytes(smallest) in advice.reason


def test_rows_are_what_planning_and_profiling_say(activation_bound):
    advice = activation_bound
    graph = ar.trace(deep(), torch.ones(1, 8192, 128), loss=square, target=GPU)
    plan = ar.plan(graph, budget=120 * MIB, target=GPU)
    best, plain = advice.row("best checkpointing"), advice.row("plain")
    assert (best.peak_bytes, best.step_s) == (plan.planned.peak_bytes, pytest.approx(plan.planned.seconds))
    assert (plain.peak_bytes, plain.step_s) == (plan.plain.peak_bytes, pytest.approx(plan.plain.seconds))
    assert sum(plain.peak_by_cause.values()) == plain.peak_bytes
    blocks = ar.profile(graph, every_block(graph), target=GPU)
    assert advice.row("every block checkpointed").peak_bytes == blocks.peak_bytes
    assert advice.frontier[0][0] == plan.smallest_bytes
    assert advice.frontier[-1] == (plan.plain.peak_bytes, pytest.approx(plan.plain.seconds))


def test_the_fastest_setting_is_for_the_effective_batch_asked_for():
    advice = advise(deep(3), torch.ones(4, 2048, 128), 60 * MIB, effective_batch=12)
    assert advice.fastest.fits
    assert advice.fastest.effective_batch == 12
    assert (advice.fastest.micro_batch, advice.fastest.regions) == (3, "planned"), "as no row has it"
    assert advice.fastest.samples_per_s == pytest.approx(12 / advice.fastest.step_s)
    assert advice.fastest.samples_per_s >= 0.99 * max(row.samples_per_s for row in advice.rows if row.fits)


def test_accumulated_steps_are_priced_as_long_as_they_are():
    advice = advise(deep(3), torch.ones(8, 1024, 128), 36 * MIB)
    row = advice.row("smaller batch, accumulated")
    assert row.accumulate > 2
    batch = torch.ones(row.micro_batch, 1024, 128)
    divided = ar.trace(deep(3), batch, loss=lambda output: square(output) / 2, target=GPU)
    twice = ar.trace(deep(3), batch, loss=square, target=GPU, accumulate=2)
    one, two = (ar.profile(graph, target=GPU).step_s for graph in (divided, twice))
    assert row.step_s == pytest.approx(two + (row.accumulate - 2) * (two - one))


def test_batch_statistics_are_told_apart():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    advice = advise(model, torch.ones(4, 3, 16, 16), "1GiB")
    assert advice.row("smaller batch, accumulated").numerics == "batch statistics differ"


def test_a_model_in_low_precision_has_no_rows_of_mixed_precision():
    advice = advise(deep().bfloat16(), torch.ones(2, 64, 128, dtype=torch.bfloat16), "1GiB")
    assert not [row for row in advice.rows if "mixed" in row.name]


def test_a_device_without_bf16_takes_fp16():
    advice = advise(deep(), torch.ones(2, 64, 128), target="t4-16g")
    assert {row.precision for row in advice.rows} == {"", "amp-fp16"}


def test_traces_are_made_without_looking_for_cycles(monkeypatch):
    seen = []
    monkeypatch.setattr("autoremat._ways.trace", lambda *_, **__: seen.append(gc.isenabled()))
    Steps(deep(), torch.ones(2, 4), None, build=None, options={}, progress=lambda *_: None).traced(
        Setting(None, 2, None)
    )
    assert (seen, gc.isenabled()) == ([False], True)


def test_a_way_that_is_asked_for_its_smallest_peak_only_keeps_no_planner(activation_bound):
    graph = ar.trace(deep(), torch.ones(1, 1024, 128), loss=square, target=GPU)
    way = Way(graph, ar.get_target(GPU), "planned", 8 * MIB)
    assert way.keep_least_only() is way
    assert "planning" not in vars(way)
    assert way.least_bytes == peak_bytes(graph, expand(graph, way.least_specs))
    assert "planning" not in vars(way)


@pytest.fixture(scope="module")
def language_model():
    return LanguageModel(500, 32, 3, Attention), torch.arange(4 * 64).view(4, 64) % 500


def test_sizes_are_exact(language_model):
    model, tokens = language_model
    budget = 4 * MIB
    advice = advise(model, tokens, budget, sizes=True, target="cpu", optimizer="sgd")

    def least(regions, **size):
        graph = ar.trace(model, resize(tokens, **size), optimizer="sgd", target="cpu")
        return (
            ar.frontier(graph, num_points=2, target="cpu").smallest_bytes if regions else ar.profile(graph).peak_bytes
        )

    for name, planned in (("plain", False), ("best checkpointing", True)):
        row = advice.row(name)
        assert least(planned, samples=row.largest_batch) <= budget < least(planned, samples=row.largest_batch + 1)
        longer = row.longest_sequence + 32
        assert least(planned, samples=4, tokens=row.longest_sequence) <= budget
        assert budget < least(planned, samples=4, tokens=longer)
    assert advice.row("best checkpointing").largest_batch > advice.row("plain").largest_batch

    def accumulated(samples, length):
        tokens = resize(language_model[1], samples=samples, tokens=length)
        return ar.profile(ar.trace(model, tokens, optimizer="sgd", target="cpu", accumulate=2)).peak_bytes

    row = advice.row("smaller batch, accumulated")
    assert accumulated(row.largest_batch, 64) <= budget < accumulated(row.largest_batch + 1, 64)
    micro, longest = row.micro_batch, row.longest_sequence
    assert accumulated(micro, longest) <= budget < accumulated(micro, longest + 32)


@pytest.mark.parametrize("axis", ["samples", "tokens"])
def test_interpolated_steps_are_those_that_a_trace_would_give(language_model, axis):
    model, tokens = language_model

    def traced(size):
        return ar.trace(model, resize(tokens, **{"samples": 4} | {axis: size}))

    known = (8, 12) if axis == "samples" else (32, 64, 96)
    at = interpolate_steps([(size, traced(size)) for size in known])
    for size in (3, 80):
        made, real = at(size), traced(size)
        assert [s.num_bytes for s in made.storages] == [s.num_bytes for s in real.storages]
        assert [(op.flops, op.moved_bytes, op.shape) for op in made.ops] == [
            (op.flops, op.moved_bytes, op.shape) for op in real.ops
        ]
        assert peak_bytes(made, expand(made)) == peak_bytes(real, expand(real))


class Positions(nn.Module):
    """Is built for a length: its table of positions, with all that belongs to it, grows with that."""

    def __init__(self, length):
        super().__init__()
        self.model, self.table = LanguageModel(500, 32, 3, Attention), nn.Embedding(length, 32)

    def forward(self, tokens):
        places = self.table(torch.arange(tokens.shape[1]))
        return nn.functional.cross_entropy(
            self.model.head(self.model.blocks(self.model.embed(tokens) + places)).flatten(0, 1), tokens.flatten()
        )


def counted_steps(build_model):
    def build(samples, length):
        return build_model(length), torch.arange(samples * length).view(samples, length) % 500

    model, tokens = build(4, 64)
    return Steps(model, tokens, ar.get_target("cpu"), build=build, options={}, progress=lambda *_: None)


def test_where_a_trace_agrees_with_interpolation_smaller_sizes_need_none():
    steps = counted_steps(Positions)
    found = steps.exact(Setting(None, 4, 512))
    traced = steps.num_traced
    for tokens in (32, 96, 480):
        made = steps.exact(Setting(None, 4, tokens))
        model = Positions(max(64, tokens))
        real = ar.trace(model, torch.arange(4 * tokens).view(4, tokens) % 500, target="cpu")
        assert same_bytes(made, real)
    assert steps.num_traced == traced
    assert found is steps.traced(Setting(None, 4, 512))


def test_where_a_trace_disagrees_with_interpolation_sizes_are_traced():
    class Branches(Positions):
        def forward(self, tokens):
            return super().forward(tokens) * (1 if len(tokens) < 9 else torch.ones(1000).sum())

    steps = counted_steps(Branches)
    for samples in (40, 20):
        traced = steps.num_traced
        assert steps.exact(Setting(None, samples, 64)) is steps.traced(Setting(None, samples, 64))
        assert steps.num_traced > traced


def test_a_step_for_other_samples_and_tokens_is_multiplied(language_model):
    model, tokens = language_model
    sizes = ({"samples": 1}, {"tokens": 96}, {}, {"samples": 1, "tokens": 96})
    by_samples, by_tokens, whole, both = (ar.trace(model, resize(tokens, **{"samples": 4} | size)) for size in sizes)
    assert same_bytes(multiply_steps(by_samples, by_tokens, whole), both)
    other = ar.trace(nn.Linear(4, 4), torch.ones(2, 4), loss=square)
    assert multiply_steps(other, by_tokens, whole) is None


def test_a_step_with_kept_gradients_is_a_later_micro_step(language_model):
    model, tokens = language_model
    alone, accumulated = (with_kept_gradients(ar.trace(model, tokens)), ar.trace(model, tokens, accumulate=2))
    for specs in ((), every_block):
        peaks = [peak_bytes(g, expand(g, specs(g) if specs else ())) for g in (alone, accumulated)]
        assert peaks[0] == peaks[1]


def test_steps_that_run_other_ops_are_not_interpolated():
    other = ar.trace(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), loss=square)
    longer = ar.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4), loss=square)
    assert interpolate_steps([(1, other), (2, longer)]) is None


def test_a_step_is_the_same_whatever_its_views_are_called_and_no_other(language_model):
    graph = ar.trace(language_model[0], language_model[1])

    def renamed(views):
        return replace(graph, ops=tuple(replace(o, name="aten.other") if o.is_view == views else o for o in graph.ops))

    assert same_ops(graph, renamed(views=True))
    assert not same_ops(graph, renamed(views=False))


@pytest.mark.parametrize(
    ("least", "budget", "found"),
    [
        (lambda n: 100 + 7 * n, 1000, 128),
        (lambda n: 100 + n * n, 1000, 30),
        (lambda n: 100 + 7 * n, 106, 0),
        (lambda n: 100 + (n // 10) * 50, 1000, 189),
        (lambda n: 5, 1000, 64_000),
    ],
)
def test_the_largest_size_is_found(least, budget, found):
    assert largest_that_fits(least, budget, start=4, most=64_000) == found


def test_a_size_is_lowered_until_the_traced_step_fits():
    assert verified_size(lambda n: 10 * n + 15, 100, 1000) == 98

    def ends_at_70(n):
        if n > 70:
            raise ar.TraceError("position table")
        return 1

    assert verified_size(ends_at_70, 100, 1000, step=16) == 48
    assert verified_size(lambda n: 10**9, 3, 1) == 0


def test_batches_are_resized_by_repeating():
    batch = {"ids": torch.arange(6).view(2, 3), "weights": torch.ones(2), "flag": True, "image": torch.ones(2, 5, 3)}
    assert (batch_size(batch), sequence_length(batch)) == (2, 3)
    larger = resize(batch, samples=3, tokens=4)
    assert larger["ids"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 3], [0, 1, 2, 0]]
    assert larger["weights"].shape == (3,)
    assert larger["image"].shape == (3, 5, 3)
    assert larger["flag"] is True
    assert sequence_length(torch.ones(2, 8)) is None
    with pytest.raises(ar.BatchError, match="each batch size on its own"):
        batch_size((torch.ones(2, 3), torch.ones(4)))


def test_wrong_options_are_refused_before_tracing():
    with pytest.raises(ar.UsageError, match="effective_batch"):
        advise(deep(), torch.ones(2, 4), effective_batch=0)
    with pytest.raises(ar.UsageError, match="accumulate"):
        advise(deep(), torch.ones(2, 4), accumulate=2)
    with pytest.raises(ar.BudgetError):
        advise(deep(), torch.ones(2, 4), "lots")


def test_advice_is_plain_data_and_reads_well(activation_bound, tmp_path):
    advice = activation_bound
    value = json.loads(advice.to_json())
    assert [row["name"] for row in value["rows"]] == [row.name for row in advice.rows]
    assert value["action"] == "checkpoint"
    assert "checkpoint" in repr(advice)
    cells = advice_cells(advice)
    assert len(cells) == len(advice.rows) + 1
    assert "fastest for 1" in cells[-1][0]
    assert advice_lines(advice)[0].startswith("Recommended: checkpoint. The plain step needs")
    with pytest.raises(KeyError):
        advice.row("magic")


def test_the_tables_are_for_80_columns(activation_bound):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*advice_tables(activation_bound), sep="\n")
    text = console.export_text()
    words = set(text.split())
    names = [*(row.name for row in activation_bound.rows), *(row.effort for row in activation_bound.rows)]
    assert {word for name in names for word in name.split()} <= words, "no word is broken"
    assert f"{len(activation_bound.rows)} mixed" in text
    assert ("may have positions for fewer tokens" in " ".join(text.split())) == ("longest" in words)


def test_the_picture_shows_every_way(activation_bound, tmp_path):
    pytest.importorskip("matplotlib")
    from autoremat._advice_figure import save_advice_figure

    file = tmp_path / "ways.svg"
    save_advice_figure(activation_bound, file)
    assert file.read_text().startswith("<?xml")
    with pytest.raises(ar.UsageError, match=r"\.svg"):
        save_advice_figure(activation_bound, tmp_path / "ways.txt")
    with pytest.raises(ar.UsageError, match="Cannot write"):
        save_advice_figure(activation_bound, tmp_path / "none" / "ways.svg")


@pytest.mark.slow
def test_the_page_is_made_by_a_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    script = Path(__file__).parents[1] / "benchmarks" / "bert_large_24gb.py"
    spec = importlib.util.spec_from_file_location("bert_large_24gb", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = ["--preset", "bert-base", "--batch", "2", "--seq", "32", "--no-sizes", "--name", "small"]
    monkeypatch.setattr("sys.argv", ["page", *arguments, "--out", str(tmp_path)])
    module.main()
    text = (tmp_path / "small.md").read_text()
    assert "| best checkpointing | 2 |" in text
    assert "Recommended: plain." in text
    assert (tmp_path / "small.svg").read_text().startswith("<?xml")


def test_the_page_in_the_docs_has_every_way():
    text = (Path(__file__).parents[1] / "docs" / "bert-large-24gb.md").read_text()
    for name in ("plain", "smaller batch, accumulated", "every block checkpointed", "best checkpointing"):
        assert f"| {name} | " in text
    assert "benchmarks/bert_large_24gb.py" in text
