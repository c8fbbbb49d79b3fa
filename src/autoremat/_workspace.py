"""Memory that a CPU kernel takes and returns within one op, by operator, where the kernel itself is not asked.

`_kernel_memory.py` asks the kernel, for all calls but very large ones; these go by the rules here. Each states what
the kernel allocates, worked out from the profiler's memory events on torch 2.13 (CPU, float32) and from the sizes in
ATen's sources. Operators without a rule count as taking nothing, though a few take copies (indices of an embedding's
gradient). Rules for convolutions, recurrent layers and matmuls in reduced precision depend
on oneDNN's choice of kernel and are upper estimates in most cases; the others were exact on the sizes tried.

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


def kept_number_bytes(name: str, args: Sequence[Any]) -> int:
    """Bytes that autograd keeps for a Python number in a product or quotient: it is wrapped, and saved unhooked.

    Args:
        name: Operator with overload.
        args: Its positional arguments.
    """
    if name not in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul_.Tensor", "aten.div_.Tensor"):
        return 0
    tensor, other = args[0], args[1]
    return _DOUBLE_BYTES if isinstance(other, Number) and isinstance(tensor, Tensor) and tensor.requires_grad else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wrapped_number(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """A Python operand is wrapped into a tensor, and that one is cast to the dtype of the result."""
    if not any(isinstance(a, Number) for a in args[:2]) or not results:
        return 0
    size = results[0].element_size()
    return _DOUBLE_BYTES if size == _DOUBLE_BYTES else _DOUBLE_BYTES + size


def _elementwise(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Numbers as tensors, and operands of another dtype than the result as copies in that."""
    size = results[0].element_size() if results else 0
    others = [a for a in args[:2] if isinstance(a, Tensor) and a.dim() and results and a.dtype != results[0].dtype]
    return _wrapped_number(args, results) + sum(a.numel() * size for a in others)


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


_CHANNEL_BLOCK = 16
"""oneDNN's blocked layouts pad channels to a multiple of this (float32 with AVX-512; 8 with AVX2)."""
_REDUCTION_BYTES = 16 * 2**10
"""What the weight gradient's reduction over threads takes besides copies of the weight: 8 to 10 KiB were seen."""


def _blocked(tensor: Tensor, *dims: int) -> int:
    """Bytes of a tensor in a blocked layout."""
    num_bytes = _bytes(tensor)
    for dim in dims:
        channels = max(1, tensor.shape[dim])
        num_bytes = num_bytes // channels * (-(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK)
    return num_bytes


def _convolution(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Input, weight and output in a blocked layout, then the output copied out of it."""
    out = _bytes(results[0])
    blocked_out = _blocked(results[0], 1)
    return max(_blocked(args[0], 1) + _blocked(args[1], 0, 1) + blocked_out, blocked_out + out) - out


def _convolution_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """The input's gradient, then the weight's, each with its operands in blocked layouts and a sum over threads."""
    gradient, x, weight, mask = args[0], args[1], args[2], args[-1]
    operands = _blocked(gradient, 1) + _blocked(x, 1) + _blocked(weight, 0, 1)
    scratch = (torch.get_num_threads() - 1) * _blocked(weight, 0, 1) + _REDUCTION_BYTES
    first = operands if mask[0] else 0
    second = (_bytes(x) if mask[0] else 0) + operands + scratch
    return max(first, second) - (_bytes(x) if mask[0] else 0)


_REDUCED_MM_BYTES = 2 * 2**20
"""What each thread of a matmul in reduced precision packs and accumulates in: up to 1.7 MB were seen (AVX-512)."""


def _matmul(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Float32 takes nothing that torch allocates."""
    is_reduced = results[0].dtype in (torch.bfloat16, torch.float16)
    return int(torch.get_num_threads()) * _REDUCED_MM_BYTES if is_reduced else 0


_RNN_BYTES = 16 * 2**10
"""What oneDNN's recurrent kernels take whatever the sizes: 15 to 17 KiB were seen."""


def _rnn_layer(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Gates of every element of the sequence, weights with padded rows, states: an upper estimate."""
    x, w0, w1 = args[0], args[1], args[2]
    length, batch = x.shape[0], x.shape[1]
    gates, hidden = w0.shape[0], w1.shape[-1]
    floats = length * batch * gates + 8 * batch * hidden + gates
    return int(4 * floats) + (_bytes(w0) + _bytes(w1)) * 17 // 16 + _RNN_BYTES


def _rnn_layer_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """As forward, and the weights and the output once or twice more: an upper estimate."""
    x, w0, w1 = args[0], args[1], args[2]
    hidden = w1.shape[-1]
    states = 4 * x.shape[1] * hidden * (2 * x.shape[0] + 8)
    return _rnn_layer(args, results) + _bytes(w0) + _bytes(w1) + int(states)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "rsub"), _elementwise),
    "mean": _mean,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _matmul),
    "_safe_softmax": _safe_softmax,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    "mkldnn_rnn_layer": _rnn_layer,
    "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
