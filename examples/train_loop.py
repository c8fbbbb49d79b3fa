"""The smallest loop of one's own under a budget. The line marked below is all that is added."""

import torch
from torch import nn
from torch.nn import functional as F

import autoremat as ar


def build() -> nn.Module:
    """A stack of feed-forward blocks with dropout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(32, 10))


def train(budget: str | int | None = None, steps: int = 4) -> tuple[list[float], nn.Module]:
    """Train for a few steps; returns the losses and the model."""
    model = build()
    if budget is not None:
        ar.enable(
            model, budget, loss=lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))
        )  # <- this
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(256, 32), torch.randint(10, (256,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    plain, _ = train()
    planned, model = train("1700KiB")
    print(ar.enabled(model))
    print("same losses:", plain == planned, planned)
