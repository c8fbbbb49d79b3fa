"""Models without memory for their weights.

Parameters are fake (torch's `FakeTensorMode`: shapes, dtypes and devices without data). Everything that comes only
from the batch and from constants (token ids, masks, positions) stays real, so that a model's ``if mask.all():``
takes the branch that it takes in training. An op that mixes the two yields a fake tensor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from autoremat._errors import TraceError

REAL_BUFFER_BYTES = 2**20
"""Buffers up to this size stay real in a fake copy: positions and masks that branches may depend on."""


@contextlib.contextmanager
def fake_weights() -> Iterator[None]:
    """Build a model without memory for its weights.

    Tensors of more than `REAL_BUFFER_BYTES` that a constructor makes from nothing are fake; small ones are real.

    Example:
        >>> with fake_weights():
        ...     layer = nn.Linear(100_000, 100_000)
        >>> layer.weight.shape
        torch.Size([100000, 100000])
    """
    with _FakeFactories(FakeTensorMode(allow_non_fake_inputs=True)):
        yield


class _FakeFactories(TorchDispatchMode):
    """Makes the large results of ops without tensor arguments fake."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, Tensor) for x in tree_iter((args, kwargs))):
            with self.mode:
                out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.untyped_storage().nbytes() > REAL_BUFFER_BYTES:
                return out
        return func(*args, **kwargs)


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What torch raises where code reads values that fake tensors do not have."""


def is_fake(model: nn.Module) -> bool:
    """Whether any parameter of a model is fake: it can be traced and planned for, not run."""
    return any(isinstance(p, FakeTensor) or isinstance(p.data, FakeTensor) for p in model.parameters())


def fake_copy(model: nn.Module, *, dtype: torch.dtype | None = None) -> tuple[nn.Module, FakeTensorMode]:
    """A deep copy of a model whose parameters are fake; the model itself is left alone.

    Args:
        model: With real or fake parameters.
        dtype: Cast floating parameters and buffers to this.

    Returns:
        The copy, and the mode that its fake tensors belong to.

    Raises:
        TraceError: If the model cannot be deep-copied; with the reason.
    """
    mode = _mode_of(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _fake_parameter(parameter, mode, dtype)
    for buffer in model.buffers():
        memo[id(buffer)] = _copy_buffer(buffer, mode, dtype)
    originals = [*model.parameters(), *model.buffers()]  # keeps every id in the memo taken while it is used
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be deep-copied for tracing: {type(error).__name__}: {error}. "
            "Remove what cannot be copied from the module's attributes, or trace on real tensors with fake=False."
        ) from error
    del originals
    return twin, mode


@contextlib.contextmanager
def fake_copies(twin: nn.Module) -> Iterator[None]:
    """While inside, ``copy.deepcopy`` of a fake model makes another one: tensors without data cannot copy themselves.

    Example:
        >>> twin, _ = fake_copy(nn.Linear(2, 2))
        >>> with fake_copies(twin):
        ...     copied = copy.deepcopy(twin)
        >>> is_fake(copied) and copied.weight is not twin.weight
        True
    """

    def copied(memo: dict[int, Any]) -> nn.Module:
        del twin.__dict__["__deepcopy__"]
        try:
            return fake_copy(twin)[0]
        finally:
            twin.__dict__["__deepcopy__"] = copied

    twin.__dict__["__deepcopy__"] = copied
    try:
        yield
    finally:
        del twin.__dict__["__deepcopy__"]


def _mode_of(model: nn.Module) -> FakeTensorMode:
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            mode: FakeTensorMode = tensor.fake_mode
            return mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake_like(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=to, device=tensor.device)


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Parameter:
    fake = nn.Parameter(_fake_like(parameter, mode, dtype), requires_grad=parameter.requires_grad)
    fake.__dict__.update({k: v for k, v in parameter.__dict__.items() if not isinstance(v, Tensor)})
    return fake


def _copy_buffer(buffer: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    if isinstance(buffer, FakeTensor) or buffer.untyped_storage().nbytes() > REAL_BUFFER_BYTES:
        return _fake_like(buffer, mode, dtype)
    copied = buffer.detach().clone()
    return copied.to(dtype) if dtype is not None and copied.is_floating_point() else copied
