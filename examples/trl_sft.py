"""The smallest supervised fine-tuning with TRL under a budget: one callback is all that is added."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from autoremat.integrations.transformers import AutorematCallback


def build() -> LlamaForCausalLM:
    """A tiny Llama, without downloads."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w61, without downloads."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, **{f"w{i}": i + 2 for i in range(62)}}))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")  # noqa: S106 - of text


def data(num_rows: int = 24) -> Dataset:
    """Rows that are tokenized already."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 64, (num_rows, 32), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def train(budget: str | int | None = None, **arguments: object) -> tuple[list[float], LlamaForCausalLM]:
    """Train for a few steps; returns the losses and the model."""
    model = build()
    callbacks = [] if budget is None else [AutorematCallback(budget)]  # <- this
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 1,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 0, "bf16": False,
            "gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True},
        }  # fmt: skip
        trainer = SFTTrainer(
            model, SFTConfig(**{**settings, **arguments}), train_dataset=data(), processing_class=tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


if __name__ == "__main__":
    plain, _ = train()
    planned, _ = train("90MiB")
    print("same losses:", plain == planned, planned)
