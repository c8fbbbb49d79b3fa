"""Plans in other libraries' words: what is executed, what is stored, what is said to be lost."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import autoremat as ar
from autoremat import Plan, PlanMismatch, Region, SavedOutput, UsageError

SIZES = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def build():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, n_layer=4, use_cache=False, loss_type="ForCausalLM")
    return transformers.GPT2LMHeadModel(config)


IDS = torch.arange(64).reshape(2, 32)
BATCH = {"input_ids": IDS, "labels": IDS}


def gradients(model):
    torch.manual_seed(3)
    model(**BATCH).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def graph():
    return ar.trace(build(), BATCH, optimizer=None)


@pytest.fixture(scope="module")
def selective(graph):
    """A plan that stores some op calls and not others of the same operator."""
    plan = ar.classic(graph, "save:attention+matmuls")
    regions = tuple(
        Region(region.path, saved=tuple(o for o in region.saved if (o.op, o.occurrence) != ("aten.addmm.default", 2)))
        for region in plan.regions[1:]
    )
    return Plan(regions)


def run_source(text):
    scope = {}
    exec(compile(text, "exported.py", "exec"), scope)
    return scope


def test_torch_runs_what_the_export_says(graph, selective):
    made = ar.export(graph, selective, "torch")
    scope = run_source(made.text)
    stored = Counter()
    original = scope["create_selective_checkpoint_contexts"]

    def spy(policy):
        def asked(context, op, *args, **kwargs):
            answer = policy(context, op, *args, **kwargs)
            if answer is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE and not context.is_recompute:
                made_now = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
                tensors = [tensor for tensor in made_now if isinstance(tensor, torch.Tensor)]
                stored[str(op)] += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            return answer

        return original(asked)

    scope["create_selective_checkpoint_contexts"] = spy
    model = build()
    assert scope["apply"](model) is model
    expected = gradients(build())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    predicted = Counter()
    for region in made.plan.regions:
        for output in region.saved:
            predicted[output.op] += output.num_bytes
    assert stored == predicted
    assert stored["aten.addmm.default"] == 3 * 4 * 64 * (96 + 32 + 32)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.out((self.a(x) + self.b(x)).relu())


def test_what_torch_runs_again_is_counted():
    """The sum is stored, and nothing else needs the two products in it."""
    sum_of_two = SavedOutput("aten.add.Tensor", 0, 0, "1", 4096)
    model = nn.Sequential(nn.Linear(8, 8), Sum())
    graph = ar.trace(model, torch.ones(128, 8), loss=torch.sum, optimizer=None)
    plan = Plan((Region("1", saved=(sum_of_two,)),))
    assert ar.export(graph, plan, "torch").plan.planned.flops == graph.flops
    share = 2 * (2 * 128 * 8 * 8) / graph.flops
    (costs, again) = ar.export(graph, plan, "torch").losses
    assert costs.startswith(f"It costs {100 * share:.1f} % more FLOPs than the plain step, the plan 0.0 %")
    assert again.startswith(f"Of these, {100 * share:.1f} % are of ops that only stored outputs need")


def test_torch_stores_all_outputs_of_an_op_or_none(graph):
    norm = SavedOutput("aten.native_layer_norm.default", 0, 0, "transformer.h.1.ln_1", 8192)
    made = ar.export(graph, Plan((Region("transformer.h.1", saved=(norm,)),)), "torch")
    assert [output.output for output in made.plan.regions[0].saved] == [0, 1, 2]


def test_spans_are_split_and_priced(graph):
    plan = ar.classic(graph, "uniform:2")
    made = ar.export(graph, plan, "torch")
    assert [region.path for region in made.plan.regions] == [f"transformer.h.{i}" for i in range(4)]
    assert any("2 spans become a region for each of their calls" in loss for loss in made.losses)
    model = run_source(made.text)["apply"](build())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(build()), strict=True))


def test_transformers_configures_a_model(graph, selective):
    plan = ar.classic(graph, "every:2")
    made = ar.export(graph, plan, "transformers")
    settings = json.loads(made.text)
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **settings)
    assert arguments.activation_checkpointing
    options = dict(arguments.activation_checkpointing_kwargs)
    model = build()
    model.activation_checkpointing_enable(
        every_n_layers=options.pop("every_n_layers"), activation_checkpointing_kwargs=options
    )
    layers = [
        path
        for path, module in model.named_modules()
        if path.startswith("transformer.h.") and getattr(module, "gradient_checkpointing", False)
    ]
    assert layers == [region.path for region in made.plan.regions] == ["transformer.h.0", "transformer.h.2"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model.train()), gradients(build().train()), strict=True))
    assert made.losses == ()
    lossy = ar.export(graph, selective, "transformers")
    assert any("stored outputs is stored: whole layers are recomputed" in loss for loss in lossy.losses)
    assert any("more FLOPs than the plain step" in loss for loss in lossy.losses)


def test_megatron_takes_the_cheapest_that_fits(graph):
    plan = ar.classic(graph, "every-block")
    made = ar.export(graph, plan, "megatron")
    assert made.text.startswith("--recompute-granularity full --recompute-method block --recompute-num-layers ")
    assert made.plan.planned.peak_bytes <= plan.planned.peak_bytes
    assert made.plan.planned.flops <= plan.planned.flops
    made = ar.export(graph, ar.classic(graph, "every:2"), "megatron")
    assert "--recompute-method block --recompute-num-layers 2" in made.text
    assert [region.path for region in made.plan.regions] == ["transformer.h.0", "transformer.h.1"]
    made = ar.export(graph, ar.classic(graph, "uniform:2"), "megatron")
    assert made.plan.planned.peak_bytes <= ar.classic(graph, "uniform:2").planned.peak_bytes


def test_a_form_that_does_not_fit_says_by_how_much(graph):
    tight = ar.frontier(graph, num_points=3).smallest_bytes
    plan = ar.plan(graph, budget=tight)
    made = ar.export(graph, plan, "transformers")
    excess = made.plan.planned.peak_bytes - tight
    assert excess > 0
    assert any("over the budget of" in loss and "it may not fit" in loss for loss in made.losses)


def test_wrappers_take_whole_modules(graph, selective):
    made = ar.export(graph, selective, "fsdp")
    model = run_source(made.text)["apply"](build())
    wrapped = [path for path, module in model.named_modules() if type(module).__name__ == "CheckpointWrapper"]
    assert wrapped == [region.path for region in selective.regions]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(build()), strict=True))
    assert any("whole modules are recomputed" in loss for loss in made.losses)


def test_running_statistics_are_said_to_be_updated_twice():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
    graph = ar.trace(model, torch.randn(8, 4), loss=torch.sum, optimizer=None)
    made = ar.export(graph, Plan((Region("0"), Region("1"))), "torch")
    assert any("2 regions, '0' first, are updated twice" in loss for loss in made.losses)


def test_what_makes_no_sense_is_refused(graph):
    with pytest.raises(UsageError, match="can be exported to torch, transformers, megatron, fsdp"):
        ar.export(graph, ar.classic(graph, "every-block"), "jax")
    with pytest.raises(UsageError, match="recomputes nothing"):
        ar.export(graph, Plan(()), "torch")
    with pytest.raises(PlanMismatch, match="another model"):
        ar.export(graph, Plan((Region("transformer.h.0"),), model_signature="0"), "torch")

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.inner(self.inner(x))

    twice = ar.trace(Twice(), torch.ones(2, 4), loss=torch.sum, optimizer=None)
    with pytest.raises(UsageError, match="no repeated layers"):
        ar.export(twice, Plan((Region("inner"),)), "megatron")
    with pytest.raises(UsageError, match="is one call of a module that is called more often"):
        ar.export(twice, Plan((Region("inner", 1),)), "torch")
