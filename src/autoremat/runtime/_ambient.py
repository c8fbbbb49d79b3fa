"""What forward sees that is neither argument nor module: process-wide flags and random state.

Known limit: globals, context variables and closures of user code are not looked at; the value check of the first
step is what finds a region that depends on them.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from autoremat.runtime._functions import FunctionMode
from autoremat.runtime._torch_compat import function_modes, replace_function_modes, sdpa_flags

Flags = tuple[Any, ...]
RandomStates = list[tuple[Callable[[Any], None], Callable[[], Any], Any]]


def _autocast_flags(device: str) -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    return (
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    )


def _accelerators() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if accelerator is None else (accelerator.type,)


_ACCELERATORS = _accelerators()
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(flag for device in ("cpu", *_ACCELERATORS) for flag in _autocast_flags(device)),
    *sdpa_flags,
)
_READERS = tuple(read for read, _ in _FLAGS)
_WRITERS = tuple(write for _, write in _FLAGS)


def read_flags() -> Flags:
    """Values of the flags that change what an op computes, and the active function modes but our own."""
    return _read_flags(tuple(mode for mode in function_modes() if not isinstance(mode, FunctionMode)))


def _read_flags(modes: tuple[Any, ...]) -> Flags:
    return (*(read() for read in _READERS), modes)


def _write_flags(current: Flags, wanted: Flags) -> None:
    for write, old, new in zip(_WRITERS, current[:-1], wanted[:-1], strict=True):
        if old != new:
            write(new)
    if current[-1] != wanted[-1]:
        replace_function_modes(wanted[-1])


@contextlib.contextmanager
def flags_set(wanted: Flags) -> Iterator[None]:
    """Run with these flags, grad mode on, and put back what was there."""
    current = _read_flags(function_modes())
    _write_flags(current, wanted)
    # Casts that autocast makes meanwhile are dropped from its cache again, as at the end of an autocast block.
    torch.autocast_increment_nesting()
    try:
        with torch.enable_grad():
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _write_flags(wanted, current)


def _devices(tensors: list[torch.Tensor]) -> list[torch.device]:
    return list({tensor.device for tensor in tensors if tensor.device.type in _ACCELERATORS})


def read_torch_random(tensors: list[torch.Tensor]) -> RandomStates:
    """State of torch's default generators: the CPU's (5,056 bytes) and those of the tensors' devices."""
    generator = torch.default_generator
    states = generator_state(generator)
    if _ACCELERATORS:
        module = torch.get_device_module(_ACCELERATORS[0])
        for device in _devices(tensors):
            read, write = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
            states.append((write, read, read()))
    return states


def read_other_random() -> RandomStates:
    """State of Python's ``random`` and NumPy's global generator: 10 and 50 microseconds to read."""
    states: RandomStates = [(random.setstate, random.getstate, random.getstate())]
    if "numpy.random" in sys.modules:
        import numpy as np  # noqa: PLC0415 (only where the user has it loaded)

        read = partial(np.random.get_state, legacy=False)
        states.append((np.random.set_state, read, read()))
    return states


state_watchers: list[Callable[[torch.Tensor], None]] = []
"""Who wants to know of a random state that is stored: torch makes it where no dispatch mode sees it."""


def generator_state(generator: torch.Generator) -> RandomStates:
    """State of a generator that the user passed along."""
    write: Callable[[Any], Any] = generator.set_state
    read = partial(_read, generator)
    return [(write, read, read())]


def _read(generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state()
    for watch in state_watchers:
        watch(state)
    return state


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_is_equal(first[key], second[key]) for key in first)
    return bool(first == second) if not hasattr(first, "tolist") else first.tolist() == second.tolist()


def drawn_from(states: RandomStates) -> RandomStates:
    """Those generators whose state is no longer what it was."""
    return [state for state in states if not _is_equal(state[1](), state[2])]


@contextlib.contextmanager
def random_set(states: RandomStates) -> Iterator[None]:
    """Run with these random states, and put back what was there."""
    before = [(write, read()) for write, read, _ in states]
    for write, _, state in states:
        write(state)
    try:
        yield
    finally:
        for write, state in before:
            write(state)
