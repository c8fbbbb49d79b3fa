"""Memory that a kernel takes and returns within one op, by operator. Estimates; most operators take none."""

from __future__ import annotations

from typing import Any

import torch


def workspace_bytes(name: str, args: Any, kwargs: Any, results: list[torch.Tensor]) -> int:
    """Bytes of a kernel's workspace.

    Args:
        name: Operator with overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        results: Its tensor outputs.
    """
    return 0
