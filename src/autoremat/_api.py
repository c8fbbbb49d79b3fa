"""The verbs trace, plan and profile: each takes a model and a batch, or what an earlier verb made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import nn

from autoremat._build_graph import trace as trace_step
from autoremat._cost import step_seconds
from autoremat._errors import BudgetInfeasible, UsageError
from autoremat._ledger import expand, peak_bytes, price
from autoremat._model_states import OptimizerFactory
from autoremat._plan import Plan, Prediction
from autoremat._regions import describe_all, resolve
from autoremat._replay import RegionSpec
from autoremat._results import MemoryProfile
from autoremat._step import Batch, LossFunction
from autoremat._step_graph import StepGraph
from autoremat._targets import Target, find_by_title, get_target
from autoremat._units import format_bytes, parse_bytes
from autoremat.solve import Planner

Progress = Callable[[str, float], None]
Objective = Literal["time", "flops"]


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    gradients: Literal["fresh", "kept"] = "fresh",
    accumulate: int = 1,
    precision: str | None = None,
    target: str | Target | None = None,
    fake: bool = True,
) -> StepGraph:
    """Record one whole training step, with no memory for weights and no GPU. The model is not changed.

    Args:
        model: With real or fake parameters.
        batch: A tensor, a tuple (positional arguments) or a dict (keyword arguments), with real values: masks and
            token ids decide which way a model's code goes.
        loss: A function of the model's output that returns a scalar; None means the output's ``.loss``, or the output
            itself where it is scalar.
        optimizer: "adamw", "adam", "sgd", "sgd-momentum" or "adafactor" (with ":foreach", ":fused" or ":loop" behind
            it if you like), a function from parameters to an optimizer, or None for forward and backward alone.
        gradients: "fresh": set to None between steps, so that they appear in backward. "kept": there all along.
        accumulate: Micro-steps in an optimizer step.
        precision: "bf16", "fp16" or "fp32" casts parameters and floating inputs; "amp-bf16" and "amp-fp16" are
            autocast; None is the model's own.
        target: Device to record the kernels of: the model's own if None.
        fake: Trace on fake tensors. False runs the step for real on a copy of the model, for code that reads values of
            activations (``.item()``, ``.nonzero()``); it takes the memory of weights and activations, and a copy.

    Returns:
        The step as plain data.

    Raises:
        BatchError: If the batch does not fit the model.
        LossError: If no scalar loss is found.
        TraceError: If the step cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> graph = trace(model, torch.ones(4, 16), loss=lambda y: y.mean())
        >>> graph.flops > 0
        True
    """
    device_kind = None if target is None else _target(model, target).device_kind
    return trace_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        gradients=gradients,
        accumulate=accumulate,
        precision=precision,
        device_kind=device_kind,
        fake=fake,
    )


def plan(
    model: nn.Module | StepGraph,
    batch: Batch | None = None,
    *,
    budget: int | str | None = None,
    activation_memory_budget: float | None = None,
    objective: Objective | None = None,
    target: str | Target | None = None,
    progress: Progress | None = None,
    **trace_options: Any,
) -> Plan:
    """Find the regions that keep a training step within a budget at the least cost.

    Args:
        model: A model, or a step that `trace` returned.
        batch: The batch, with a model; not with a step.
        budget: Bytes for the whole step, parameters, gradients and optimizer state included: an int or "24GiB".
        activation_memory_budget: Instead of ``budget``: a share, 0 to 1, of what the plain step's peak has above its
            static bytes.
        objective: Least predicted "time" on the target, or least "flops" (exact, elementwise work is free). None means
            time where the device is known (a target is named, or the model is on a GPU), else FLOPs.
        target: Name of a target, a `Target`, or None for the model's own device.
        progress: Called with a label and a fraction done.
        **trace_options: As for `trace`, with a model.

    Returns:
        The plan, with its predicted peak by cause and its overhead.

    Raises:
        BudgetError: If the budget cannot be read.
        BudgetInfeasible: If no plan fits; carries the smallest budget that does.

    Example:
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> found = plan(model, torch.ones(512, 64), budget="1GiB", loss=lambda y: y.sum())
        >>> len(found.regions)
        0
    """
    report = progress or (lambda label, fraction: None)
    if objective not in ("time", "flops", None):
        raise UsageError(f"objective={objective!r}: use 'time' or 'flops'.")
    budget_of = _budget_reader(budget, activation_memory_budget)
    report("tracing the step", 0.0)
    graph = _graph(model, batch, target, trace_options)
    device = _target(None if isinstance(model, StepGraph) else model, target, graph.device_kind)
    objective = objective or ("time" if target is not None or graph.device_kind == "cuda" else "flops")
    report("solving blocks", 0.5)
    op_seconds = step_seconds(graph, device)
    op_cost = op_seconds if objective == "time" else [float(op.flops) for op in graph.ops]
    planner = Planner(graph, op_cost=op_cost, price=lambda specs: peak_bytes(graph, expand(graph, specs)))
    budget_bytes = budget_of(planner.plain_bytes, graph.static_bytes)
    report("choosing regions", 0.8)
    solution = planner.plan(budget_bytes)
    if solution.peak_bytes > budget_bytes:
        raise _infeasible(graph, budget_bytes, planner, op_seconds)
    report("done", 1.0)
    bound = solution.bound / max(sum(op_cost), 1e-30)
    return _make_plan(
        graph, solution.regions, budget_bytes, planner.smallest_bytes, op_seconds, device, objective, bound
    )


def profile(
    graph: StepGraph, plan: Plan | Sequence[RegionSpec] | None = None, *, target: str | Target | None = None
) -> MemoryProfile:
    """Live bytes by cause over a step, plain or planned.

    Args:
        graph: A step that `trace` returned.
        plan: A plan for it; None for the plain step.
        target: Device whose speed gives the times; the graph's own kind if None.

    Returns:
        The profile.

    Raises:
        PlanMismatch: If the plan names what the step does not run.

    Example:
        >>> graph = trace(nn.Linear(8, 8), torch.ones(2, 8), loss=lambda y: y.sum())
        >>> profile(graph).peak_by_cause["parameter"]
        288
    """
    specs = resolve(graph, plan) if isinstance(plan, Plan) else list(plan or ())
    return price(graph, expand(graph, specs), step_seconds(graph, _target(None, target, graph.device_kind)))


def _graph(
    model: nn.Module | StepGraph, batch: Batch | None, target: str | Target | None, trace_options: dict[str, Any]
) -> StepGraph:
    if isinstance(model, StepGraph):
        if batch is not None or trace_options:
            names = ", ".join(trace_options) or "batch"
            raise UsageError(f"A traced step has its batch and options already; leave out {names}.")
        return model
    if batch is None:
        raise UsageError(f"Planning for {type(model).__name__} needs a batch: plan(model, batch, budget=...).")
    return trace(model, batch, target=target, **trace_options)


def _target(model: nn.Module | None, target: str | Target | None, device_kind: str = "cpu") -> Target:
    """The target that was named, or the one of the device at hand."""
    if isinstance(target, Target):
        return target
    if target is not None:
        return get_target(target)
    device = next((p.device for p in model.parameters()), None) if model is not None else None
    if device is None or device.type != "cuda":
        return get_target("cpu" if device_kind == "cpu" else "a100-80g")
    name = torch.cuda.get_device_name(device)
    found = find_by_title(name)
    if found is None:
        raise UsageError(f"No target describes this GPU ({name}). Give target= one that is like it.")
    return found


def _budget_reader(budget: int | str | None, share: float | None) -> Callable[[int, int], int]:
    """Check the budget before anything is traced; its bytes follow from the plain peak and the static bytes."""
    if (budget is None) == (share is None):
        raise UsageError("Give one of budget= (bytes for the whole step) and activation_memory_budget= (a share).")
    if budget is not None:
        num_bytes = parse_bytes(budget)
        return lambda plain, static: num_bytes
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UsageError(f"activation_memory_budget={share!r}: use a share between 0 and 1, or budget= in bytes.")
    return lambda plain, static: static + int(share * (plain - static))


def _infeasible(graph: StepGraph, budget_bytes: int, planner: Planner, op_seconds: Sequence[float]) -> BudgetInfeasible:
    """Say what the smallest peak is made of."""
    smallest = planner.smallest_bytes
    tightest = planner.plan(smallest)
    found = price(graph, expand(graph, tightest.regions), op_seconds)
    causes = sorted(found.peak_by_cause.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{cause.replace('_', ' ')} {format_bytes(size)}" for cause, size in causes)
    return BudgetInfeasible(
        f"No plan for {graph.model} fits into {format_bytes(budget_bytes)} ({budget_bytes} bytes). The smallest budget "
        f"that does is {format_bytes(smallest)} ({smallest} bytes): {parts} at {found.peak_at}. "
        "Raise the budget, or use a smaller batch, a lower precision or an optimizer with less state.",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
    )


def _make_plan(
    graph: StepGraph,
    specs: Sequence[RegionSpec],
    budget_bytes: int,
    smallest_bytes: int,
    op_seconds: Sequence[float],
    target: Target,
    objective: Objective,
    bound: float,
) -> Plan:
    plain = price(graph, expand(graph), op_seconds)
    planned = price(graph, expand(graph, specs), op_seconds)
    return Plan(
        regions=describe_all(graph, specs),
        budget_bytes=budget_bytes,
        plain=_prediction(plain),
        planned=_prediction(planned),
        smallest_bytes=smallest_bytes,
        static_bytes=graph.static_bytes,
        model=graph.model,
        model_signature=graph.model_signature,
        input_signature=graph.input_signature,
        optimizer=graph.optimizer,
        precision=graph.precision,
        accumulate=graph.accumulate,
        target=target.name,
        objective=objective,
        bound=bound,
        versions={"autoremat": _version(), "torch": torch.__version__},
    )


def _prediction(found: MemoryProfile) -> Prediction:
    return Prediction(
        peak_bytes=found.peak_bytes,
        peak_by_cause=dict(found.peak_by_cause),
        peak_at=found.peak_at,
        flops=found.flops,
        seconds=found.step_s,
    )


def _version() -> str:
    try:
        return version("autoremat")
    except PackageNotFoundError:
        return "0"
