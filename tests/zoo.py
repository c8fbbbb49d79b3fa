"""Small models for tests: name -> build, batch, loss, paths of regions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Case:
    build: Any
    batch: Any
    loss_fn: Any
    paths: list[str]


class ResidualBlock(nn.Module):
    """In-place ReLU and addition after BatchNorm, as in torchvision's ResNets."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.down = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, dropout=0.3), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def _square(out):
    return out.square().mean()


def _loss(out):
    return out.loss


def _ids(size=64):
    return torch.arange(32).remainder(size).view(2, 16)


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )  # fmt: skip
    batch = {"input_ids": _ids(), "labels": _ids()}
    return Case(
        functools.partial(transformers.GPT2LMHeadModel, config), batch, _loss, ["transformer.h.0", "transformer.h.1"]
    )


def _small(config_class, **kwargs):
    return config_class(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **kwargs
    )


def llama():
    import transformers

    config = _small(transformers.LlamaConfig, num_key_value_heads=2)
    batch = {"input_ids": _ids(), "labels": _ids()}
    return Case(
        functools.partial(transformers.LlamaForCausalLM, config), batch, _loss, ["model.layers.0", "model.layers.1"]
    )


def bert():
    import transformers

    config = _small(transformers.BertConfig)
    batch = {"input_ids": _ids(), "labels": _ids()}
    paths = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    return Case(functools.partial(transformers.BertForMaskedLM, config), batch, _loss, paths)


def t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0, pad_token_id=0
    )
    batch = {"input_ids": _ids(), "labels": _ids()}
    paths = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]
    return Case(functools.partial(transformers.T5ForConditionalGeneration, config), batch, _loss, paths)


def vit():
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    batch = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return Case(
        functools.partial(transformers.ViTForImageClassification, config),
        batch,
        _loss,
        ["vit.layers.0", "vit.layers.1"],
    )


def resnet():
    def build():
        return nn.Sequential(ResidualBlock(3, 4), ResidualBlock(4, 8), nn.Dropout(0.3), ResidualBlock(8, 8))

    return Case(build, (torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8),), _square, ["0", "1", "3"])


def lstm():
    return Case(Recurrent, (torch.linspace(-1, 1, 80).view(5, 2, 8),), _square, ["lstm"])


def mlp():
    def build():
        blocks = [
            nn.Sequential(
                nn.Linear(8, 8),
                nn.Dropout(0.3),
                nn.GELU(),
                nn.Linear(8, 8),
                nn.Dropout(0.2),
                nn.Tanh(),
                nn.Dropout(0.1),
            )
            for _ in range(3)
        ]
        return nn.Sequential(*blocks)

    x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
    return Case(build, (x,), _square, ["0", "1", "2"])


MODELS = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, resnet, lstm, mlp)}
