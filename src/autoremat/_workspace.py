"""Memory that a CPU kernel takes and returns within one op, by operator.

Each rule states what the kernel allocates, worked out from the profiler's memory events on torch 2.13 (CPU, float32)
and from the sizes in ATen's sources; operators without a rule take nothing. The rules for convolutions depend on
oneDNN's choice of layout and are upper estimates; all others reproduce the events exactly.

Known limits: CUDA kernels have no rules (cuBLAS and cuDNN workspaces belong to the allocator's reserve).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Sequence[Any], Sequence[Tensor]], int]

_DOUBLE_BYTES = 8
"""A Python number becomes a zero-dimensional float64 (or int64) tensor."""


def workspace_bytes(name: str, args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Bytes of a CPU kernel's workspace.

    Args:
        name: Operator with overload, ``"aten.mul.Tensor"``.
        args: Its positional arguments.
        results: Its tensor outputs.
    """
    rule = _RULES.get(name.split(".")[1]) if "." in name else None
    return 0 if rule is None else rule(args, results)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wrapped_number(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """A Python operand is wrapped into a tensor, and that one is cast to the dtype of the result."""
    if not any(isinstance(a, Number) for a in args[:2]) or not results:
        return 0
    size = results[0].element_size()
    return _DOUBLE_BYTES if size == _DOUBLE_BYTES else _DOUBLE_BYTES + size


def _mean(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """A sum, divided in place by the count."""
    return _DOUBLE_BYTES + results[0].element_size()


def _safe_softmax(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Masks of what is minus infinity, by element and by row, and a zero."""
    numel, row = results[0].numel(), max(1, results[0].shape[-1] if results[0].dim() else 1)
    return numel + numel // row + results[0].element_size()


def _layer_norm_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Partial gradients of weight and bias, one row for each thread."""
    weight = args[5]
    return 0 if weight is None else 2 * torch.get_num_threads() * _bytes(weight)


def _batch_norm(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Scale and shift by channel."""
    channels = args[0].shape[1] if args[0].dim() > 1 else 1
    return 8 * channels


def _batch_norm_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """A copy of the input's size."""
    return _bytes(args[0])


def _attention_splits(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of the tile that a thread works on, see ``FlashAttentionKernel.cpp``."""
    rows, columns = query.shape[-2], key.shape[-2]
    split = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(split, rows), min(512, columns)


def _flash_attention(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Each thread's tile of scores, its row maxima and sums, and its tile of the output, in float32."""
    query, key = args[0], args[1]
    rows, columns = _attention_splits(query, key)
    floats = rows * columns + 2 * rows + rows * query.shape[-1]
    reduced = 0 if query.dtype in (torch.float32, torch.float64) else 2 * rows * columns
    return int(torch.get_num_threads() * (4 * floats + reduced))


def _flash_attention_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Each thread's tiles of weights and their gradients, and one tile's row sums, in float32."""
    query, key = args[1], args[2]
    rows, columns = _attention_splits(query, key)
    reduced = 0 if query.dtype in (torch.float32, torch.float64) else 4 * rows * columns
    return int(torch.get_num_threads() * (8 * rows * columns + reduced) + 4 * rows)


def _convolution(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Weight and input in oneDNN's layout, or the output in it: an upper estimate."""
    return max(_bytes(args[0]) + _bytes(args[1]), _bytes(results[0]))


def _convolution_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """The weight's gradient in oneDNN's layout, or gradient and input in it: an upper estimate."""
    return max(_bytes(args[2]), 2 * _bytes(args[0]))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "rsub"), _wrapped_number),
    "mean": _mean,
    "_safe_softmax": _safe_softmax,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
