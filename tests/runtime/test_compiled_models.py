"""GPT-2 and BERT under one plan, eager and compiled: gradients and measured peaks."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import autoremat as ar

COMPILER_TOLERANCE = 10  # of the largest difference that compiling the plain step makes; sums are taken in other orders
PEAK_TOLERANCE = 0.04  # docs/howto/compile.md; compiling BERT's plain step alone costs 3.4 %

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, at its first compile
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler asks for it
]

SIZE = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}


def gpt2():
    config = transformers.GPT2Config(
        **SIZE, **NO_DROPOUT, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=256, vocab_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, loss_type="ForMaskedLM",
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


IDS = torch.arange(256).reshape(4, 64) % 64
BATCH = {"input_ids": IDS, "labels": IDS}


def whole_ops():
    """The compiler's partitioner, without the decompositions whose temporaries only a fusing backend avoids."""
    from functorch.compile import min_cut_rematerialization_partition

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)


def build(make):
    torch.manual_seed(0)
    return make()


def run(make, plan=None, backend=None):
    """Gradients of a step, and the peak of another above what is alive, from the profiler's memory events."""
    model = build(make)
    if plan is not None:
        ar.apply(model, plan)
    torch.compiler.reset()
    call = model if backend is None else torch.compile(model, backend=backend)
    call(**BATCH).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            call(**BATCH).loss.backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return gradients, peak


def difference(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)


BOTH_PLANS = ("save:matmuls", "every-block")


# Each compilation takes seconds: benchmarks/compiled.py has the other combinations.
@pytest.mark.parametrize(
    ("make", "backend", "plans"),
    [(gpt2, "whole ops", BOTH_PLANS[:1]), (bert, "whole ops", BOTH_PLANS), (bert, "decomposed", BOTH_PLANS[:1])],
)
def test_a_compiled_step_has_the_gradients_of_an_eager_one(make, backend, plans):
    graph = ar.trace(build(make), BATCH, optimizer=None)
    expected, _ = run(make)
    keeps_ops = backend == "whole ops"
    backend = whole_ops() if keeps_ops else "aot_eager_decomp_partition"
    plain, plain_peak = run(make, backend=backend)
    tolerance = COMPILER_TOLERANCE * max(difference(plain, expected), torch.finfo().eps)
    for name in plans:
        plan = ar.classic(graph, name)
        gradients, eager_peak = run(make, plan)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        gradients, peak = run(make, plan, backend)
        assert difference(gradients, expected) <= tolerance
        if keeps_ops:
            assert peak < plain_peak
            assert peak <= eager_peak * (1 + PEAK_TOLERANCE)
