"""A small model around blocks under test."""

import torch
from torch import nn

X = torch.linspace(-1, 1, 32).view(4, 8)


class Around(nn.Module):
    """A linear layer, the blocks under test, a head."""

    def __init__(self, *blocks):
        super().__init__()
        self.pre, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 1)

    def forward(self, x):
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
