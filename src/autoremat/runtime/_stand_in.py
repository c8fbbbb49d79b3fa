"""A tensor without data: what recompute gets in place of an output or argument that it has no use for.

Views of one are stand-ins again, made on the meta device; whatever would read the data is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_iter

from autoremat._errors import RecomputeError


@dataclass(frozen=True, slots=True)
class Shape:
    """Metadata of a tensor whose data is not kept."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


def shape_of(tensor: torch.Tensor) -> Shape:
    """Metadata of a tensor."""
    return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class Origin:
    """What a stand-in stands for.

    Attributes:
        what: In words: the output of an op, an argument.
        region: Name of the region.
        remedy: What to do if it is read after all.
        on_read: Called when that happens.
    """

    what: str
    region: str
    remedy: str = "The plan does not fit this run of the module; make it again with this batch."
    on_read: Callable[[], None] | None = None


class StandIn(torch.Tensor):
    """Size, stride, dtype and device, but no data."""

    _origin: Origin
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Shape, origin: Origin) -> Self:
        tensor: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape.size, strides=shape.stride, storage_offset=shape.offset, dtype=shape.dtype, device=shape.device
        )
        tensor._origin = origin
        return tensor

    def __init__(self, shape: Shape, origin: Origin) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self._origin.what}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if func in _METADATA_READERS and isinstance(first, StandIn):
            return NotImplemented
        if not isinstance(first, StandIn) or not _is_view(func):
            origin = next(value._origin for value in tree_iter((args, kwargs)) if isinstance(value, StandIn))
            if origin.on_read is not None:
                origin.on_read()
            raise RecomputeError(f"{origin.region}: {func} reads {origin.what}. {origin.remedy}")
        meta = func(_on_meta(first), *args[1:], **(kwargs or {}))
        if isinstance(meta, (list, tuple)):
            return type(meta)([cls._like(part, first) for part in meta])
        return cls._like(meta, first)

    @classmethod
    def _like(cls, meta: torch.Tensor, source: StandIn) -> StandIn:
        shape = Shape(tuple(meta.shape), meta.stride(), meta.dtype, source.device, int(meta.storage_offset()))
        return cls(shape, source._origin)


_METADATA_READERS = frozenset({torch.ops.prim.device.default})


def _on_meta(stand_in: StandIn) -> torch.Tensor:
    base = torch.empty((), dtype=stand_in.dtype, device="meta")
    return base.as_strided(stand_in.shape, stand_in.stride(), stand_in.storage_offset())


def _is_view(func: Any) -> bool:
    """Whether an op only makes views of its first argument."""
    if func is torch.ops.aten.detach.default or func is torch.ops.aten._unsafe_view.default:
        return True
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return alias is not None and not alias.is_write
