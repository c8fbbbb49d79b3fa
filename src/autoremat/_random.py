"""Random state of a process, saved and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of torch's default generators, of ``random`` and of NumPy's global generator."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state at this moment."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Make it the process's state again."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def differences(self, other: RandomState) -> list[str]:
        """Names of the sources whose state differs."""
        names = []
        if not torch.equal(self.torch_cpu, other.torch_cpu):
            names.append("torch CPU")
        names += [
            f"torch CUDA {i}"
            for i, (a, b) in enumerate(zip(self.torch_cuda, other.torch_cuda, strict=True))
            if not torch.equal(a, b)
        ]
        if self.python != other.python:
            names.append("Python random")
        if repr(self.numpy) != repr(other.numpy) or not np.array_equal(self.numpy[1], other.numpy[1]):
            names.append("NumPy")
        return names


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put every random state back on exit."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
