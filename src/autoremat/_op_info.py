"""Facts about ATen operators: what they write, whether they draw random numbers, their FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of an operator before it runs.

    Attributes:
        name: ``"aten.addmm.default"``.
        written: Positions of the arguments that it writes.
        written_names: Their names, for keyword calls.
        returns_written: Whether what it returns are the arguments that it writes, in order.
        is_random: Whether it may draw random numbers.
        dropout: Position and name of its dropout probability; a call with 0 draws nothing.
        flops: Formula of its FLOPs from shapes, if it has one.
    """

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    returns_written: bool
    is_random: bool
    dropout: tuple[int, str] | None
    flops: Any


@cache
def op_info(func: Any) -> OpInfo:
    """Look an operator up."""
    arguments = func._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    if "batch_norm" in func._schema.name and "backward" not in func._schema.name and not written:
        # The legacy schemas do not say that running statistics change.
        written = [i for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var")]
    returned = [r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns]
    dropout = next(((i, a.name) for i, a in enumerate(arguments) if a.name == "dropout_p"), None)
    packet = getattr(func, "_overloadpacket", None)
    return OpInfo(
        name=str(func),
        written=tuple(written),
        written_names=tuple(arguments[i].name for i in written),
        returns_written=len(returned) == len(written) and all(returned),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        dropout=dropout,
        flops=_OWN_FLOPS.get(str(packet)) or flop_registry.get(packet),
    )


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def mutated_arguments(info: OpInfo, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that a call writes in place."""
    found: list[torch.Tensor] = []
    for position, name in zip(info.written, info.written_names, strict=True):
        value = _argument(args, kwargs, position, name)
        values = value if isinstance(value, list | tuple) else [value]
        found.extend(v for v in values if isinstance(v, torch.Tensor))
    if found and "batch_norm" in info.name and _argument(args, kwargs, 5, "training") is False:
        return []  # evaluation mode reads the running statistics only
    return found


def is_random_call(info: OpInfo, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers."""
    if not info.is_random:
        return False
    return info.dropout is None or bool(_argument(args, kwargs, *info.dropout))


def op_flops(info: OpInfo, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of a call: matmuls, convolutions and attention count, elementwise work does not."""
    return 0 if info.flops is None else int(info.flops(*args, **kwargs, out_val=out))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Two matmuls: queries by keys, weights by values."""
    batch, heads, rows, width = (int(n) for n in query.shape)
    return 2 * batch * heads * rows * int(key.shape[-2]) * (width + int(value.shape[-1]))


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _attention(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Five matmuls for the two of forward: scores again, then gradients of weights, value, query and key."""
    batch, heads, rows, width = (int(n) for n in query.shape)
    columns, value_width = int(key.shape[-2]), int(value.shape[-1])
    return 2 * batch * heads * rows * columns * (3 * width + 2 * value_width)


def _rnn_layer(x: Any, w0: Any, w1: Any, *_: Any, **__: Any) -> int:
    """One direction of a recurrent layer: input and hidden state by their weights, for every element of a sequence."""
    length, batch = x.shape[0], x.shape[1]
    return 2 * int(length) * int(batch) * int(w0.numel() + w1.numel())


def _rnn_layer_backward(x: Any, w0: Any, w1: Any, *_: Any, **__: Any) -> int:
    return 2 * _rnn_layer(x, w0, w1)


_OWN_FLOPS = {
    "aten.mkldnn_rnn_layer": _rnn_layer,
    "aten.mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
}
"""Fused CPU operators without a formula in torch's registry (torch 2.13)."""
