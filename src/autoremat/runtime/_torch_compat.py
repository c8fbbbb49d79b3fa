"""The one home of private torch symbols, each with why it is here and what would free us of it.

Run on torch 2.13 only; older releases that pyproject.toml admits are untested.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
import torch.utils.hooks
from torch._C._autograd import (
    # Whether a backward keeps the graph decides what is worth holding; no public reader.
    _get_current_graph_task_keep_graph,
    # The public saved_tensors_hooks does the same at three times the cost; freed by a faster context manager.
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,  # no public reader
)
from torch._subclasses.fake_tensor import FakeTensor  # no public test for "has no data"
from torch.overrides import TorchFunctionMode

# Entering a TorchDispatchMode keeps books for torch.compile, which a region never runs under; a mode pushed
# bare costs a tenth. Freed by a cheap public way to enter a mode.
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from autoremat._errors import PlanError

__all__ = [
    "DefaultHook",
    "OpLog",
    "activation_memory_budget",
    "alias",
    "at_end_of_backward",
    "checkpoint_debug_override",
    "current_trace",
    "detached",
    "dispatch_modes_active",
    "early_stop_override",
    "function_modes",
    "global_hooks",
    "graph_exec_group",
    "graph_is_kept",
    "has_backward_hooks",
    "has_no_data",
    "in_backward",
    "is_sharded_unit",
    "pop_dispatch_mode",
    "pop_hooks",
    "push_dispatch_mode",
    "push_function_mode",
    "push_hooks",
    "refuse_compile",
    "replace_function_modes",
    "runs_while_tracing",
    "sdpa_flags",
    "selective_contexts",
    "shared_versions",
    "top_hooks",
    "traced_module",
    "traced_nodes",
    "transforms_or_tracing_active",
    "unobserved",
    "with_effects_in_forward_only",
    "wrap_as_backward_hooks_do",
]

T = TypeVar("T")
DefaultHook = Callable[[Any], Any]

push_hooks: Callable[[DefaultHook, DefaultHook], None] = _push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _pop_saved_tensors_default_hooks
# Hooks registered for all modules have no public reader.
global_hooks: tuple[dict[int, Any], dict[int, Any]] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
)
push_dispatch_mode: Callable[[Any], None] = _push_mode
pop_dispatch_mode: Callable[[], Any] = _pop_mode

# torch.func transforms refuse saved-tensor hooks; torch.jit traces would record them. No public test for either.
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


_global_backward_hooks = (
    torch.nn.modules.module._global_backward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)


def has_backward_hooks(module: Any) -> bool:
    """Whether a call of this passes its arguments through a function that backward hooks hang on."""
    own = (module._backward_pre_hooks, module._backward_hooks) if isinstance(module, torch.nn.Module) else ()
    return any(own) or (bool(own) and any(_global_backward_hooks))


def wrap_as_backward_hooks_do(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass arguments through that function, without any hook."""
    wrapped: tuple[Any, ...] = torch.utils.hooks.BackwardHook(None, [], []).setup_input_hook(args)
    return wrapped


def top_hooks() -> Any:
    """The saved-tensor hooks that are in effect."""
    return _top_saved_tensors_default_hooks(True)


def transforms_or_tracing_active() -> bool:
    """Whether a ``torch.func`` transform or ``torch.jit`` tracing is running."""
    return _transforms_active() or _tracing_state() is not None


def function_modes() -> tuple[Any, ...]:
    """Active function modes, outermost first (``torch.set_default_device`` is one). No public accessor."""
    num_modes = _num_function_modes()
    return tuple(torch._C._get_function_stack_at(i) for i in range(num_modes)) if num_modes else ()


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Make this the innermost function mode; `replace_function_modes` takes it off wherever it is."""
    torch._C._push_on_torch_function_stack(mode)


def replace_function_modes(modes: tuple[Any, ...]) -> None:
    """Make these the active function modes."""
    for _ in range(_num_function_modes()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


graph_is_kept: Callable[[], bool] = _get_current_graph_task_keep_graph
"""Whether the running backward leaves the graph for another one; True outside any."""

_current_backward: Callable[[], int] = torch._C._current_graph_task_id
graph_exec_group: Callable[[], object | None] = getattr(torch._C, "_get_graph_exec_group", lambda: None)
"""The ``torch.utils.checkpoint.GraphExecGroup`` that we are in; its public side has no reader."""


def in_backward() -> bool:
    """Whether this thread runs a backward. No public test."""
    return _current_backward() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this when the running backward is over; do nothing outside one. No public hook."""
    if in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(callback)


_KeyGuard = torch._C._SetExcludeDispatchKeyGuard
_VERSION_KEY = torch._C.DispatchKey.ADInplaceOrView


def shared_versions() -> Any:
    """A context for `alias`, for one thread; entering it again is cheaper than making another."""
    return _KeyGuard(_VERSION_KEY, False)


def alias(tensor: torch.Tensor, context: Any) -> torch.Tensor:
    """A detached alias that shares the version counter, for use inside a dispatch mode.

    Below autograd, ``detach`` makes an alias with a counter of its own; this key is what shares it.

    Args:
        tensor: What to make an alias of.
        context: From `shared_versions`.
    """
    with context:
        return tensor.detach()


def cut(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A tensor made in recompute without the graph that made it, which would live as long.

    Under autocast it is no leaf, as it was none in forward: autocast keeps the casts of leaves that require gradients,
    so that a module which casts its argument three times would do so once.

    Args:
        tensor: The tensor.
        requires_grad: Whether what is made of it gets gradients.
    """
    found = tensor.detach().requires_grad_(requires_grad)
    if requires_grad and torch.is_autocast_enabled(found.device.type):
        with torch.enable_grad():
            found = torch.ops.aten.alias.default(found)
    return found


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that modes do not see, where that makes no difference: a tenth of the time under a mode."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():  # takes effect when it is made, so that it cannot be made beforehand
        return tensor.detach()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Run ops that no mode sees or changes: they are no part of the user's program. No public switch for modes."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def early_stop_override() -> bool | None:
    """What ``torch.utils.checkpoint.set_checkpoint_early_stop`` says, None outside it. It has no public reader."""
    return torch.utils.checkpoint._enable_checkpoint_early_stop


def checkpoint_debug_override(debug: bool) -> bool:
    """What ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` says, or else this. It has no public reader."""
    override: bool | None = torch.utils.checkpoint._checkpoint_debug_enabled
    return debug if override is None else override


def runs_while_tracing(function: Callable[..., T]) -> Callable[..., T]:
    """Make the compiler call this for real when it traces a call, and put the result into the code.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler (1.5 seconds) to set one attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def with_effects_in_forward_only(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function inside a checkpoint that is being compiled: what it changes of attributes, it changes once.

    The compiler's setting for this would stay on where it gives a region up; it has no public way for one call alone.
    """
    call = functools.partial(function, *args, **kwargs)
    result: T = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(call)
    return result


def refuse_compile(message: str) -> PlanError:
    """An error that the compiler hands to the user as it is; it wraps all others in its own. No public way."""
    import torch._dynamo.exc  # noqa: PLC0415 (the compiler takes a second and a half)

    class CompileRefused(PlanError, torch._dynamo.exc.ShortenTraceback):
        """A region that compiled code cannot recompute as planned."""

    return CompileRefused(message, first_useful_frame=None)


def current_trace() -> object | None:
    """What the compiler is tracing now, one object for each graph; None outside of it. No public reader."""
    return torch._guards.TracingContext.try_get()


def activation_memory_budget() -> float:
    """The compiler's own setting for how much of the activations may be kept. It has no public home."""
    import torch._functorch.config  # noqa: PLC0415 (as above)

    return float(torch._functorch.config.activation_memory_budget)


def traced_module() -> str | None:
    """Where the module is that makes the op call which the compiler is tracing, as a source expression."""
    stack: Any = torch.fx.traceback.current_meta.get("nn_module_stack")
    return None if not stack else str(list(stack.values())[-1][0])


def traced_nodes() -> Iterable[torch.fx.Node]:
    """What the compiler has traced of a graph so far; nothing where it only infers shapes. No public reader."""
    mode: Any = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    return () if mode is None else mode.tracer.graph.nodes


def selective_contexts(policy: Any, at_end: Callable[[], None]) -> tuple[Any, Any]:
    """The modes of torch's selective checkpointing, for tracing.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes the same pair; but only a subclass can say that
    several calls are one region to the partitioner, and know when the call is over.

    Args:
        policy: A policy with a ``progress``, whose ``graph_id`` is that of the region.
        at_end: Called when forward has been traced.
    """
    storage: Any = defaultdict(dict)
    # A tensor that is changed in place after it was saved would be refused without a plan, too.
    cached = torch.utils.checkpoint._CachedTorchDispatchMode(None, storage, allow_cache_entry_mutation=True)
    return _RegionMode(policy, storage, at_end), cached


class _RegionMode(torch.utils.checkpoint._CachingTorchDispatchMode):
    def __init__(self, policy: Any, storage: Any, at_end: Callable[[], None]) -> None:
        self._progress = policy.progress
        self._at_end = at_end
        super().__init__(policy, storage)

    @property
    def ac_graph_id(self) -> int | None:
        graph_id: int | None = self._progress.graph_id
        return graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, value: int | None) -> None:
        if self._progress.graph_id is None:
            self._progress.graph_id = value

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> Any:
        result = super().__exit__(exc_type, exc, traceback)
        if exc_type is None:
            self._at_end()
        return result


class OpLog(TorchDispatchMode):
    """Lists the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


PLAIN_TENSORS = (torch.Tensor, FakeTensor)
"""Types of tensors that are what they seem; others may stand for several, or for none."""


def is_sharded_unit(module: object) -> bool:
    """Whether a module gathers its own parameters before forward (``fully_shard``). Looks, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has shape and dtype but no values (fake or meta)."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


# The public readers of these flags are the same functions; the public setters are context managers that warn.
sdpa_flags: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
