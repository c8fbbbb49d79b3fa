"""Calls of the operators of common training steps whose time is not that of the bytes they move, for `_calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 1024, 768
"""Three MiB of float32: what a layer of a middling batch has, in no first or second cache."""


@dataclass(frozen=True, slots=True)
class ElementCall:
    """An operator with arguments for it."""

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)


def element_calls(randn: Callable[..., Tensor], dtype: torch.dtype) -> list[ElementCall]:
    """The calls, on inputs of their own.

    Args:
        randn: Makes normal random numbers of a shape, with ``dtype=``.
        dtype: Of the inputs.
    """
    aten = torch.ops.aten
    x, y, z = (randn(ROWS, COLUMNS, dtype=dtype) for _ in range(3))
    positive = x.abs() + 0.1
    calls = [
        *[(op.default, (x,)) for op in (aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.exp, aten.erf)],
        *[(op.default, (x,)) for op in (aten.sin, aten.cos, aten.relu, aten.neg)],
        *[(op.default, (positive,)) for op in (aten.sqrt, aten.rsqrt, aten.log)],
        *[(op.default, (x, y)) for op in (aten.gelu_backward, aten.silu_backward, aten.tanh_backward)],
        (aten.sigmoid_backward.default, (x, y)),
        (aten.threshold_backward.default, (x, y, 0.0)),
        (aten.pow.Tensor_Scalar, (x, 2)),
        (aten.div.Tensor, (x, positive)),
        (aten.div.Scalar, (x, 3.0)),
        (aten.div_.Scalar, (z, 1.0001)),
        (aten.mul.Scalar, (x, 3.0)),
        (aten.sum.dim_IntList, (x, [0], True)),
        (aten.mean.dim, (x, [-1], True)),
        (aten.lerp_.Scalar, (z, y, 0.1)),
        (aten.addcmul_.default, (z, x, y)),
        (aten.addcdiv_.default, (z, x, positive)),
        (aten.where.self, (x > 0, x, y)),
        (aten.masked_fill.Scalar, (x, y > 0, 0.0)),
        (aten.cat.default, ([x, y], -1)),
        (aten.bernoulli_.float, (z, 0.9)),
        (aten.native_dropout.default, (x, 0.1, True)),
        *_norms(x, y, randn),
        *_softmaxes(x, y),
    ]
    heads = x.view(ROWS // 64, 64, 12, COLUMNS // 12).transpose(1, 2)
    # Models clone to change the order in memory; without being told to, clone would keep it, and only copy.
    clone = ElementCall(aten.clone.default, (heads,), {"memory_format": torch.contiguous_format})
    return [*(ElementCall(operator, arguments) for operator, arguments in calls), clone]


def _norms(x: Tensor, y: Tensor, randn: Callable[..., Tensor]) -> list[tuple[Any, tuple[Any, ...]]]:
    aten = torch.ops.aten
    scale, shift = randn(COLUMNS, dtype=x.dtype), randn(COLUMNS, dtype=x.dtype)
    _, mean, rstd = aten.native_layer_norm.default(x, [COLUMNS], scale, shift, 1e-5)
    image, gradient = (t.view(16, 64, 24, -1) for t in (x, y))
    channel = [randn(64, dtype=torch.float32) for _ in range(4)]
    running = channel[2].abs() + 1
    batch = (image, channel[0], channel[1], channel[3], running)
    _, save_mean, save_rstd = aten.native_batch_norm.default(*batch, True, 0.1, 1e-5)
    return [
        (aten.native_layer_norm.default, (x, [COLUMNS], scale, shift, 1e-5)),
        (aten.native_layer_norm_backward.default, (y, x, [COLUMNS], mean, rstd, scale, shift, [True] * 3)),
        (aten.native_batch_norm.default, (*batch, True, 0.1, 1e-5)),
        (
            aten.native_batch_norm_backward.default,
            (gradient, image, channel[0], channel[3], running, save_mean, save_rstd, True, 1e-5, [True] * 3),
        ),
    ]


def _softmaxes(x: Tensor, y: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    aten = torch.ops.aten
    out, log_out = torch.softmax(x, -1), torch.log_softmax(x, -1)
    labels = torch.zeros(ROWS, dtype=torch.int64, device=x.device)
    _, weight = aten.nll_loss_forward.default(log_out, labels, None, 1, -100)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return [
        (aten._softmax.default, (x, -1, False)),
        (aten._safe_softmax.default, (x, -1)),
        (aten._softmax_backward_data.default, (y, out, -1, x.dtype)),
        (aten._log_softmax.default, (x, -1, False)),
        (aten._log_softmax_backward_data.default, (y, log_out, -1, x.dtype)),
        (aten.nll_loss_backward.default, (one, log_out, labels, None, 1, -100, weight)),
    ]
