"""A number that tells whether a recomputed tensor has the bits that it had in forward.

The bytes are summed as 64-bit lanes in `NUM_COLUMNS` columns (a prime, so that moved rows change the columns), in
integers, so that the order of summation does not matter. No copy of the tensor is made unless it is strided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from autoremat.runtime._torch_compat import has_no_data, unobserved

NUM_COLUMNS = 61
LANE_BYTES = 8
CHUNK_ELEMENTS = 1 << 18
"""A strided tensor is copied in pieces of about this many elements."""


def checksum(tensor: torch.Tensor, constants: Collection[int] = ()) -> int | None:
    """Hash of a tensor's values, or None where there are none to read (fake, sparse, quantized, subclasses).

    Args:
        tensor: Any tensor; an empty one hashes to 0.
        constants: Addresses of tensors that are not worth reading.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    if tensor.layout != torch.strided or tensor.is_quantized or has_no_data(tensor):
        return None
    if tensor.dtype is torch.uint8:
        return None  # workspaces of fused kernels (oneDNN's LSTM), part of which is never written
    if tensor.data_ptr() in constants:
        return None
    with unobserved():
        return _hash(tensor.detach())


def _hash(tensor: torch.Tensor) -> int:
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    if tensor.numel() == 0:
        return 0
    return hash(tuple(map(_bytes_hash, _contiguous_parts(tensor))))


def _contiguous_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or one copied piece of it after the other: only one is alive at a time."""
    if tensor.is_contiguous():
        yield tensor
        return
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    tensor = tensor.permute(order)
    if tensor.is_contiguous():
        yield tensor
        return
    step = max(1, CHUNK_ELEMENTS * tensor.shape[0] // tensor.numel())
    for i in range(0, tensor.shape[0], step):
        yield tensor[i : i + step].contiguous()


def _bytes_hash(tensor: torch.Tensor) -> int:
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    octets = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
    misaligned: int = octets.storage_offset() % LANE_BYTES  # type: ignore[assignment]
    start = (LANE_BYTES - misaligned) % LANE_BYTES
    end = start + (len(octets) - start) // LANE_BYTES * LANE_BYTES
    if end <= start:
        return hash(tuple(octets.tolist()))
    lanes = octets[start:end].view(torch.int64)
    num_rows = len(lanes) // NUM_COLUMNS
    columns = lanes[: num_rows * NUM_COLUMNS].view(num_rows, NUM_COLUMNS).sum(0)
    rest = lanes[num_rows * NUM_COLUMNS :]
    return hash((*octets[:start].tolist(), *columns.tolist(), *rest.tolist(), *octets[end:].tolist()))
