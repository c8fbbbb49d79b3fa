"""A step's allocations through the allocator: they agree with the ledger, and budgets hold for reserved bytes."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autoremat as ar
from autoremat._allocator import Allocate, Free, simulate
from autoremat._allocator_settings import AllocatorSettings
from autoremat._ledger import expand, peak_bytes
from autoremat._plan import Plan
from autoremat._regions import resolve
from autoremat._replay import RegionSpec
from autoremat._reserved import reserved, step_allocations, with_blas_workspaces
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import BEFORE_STEP
from chains import Chain
from strategies import Tape, scaled, step_graphs
from test_expand import regions

MIB = 2**20


def live_peaks(events):
    """Peak of living bytes, and what is left alive."""
    live, peak = {}, 0
    for event in events:
        if isinstance(event, Free):
            del live[event.key]
        else:
            assert event.key not in live
            live[event.key] = event.num_bytes
            peak = max(peak, sum(live.values()))
    return peak, live


@given(step_graphs(nested=False), st.data())
@settings(max_examples=60, deadline=None)
def test_each_step_allocates_what_the_ledger_counts(graph, data):
    blocks = [
        c.index for c in graph.calls if c.parent == (0 if c.micro_step == 0 else c.parent) and c.path.count(".") == 1
    ]
    chosen = data.draw(st.sets(st.sampled_from(blocks))) if blocks else set()
    schedule = expand(graph, [RegionSpec(c) for c in sorted(chosen)])
    one, left = live_peaks(step_allocations(graph, schedule, num_steps=1))
    assert one == peak_bytes(graph, schedule)
    assert sum(left.values()) == graph.static_bytes
    assert live_peaks(step_allocations(graph, schedule, num_steps=3)) == (one, left)


@pytest.fixture(scope="module")
def chain():
    return ar.trace(Chain(8, width=8), (torch.ones(2, 64, 8),), optimizer=None)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_spans_and_nested_regions_allocate_what_the_ledger_counts(chain, data):
    specs = resolve(chain, Plan(regions=tuple(regions(data.draw, 0, 7, 3))))
    schedule = expand(chain, specs)
    peak, left = live_peaks(step_allocations(chain, schedule, num_steps=2))
    assert (
        peak <= peak_bytes(chain, schedule) <= peak + max(op.workspace_bytes for op in chain.ops) + 8 * len(chain.ops)
    )
    assert sum(left.values()) == chain.static_bytes


@given(step_graphs(nested=False))
@settings(max_examples=40, deadline=None)
def test_a_third_step_reserves_no_more_than_two(graph):
    large = scaled(graph, 3 * MIB // 2)
    schedule = expand(large)
    usage = reserved(large, schedule)
    assert usage.reserved_bytes >= usage.allocated_bytes >= peak_bytes(large, schedule)
    assert usage.num_retries == 0


def training_tape():
    tape = Tape(unit_bytes=MIB)
    weight = tape.before(20, "parameter")
    state = tape.before(40, "optimizer_state")
    count = tape.before(0, "optimizer_state")
    tape.storages[count]["num_bytes"] = 4
    tape.enter("", "Model", ())
    (y,) = tape.op("mm", (weight,), (30,))
    tape.save(inputs=(y,), parameter=weight)
    tape.leave(y)
    tape.backward()
    tape.op("adam", (weight,), (10,), phase="optimizer", mutates=(weight, state), cause="temporary")
    return tape.graph(device_kind="cuda")


def test_the_optimizer_makes_its_state_at_the_end_of_the_first_step():
    graph = training_tape()
    events = list(step_allocations(graph, expand(graph)))
    sizes = {s.index: s.num_bytes // MIB for s in graph.storages}
    order = [sizes[event.key[0]] for event in events if isinstance(event, Allocate)]
    # The first step: weight, activation, its gradient, the weight's gradient, state (the step count is on the host) and
    # a temporary. The second step finds weight and state.
    assert order == [20, 30, 30, 20, 40, 10, 30, 30, 20, 10]
    fused = dataclasses.replace(graph, optimizer="adamw:fused")
    assert sum(isinstance(event, Allocate) for event in step_allocations(fused, expand(fused))) == 11


def test_each_thread_that_multiplies_gets_a_workspace_for_good():
    graph = training_tape()
    ops = tuple(dataclasses.replace(op, name=op.name.replace("backward", "mm")) for op in graph.ops)
    graph = dataclasses.replace(graph, ops=ops)
    events = list(step_allocations(graph, expand(graph), blas_workspace_bytes=7))
    assert [event.key for event in events if isinstance(event, Allocate) and event.num_bytes == 7] == [
        ("cublas", False),
        ("cublas", True),
    ]
    assert not [event for event in events if isinstance(event, Free) and event.key[0] == "cublas"]
    assert with_blas_workspaces(graph, 7).hidden_bytes == 14


def test_workspaces_and_held_bytes_are_allocated_and_let_go():
    graph = training_tape()
    ops = tuple(dataclasses.replace(op, workspace_bytes=5 if op.name == "aten.mm.default" else 0) for op in graph.ops)
    graph = dataclasses.replace(graph, ops=ops)
    schedule = expand(graph)
    hold = [Event(Action.HOLD, region=0, num_bytes=3 * MIB), Event(Action.HOLD, region=0, num_bytes=2 * MIB)]
    let_go = [Event(Action.RELEASE, region=0, num_bytes=4 * MIB)]
    schedule = Schedule(events=(*hold, *let_go, *schedule.events), regions=((0,),))
    events = list(step_allocations(graph, schedule, num_steps=2))
    assert sum(isinstance(event, Allocate) and event.num_bytes == 5 for event in events) == 2
    held = [
        (type(event).__name__, getattr(event, "num_bytes", 0) // MIB) for event in events if event.key[-1] == "held"
    ]
    assert held[:5] == [("Allocate", 3), ("Allocate", 2), ("Free", 0), ("Free", 0), ("Allocate", 1)]
    assert live_peaks(events)[1].keys() == {(0, 0), (1, 0)}


# -- against the allocations of real steps -----------------------------------------------------------------------

SMALL_SEGMENT_BYTES = 2 * MIB
"""Kernels make tensors of a few bytes that no trace sees; they can need one more segment of the small pool."""


def small_gpt2():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=384, n_head=6, n_positions=256, vocab_size=2048, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss", use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (4, 256))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def real_allocations(model, batch, plan):
    """What two real training steps ask of the (CPU) allocator, in order, from the profiler."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with (
        contextlib.nullcontext() if plan is None else ar.apply(model, plan, check="never"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
            optimizer.step()
    found, nodes = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if hasattr(node.extra_fields, "alloc_size"):
            found.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
    keys, live = itertools.count(), {}
    for _, pointer, size in sorted(found):
        if size > 0:
            live[pointer] = ("real", next(keys))
            yield Allocate(live[pointer], size)
        elif pointer in live:
            yield Free(live.pop(pointer))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "planned"])
def test_real_steps_reserve_what_is_predicted(kind):
    model, batch = small_gpt2()
    graph = ar.trace(model, batch)
    plan = ar.plan(graph, activation_memory_budget=0.5) if kind == "planned" else None
    assert plan is None or plan.regions
    predicted = list(step_allocations(graph, expand(graph, [] if plan is None else resolve(graph, plan))))
    before = [*itertools.takewhile(lambda event: is_static(graph, event), predicted)]
    real = [*before, *real_allocations(model, batch, plan)]
    for setup in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        expected, found = simulate(real, setup), simulate(predicted, setup)
        assert abs(found.reserved_bytes - expected.reserved_bytes) <= SMALL_SEGMENT_BYTES
        assert found.requested_bytes == pytest.approx(expected.requested_bytes, rel=1e-4)
        assert found.fragmentation_bytes > 2 * SMALL_SEGMENT_BYTES, "nothing to predict"


def is_static(graph, event):
    return isinstance(event, Allocate) and graph.storages[event.key[0]].born == BEFORE_STEP


# -- in plans and profiles --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph():
    def block():
        return nn.Sequential(nn.Linear(512, 1500), nn.GELU(), nn.Linear(1500, 512), nn.Tanh())

    model = nn.Sequential(*[block() for _ in range(6)])
    return ar.trace(model, torch.ones(3000, 512), loss=lambda y: y.square().mean(), target="rtx3090-24g")


def test_profiles_of_a_cuda_target_say_what_is_reserved(graph):
    found = ar.profile(graph, target="rtx3090-24g")
    usage = found.allocator
    assert usage.reserved_bytes >= usage.allocated_bytes >= found.peak_bytes
    assert usage.requested_bytes == found.peak_bytes - 4 * 24  # 24 step counts are on the host
    assert "reserved" in repr(found)
    assert found.to_dict()["allocator"]["reserved_bytes"] == usage.reserved_bytes
    assert ar.profile(graph, target="cpu").allocator is None
    grown = ar.profile(graph, target="rtx3090-24g", allocator="expandable_segments:True").allocator
    assert grown.reserved_bytes <= usage.reserved_bytes
    assert graph.hidden_bytes == 2 * 8_519_680, "forward's and backward's handles"
    assert (
        grown
        == ar.profile(graph, target="rtx3090-24g", allocator=AllocatorSettings(expandable_segments=True)).allocator
    )


def test_a_budget_of_reserved_bytes_holds_for_them(graph):
    target = "rtx3090-24g"
    smallest = ar.profile(graph, ar.plan(graph, activation_memory_budget=0.5, target=target), target=target)
    budget = smallest.allocator.allocated_bytes + 12 * MIB
    loose = ar.plan(graph, budget=budget, target=target)
    assert loose.planned.reserved_bytes > budget, "the case must need tightening"
    assert loose.planned.fragmentation_bytes == loose.planned.reserved_bytes - loose.planned.peak_bytes
    tight = ar.plan(graph, budget=budget, budget_is="reserved", target=target)
    assert tight.planned.reserved_bytes <= budget
    assert tight.planned.reserved_bytes == ar.profile(graph, tight, target=target).allocator.reserved_bytes
    assert tight.budget_is == "reserved"
    assert tight.bound <= tight.overhead_s
    assert ar.Plan.from_json(tight.to_json()) == tight
    grown = ar.plan(graph, budget=budget, budget_is="reserved", target=target, allocator="expandable_segments:True")
    assert grown.allocator == "expandable_segments:True"
    assert tight.allocator == ""
    assert grown.planned.reserved_bytes == ar.profile(graph, grown, target=target).allocator.reserved_bytes <= budget
    assert grown.overhead_s <= tight.overhead_s


def test_a_budget_of_reserved_bytes_that_cannot_be_met_says_what_can(graph):
    target = "rtx3090-24g"
    allocated = ar.plan(graph, budget="20GiB", target=target).smallest_bytes
    with pytest.raises(ar.BudgetInfeasible, match="expandable_segments") as caught:
        ar.plan(graph, budget=allocated, budget_is="reserved", target=target)
    assert caught.value.smallest_bytes > allocated
    found = ar.plan(graph, budget=caught.value.smallest_bytes, budget_is="reserved", target=target)
    assert found.planned.reserved_bytes <= caught.value.smallest_bytes


def test_a_cpu_reserves_nothing(graph):
    with pytest.raises(ar.UsageError, match="CUDA"):
        ar.plan(graph, budget="1GiB", budget_is="reserved", target="cpu")
    with pytest.raises(ar.UsageError, match="allocated"):
        ar.plan(graph, budget="1GiB", budget_is="resident")
    with pytest.raises(ar.UsageError, match="max_spilt"):
        ar.plan(graph, budget="1GiB", allocator="max_spilt:1")
