"""Models of real sizes for `gpu_check.py`, each also so small that a CPU runs it in a second."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SEED = 0


@dataclass(frozen=True)
class Case:
    """A model with its batch, as `autoremat.trace` takes them."""

    model: nn.Module
    batch: object
    precision: str | None = None
    loss: object = None


def _ids(vocabulary, batch, seq):
    ids = torch.randint(vocabulary, (batch, seq), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "labels": ids.clone()}


def _images(batch, size, classes):
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn((batch, 3, size, size), generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=generator)}


def bert(small):
    import transformers

    shape = (
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 256,
        }
        if small
        else {}
    )
    config = transformers.BertConfig(**shape)
    return Case(transformers.BertForMaskedLM(config), _ids(config.vocab_size, *((16, 48) if small else (16, 512))))


def gpt2(small):
    import transformers

    shape = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64} if small else {}
    config = transformers.GPT2Config(
        use_cache=False, loss_type="ForCausalLMLoss", bos_token_id=0, eos_token_id=0, **shape
    )
    batch = _ids(config.vocab_size, *((16, 48) if small else (8, 1024)))
    return Case(transformers.GPT2LMHeadModel(config), batch, precision="amp-bf16")


def llama(small):
    import transformers

    sizes = (128, 64, 2, 4, 2, 128) if small else (32_000, 1024, 16, 16, 4, 2816)
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    config = transformers.LlamaConfig(**dict(zip(names, sizes, strict=True)), use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return Case(model, _ids(config.vocab_size, *((16, 48) if small else (2, 4096))))


def t5(small):
    import transformers

    shape = {"vocab_size": 128, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16} if small else {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
    }  # fmt: skip
    config = transformers.T5Config(**shape, use_cache=False, decoder_start_token_id=0)
    batch = _ids(config.vocab_size, *((16, 48) if small else (8, 512)))
    return Case(transformers.T5ForConditionalGeneration(config), batch)


def vit(small):
    import transformers

    shape = (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
        }
        if small
        else {}
    )
    config = transformers.ViTConfig(num_labels=1000, hidden_dropout_prob=0.1, **shape)
    batch = _images(2 if small else 64, config.image_size, 1000)
    return Case(transformers.ViTForImageClassification(config), batch, precision="amp-bf16")


def resnet50(small):
    from autoremat._resnet import imagenet_resnet

    return Case(imagenet_resnet(50), _images(2, 64, 1000) if small else _images(64, 224, 1000))


class Block(nn.Module):
    """Two convolutions with group norms and a residual connection."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Down, up, and the long connections between."""

    def __init__(self, widths):
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip(widths, (*widths[1:], widths[-1]), strict=True))
        self.down = nn.ModuleList(Block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Block(2 * b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.last(x)


def square_mean(out):
    return out.square().mean()


def unet(small):
    widths, batch, size = ((16, 32), 2, 16) if small else ((64, 128, 256, 512), 16, 128)
    images = torch.randn((batch, 3, size, size), generator=torch.Generator().manual_seed(SEED))
    return Case(UNet(widths), images, loss=square_mean)


ZOO = {f.__name__: f for f in (bert, gpt2, llama, t5, vit, resnet50, unet)}


def build(name, *, small):
    """A case, the same weights every time."""
    torch.manual_seed(SEED)
    return ZOO[name](small)
