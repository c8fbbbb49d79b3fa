"""Fake kernels where torch's differ from the real ones in what they return (torch 2.13).

A fake kernel gives outputs of the right shape; what they lack is what their real counterparts allocate besides, or
dtypes that real ones take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from autoremat._op_info import OpInfo, is_random_call

READS_NUMBER = "aten._local_scalar_dense.default"
_RNN_LAYER = "aten.mkldnn_rnn_layer.default"
_RNN_BACKWARD = "aten.mkldnn_rnn_layer_backward.default"
_GROUPED_MM = "aten._grouped_mm.default"
_MASKED_SELECT = "aten.masked_select.default"
_FOREACH = "aten._foreach_"
_INDEXED = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default")


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def with_positions(info: OpInfo, args: Any) -> Any:
    """Arguments in which real masks that index are replaced by the positions that they choose, as kernels do."""
    if info.name not in _INDEXED:
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with _disable_current_modes():
                indices.extend(index.nonzero().unbind(1))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


class FakeKernels:
    """Runs operators on fake tensors.

    Args:
        mode: That the tensors belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._rnn_workspaces: dict[Any, int] = {}

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Run one operator."""
        if info.name == _GROUPED_MM:
            return self._grouped_mm(*args, **kwargs)
        if info.name.startswith(_FOREACH) and not func._schema.returns and all(_is_fake(x) for x in args[0]):
            return None  # changes values, which there are none of; to find that out took a tenth of a trace
        if info.name == _MASKED_SELECT and not isinstance(args[1], FakeTensor):
            num_chosen = int(torch.broadcast_to(args[1], torch.broadcast_shapes(args[0].shape, args[1].shape)).sum())
            return self._empty((num_chosen,), args[0].dtype, args[0].device)
        args = with_positions(info, args)
        out = func(*args, **kwargs)
        if is_random_call(info, args, kwargs):
            with _disable_current_modes():  # so that whoever compares random states sees that it drew
                torch.rand((), generator=kwargs.get("generator"))
        if info.name == _RNN_LAYER and args:
            return self._with_rnn_workspace(func, args, out)
        if info.name == _RNN_BACKWARD:
            return self._with_two_bias_gradients(out)
        return out

    def _empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        with _disable_current_modes(), self._mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def _with_rnn_workspace(self, func: Any, args: Any, out: Any) -> Any:
        """Fake kernels do not know the size of oneDNN's workspace, which autograd saves: ask the real kernel once."""
        key = tuple(tuple(a.shape) if isinstance(a, Tensor) else str(a) for a in args)
        if key not in self._rnn_workspaces:
            with _disable_current_modes():  # under no_grad the kernel would make no workspace
                zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
                self._rnn_workspaces[key] = func(*zeros)[-1].numel()
        *outputs, workspace = out
        return (*outputs, self._empty(self._rnn_workspaces[key], workspace.dtype, workspace.device))

    def _with_two_bias_gradients(self, out: Any) -> Any:
        """The fake kernel returns one tensor as the gradient of both biases, the real one makes two."""
        *first, bias, _, hidden, cell = out
        return (*first, bias, self._empty(bias.shape, bias.dtype, bias.device), hidden, cell)

    def _grouped_mm(
        self, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
    ) -> Tensor:
        """The fake kernel knows bfloat16 only, real ones take any dtype. Groups share the rows."""
        rows = [a.shape[-2], b.shape[-1]]
        if a.dim() == b.dim():
            rows.insert(0, a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0])
        return self._empty(rows, out_dtype or a.dtype, a.device)
