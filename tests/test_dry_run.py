"""A planned step on fake tensors peaks where its schedule says, and where the real one does."""

import dataclasses

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._dry_run import MAX_ROUNDS, RANDOM_STATE, dry_run, keep_budget, trace_planned
from autoremat._ledger import expand, peak_bytes
from autoremat._regions import describe_all
from region_choices import region_specs, slack_bytes
from zoo import MODELS


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_dry_run_peaks_where_the_schedule_does(name, keep):
    case = MODELS[name]()
    model = case.build()
    graph = ar.trace(model, case.batch, loss=case.loss_fn)
    specs = region_specs(graph, case.paths, keep=keep)
    plan = ar.Plan(regions=describe_all(graph, specs))
    dry = dry_run(model, case.batch, plan, loss=case.loss_fn).peak_bytes
    assert dry <= peak_bytes(graph, expand(graph, specs)) <= dry + slack_bytes(graph, specs)
    assert dry == ar.measure(model, case.batch, plan, loss=case.loss_fn, num_steps=1, plain=False).planned.peak_bytes


def test_recompute_runs_in_backward_and_leaves_the_model_alone():
    case = MODELS["gpt2"]()
    model = case.build().eval()
    graph = ar.trace(model, case.batch)
    plan = ar.Plan(regions=describe_all(graph, region_specs(graph, case.paths, keep=False)))
    before, state = dict(vars(model)), torch.get_rng_state()
    planned = trace_planned(model, case.batch, plan)
    names = [op.name for op in planned.ops if op.phase == "backward"]
    assert names.count("aten._safe_softmax.default") == 2
    assert any(op.name == RANDOM_STATE for op in planned.ops)
    assert torch.equal(state, torch.get_rng_state())
    assert vars(model).keys() == before.keys()
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_accumulation_autocast_clipping_and_kept_gradients_run_dry():
    case = MODELS["llama"]()
    options = {"accumulate": 3, "precision": "amp-bf16", "gradients": "kept", "clip_grad_norm": 1.0}
    model = case.build()
    graph = ar.trace(model, case.batch, **options)
    specs = region_specs(graph, case.paths, keep=False)
    plan = ar.Plan(regions=describe_all(graph, specs))
    assert dry_run(model, case.batch, plan, **options).peak_bytes == peak_bytes(graph, expand(graph, specs))


def test_a_gpu_step_runs_dry():
    case = MODELS["gpt2"]()
    model = case.build()
    graph = ar.trace(model, case.batch, target="a100-40g")
    specs = region_specs(graph, case.paths, keep=False)
    plan = ar.Plan(regions=describe_all(graph, specs))
    assert dry_run(model, case.batch, plan, target="a100-40g").peak_bytes == peak_bytes(graph, expand(graph, specs))


def chain():
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(6)])


def test_plan_promises_the_peak_of_the_dry_run(monkeypatch):
    model, x = chain(), torch.ones(512, 32)
    loss = lambda y: y.square().mean()  # noqa: E731 - used twice
    graph = ar.trace(model, x, loss=loss)
    budget = int(0.7 * ar.profile(graph).peak_bytes)
    made = ar.plan(model, x, budget=budget, loss=loss)
    assert made.planned.peak_bytes == dry_run(model, x, made, loss=loss).peak_bytes <= budget
    monkeypatch.setattr("autoremat._api.run_dry", lambda *_, **__: pytest.fail("was asked not to run"))
    assert ar.plan(model, x, budget=budget, loss=loss, dry_run=False) == made


def test_a_plan_over_the_budget_is_made_again_with_less():
    model, x = chain(), torch.ones(512, 32)
    graph = ar.trace(model, x, loss=lambda y: y.square().mean())
    plain = ar.profile(graph).peak_bytes
    budget = (ar.plan(graph, budget=plain).smallest_bytes + plain) // 2
    asked = []

    def make(limit):
        asked.append(limit)
        return ar.plan(graph, budget=limit)

    def run(plan, extra):
        found = ar.profile(graph, plan)
        return dataclasses.replace(found, peak_bytes=found.peak_bytes + extra)

    extra = budget - ar.plan(graph, budget=budget).planned.peak_bytes + 1000
    promised = keep_budget(make, budget, lambda plan: run(plan, extra))
    assert len(asked) == 2
    assert asked[0] == promised.budget_bytes == budget > asked[1]
    assert promised.planned.peak_bytes <= budget
    with pytest.raises(ar.BudgetInfeasible, match="no smaller one is left") as error:
        keep_budget(make, budget, lambda plan: run(plan, budget))
    assert error.value.smallest_bytes > budget
    with pytest.raises(ar.PlanError, match=f"After {MAX_ROUNDS} rounds.*dry_run=False"):
        keep_budget(make, budget, lambda plan: dataclasses.replace(run(plan, 0), peak_bytes=budget + 1))


def test_a_mixture_of_experts_runs_dry():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    graph = ar.trace(model, batch)
    specs = region_specs(graph, ["model.layers.0", "model.layers.1"], keep=False)
    plan = ar.Plan(regions=describe_all(graph, specs))
    assert dry_run(model, batch, plan).peak_bytes == peak_bytes(graph, expand(graph, specs))
