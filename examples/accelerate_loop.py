"""The smallest loop with Accelerate under a budget, in bf16 and with accumulation. One line is all that is added."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autoremat as ar


def build() -> nn.Module:
    """A stack of feed-forward blocks with dropout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(32, 10))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """What the loss takes memory for: any labels will do."""
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


def train(budget: str | int | None = None, micro_steps: int = 4) -> tuple[list[float], nn.Module]:
    """Train for a few steps; returns the losses and the model."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    model = build()
    if budget is not None:
        ar.enable(model, budget, loss=loss_of)  # <- this, before prepare or after it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(256 * micro_steps, 32), torch.randint(10, (256 * micro_steps,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=256))
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    plain, _ = train()
    planned, model = train("1800KiB")
    print(ar.enabled(model))
    print("same losses:", plain == planned, planned)
