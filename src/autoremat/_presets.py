"""Models to plan for by name, built from configurations: nothing is downloaded, weights are random or fake.

Shapes are those of the published checkpoints. Where a longer sequence is asked for than a model was made for, its
position table is as long as the sequence. Dropout is on, as the configurations have it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoremat._errors import UsageError
from autoremat._fake import fake_weights

CAST_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions in which the whole model is built; the others are for autocast."""
_BATCH_SEED = 0


@dataclass(frozen=True, slots=True)
class Built:
    """A model with a batch for it.

    Attributes:
        model: In training mode.
        batch: A tensor, a tuple of positional or a dict of keyword arguments.
        loss: A function of the model's output that returns a scalar; None where the output has a ``loss``.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Preset:
    """How a preset is built: `make` gets the sequence length (0 for images), `fill` makes the batch."""

    make: Callable[[int], nn.Module]
    fill: Callable[[nn.Module, int, int], dict[str, Tensor]]
    default_batch: int
    default_seq: int
    about: str


def build_preset(
    name: str, *, batch: int | None = None, seq: int | None = None, precision: str | None = None, fake: bool = True
) -> Built:
    """Build a model and a batch by name.

    Args:
        name: One of `preset_names`.
        batch: Number of samples; None for the preset's own.
        seq: Tokens in each; None for the preset's own. Not for image models.
        precision: "fp32", "bf16" or "fp16" builds the whole model in that dtype; anything else leaves float32.
        fake: Take no memory for weights; such a model can be traced and planned for, not run.

    Raises:
        UsageError: For an unknown name (lists the nearest) or a number that does not fit the model.
    """
    preset = _find(name)
    batch_size = preset.default_batch if batch is None else batch
    tokens = preset.default_seq if seq is None else seq
    if batch_size < 1 or (preset.default_seq and tokens < 1):
        raise UsageError(f"Batch and sequence must be positive, not {batch_size} and {tokens}.")
    if not preset.default_seq and tokens:
        raise UsageError(f"{name} takes images, which have no sequence length: leave --seq out.")
    dtype = CAST_DTYPES.get(precision or "fp32", torch.float32)
    with _default_dtype(dtype), _no_memory() if fake else contextlib.nullcontext():
        model = preset.make(tokens)
        _tie(model)
    values = preset.fill(model, batch_size, tokens)
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in values.items()}
    return Built(model=model.train(), batch=cast)


def preset_names() -> tuple[str, ...]:
    """Names that `build_preset` knows."""
    return tuple(_PRESETS)


def preset_about(name: str) -> str:
    """One line about a preset."""
    return _find(name).about


def _find(name: str) -> _Preset:
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=3, cutoff=0.5) or list(_PRESETS)
        raise UsageError(
            f"No preset {name!r}. Near it: {', '.join(near)}. For a model of your own write file.py:function."
        )
    return _PRESETS[name]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextlib.contextmanager
def _no_memory() -> Iterator[None]:
    """Fake weights, and no time spent on the initial values that Transformers would give them."""
    with fake_weights(), contextlib.ExitStack() as stack:
        if importlib.util.find_spec("transformers") is not None:
            stack.enter_context(importlib.import_module("transformers.initialization").no_init_weights())
        yield


def _tie(model: nn.Module) -> None:
    # Transformers ties weights at the end of initialization, which fake models skip.
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _transformers(attribute: str) -> Any:
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            'This preset needs the transformers package: pip install "autoremat[transformers]".'
        ) from error
    return getattr(package, attribute)


def _bert(seq: int, **shape: Any) -> nn.Module:
    config = _transformers("BertConfig")(max_position_embeddings=max(512, seq), **shape)
    model: nn.Module = _transformers("BertForMaskedLM")(config)
    return model


def _bert_large(seq: int) -> nn.Module:
    return _bert(seq, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def gpt2(seq: int, **shape: Any) -> nn.Module:
    """GPT-2 for training on sequences of ``seq`` tokens.

    Args:
        seq: Tokens in a sequence.
        shape: Fields of Transformers' ``GPT2Config``.
    """
    config = _transformers("GPT2Config")(**{"n_positions": max(1024, seq), "use_cache": False} | shape)
    model: nn.Module = _transformers("GPT2LMHeadModel")(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment] # what it falls back to, without the warning
    return model


def _llama_3_8b(seq: int) -> nn.Module:
    return _llama_3(seq, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32)


def _llama_3_70b(seq: int) -> nn.Module:
    return _llama_3(seq, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64)


def _llama_3(seq: int, **shape: Any) -> nn.Module:
    config = _transformers("LlamaConfig")(
        **shape,
        vocab_size=128_256,
        num_key_value_heads=8,
        max_position_embeddings=max(8192, seq),
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=False,
    )
    model: nn.Module = _transformers("LlamaForCausalLM")(config)
    return model


def _t5_base(_: int) -> nn.Module:
    config = _transformers("T5Config")(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False, decoder_start_token_id=0
    )
    model: nn.Module = _transformers("T5ForConditionalGeneration")(config)
    return model


def _vit_b16(_: int) -> nn.Module:
    model: nn.Module = _transformers("ViTForImageClassification")(_transformers("ViTConfig")(num_labels=1000))
    return model


def _resnet_50(_: int) -> nn.Module:
    from autoremat._resnet import imagenet_resnet  # noqa: PLC0415 - other presets do without

    return imagenet_resnet(50)


def _resnet_1001(_: int) -> nn.Module:
    from autoremat._resnet import cifar_resnet  # noqa: PLC0415 - other presets do without

    return cifar_resnet(1001)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_BATCH_SEED)


def _tokens(model: nn.Module, batch: int, seq: int) -> dict[str, Tensor]:
    """Random tokens; each is its own label, which is all that memory and FLOPs depend on."""
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    ids = torch.randint(vocabulary, (batch, seq), generator=_generator())
    return {"input_ids": ids, "labels": ids.clone()}


def _images(size: int, num_classes: int) -> Callable[[nn.Module, int, int], dict[str, Tensor]]:
    def fill(_: nn.Module, batch: int, __: int) -> dict[str, Tensor]:
        generator = _generator()
        return {
            "pixel_values": torch.randn((batch, 3, size, size), generator=generator),
            "labels": torch.randint(num_classes, (batch,), generator=generator),
        }

    return fill


_PRESETS = {
    "bert-base": _Preset(_bert, _tokens, 16, 512, "BERT, 12 layers, masked language modelling"),
    "bert-large": _Preset(_bert_large, _tokens, 16, 512, "BERT, 24 layers, masked language modelling"),
    "gpt2": _Preset(gpt2, _tokens, 8, 1024, "GPT-2, 12 layers, language modelling"),
    "llama-3-8b": _Preset(_llama_3_8b, _tokens, 1, 4096, "Llama 3 8B, 32 layers, language modelling"),
    "llama-3-70b": _Preset(_llama_3_70b, _tokens, 1, 4096, "Llama 3 70B, 80 layers, language modelling"),
    "t5-base": _Preset(_t5_base, _tokens, 8, 512, "T5, 12 + 12 layers, sequence to sequence"),
    "vit-b16": _Preset(_vit_b16, _images(224, 1000), 64, 0, "ViT-B/16, 12 layers, image classification"),
    "resnet-50": _Preset(_resnet_50, _images(224, 1000), 64, 0, "ResNet, 50 layers, image classification"),
    "resnet-1001": _Preset(_resnet_1001, _images(32, 10), 64, 0, "ResNet, 1,001 layers, 32-pixel images"),
}
