"""Batches of another size, made of a given one by repeating it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from autoremat._errors import BatchError
from autoremat._step import Batch


def batch_size(batch: Batch) -> int:
    """Number of samples: the first dimension that the batch's tensors share.

    Raises:
        BatchError: If there is no tensor, or they do not share it.
    """
    sizes = Counter(x.shape[0] for x in tree_iter(batch) if isinstance(x, Tensor) and x.dim() > 0)
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensors"
        raise BatchError(
            f"The batch's tensors do not share a first dimension ({found}), so it cannot be made larger or smaller by "
            "repeating. Plan for each batch size on its own: plan(model, batch, budget=...)."
        )
    return next(iter(sizes))


def sequence_length(batch: Batch) -> int | None:
    """Tokens in a sample: the second dimension of the batch's integer matrices, if they share one."""
    lengths = {x.shape[1] for x in tree_iter(batch) if _is_tokens(x)}
    return lengths.pop() if len(lengths) == 1 else None


def _is_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point() and x.shape[1] > 1


def resize(batch: Batch, *, samples: int, tokens: int | None = None) -> Batch:
    """The batch with so many samples of so many tokens; what it has is repeated or cut.

    Args:
        batch: As for `batch_size`.
        samples: Number of samples.
        tokens: Tokens in each; None leaves the length.
    """
    length = sequence_length(batch)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        changed = _repeat(x, 0, samples)
        if tokens is not None and length is not None and x.dim() >= 2 and x.shape[1] == length:
            changed = _repeat(changed, 1, tokens)
        return changed.requires_grad_(x.requires_grad)

    resized: Batch = tree_map(change, dict(batch) if isinstance(batch, Mapping) else batch)
    return resized


def _repeat(x: Tensor, dim: int, size: int) -> Tensor:
    index = torch.arange(size, device=x.device) % x.shape[dim]
    return x.detach().index_select(dim, index)
