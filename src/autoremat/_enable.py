"""`enable`: one line in a training loop, and the model keeps a budget from then on.

A forward pre-hook looks at what the model is called with. At the first training step of a kind and size it plans, which
takes seconds; afterwards it looks the plan up, which takes microseconds. Evaluation and generation run plain.

What is not known until it is told: a loss outside of the model (``loss=``), and memory of the loop's own, such as a
second model. Compiled models are refused; one device of many is planned for with ``parallel=``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from autoremat._allocator_settings import AllocatorSettings
from autoremat._enabled import FIND, Enabled
from autoremat._errors import PlanError, UsageError
from autoremat._model_states import OptimizerFactory, optimizer_factory
from autoremat._planning import BudgetKind, Objective
from autoremat._prepared import PlanOptions
from autoremat._step import LossFunction, Precision
from autoremat._targets import Target
from autoremat._units import parse_bytes
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._compiled import compiled_units

Model = TypeVar("Model", bound=nn.Module)
AUTO = "auto"
_TRACE_OPTIONS = frozenset({"scaler", "ema", "parallel", "clip_grad_norm", "precision", "fake", "cost"})
_COMPILED = (
    "Plans are switched by the shapes of a batch, and compiled code has one plan: make it with autoremat.plan(model, "
    "batch, ...), compile, and call autoremat.apply(model, plan)."
)
_ENABLED: weakref.WeakKeyDictionary[nn.Module, Enabled] = weakref.WeakKeyDictionary()


def enable(
    model: Model,
    budget: int | str = AUTO,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | Optimizer | None = FIND,
    reserve: int | str | None = None,
    holds_output: bool = True,
    background: bool = False,
    budget_is: BudgetKind = "allocated",
    objective: Objective | None = None,
    target: str | Target | None = None,
    allocator: str | AllocatorSettings | None = None,
    dry_run: bool = True,
    **trace_options: Any,
) -> Model:
    """Train a model within a budget, with one line: plans are made from the batches that arrive.

    The first training step of each kind is planned before it runs, which takes seconds. A plan serves all steps that
    are no larger; plans for much smaller ones are made where that pays, and kept, and switched between steps. Autocast
    and accumulated gradients are seen and counted. In evaluation, and without gradients, the model is plain. What is
    computed never changes, only what is stored.

    Args:
        model: The model that the training loop calls. It is not changed but for a hook; its state_dict stays as it is.
        budget: Bytes of device memory for the whole step, or "auto": what the device has left at the first step, less a
            reserve.
        loss: A function of the model's output that returns a scalar, to count its memory. None: the output's ``.loss``,
            or the output itself where it is scalar, or else, with a warning, a cross-entropy of the output.
        optimizer: As for `trace`, or the optimizer itself. By default it is looked for at the first step: the
            optimizers that hold the model's parameters, else, with a warning, AdamW.
        reserve: With "auto": bytes to leave free; None leaves 5 % of the device's memory.
        holds_output: Whether the loop holds the output until the next step, as ``output = model(batch)`` does. False
            saves its memory where a function returns only the loss.
        background: Let the planner work beside the training steps, where a plan that is known already (each layer a
            region, or a plan for other sizes) keeps the budget meanwhile. Off by default: the planner is Python, too,
            so steps beside it are slower, and which step runs under which plan then depends on time (results do not).
        budget_is: As for `plan`.
        objective: As for `plan`.
        target: As for `plan`.
        allocator: As for `plan`.
        dry_run: As for `plan`.
        **trace_options: ``scaler``, ``ema``, ``clip_grad_norm``, ``precision``, ``parallel``, ``fake`` and ``cost`` as
            for `trace`.

    Returns:
        The model that was given. `enabled` returns what is known about it.

    Raises:
        BudgetError: If the budget cannot be read.
        PlanError: If the model is compiled, or is enabled or checkpointed already.
        UsageError: For an option that is not there. At the first step: whatever `plan` raises.

    Example:
        >>> import torch
        >>> model = enable(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), budget="1MiB", loss=torch.mean)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(4, 8)).mean().backward()
        >>> enabled(model).plan.optimizer
        'SGD'
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"enable() takes a torch.nn.Module, not {type(model).__name__}.")
    handles: list[Any] = []

    def disable() -> None:
        for handle in handles:
            handle.remove()
        current = reference()
        if current is not None:
            _ENABLED.pop(current, None)

    reference = weakref.ref(model)
    options = PlanOptions(target, objective, budget_is, allocator, dry_run, trace_options)
    state = make_enabled(
        model,
        budget,
        loss=loss,
        optimizer=optimizer,
        reserve=reserve,
        holds_output=holds_output,
        background=background,
        options=options,
        on_disable=disable,
    )
    handles.append(model.register_forward_pre_hook(plan_forward, prepend=True, with_kwargs=True))
    handles.append(model.register_forward_hook(explain_failure, always_call=True))
    _ENABLED[model] = state
    return model


def make_enabled(
    model: nn.Module,
    budget: int | str = AUTO,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | Optimizer | None = FIND,
    reserve: int | str | None = None,
    holds_output: bool = True,
    background: bool = False,
    options: PlanOptions,
    on_disable: Callable[[], None] = lambda: None,
) -> Enabled:
    """What `enable` keeps for a model, without the hooks: for who is told of each step in another way.

    Args:
        model: As for `enable`; the modules of another one, if that is what runs.
        budget: As for `enable`.
        loss: As for `enable`.
        optimizer: As for `enable`.
        reserve: As for `enable`.
        holds_output: As for `enable`.
        background: As for `enable`.
        options: How to plan.
        on_disable: Called when it is switched off.

    Raises:
        AutorematError: As for `enable`.
    """
    trace_options = options.trace_options
    if unknown := set(trace_options) - _TRACE_OPTIONS:
        raise UsageError(
            f"enable() has no option {', '.join(sorted(unknown))}. Accumulation and gradients that are kept are seen; "
            f"trace options are {', '.join(sorted(_TRACE_OPTIONS))}."
        )
    Precision.parse(trace_options.get("precision"))
    if not isinstance(optimizer, Optimizer) and optimizer != FIND:
        optimizer_factory(optimizer)
    refuse_enabled(model)
    return Enabled(
        model,
        budget_bytes=None if budget == AUTO else parse_bytes(budget),
        reserve_bytes=None if reserve is None else parse_bytes(reserve),
        options=options,
        loss=loss,
        optimizer=optimizer,
        holds_output=holds_output,
        background=background,
        on_disable=on_disable,
    )


def enabled(model: nn.Module) -> Enabled:
    """What `enable` keeps for a model: its plan, its budget, and the way to switch it off.

    Args:
        model: The model that was given to `enable`.

    Raises:
        UsageError: If it is not enabled.

    Example:
        >>> model = enable(nn.Linear(2, 2), budget="1GiB")
        >>> enabled(model)
        <Enabled: budget 1.00 GiB, no plan yet>
        >>> enabled(model).disable()
    """
    state = _ENABLED.get(model)
    if state is None:
        raise UsageError(
            f"This {type(model).__name__} is not enabled. Call autoremat.enable(model, budget=...), and ask for the "
            "same object: not for a wrapper around it, nor for a part of it."
        )
    return state


def refuse_enabled(model: nn.Module) -> None:
    """Refuse a model that something checkpoints already, or that plans cannot be put on.

    Raises:
        PlanError: With what to switch off.
    """
    name = type(model).__name__
    for unit in compiled_units(model):
        raise PlanError(f"{type(unit).__name__} of {name} is compiled. {_COMPILED}")
    if any(module in _ENABLED for module in model.modules()):
        raise PlanError(f"{name} is enabled already. Call autoremat.enabled(model).disable() first.")
    for path, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise PlanError(
                f"{name} checkpoints its layers already ({path or 'the model'} has gradient_checkpointing=True): each "
                "would be recomputed twice. Call model.gradient_checkpointing_disable(), or leave "
                "gradient_checkpointing=True and activation_checkpointing=True out of the training arguments."
            )


@compat.runs_while_tracing
def refuse_compiler(name: str) -> bool:
    """While the compiler traces an enabled model. The compiler needs something to be returned."""
    raise compat.refuse_compile(f"{name} is enabled and being compiled. {_COMPILED}")


def plan_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an enabled model."""
    if torch.compiler.is_compiling():
        refuse_compiler(type(module).__name__)
        return
    state = _ENABLED.get(module)  # copies of the model have the hook, and are plain
    if state is not None:
        state.before_forward(args, kwargs)


def explain_failure(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of an enabled model, called after an exception, too: adds to it what was alive if memory ran out."""
    if torch.compiler.is_compiling():
        return
    error = sys.exception() if output is None else None
    state = _ENABLED.get(module)
    if state is not None and error is not None:
        state.note_out_of_memory(error)
