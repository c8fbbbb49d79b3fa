"""Python files that apply a plan with torch alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autoremat._plan import Plan

_TORCH = '''"""Selective activation checkpointing of {model}, op call by op call, with torch 2.4 or later alone.

Call `apply(model)` once, before training. Modules are named by path; stored outputs by operator and by how many calls
of it came before in the module's call, casts of parameters not counted. All other ops run again in backward.
"""

from collections import Counter
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

REGIONS = [
{regions}]


def contexts(stored):
    counts = Counter()

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            return CheckpointPolicy.MUST_RECOMPUTE
        call = counts[ctx.is_recompute, str(op)]
        counts[ctx.is_recompute, str(op)] += 1
        is_stored = (str(op), call) in stored
        return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model):
    for paths, stored in REGIONS:
        for path in paths:
            module = model.get_submodule(path)
            options = {{"context_fn": partial(contexts, frozenset(stored))}} if stored else {{}}
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)
    return model
'''

_FSDP = '''"""Activation checkpointing of {model} with torch's wrappers, for use before or after fully_shard."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

PATHS = [
{paths}]


def apply(model):
    chosen = {{model.get_submodule(path) for path in PATHS}}
    apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    return model
'''


def torch_source(plan: Plan, model: str) -> str:
    """A module whose ``apply(model)`` does what the regions of a plan say.

    Args:
        plan: Regions of one call each, without regions inside them.
        model: Name of the model, for the reader.
    """
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for region in plan.regions:
        stored = tuple(dict.fromkeys((output.op, output.occurrence) for output in region.saved))
        alike.setdefault(stored, []).append(region.path)
    regions = "".join(_region(paths, stored) for stored, paths in alike.items())
    return _TORCH.format(model=model, regions=regions)


def _region(paths: Sequence[str], stored: Sequence[tuple[str, int]]) -> str:
    lines = ["    (", f"        {json.dumps(list(paths))},", "        ["]
    lines += [f"            ({json.dumps(op)}, {occurrence})," for op, occurrence in stored]
    return "\n".join([*lines, "        ],", "    ),", ""])


def fsdp_source(paths: Sequence[str], model: str) -> str:
    """A module whose ``apply(model)`` wraps these modules into torch's checkpoint wrappers."""
    return _FSDP.format(model=model, paths="".join(f"    {json.dumps(path)},\n" for path in paths))
