"""TRL's trainers whose loss the model does not return: same bits, and within the budget, by the Trainer's callback."""

from itertools import accumulate

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from autoremat._measure import record_memory
from autoremat.integrations.transformers import AutorematCallback

pytestmark = [pytest.mark.filterwarnings("ignore")]


def build():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokenizer():
    words = Tokenizer(
        models.WordLevel({"<pad>": 0, "<end>": 1, **{f"w{i}": i + 2 for i in range(62)}}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def text(generator, length):
    return " ".join(f"w{i}" for i in torch.randint(62, (length,), generator=generator).tolist())


def prefer(model, settings, **more):
    """Two answers to each question, with a second model beside the one that is trained."""
    generator = torch.Generator().manual_seed(0)
    rows = [{name: text(generator, 64) for name in ("prompt", "chosen", "rejected")} for _ in range(8)]
    return DPOTrainer(model, build(), DPOConfig(**settings), train_dataset=Dataset.from_list(rows), **more)


def reinforce(model, settings, **more):
    """Answers that the model generates itself."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"prompt": text(generator, 64)} for _ in range(8)]
    settings |= {"num_generations": 4, "max_completion_length": 24}

    def reward(completions, **_):
        return [float(len(set(completion.split()))) for completion in completions]

    return GRPOTrainer(model, reward, GRPOConfig(**settings), train_dataset=Dataset.from_list(rows), **more)


def train(make, folder, budget=None):
    """Losses, model and callback."""
    callback = None if budget is None else AutorematCallback(budget)
    model = build()
    settings = {
        "output_dir": folder, "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "seed": 0,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = make(model, settings, processing_class=tokenizer(), callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model, callback


@pytest.mark.parametrize(("make", "num_models"), [(prefer, 2), (reinforce, 1)])
def test_trainers_with_losses_of_their_own_do_the_same_within_the_budget(make, num_models, tmp_path):
    (losses, plain, _), events = record_memory(lambda: train(make, tmp_path))
    # A second model is not seen, and comes on top of the budget.
    beside = (num_models - 1) * sum(p.nbytes for p in plain.parameters())
    plain_peak = max(accumulate(change for _, change in events)) - beside
    budget = int(0.85 * plain_peak)
    (found, planned, callback), events = record_memory(lambda: train(make, tmp_path, budget))
    assert found == losses
    assert len(losses) == 2
    assert all(torch.equal(a, b) for a, b in zip(planned.parameters(), plain.parameters(), strict=True))
    assert callback.enabled.plan.regions
    assert max(accumulate(change for _, change in events)) - beside <= budget
