"""The report of what regions hold is the sum of storages, each counted once."""

import pytest
import torch
from torch import nn

import autoremat.runtime as ar
from autoremat._errors import PlanError
from autoremat._plan import OpCall, Plan, Region, SavedOutput


def test_what_each_region_holds():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)])
    kept = SavedOutput("aten.addmm.default", 0, 0, "", 0)
    lost = OpCall("aten.addmm.default", 7)
    plan = Plan((Region("0"), Region("1", saved=(kept,), skipped=(OpCall("aten.addmm.default", 0), lost))))
    ar.apply(model, plan)
    model(torch.ones(2, 4)).sum().backward()
    report = ar.explain(model)
    state_bytes = torch.get_rng_state().nbytes
    assert [r.num_recomputes for r in report.regions] == [1, 1]
    assert {(s.name, s.num_bytes) for s in report.regions[0].held} == {
        ("argument 0", 32),
        ("random state", state_bytes),
    }
    assert [s.name for s in report.regions[1].held].count("aten.addmm.default #0") == 1
    assert report.held_bytes == sum(r.held_bytes for r in report.regions) == 2 * state_bytes + 3 * 32
    assert report.regions[1].unmatched == ("aten.addmm.default #7",)
    assert "not matched: aten.addmm.default #7" in repr(report)


def test_a_storage_held_twice_counts_once():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Tanh(), nn.Tanh()

        def forward(self, x):
            return self.a(x) + self.b(x.t()).t()

    model = Pair()
    ar.apply(model, Plan((Region("a"), Region("b"))))
    model(torch.ones(2, 4, requires_grad=True).clone())
    assert ar.explain(model).held_bytes == 32


def test_a_model_without_a_plan():
    with pytest.raises(PlanError, match="has no regions"):
        ar.explain(nn.Tanh())
