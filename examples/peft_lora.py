"""The smallest LoRA fine-tuning with PEFT under a budget. One line is all that is added."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import autoremat as ar


def build() -> PeftModel:
    """A tiny Llama with adapters, without downloads."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def train(budget: str | int | None = None, steps: int = 3) -> tuple[list[float], PeftModel]:
    """Train for a few steps; returns the losses and the model."""
    model = build()
    if budget is not None:
        ar.enable(model, budget)  # <- this
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        ids = torch.randint(64, (8, 64))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    plain, _ = train()
    planned, model = train("3MiB")
    print(ar.enabled(model))
    print("same losses:", plain == planned, planned)
