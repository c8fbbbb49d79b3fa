"""One region by hand: a function call whose saved tensors are dropped and recomputed.

The arguments mean what they mean for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``
(https://docs.pytorch.org/docs/stable/checkpoint.html). Beyond it: modules that the function reaches are recomputed in
the state that forward saw, and left as they are; Python's and NumPy's random numbers are repeated; a tensor handed
out twice by ``ctx.saved_tensors`` is the same; a loop variable that the function closes over is the one of its call.

Where it differs from torch on purpose, so that torch's own tests of it do not pass:

- A module's attributes are as forward left them: a call counter counts once (``test_checkpoint_trigger``).
- ``ctx.saved_tensors`` can be read twice (``test_checkpointing_without_reentrant_custom_function_works``).
- ``use_reentrant`` need not be given (``test_checkpoint_warns_if_use_reentrant_not_passed_explcitly``).
- After a backward through a part of the graph that does not keep it, another part is not recomputed again
  (``test_checkpoint_graph_execution_group`` without a group).
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from autoremat._errors import RecomputeError, UsageError
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._enter import enter, leave
from autoremat.runtime._module_state import ModuleWatch
from autoremat.runtime._recipe import Learned, Part, Recipe

_torch_checkpoint = torch_checkpoint.checkpoint
T = TypeVar("T")
ContextFn = Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]


class CheckpointError(RecomputeError, torch_checkpoint.CheckpointError):
    """Recomputation by `checkpoint` did not reproduce forward; caught by code written for torch's own."""


def no_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """The default ``context_fn``."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: ContextFn = no_contexts,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> T:
    """Call a function without keeping what autograd saves in it; backward calls it again.

    Args:
        function: What to call.
        *args: Its positional arguments.
        use_reentrant: True hands the call to torch's reentrant kind, with its limits and without the checks of
            this one.
        context_fn: Returns two context managers, entered around the call in forward and in recompute.
        determinism_check: "default" compares shapes, dtypes and devices of recomputed tensors (and, in the first call
            of a function, their values); "none" compares nothing.
        debug: Whether an error lists the ops of forward and recompute.
        early_stop: Whether recompute stops once the last saved tensor is back.
        preserve_rng_state: Whether recompute draws the random numbers that forward drew.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        UsageError: For arguments that it does not know.
        CheckpointError: In backward, if recompute did not do what forward did.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(torch.sin, x).sum().backward()
        >>> torch.equal(x.grad, torch.cos(x))
        True
    """
    debug = compat.checkpoint_debug_override(debug)
    _check_arguments(determinism_check, context_fn, debug=debug, use_reentrant=bool(use_reentrant), kwargs=kwargs)
    if use_reentrant:
        result: T = _torch_checkpoint(function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state)
        return result
    if torch.compiler.is_compiling():
        return _compiled(function, args, kwargs, context_fn, preserve_rng_state=preserve_rng_state)
    if not torch.is_grad_enabled() or compat.transforms_or_tracing_active():
        return function(*args, **kwargs)
    logs = OpLogs() if debug else None
    in_forward, in_recompute = context_fn() if logs is None else logs.contexts()
    modules = list(dict.fromkeys(_modules_of(function, args, kwargs)))
    override = compat.early_stop_override()
    checks = determinism_check == "default" and preserve_rng_state and not _changes_stored_values(in_recompute)
    recipe = Recipe(
        _name(function),
        [Part("", _watch_of(modules))],
        check="first" if checks else "never",
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop if override is None else override,
        learned=_learned_about(function, modules),
    )
    recipe.compares_shapes = determinism_check == "default"
    recipe.runs_own_hooks = True
    recipe.error = CheckpointError if logs is None else logs.error
    owner = object()
    output: Any = owner
    enter(recipe, _bound(function, in_recompute), owner, args, kwargs)
    try:
        with in_forward:
            output = function(*args, **kwargs)
        if output is owner:
            raise CheckpointError(
                f"{recipe.name}: the forward context provided by context_fn suppressed an exception raised during the "
                "checkpointed forward, so that there is no result to return. Let the context pass it on."
            )
    except BaseException:
        leave(owner, failed=True)
        raise
    leave(owner)
    return output  # type: ignore[no-any-return]


def _check_arguments(
    determinism_check: str, context_fn: ContextFn, *, debug: bool, use_reentrant: bool, kwargs: dict[str, Any]
) -> None:
    if use_reentrant:
        if kwargs:
            raise UsageError(
                f"Unexpected keyword arguments: {', '.join(kwargs)}. The reentrant kind takes positional ones only; "
                "use_reentrant=False takes both."
            )
        if debug or context_fn is not no_contexts:
            raise UsageError("context_fn and debug are only supported when use_reentrant=False.")
    if determinism_check not in ("default", "none"):
        raise UsageError(f"determinism_check should be one of ['default', 'none'], not {determinism_check!r}.")
    if debug and context_fn is not no_contexts:
        raise UsageError("debug=True is incompatible with a context_fn: it needs the contexts for itself.")


def _changes_stored_values(context: contextlib.AbstractContextManager[Any]) -> bool:
    """Whether it is torch's selective context, told to hand stored tensors out even if they were changed since."""
    return bool(getattr(context, "allow_cache_entry_mutation", False))


def _compiled(
    function: Callable[..., T], args: Any, kwargs: dict[str, Any], context_fn: ContextFn, *, preserve_rng_state: bool
) -> T:
    """Under ``torch.compile``: torch's own operator, which the compiler knows; side effects happen in forward only."""
    if context_fn is not no_contexts:
        kwargs = {**kwargs, "context_fn": context_fn}
    result: T = _torch_checkpoint(
        compat.with_effects_in_forward_only, function, *args,
        use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs,
    )  # fmt: skip
    return result


def checkpoint_sequential(
    functions: nn.Sequential | list[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 (torch's name)
    use_reentrant: bool | None = False,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other, in segments of which all but the last are checkpointed.

    Args:
        functions: What to run; a Sequential or a list.
        segments: How many segments; each has ``len(functions) // segments`` functions, the last one the rest.
        input: Argument of the first function.
        use_reentrant: As for `checkpoint`.
        **kwargs: ``preserve_rng_state``, as for `checkpoint`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        >>> checkpoint_sequential(model, 3, torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise UsageError(f"Unexpected keyword arguments: checkpoint_sequential does not know {', '.join(kwargs)}.")
    stages = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(stages):
        raise UsageError(f"{len(stages)} functions make 1 to {len(stages)} segments, not {segments}.")
    size = len(stages) // segments
    end = -1
    for start in range(0, size * (segments - 1), size):
        end = start + size - 1
        stage = functools.partial(_run_all, tuple(stages[start : end + 1]))
        input = checkpoint(  # noqa: A001
            stage, input, use_reentrant=use_reentrant, preserve_rng_state=preserve
        )
    return _run_all(tuple(stages[end + 1 :]), input)


def _run_all(stages: tuple[Callable[..., Any], ...], value: Any) -> Any:
    for stage in stages:
        value = stage(value)
    return value


def _name(function: Any) -> str:
    if isinstance(function, nn.Module):
        return f"checkpoint of {type(function).__name__}"
    while isinstance(function, functools.partial):
        function = function.func
    return f"checkpoint of {getattr(function, '__qualname__', type(function).__name__)}"


_LEARNED: weakref.WeakKeyDictionary[Any, dict[Any, Learned]] = weakref.WeakKeyDictionary()


def _learned_about(function: Any, modules: list[nn.Module]) -> Learned:
    """What is known of a piece of code on a module; a closure made anew shares it with the last one."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", type(function))
    about = _LEARNED.setdefault(modules[0] if modules else code, {})
    return about.setdefault(code, Learned())


_WATCHES: weakref.WeakKeyDictionary[nn.Module, ModuleWatch] = weakref.WeakKeyDictionary()


def _watch_of(modules: list[nn.Module]) -> ModuleWatch | None:
    if not modules:
        return None
    watch = _WATCHES.get(modules[0])
    if watch is None or not watch.is_of(modules):
        watch = ModuleWatch([(type(module).__name__, module) for module in modules])
        _WATCHES[modules[0]] = watch
    return watch


def _modules_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[nn.Module]:
    """Modules that a function reaches: itself, owners, arguments, and those of functions in its closure.

    Of globals, only those that these functions name themselves, or functions next to them.
    """
    todo, seen = [function, *args, *kwargs.values()], set()
    while todo:
        value = todo.pop(0)
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
            todo += [item for arg in value.args if isinstance(arg, tuple) for item in arg]
        elif isinstance(value, types.MethodType):
            todo += [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType) and value not in seen:
            seen.add(value)
            todo += [item for _, item in _cells(value)]
            todo += _globals_of(value)


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Modules that a function's own code names, and functions that are defined where it is."""
    names = function.__globals__
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, nn.Module) or (isinstance(value, types.FunctionType) and value.__globals__ is names):
            yield value


def _cells(function: Any) -> Iterator[tuple[types.CellType, Any]]:
    """What a function closes over, where that is a module or a function: such names get rebound by loops."""
    closure = getattr(getattr(function, "__func__", function), "__closure__", None)
    for cell in closure or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, functools.partial)):
            yield cell, value


def _bound(function: Callable[..., T], context: contextlib.AbstractContextManager[Any]) -> Callable[..., T]:
    """The function as it is now, run in the recompute context."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    cells = tuple(_cells(inner))
    if not cells and isinstance(context, contextlib.nullcontext):
        return function
    return functools.partial(_run_again, function, cells, context)


def _run_again(
    function: Callable[..., T],
    cells: tuple[tuple[types.CellType, Any], ...],
    context: contextlib.AbstractContextManager[Any],
    *args: Any,
    **kwargs: Any,
) -> T:
    rebound = [(cell, cell.cell_contents, value) for cell, value in cells if cell.cell_contents is not value]
    for cell, _, value in rebound:
        cell.cell_contents = value
    try:
        with context:
            return function(*args, **kwargs)
    finally:
        for cell, found, _ in rebound:
            cell.cell_contents = found


class OpLogs:
    """The ops of forward and recompute, for ``debug=True``."""

    def __init__(self) -> None:
        self.forward, self.recompute = compat.OpLog(), compat.OpLog()

    def contexts(self) -> tuple[compat.OpLog, compat.OpLog]:
        """What is entered around forward and recompute."""
        return self.forward, self.recompute

    def error(self, message: str) -> CheckpointError:
        """An error that lists the ops."""
        return CheckpointError(
            "\n".join(
                [
                    message,
                    "You are seeing this error because you passed `debug=True` to checkpoint, which lists the ops:",
                    "Ops of forward:",
                    *(f"  {name}" for name in self.forward.names),
                    "Ops of recompute:",
                    *(f"  {name}" for name in self.recompute.names),
                ]
            )
        )
