"""Trace a training step into a `StepGraph`: set it up, record it, sort what was recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.utils._pytree import tree_iter

from autoremat._capture import OnOp, Recorder, Recording
from autoremat._device_ops import CudaOps
from autoremat._errors import AutorematError, TraceError, UsageError
from autoremat._fake import NEEDS_VALUES, fake_copies, fake_copy, is_fake
from autoremat._model_states import EmaFactory, OptimizerFactory, States, StatesFactory, optimizer_name
from autoremat._random import preserved_random_state
from autoremat._record_calls import drop_small_functions, record_calls
from autoremat._signature import model_signature
from autoremat._step import Batch, LossFunction, Precision, check_batch, check_step, describe_batch, own_batch, run_step
from autoremat._step_graph import Op, SavedTensor, StepGraph, Storage

Attach = Callable[[nn.Module, Recorder], contextlib.AbstractContextManager[Any]]
CPU_RNG_STATE_BYTES = 5056
"""``torch.get_rng_state().nbytes``. A CUDA generator's state is kept in host memory: no device bytes."""
_TRACED_MICRO_STEPS = 2
"""Gradients appear in the first micro-step and are added to in the second; later ones repeat the second."""


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    gradients: str = "fresh",
    accumulate: int = 1,
    precision: str | None = None,
    scaler: bool | GradScaler = False,
    ema: bool | EmaFactory = False,
    clip_grad_norm: float | None = None,
    device_kind: str | None = None,
    fake: bool | None = None,
    on_op: OnOp | None = None,
    attach: Attach | None = None,
) -> StepGraph:
    """Record one whole training step of a model, with fake parameters: no memory for weights, no GPU.

    The model is not changed: a deep copy (with fake parameters) runs the step. The optimizer's state is there before
    it, as in every step but the first.

    Args:
        model: With real or fake parameters, as built by its own constructor.
        batch: A tensor, a tuple (positional) or a dict (keyword) of real tensors.
        loss: A function of the model's output; None means the output's ``.loss``, or the output itself.
        optimizer: A name (see `OPTIMIZERS`), a function from parameters to an optimizer, or None for forward and
            backward alone.
        gradients: "fresh" (set to None between steps: they appear in backward) or "kept" (they exist all along).
        accumulate: Micro-steps in an optimizer step.
        precision: One of `PRECISIONS`, or None for the model's own.
        scaler: Whether a `torch.amp.GradScaler` scales the loss, or one that says how.
        ema: Whether a running average of the parameters is kept, or a function that makes it from the model.
        clip_grad_norm: Largest norm of all gradients together, applied before the optimizer; None clips nothing.
        device_kind: "cuda" to record the attention and dropout kernels of a GPU; None for the model's own device.
        fake: Run on fake tensors (True) or on real copies (False), for models whose code reads values of activations.
            None: on fake ones; on real copies, with a warning, where the code turns out to read values.
        on_op: Called with operator, arguments and keywords of each op that is recorded.
        attach: Called with the copy of the model and the recorder before the step; what it returns is entered around
            it. Ops are then recorded as they run, those of recomputation too, all as the model's own.

    Returns:
        The step.

    Raises:
        BatchError: If the batch does not fit the model.
        LossError: If no scalar loss is found.
        TraceError: If the step cannot be traced; with the module in which it failed.

    Example:
        >>> graph = trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8), loss=lambda y: y.sum())
        >>> graph.storages[0].label, graph.storages[0].num_bytes
        ('0.weight', 256)
    """
    check_step(gradients=gradients, accumulate=accumulate, clip_grad_norm=clip_grad_norm)
    casting = Precision.parse(precision)
    states = StatesFactory.parse(
        optimizer, scaler=scaler, ema=ema, precision=precision, device_kind=device_kind or _device_kind(model)
    )
    check_batch(model, batch)
    if device_kind == "cuda" and fake is False and _device_kind(model) != "cuda":
        raise UsageError(
            "The kernels of a GPU run only on fake tensors here; leave fake=True, or move the model to one."
        )
    batch = casting.cast_batch(own_batch(batch))

    def run(on_fake: bool) -> Recorder:
        twin, mode = fake_copy(model, dtype=casting.cast) if on_fake else (_real_copy(model, casting.cast), None)
        twin.train()
        with preserved_random_state():
            return _record(
                twin,
                batch,
                mode,
                loss=loss,
                states=states,
                keep_gradients=gradients == "kept",
                micro_steps=min(accumulate, _TRACED_MICRO_STEPS),
                precision=casting,
                clip_grad_norm=clip_grad_norm,
                as_cuda=device_kind == "cuda",
                on_op=on_op,
                attach=attach,
            )

    kind = device_kind or _device_kind(model)
    can_be_real = not is_fake(model) and kind == _device_kind(model) and on_op is None
    recorder = run(fake) if fake is not None else _run_as_needed(run, can_be_real=can_be_real)
    return _sort(
        recorder.recording,
        model=type(model).__name__,
        model_signature=model_signature(model, dtype=casting.cast),
        input_signature=describe_batch(batch),
        accumulate=accumulate,
        device_kind=kind,
        optimizer=optimizer_name(optimizer),
        around=states.describe(),
        precision=precision or "",
        rng_state_bytes=CPU_RNG_STATE_BYTES if kind == "cpu" else 0,
    )


def _run_as_needed(run: Callable[[bool], Recorder], *, can_be_real: bool) -> Recorder:
    """On fake tensors if the model's code lets that, else on real ones."""
    try:
        return run(True)
    except TraceError as error:
        if not can_be_real or not isinstance(error.__cause__, NEEDS_VALUES):
            raise
        cause = str(error).partition(" Its code")[0]
    warnings.warn(
        f"{cause} It is traced on a real copy instead, which takes its memory; what the plan promises holds for the "
        "values that this batch leads to. Say fake=False to do so without this warning.",
        stacklevel=4,
    )
    return run(False)


def _real_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    if is_fake(model):
        raise UsageError(f"{type(model).__name__} has no weights in memory; trace it with fake=True.")
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    return twin if dtype is None else twin.to(dtype)


def _device_kind(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _record(
    twin: nn.Module,
    batch: Batch,
    mode: FakeTensorMode | None,
    *,
    loss: LossFunction | None,
    states: StatesFactory,
    keep_gradients: bool,
    micro_steps: int,
    precision: Precision,
    clip_grad_norm: float | None,
    as_cuda: bool,
    on_op: OnOp | None,
    attach: Attach | None,
) -> Recorder:
    parameters = [p for p in twin.parameters() if p.requires_grad]
    around = _warm_states(states, twin, parameters, mode)
    names = {p: name for name, p in twin.named_parameters()}
    kind = "cuda" if as_cuda else parameters[0].device.type if parameters else "cpu"
    recorder = Recorder(mode, device_kind=kind, on_op=on_op)
    _register_states(recorder, twin, batch, around)
    if keep_gradients:
        _make_gradients(parameters, mode)
        for p in parameters:
            recorder.register(_grad(p), "gradient", names[p])
    recording = recorder.recording

    def on_micro_step(number: int) -> None:
        recording.phase, recording.micro_step = "forward", number

    def mark_gradients() -> None:
        recording.phase = "optimizer"
        for p in parameters:
            if p.grad is not None:
                index = recorder.storage_index(p.grad)
                if index is not None:
                    recording.storages[index].cause = "gradient"
                    recording.storages[index].label = names[p]

    with (
        _errors_named(twin, recorder),
        CudaOps() if as_cuda else contextlib.nullcontext(),
        _attached(attach, twin, recorder, batch, lambda: run_step(twin, batch, loss=loss, precision=precision)),
        record_calls(recorder, twin, only_root=attach is not None),
        _backward_phase(recording),
        recorder,
        recorder.saved_tensors(),
    ):
        value = run_step(
            twin,
            batch,
            loss=loss,
            states=around,
            precision=precision,
            accumulate=micro_steps,
            clip_grad_norm=clip_grad_norm,
            on_micro_step=on_micro_step,
            before_optimizer=mark_gradients,
        )
    del value
    recorder.close()
    drop_small_functions(recording)
    return recorder


@contextlib.contextmanager
def _attached(
    attach: Attach | None, twin: nn.Module, recorder: Recorder, batch: Batch, run: Callable[[], object]
) -> Iterator[None]:
    """Around the step, after another in which what is attached learns what it learns in its first."""
    if attach is None:
        yield
        return
    with attach(twin, recorder):
        leaves = [*twin.parameters(), *(x for x in tree_iter(batch) if isinstance(x, torch.Tensor))]
        before = {tensor: tensor.grad for tensor in leaves}
        warm_up = Recorder(recorder.fake_mode, device_kind="cuda")  # for its fake kernels; no need to ask real ones
        warm_up.without_memory = recorder.without_memory
        with preserved_random_state(), warm_up:
            run()
        warm_up.close()
        for tensor, gradient in before.items():
            tensor.grad = gradient
        yield


def _register_states(recorder: Recorder, twin: nn.Module, batch: Batch, states: States) -> None:
    for name, parameter in twin.named_parameters():
        recorder.register(parameter, "parameter", name)
    for name, buffer in twin.named_buffers():
        recorder.register(buffer, "buffer", name)
    for value in tree_iter(batch):
        if isinstance(value, torch.Tensor):
            recorder.register(value, "input")
    for cause, name, tensor in states.tensors(twin):
        recorder.register(tensor, cause, name)


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _make_gradients(parameters: list[nn.Parameter], mode: FakeTensorMode | None) -> None:
    for p in parameters:
        with mode or contextlib.nullcontext():
            p.grad = torch.zeros_like(p)


def _warm_states(
    factory: StatesFactory, twin: nn.Module, parameters: list[nn.Parameter], mode: FakeTensorMode | None
) -> States:
    """What is around the model after one step, so that it has all that it keeps."""
    with contextlib.nullcontext() if mode is None else fake_copies(twin):
        states = factory.build(twin)
    _make_gradients(parameters, mode)
    if states.scaler is not None:
        states.scaler.scale(torch.zeros(()))
    warm_up = Recorder(mode)  # for its answers to optimizers that read values; what it writes down is dropped
    warm_up.recording.phase = "optimizer"
    with warm_up:
        states.end_step(twin)
    warm_up.close()
    for parameter in parameters:  # also those that the optimizer left out
        parameter.grad = None
    return states


@contextlib.contextmanager
def _backward_phase(recording: Recording) -> Iterator[None]:
    """Mark what runs inside ``Tensor.backward`` as backward."""
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recording.phase = "backward"
        original(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _errors_named(twin: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Turn an exception of the model into a `TraceError` that says where it came from."""
    try:
        yield
    except AutorematError:
        raise
    except Exception as error:
        calls, running = recorder.recording.calls, recorder.running_call()
        where = f"module {calls[running].path!r} ({calls[running].class_name})" if running is not None else "the step"
        what = f"{type(twin).__name__} failed in {where} while it was traced: {type(error).__name__}: {error}."
        if isinstance(error, NEEDS_VALUES):
            raise TraceError(
                f"{what} Its code reads values of activations (routing, .item(), .nonzero()), which fake tensors do "
                "not have: build it with real weights and trace with fake=False."
            ) from error
        raise TraceError(f"{what} Check that the batch is one that the model trains on.") from error


def _with_numbers(recording: Recording) -> list[Op]:
    """Ops with the bytes of the Python numbers that autograd keeps from one op to another."""
    change: Counter[int] = Counter()
    for number in recording.numbers:
        change[number.op] += number.num_bytes
        if number.last_op is not None:
            change[number.last_op] -= number.num_bytes
    return [dataclasses.replace(op, kept_bytes=change[op.index]) if change[op.index] else op for op in recording.ops]


def _sort(recording: Recording, **attributes: Any) -> StepGraph:
    """Freeze a recording."""
    end = recording.clock
    saved_storages = {record.storage for record in recording.saved}
    storages = []
    for record in recording.storages:
        cause = record.cause
        if cause == "temporary" and record.index in saved_storages:
            cause = "activation"
        storages.append(
            Storage(
                index=record.index,
                num_bytes=record.num_bytes,
                cause=cause,
                born=record.born,
                last_ref=end if record.last_ref is None else record.last_ref,
                label=record.label,
                shape=record.shape,
            )
        )
    saved = [
        SavedTensor(
            storage=record.storage,
            call=record.call,
            packed=record.packed,
            unpacked=record.unpacked,
            released=end if record.released is None else record.released,
        )
        for record in recording.saved
        if record.storage >= 0
    ]
    return StepGraph(
        ops=tuple(_with_numbers(recording)),
        storages=tuple(storages),
        saved=tuple(saved),
        calls=tuple(recording.calls),
        **attributes,
    )
