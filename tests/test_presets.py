"""Presets and models from files."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from autoremat import UsageError, build_preset, preset_names
from autoremat._fake import is_fake
from autoremat._loader import load_model
from autoremat._resnet import cifar_resnet, imagenet_resnet

# Parameters of the published checkpoints; for heads tied to the embedding that is counted once.
NUM_PARAMETERS = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "t5-base": 222_903_552,
    "vit-b16": 86_567_656,
    "resnet-50": 25_557_032,
}


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_shapes_and_take_no_memory(name):
    built = build_preset(name)
    count = sum(parameter.numel() for parameter in built.model.parameters())
    assert count == NUM_PARAMETERS.get(name, count)
    assert built.model.training
    assert is_fake(built.model) or count < 20e6
    assert built.loss is None
    assert "labels" in built.batch


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_tied_weights_are_tied_when_fake(name):
    model = build_preset(name, batch=1, seq=8).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_real_presets_run_and_have_a_loss():
    built = build_preset("gpt2", batch=1, seq=16, fake=False)
    loss = built.model(**built.batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in built.model.parameters())


def test_a_longer_sequence_gets_a_longer_position_table():
    assert build_preset("bert-large", batch=1, seq=1024).model.config.max_position_embeddings == 1024
    assert build_preset("gpt2", batch=1, seq=2048).model.config.n_positions == 2048


def test_precision_casts_the_whole_model_and_leaves_the_default_dtype():
    built = build_preset("llama-3-8b", batch=1, seq=8, precision="bf16")
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert build_preset("resnet-50", batch=1, precision="bf16").batch["pixel_values"].dtype == torch.bfloat16
    assert build_preset("gpt2", batch=1, seq=8, precision="amp-bf16").model.dtype == torch.float32


def test_building_llama_takes_little_memory():
    program = (
        "from pathlib import Path\nfrom autoremat import build_preset\n"
        "build_preset('llama-3-8b', batch=1, seq=8, precision='bf16')\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )  # not ru_maxrss, which starts at the size of the process that forked
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 2 * 2**20, "KiB"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert-lage", {}, "bert-large"),
        ("resnet-50", {"seq": 8}, "leave --seq out"),
        ("gpt2", {"batch": 0}, "must be positive"),
        ("gpt2", {"seq": -1}, "must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        build_preset(name, **options)


def test_resnets_run_and_count_their_layers():
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    small = cifar_resnet(20)
    out = small(images, labels)
    out.loss.backward()
    assert out.logits.shape == (2, 10)
    # Shortcut projections are not counted as layers.
    layers = [m for n, m in small.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    assert len(layers) == 20
    assert imagenet_resnet(50, num_classes=7)(torch.randn(1, 3, 64, 64).expand(2, -1, -1, -1)).logits.shape == (2, 7)
    assert small(images).loss is None


@pytest.mark.parametrize(("make", "depth"), [(imagenet_resnet, 51), (cifar_resnet, 100), (cifar_resnet, 2)])
def test_resnets_of_no_such_depth_are_refused(make, depth):
    with pytest.raises(UsageError, match="layers"):
        make(depth)


def _write(path, text):
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


def test_models_come_from_files(tmp_path):
    (tmp_path / "helper_of_models.py").write_text("WIDTH = 3\n")
    text = "import helper_of_models\ndef make(batch=2):\n    width = helper_of_models.WIDTH\n"
    text += "    return nn.Linear(width, 1), torch.zeros(batch, width), lambda out: out.sum()\n"
    file = _write(tmp_path / "models.py", text)
    built = load_model(f"{file}:make", batch=5)
    assert built.batch.shape == (5, 3)
    assert built.loss(built.model(built.batch)).ndim == 0
    cast = load_model(f"{file}:make", precision="bf16")
    assert cast.model.weight.dtype == cast.batch.dtype == torch.bfloat16
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("text", "name", "options", "message"),
    [
        ("", "make", {}, "no function 'make'"),
        ("def other(): pass", "make", {}, "It has: other"),
        ("def make(): return 3", "make", {}, r"returned \(int\)"),
        ("def make(): return nn.Linear(1, 1), 1, 2, 3", "make", {}, "Return model, batch"),
        ("def make(): return nn.Linear(1, 1), 1, 'mean'", "make", {}, "a loss of type str"),
        ("def make(): return nn.Linear(1, 1), 1", "make", {"batch": 2}, "leave out --batch"),
        ("def make(): raise KeyError('spam')", "make", {}, "KeyError: 'spam'"),
        ("import no_such_package_here", "make", {}, "cannot be imported"),
    ],
)
def test_a_file_that_does_not_serve_is_refused(tmp_path, text, name, options, message):
    file = _write(tmp_path / "broken_models.py", text)
    with pytest.raises(UsageError, match=message):
        load_model(f"{file}:{name}", **options)


def test_a_missing_file_is_refused():
    with pytest.raises(UsageError, match="No file"):
        load_model("nowhere.py:make")
