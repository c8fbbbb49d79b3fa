"""Lightning is installed under either of two names: the callbacks work with the older one, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
from autoremat.integrations.lightning import AutorematCallback, MonitorCallback
import pytorch_lightning as pl
import torch
from torch import nn

assert issubclass(AutorematCallback, pl.Callback) and issubclass(MonitorCallback, pl.Callback)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


callback, watch = AutorematCallback("140KiB"), MonitorCallback(warn=False)
trainer = pl.Trainer(
    max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[callback, watch],
)
rows = torch.utils.data.TensorDataset(torch.randn(256, 16))
trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=128))
assert callback.enabled.plan.regions
assert len(watch.results.records) == 2
"""


def test_the_callbacks_work_where_only_the_older_package_is_installed(tmp_path):
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
