"""What ``--help`` teaches: an example for each command, and the words that its output uses, in a line each."""

from __future__ import annotations

import inspect
from typing import Any

import typer

WORDS = {
    "peak": "the largest live bytes in a step: parameters, gradients, optimizer state, activations, temporaries",
    "budget": "device memory for all of that; GiB is 1024**3 bytes, GB is 1e9",
    "region": "a module call whose saved tensors are dropped after forward and computed again in backward",
    "plan": "regions, and which outputs in them are stored: a small file",
    "overhead": "recomputed FLOPs, or predicted time, over those of the step without a plan",
    "target": "the device that a plan is for: one by name, or here (this machine, after autoremat calibrate)",
    "frontier": "the least overhead for every budget",
    "bound": "a proved limit: no schedule has less overhead at that budget",
    "accumulation": "several forwards and backwards for one optimizer step",
    "dry run": "the planned step on tensors without memory: what the runtime does, counted",
}
LESSONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan": (
        "autoremat plan bert-large --batch 16 --seq 1024 --budget 24GiB --target rtx3090-24g -o plan.json",
        ("plan", "budget", "peak", "overhead", "bound"),
    ),
    "why": ("autoremat why bert-large --batch 16 --budget 24GiB", ("region", "budget", "bound")),
    "frontier": ("autoremat frontier gpt2 --batch 8 --classic", ("frontier", "peak", "overhead", "bound")),
    "verify": ("autoremat verify train.py:make --budget 2GiB", ("plan", "region")),
    "measure": ("autoremat measure train.py:make --plan plan.json", ("peak", "budget")),
    "profile": ("autoremat profile gpt2 --batch 8 --budget 6GiB --dry-run", ("peak", "plan", "dry run")),
    "advise": ("autoremat advise bert-large --batch 16 --target rtx3090-24g", ("target", "accumulation", "overhead")),
    "run": ("autoremat run --budget 8GiB --monitor console train.py --epochs 1", ("budget", "plan")),
    "export": ("autoremat export gpt2 --budget 6GiB --to torch -o regions.py", ("plan", "region")),
    "report": ("autoremat report gpt2 --budget 8GiB -o report.html", ("peak", "frontier")),
    "targets": ("autoremat targets --json", ("target",)),
    "calibrate": ("autoremat calibrate", ("target",)),
    "presets": ("autoremat presets", ()),
    "demo": ("autoremat demo --steps 5", ("plan", "budget")),
}


def teach(app: typer.Typer) -> None:
    """Put example and words under the help of each command."""
    for command in app.registered_commands:
        callback: Any = command.callback
        paragraphs = (inspect.getdoc(callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # lines of the source are not kept
        lesson = LESSONS.get(command.name or callback.__name__)
        if lesson is not None:
            example, words = lesson
            command.epilog = "\n\n".join([f"Example: {example}", *(f"{word}: {WORDS[word]}." for word in words)])
