"""Watching a training by Transformers' Trainer and by Lightning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._plan import Region

PLAN = ar.Plan(regions=(Region("body.0"), Region("body.1")))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        out = self.head(self.body(x)).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


DATA = [{"x": torch.full((8,), i / 16), "labels": torch.tensor(i / 8)} for i in range(16)]


def test_the_trainers_steps_are_watched_and_its_log_says_so(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from autoremat.integrations.transformers import MonitorCallback

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
        max_grad_norm=1e9,
    )  # fmt: skip
    watch = MonitorCallback(check_every=2, peak="always", warn=False)
    model = Model()
    trainer = transformers.Trainer(model, arguments, train_dataset=DATA, callbacks=[watch])
    with ar.apply(model, PLAN), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    records = watch.results.records
    assert [record.step for record in records] == [1, 2, 3, 4], records
    assert [(r.num_micro_steps, r.num_recomputes) for r in records] == [(2, 4)] * 4
    assert [check.equal for check in watch.results.checks] == [True, True]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0]["grad_norm"] == pytest.approx(records[0].gradient_norm)
    assert "autoremat_recompute_share" in capsys.readouterr().out


def test_lightnings_steps_are_watched(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from autoremat.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def training_step(self, batch, _index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    watch = MonitorCallback(check_every=3, warn=False)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[watch], default_root_dir=tmp_path,
        )  # fmt: skip
        with ar.apply(module.net, PLAN):
            trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=4))
    records = watch.results.records
    assert [record.step for record in records] == [1, 2, 3, 4], records
    assert [(r.num_recomputes, r.gradient_norm > 0) for r in records] == [(2, True)] * 4
    (check,) = watch.results.checks
    assert (check.step, check.equal, check.num_compared) == (3, True, 6)
