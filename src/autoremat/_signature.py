"""What identifies a model to a plan: names, shapes and dtypes of its parameters and buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import nn


def signature_lines(model: nn.Module, *, dtype: object = None) -> Iterator[str]:
    """One line for each parameter and buffer: name, dtype and shape; shared ones under every name.

    Args:
        model: Any module.
        dtype: Dtype to state for floating tensors instead of their own.
    """
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        shown = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        name = name.replace("_orig_mod.", "")  # noqa: PLW2901 (what torch.compile puts around a module)
        yield f"{name} {str(shown).removeprefix('torch.')} {list(tensor.shape)}"


def model_signature(model: nn.Module, *, dtype: object = None) -> str:
    """A short hash over `signature_lines`: equal for models that a plan fits alike.

    Example:
        >>> model_signature(nn.Linear(2, 3)) == model_signature(nn.Linear(2, 3))
        True
    """
    text = "\n".join([_class_name(model), *signature_lines(model, dtype=dtype)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _class_name(model: nn.Module) -> str:
    """Name of a model's class; ``fully_shard`` puts one of its own before it."""
    kind = type(model)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__[1:]):
        kind = kind.__bases__[-1]
    return kind.__name__
