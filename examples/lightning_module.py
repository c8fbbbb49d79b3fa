"""The smallest training with Lightning under a budget: one callback is all that is added."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoremat.integrations.lightning import AutorematCallback


class Classifier(pl.LightningModule):
    """A stack of feed-forward blocks with dropout, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(32, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Write down the loss, which Lightning has logged by then."""
        self.losses.append(float(self.trainer.callback_metrics.get("loss", 0.0)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(budget: str | int | None = None, steps: int = 4, **options: object) -> tuple[list[float], Classifier]:
    """Train for a few steps; returns the losses and the module."""
    pl.seed_everything(0, verbose=False)
    module = Classifier()
    data = TensorDataset(torch.randn(steps * 256, 32), torch.randint(10, (steps * 256,)))
    callbacks = [] if budget is None else [AutorematCallback(budget)]  # <- this
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=256))
    return module.losses, module


if __name__ == "__main__":
    plain, _ = train()
    planned, _ = train("1900KiB")
    print("same losses:", plain == planned, planned)
