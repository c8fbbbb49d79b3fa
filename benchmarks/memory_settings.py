"""The settings of `memory_accuracy.py`: small models of every kind, and the training steps around them.

Models are as their papers and packages have them, narrower and shorter, so that a step takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 1000
SEED = 0


@dataclass(frozen=True)
class Setting:
    """One training step to predict and measure.

    Attributes:
        name: ``"model, what is special"``.
        build: Returns the model and its batch.
        options: As for `autoremat.trace`.
        quick: Whether it is part of ``--quick``.
        why: What a difference between prediction and measurement comes from, where there is one.
    """

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    why: str = ""


def tokens(batch: int, length: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    ids = torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "labels": ids.clone()}


def images(batch: int, size: int, num_classes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return {
        "pixel_values": torch.randn((batch, 3, size, size), generator=generator),
        "labels": torch.randint(num_classes, (batch,), generator=generator),
    }


def _transformers(kind: str, config: str, **fields: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    return model


_SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def bert(dropout: float = 0.1, **fields: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = _transformers("BertForMaskedLM", "BertConfig", intermediate_size=512, **_SHAPE, **rates, **fields)
    return model, tokens(4, 128)


def bert_padded() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = bert()
    mask = torch.ones_like(batch["input_ids"])
    mask[1:, 96:] = 0
    return model, batch | {"attention_mask": mask}


def gpt2(dropout: float = 0.1) -> tuple[nn.Module, dict[str, Tensor]]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    fields = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    return _transformers("GPT2LMHeadModel", "GPT2Config", **fields, **ends, **rates), tokens(4, 128)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    fields = _SHAPE | {"intermediate_size": 344, "num_key_value_heads": 2}
    return _transformers("LlamaForCausalLM", "LlamaConfig", **fields, use_cache=False), tokens(4, 128)


def t5(dropout: float = 0.1) -> tuple[nn.Module, dict[str, Tensor]]:
    fields = {"d_model": 128, "d_ff": 512, "num_layers": 3, "num_heads": 4, "d_kv": 32, "vocab_size": VOCABULARY}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}
    return _transformers("T5ForConditionalGeneration", "T5Config", dropout_rate=dropout, **fields, **ends), tokens(
        4, 96
    )


def vit(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    fields = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    shape = {"image_size": 64, "patch_size": 8, "num_labels": 10, "hidden_dropout_prob": dropout}
    return _transformers("ViTForImageClassification", "ViTConfig", **fields, **shape), images(8, 64, 10)


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    fields = _SHAPE | {"intermediate_size": 256, "num_key_value_heads": 2, "num_local_experts": 4}
    return _transformers("MixtralForCausalLM", "MixtralConfig", **fields, use_cache=False), tokens(4, 96)


def qwen2_moe() -> tuple[nn.Module, dict[str, Tensor]]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    shared = {"shared_expert_intermediate_size": 256, "intermediate_size": 256, "num_key_value_heads": 2}
    return _transformers(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_SHAPE, **experts, **shared, use_cache=False
    ), tokens(4, 96)


def resnet_50() -> tuple[nn.Module, dict[str, Tensor]]:
    from autoremat._resnet import imagenet_resnet

    return imagenet_resnet(50), images(4, 96, 1000)


def resnet_1001() -> tuple[nn.Module, dict[str, Tensor]]:
    from autoremat._resnet import cifar_resnet

    return cifar_resnet(1001), images(2, 16, 10)


class LanguageLstm(nn.Module):
    """Embedding, LSTM, a linear head, cross entropy."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 192, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(192, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def lstm(dropout: float = 0.2) -> tuple[nn.Module, dict[str, Tensor]]:
    return LanguageLstm(dropout), tokens(8, 64)


class UnetBlock(nn.Module):
    """Group norm, SiLU and a 3x3 convolution, twice, beside a 1x1 convolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels, 3, padding=1)
        )
        self.second = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.skip(x)


class PixelAttention(nn.Module):
    """Self-attention over pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x).flatten(2)).unflatten(1, (3, 4, -1)).transpose(-1, -2)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(1))
        return x + self.out(mixed.transpose(-1, -2).flatten(1, 2)).view_as(x)


class Unet(nn.Module):
    """Three levels down and up with skips; trained to predict noise."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(UnetBlock(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = nn.Sequential(UnetBlock(widths[-1], widths[-1]), PixelAttention(widths[-1]))
        self.up = nn.ModuleList(
            UnetBlock(a + b, b) for a, b in zip([widths[-1], *widths[::-1]], widths[::-1], strict=False)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1))
        return functional.mse_loss(self.head(x), pixel_values)


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    return Unet(), images(2, 32, 10)


def lora(base: Callable[[], tuple[nn.Module, dict[str, Tensor]]], *targets: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import peft

    model, batch = base()
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=list(targets))
    return peft.get_peft_model(model, config), batch


def settings() -> list[Setting]:
    """Every setting, in the order of the table."""
    clip, kept, four = {"clip_grad_norm": 1.0}, {"gradients": "kept"}, {"accumulate": 4}
    bf16, amp = {"precision": "bf16"}, {"precision": "amp-bf16"}

    def optimizer(name: str) -> dict[str, str]:
        return {"optimizer": name}

    return [
        Setting("BERT", bert, quick=True),
        Setting("BERT, no dropout", lambda: bert(0.0)),
        Setting("BERT, padded", bert_padded),
        Setting("BERT, eager attention", lambda: bert(attn_implementation="eager")),
        Setting("BERT, bf16", bert, bf16),
        Setting("BERT, autocast", bert, amp, quick=True),
        Setting("BERT, accumulate 4", bert, four),
        Setting("BERT, AdamW foreach", bert, optimizer("adamw:foreach")),
        Setting("BERT, AdamW fused", bert, optimizer("adamw:fused")),
        Setting("BERT, SGD momentum", bert, optimizer("sgd-momentum")),
        Setting("BERT, Adafactor", bert, optimizer("adafactor")),
        Setting("BERT, clipped", bert, clip),
        Setting("BERT, gradients kept", bert, kept),
        Setting("GPT-2", gpt2, quick=True),
        Setting("GPT-2, no dropout", lambda: gpt2(0.0)),
        Setting("GPT-2, bf16", gpt2, bf16),
        Setting("GPT-2, autocast", gpt2, amp),
        Setting("GPT-2, accumulate 4, clipped, foreach", gpt2, four | clip | optimizer("adamw:foreach")),
        Setting("GPT-2, kept, SGD momentum foreach", gpt2, kept | optimizer("sgd-momentum:foreach")),
        Setting("Llama GQA", llama),
        Setting("Llama GQA, bf16", llama, bf16, quick=True),
        Setting("Llama GQA, autocast, foreach", llama, amp | optimizer("adamw:foreach")),
        Setting("Llama GQA, accumulate 4, kept", llama, four | kept),
        Setting("Llama GQA, Adafactor, clipped", llama, optimizer("adafactor") | clip),
        Setting("T5", t5),
        Setting("T5, no dropout, SGD", lambda: t5(0.0), optimizer("sgd")),
        Setting("T5, autocast", t5, amp),
        Setting("ViT", vit),
        Setting("ViT, dropout, bf16, fused", lambda: vit(0.1), bf16 | optimizer("adamw:fused")),
        Setting("Mixtral", mixtral, quick=True),
        Setting("Qwen2-MoE, autocast", qwen2_moe, amp),
        Setting("U-Net", unet, quick=True),
        Setting("U-Net, autocast, clipped", unet, amp | clip),
        Setting("ResNet-50", resnet_50),
        Setting("ResNet-50, autocast, SGD momentum", resnet_50, amp | optimizer("sgd-momentum")),
        Setting("ResNet-1001", resnet_1001),
        Setting("LSTM", lstm, quick=True),
        Setting("LSTM, no dropout, clipped, SGD", lambda: lstm(0.0), clip | optimizer("sgd")),
        Setting("LoRA on Llama", lambda: lora(llama, "q_proj", "v_proj"), quick=True),
        Setting("LoRA on GPT-2, autocast", lambda: lora(gpt2, "c_attn"), amp),
    ]
