"""The smallest fine-tuning with Transformers' Trainer under a budget: one callback is all that is added."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from autoremat.integrations.transformers import AutorematCallback


def build() -> BertForSequenceClassification:
    """A tiny BERT, without downloads."""
    set_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=2
    )
    return BertForSequenceClassification(config)


def data(num_rows: int = 24) -> list[dict[str, torch.Tensor]]:
    """Rows of token ids with a label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (num_rows, 64), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]


def train(budget: str | int | None = None, **arguments: object) -> tuple[list[float], BertForSequenceClassification]:
    """Train for a few steps; returns the losses and the model."""
    model = build()
    callbacks = [] if budget is None else [AutorematCallback(budget)]  # <- this
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 1,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 0,
        }  # fmt: skip
        trainer = Trainer(
            model, TrainingArguments(**{**settings, **arguments}), train_dataset=data(), callbacks=callbacks
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


if __name__ == "__main__":
    plain, _ = train()
    planned, _ = train("3MiB")
    print("same losses:", plain == planned, planned)
