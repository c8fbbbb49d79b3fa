"""The verbs from trace to profile: each takes a model and a batch, or what an earlier verb made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from torch.amp import GradScaler

from autoremat._allocator_settings import AllocatorSettings
from autoremat._build_graph import trace as trace_step
from autoremat._cost import step_seconds
from autoremat._data_parallel import DataParallel, replicate
from autoremat._dry_run import dry_run as run_dry
from autoremat._dry_run import keep_budget
from autoremat._errors import UsageError
from autoremat._frontier import MIN_POINTS, Frontier
from autoremat._layer_map import LayerMap
from autoremat._map_layers import map_layers
from autoremat._measure_ops import CallLog, measure_calls
from autoremat._model_states import EmaFactory, OptimizerFactory
from autoremat._plan import Plan
from autoremat._planning import (
    BudgetKind,
    Objective,
    Planning,
    blas_workspace_bytes,
    choose_objective,
    find_target,
    price_step,
    read_allocator,
)
from autoremat._reasons import Reasons
from autoremat._regions import resolve
from autoremat._replay import RegionSpec
from autoremat._reserved import with_blas_workspaces
from autoremat._results import MemoryProfile
from autoremat._sharding import Sharding, shard
from autoremat._step import Batch, LossFunction
from autoremat._step_graph import StepGraph
from autoremat._targets import Target
from autoremat._units import parse_bytes
from autoremat._why import why as find_reasons

Progress = Callable[[str, float], None]


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    gradients: Literal["fresh", "kept"] = "fresh",
    accumulate: int = 1,
    precision: str | None = None,
    scaler: bool | GradScaler = False,
    ema: bool | EmaFactory = False,
    parallel: DataParallel | Sharding | None = None,
    clip_grad_norm: float | None = None,
    target: str | Target | None = None,
    fake: bool | None = None,
    cost: Literal["roofline", "measured"] = "roofline",
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
        scaler: True for a `torch.amp.GradScaler` around the step, or one that says how.
        ema: True for a running average of the parameters (`torch.optim.swa_utils.AveragedModel`), or a function that
            makes one from the model: a module with ``update_parameters(model)``.
        parallel: How the step is spread over devices: `DataParallel` or `Sharding`. The graph is then that of the
            first of them.
        clip_grad_norm: Largest norm of all gradients together (`torch.nn.utils.clip_grad_norm_` before the optimizer);
            None clips nothing.
        target: Device to record the kernels of: the model's own if None.
        fake: True traces on fake tensors. False runs the step for real on a copy of the model, for code that reads
            values of activations (routing by loops over experts, ``.item()``, ``.nonzero()``); it takes the memory of
            weights and activations, and a copy. None does the first, and the second, with a warning, where it must.
        cost: Where the ops' times come from later: the target's "roofline", or "measured": with ``target="here"``,
            each distinct call is timed on this machine now (seconds to minutes; times are kept for the next trace).

    Returns:
        The step as plain data.

    Raises:
        BatchError: If the batch does not fit the model.
        LossError: If no scalar loss is found.
        TraceError: If the step cannot be traced.
        UsageError: For an option out of range; for ``cost="measured"`` where `calibrate` has not run.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> graph = trace(model, torch.ones(4, 16), loss=lambda y: y.mean())
        >>> graph.flops > 0
        True
    """
    device = None if target is None else find_target(model, target)
    log = _call_log(cost, device, parallel)
    graph = trace_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        gradients=gradients,
        accumulate=accumulate,
        precision=precision,
        scaler=scaler,
        ema=ema,
        clip_grad_norm=clip_grad_norm,
        device_kind=None if device is None else device.device_kind,
        fake=fake,
        on_op=log,
    )
    graph = with_blas_workspaces(graph, blas_workspace_bytes(model, target))
    if log is not None and device is not None and device.calibration is not None:
        graph = dataclasses.replace(graph, measured_s=tuple(measure_calls(log, device.calibration)))
    return graph if parallel is None else distribute(graph, parallel)


def distribute(graph: StepGraph, parallel: DataParallel | Sharding) -> StepGraph:
    """The step of one of many devices, made from the step of one: one trace answers for any number of devices.

    Args:
        graph: A step that `trace` returned, of one device.
        parallel: `DataParallel` (every device has the whole model) or `Sharding` (they share its states).

    Returns:
        The step of the first of them.

    Raises:
        UsageError: If the step cannot be spread so.

    Example:
        >>> import torch
        >>> graph = trace(nn.Sequential(nn.Linear(8, 8, bias=False)), torch.ones(2, 8), loss=lambda y: y.sum())
        >>> graph.static_bytes, distribute(graph, Sharding(stage=3, world_size=4)).static_bytes
        (836, 260)
    """
    return replicate(graph, parallel) if isinstance(parallel, DataParallel) else shard(graph, parallel)


def _call_log(cost: str, device: Target | None, parallel: DataParallel | Sharding | None) -> CallLog | None:
    if cost not in ("roofline", "measured"):
        raise UsageError(f"cost={cost!r}: use 'roofline' or 'measured'.")
    if cost == "roofline":
        return None
    if parallel is not None:
        raise UsageError("cost='measured' times the ops of one device: leave out parallel=, or use cost='roofline'.")
    if device is None or device.calibration is None:
        raise UsageError(
            "cost='measured' times ops on this machine: use it with target='here', after `autoremat calibrate` "
            "(autoremat.calibrate()), which measures what is around the ops."
        )
    return CallLog()


def plan(
    model: nn.Module | StepGraph,
    batch: Batch | None = None,
    *,
    budget: int | str | None = None,
    activation_memory_budget: float | None = None,
    budget_is: BudgetKind = "allocated",
    objective: Objective | None = None,
    target: str | Target | None = None,
    allocator: str | AllocatorSettings | None = None,
    dry_run: bool = True,
    for_compile: bool = False,
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
        budget_is: Whether the budget holds for "allocated" bytes (those of living tensors) or for "reserved" ones:
            what the CUDA caching allocator takes from the device for them, cache and fragments included.
        objective: Least predicted "time" on the target, or least "flops" (exact, elementwise work is free). None means
            time where the device is known (a target is named, or the model is on a GPU), else FLOPs.
        target: Name of a target, a `Target`, or None for the model's own device.
        allocator: Settings of the caching allocator as in ``PYTORCH_ALLOC_CONF``; None for torch's defaults.
        dry_run: With a model: run the planned step on fake tensors too, and promise the peak of that run. It takes
            about as long as tracing; steps that are spread over devices (``parallel=``) and budgets of reserved bytes
            go without.
        for_compile: Only regions that ``torch.compile`` can express: none inside another, and all calls of a module
            alike. The peak is that of eager mode: compiled code promises none.
        progress: Called with a label and a fraction done.
        **trace_options: As for `trace`, with a model.

    Returns:
        The plan, with its predicted peak by cause and its overhead.

    Raises:
        BudgetError: If the budget cannot be read.
        BudgetInfeasible: If no plan fits; carries the smallest budget that does.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> found = plan(model, torch.ones(512, 64), budget="1GiB", loss=lambda y: y.sum())
        >>> len(found.regions)
        0
    """
    report = progress or (lambda label, fraction: None)
    _check_objective(objective)
    if budget_is not in ("allocated", "reserved"):
        raise UsageError(f"budget_is={budget_is!r}: use 'allocated' or 'reserved'.")
    settings = read_allocator(allocator)
    budget_of = _budget_reader(budget, activation_memory_budget)
    report("tracing the step", 0.0)
    graph = _graph(model, batch, target, trace_options)
    report("solving blocks", 0.5)
    device = find_target(model, target, graph.device_kind)
    if budget_is == "reserved" and device.device_kind != "cuda":
        raise UsageError("Only a CUDA device has a caching allocator: leave budget_is='allocated', or name a target=.")
    chosen = choose_objective(graph, target, objective)
    planning = Planning(graph, device, chosen, settings, for_compile=for_compile)
    report("choosing regions", 0.8)
    budget_bytes = budget_of(planning.planner.plain_bytes, graph.static_bytes)
    if budget_is == "reserved":
        made = planning.plan_reserved(budget_bytes)
    elif not dry_run or isinstance(model, StepGraph) or trace_options.get("parallel") is not None:
        made = planning.plan(budget_bytes)
    else:
        assert batch is not None
        given = batch
        options = {name: value for name, value in trace_options.items() if name not in ("parallel", "cost")}
        made = keep_budget(
            planning.plan, budget_bytes, lambda found: run_dry(model, given, found, target=target, **options)
        )
    report("done", 1.0)
    return made


def frontier(
    model: nn.Module | StepGraph,
    batch: Batch | None = None,
    *,
    num_points: int = 64,
    classics: bool = False,
    objective: Objective | None = None,
    target: str | Target | None = None,
    for_compile: bool = False,
    progress: Progress | None = None,
    **trace_options: Any,
) -> Frontier:
    """Find the plans of a training step for all budgets, from the smallest possible peak to no checkpointing.

    Args:
        model: A model, or a step that `trace` returned.
        batch: The batch, with a model; not with a step.
        num_points: Most points to find; they lie closest where overhead changes most.
        classics: Price the schedules of `classic` too, one of each kind.
        objective: As for `plan`.
        target: As for `plan`.
        for_compile: As for `plan`.
        progress: Called with a label and a fraction done.
        **trace_options: As for `trace`, with a model.

    Returns:
        The frontier; its ``plan(budget)`` is what `plan` returns for that budget. More budget never costs more.

    Raises:
        UsageError: If an option is out of range.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> curve = frontier(model, torch.ones(512, 64), loss=lambda y: y.sum())
        >>> curve.points[0].overhead_flops > curve.points[-1].overhead_flops == 0
        True
    """
    report = progress or (lambda label, fraction: None)
    if num_points < MIN_POINTS:
        raise UsageError(f"num_points={num_points}: a frontier has at least {MIN_POINTS} points, its two ends.")
    _check_objective(objective)
    report("tracing the step", 0.0)
    graph = _graph(model, batch, target, trace_options)
    report("solving blocks", 0.2)
    device, chosen = find_target(model, target, graph.device_kind), choose_objective(graph, target, objective)
    planning = Planning(graph, device, chosen, for_compile=for_compile)
    report("walking along the frontier", 0.3)
    found = planning.frontier(num_points, with_classics=classics)
    report("done", 1.0)
    return found


def classic(graph: StepGraph, name: str, *, target: str | Target | None = None) -> Plan:
    """A schedule that people use by name, as a plan: to compare with, or to run.

    - ``"none"``: nothing is recomputed.
    - ``"every-block"``: each repeated layer is a region, as ``gradient_checkpointing=True`` does.
    - ``"every:n"``: every n-th layer is one.
    - ``"uniform:k"`` and ``"sqrt"``: segments of k layers, or of the square root of their number.
    - ``"recursive"``: halves of halves, which takes logarithmically little memory and logarithmically much time.
    - ``"save:attention"``, ``"save:matmuls"``, ``"save:attention+matmuls"``: each layer is a region that stores the
      outputs of these operators, as torch's selective checkpointing policies do (but ops that only stored ones need do
      not run again).

    Args:
        graph: A step that `trace` returned.
        name: Which.
        target: Device whose speed gives the times; the graph's own kind if None.

    Returns:
        The plan, with its predicted peak and overhead, and without a budget or a bound.

    Raises:
        UsageError: If there is no schedule of that name.

    Example:
        >>> import torch
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        ...     def forward(self, x):
        ...         return self.down(self.up(x).relu())
        >>> model = nn.Sequential(*[Block() for _ in range(9)])
        >>> graph = trace(model, torch.ones(64, 8), loss=lambda y: y.sum())
        >>> [len(classic(graph, name).regions) for name in ("none", "every-block", "every:3", "sqrt")]
        [0, 9, 3, 3]
    """
    objective = choose_objective(graph, target, None)
    return Planning(graph, find_target(None, target, graph.device_kind), objective).classic(name)


def why(
    graph: StepGraph,
    plan: Plan,
    *,
    step: int | str | None = None,
    target: str | Target | None = None,
) -> Reasons:
    """Say why a plan is as it is: what each region is for, what more memory would buy, what stops it from going lower.

    Each region is taken out and the step without it is priced by the ledger; plans for other budgets are the planner's
    own. (`explain` says what the regions of a model held and did when it ran.)

    Args:
        graph: The step: what `trace` returned.
        plan: A plan for it, made by `plan` or `classic` or by hand.
        step: How much more and less memory to look at, as bytes or "1GiB"; None for 1 GiB, or less where that would be
            much of what plans can change.
        target: Device whose speed gives the times; the plan's own if None.

    Returns:
        The reasons, with a table in a terminal by ``autoremat why``.

    Raises:
        PlanMismatch: If the plan names what the step does not run.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> graph = trace(model, torch.ones(512, 64), loss=lambda y: y.sum())
        >>> curve = frontier(graph)
        >>> reasons = why(graph, curve.plan(curve.smallest_bytes))
        >>> any(region.peak_without_bytes > curve.smallest_bytes for region in reasons.regions)
        True
    """
    device = find_target(None, target or plan.target or None, graph.device_kind)
    planning = Planning(graph, device, plan.objective, read_allocator(plan.allocator))
    return find_reasons(planning, plan, step_bytes=None if step is None else parse_bytes(step))


def profile(
    graph: StepGraph,
    plan: Plan | Sequence[RegionSpec] | None = None,
    *,
    target: str | Target | None = None,
    allocator: str | AllocatorSettings | None = None,
) -> MemoryProfile:
    """Live bytes by cause over a step, plain or planned, and on a CUDA device what is reserved for them.

    Args:
        graph: A step that `trace` returned.
        plan: A plan for it; None for the plain step.
        target: Device whose speed gives the times; the graph's own kind if None.
        allocator: As for `plan`; None for the plan's own.

    Returns:
        The profile.

    Raises:
        PlanMismatch: If the plan names what the step does not run.

    Example:
        >>> import torch
        >>> graph = trace(nn.Linear(8, 8), torch.ones(2, 8), loss=lambda y: y.sum())
        >>> profile(graph).peak_by_cause["parameter"]
        288
    """
    specs = resolve(graph, plan) if isinstance(plan, Plan) else list(plan or ())
    device = find_target(None, target, graph.device_kind)
    settings = plan.allocator if allocator is None and isinstance(plan, Plan) else allocator
    return price_step(graph, specs, step_seconds(graph, device), device, read_allocator(settings))


def layers(
    graph: StepGraph, plan: Plan | Sequence[RegionSpec] | None = None, *, target: str | Target | None = None
) -> LayerMap:
    """What each layer of a model leaves for backward, recomputes and costs, plain and planned.

    Args:
        graph: A step that `trace` returned.
        plan: A plan for it; None for the plain step.
        target: Device whose speed gives the times; the graph's own kind if None.

    Returns:
        A row for each module path, as a tree, and one for each operator.

    Raises:
        PlanMismatch: If the plan names what the step does not run.

    Example:
        >>> import torch
        >>> graph = trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(2, 8), loss=lambda y: y.sum())
        >>> [(row.path, row.class_name, row.total.parameter_bytes) for row in layers(graph).layers]
        [('', 'Sequential', 288), ('0', 'Linear', 288), ('1', 'Tanh', 0)]
    """
    specs = resolve(graph, plan) if isinstance(plan, Plan) else list(plan or ())
    return map_layers(graph, specs, step_seconds(graph, find_target(None, target, graph.device_kind)))


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


def _check_objective(objective: str | None) -> None:
    if objective not in ("time", "flops", None):
        raise UsageError(f"objective={objective!r}: use 'time' or 'flops'.")


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
