"""Trace a CUDA step without CUDA: the ops that torch chooses by device, chosen as on the target.

Two composite functions of torch run other kernels on a GPU than on a CPU, and save other tensors: attention (flash
and memory-efficient kernels keep an output and row statistics instead of the probabilities) and dropout (a mask of
one byte an element instead of four). Under `CudaOps` a trace on fake CPU tensors records what CUDA would run.

Source: torch's own choice in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (flash first, then
memory-efficient, then math) and ``native_dropout`` in ``aten/src/ATen/native/Dropout.cpp``.

Known limits: cuDNN attention is left out (torch prefers it on Hopper in some versions; it saves the same sizes).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256
_EFFICIENT_ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}


class CudaOps(TorchFunctionMode):
    """Runs attention and dropout by the operators that CUDA would use, on tensors of any (fake) device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if inplace or not training or p in (0.0, 1.0):
        return F.dropout(input, p, training, inplace)
    dropped: Tensor = torch.native_dropout(input, p, training)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _can_flash(query, key, value, attn_mask):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, dim=-3) for x in (key, value))
    if _can_be_efficient(query, value):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


def _can_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        mask is None
        and query.dim() == 4
        and query.dtype in _FLASH_DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD_DIM
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width % 8:
        query, key, value = (F.pad(x, (0, 8 - width % 8)) for x in (query, key, value))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _can_be_efficient(query: Tensor, value: Tensor) -> bool:
    alignment = _EFFICIENT_ALIGNMENT.get(query.dtype)
    return (
        query.dim() == 4
        and alignment is not None
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_statistics = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_statistics, dropout_p, is_causal, scale=scale
    )[0]
    return out
