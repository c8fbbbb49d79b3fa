"""The command line run in the process of a test, and models for it."""

import sys

from autoremat import __main__

MODELS = """
import itertools
import torch
from torch import nn

def chain(batch=512):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*blocks), torch.ones(batch, 64), lambda out: out.square().mean()

def without_loss():
    return nn.Linear(4, 4), torch.ones(2, 4)

def wrong_batch():
    return nn.Linear(4, 1), {"y": torch.ones(2, 4)}, lambda out: out.mean()

def narrow():
    return nn.Sequential(nn.Linear(32, 32)), torch.ones(2, 32), lambda out: out.mean()

CALLS = itertools.count(1)

class Twisted(nn.Module):
    # What recompute sees is not what forward saw, and no runtime can know.
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.linear(x) * next(CALLS))

def twisted():
    torch.manual_seed(0)
    return nn.Sequential(Twisted(), Twisted(), nn.Linear(64, 1)), torch.ones(512, 64), lambda out: out.mean()
"""


def write_models(folder):
    """Write the models into a file; returns its path."""
    file = folder / "cli_models.py"
    file.write_text(MODELS)
    return str(file)


def runner(monkeypatch, capsys):
    """A function that runs the command line in this process; it returns exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["autoremat", *arguments])
        code = 0
        try:
            __main__.main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call
