"""Running out of memory: what is said, and a step that runs again under a tighter plan as if nothing had happened."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import autoremat as ar
from autoremat._device_memory import is_out_of_memory
from test_enable import ROWS, WIDTH, build, loss_of, states


class Device(TorchDispatchMode):
    """A device of so many bytes, beside what was there before."""

    def __init__(self, size=1 << 62):
        super().__init__()
        self.size, self.now, self.peak, self.known, self.failures = size, 0, 0, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        if self.now > self.size:
            self.failures += 1
            message = f"CUDA out of memory. {self.now - self.size} bytes too many."
            raise torch.OutOfMemoryError(message)
        return out

    def note(self, storage):
        key = storage._cdata
        if key not in self.known and storage.nbytes():
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self.known[key] = weakref.ref(storage, functools.partial(self.free, key, storage.nbytes()))

    def free(self, key, num_bytes, _):
        if self.known.pop(key, None) is not None:
            self.now -= num_bytes


def step(model, batch):
    loss = loss_of(model(batch))
    loss.backward()
    return loss.detach()


@pytest.fixture(scope="module")
def plain():
    """A plain step: model after it, loss, random state after it, peak of what it makes."""
    model, batch = build(), torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    torch.manual_seed(1)
    with Device() as device:
        loss = step(model, batch)
    return model, batch, loss, torch.get_rng_state(), device.peak


def enable(budget="1GiB", **options):
    return ar.enable(build(), budget, **{"loss": loss_of, "optimizer": None, "holds_output": False, **options})


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_step_runs_again_under_tighter_plans_until_it_fits(plain, optimizer):
    other, batch, loss, random_state, peak = plain
    model = enable(optimizer=optimizer)  # planning runs it, which is no step of the training's
    retried = ar.retry_step(model)(step)
    torch.manual_seed(1)
    with Device(int(0.75 * peak)) as device:
        found = retried(model, batch)
    assert device.failures > 0
    assert ar.enabled(model).plan.regions
    assert ar.enabled(model).budget_bytes < 2**30
    assert torch.equal(found, loss)
    assert torch.equal(torch.get_rng_state(), random_state)
    ours, theirs = states(model), states(other)  # batch norm counted the step once
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("num_passes", [1, 2])
def test_gradients_of_earlier_micro_steps_are_added_to_once(num_passes):
    """Memory runs out in backward, before one block or another, so that each run adds to some gradients only."""

    def run(model, watch):
        batches = torch.linspace(-1, 1, 3 * ROWS * WIDTH).view(3, ROWS, WIDTH)
        fails = iter(["2", None, "1", "0", None, "0", "2", None])

        def micro_step(batch, failing=None):
            def fail(_gradient):
                raise torch.OutOfMemoryError("out of memory")

            for number in range(num_passes):
                x = batch
                for name, block in model.blocks.named_children():
                    x = block(x)
                    if name == failing and number == num_passes - 1:
                        x.register_hook(fail)
                loss_of(model.head(x)).backward()

        torch.manual_seed(1)
        for batch in batches:
            watch(lambda batch=batch: micro_step(batch, next(fails) if watch is not plainly else None))

    def plainly(function):
        function()

    plain, model = build(), enable()
    model(torch.zeros(ROWS, WIDTH))  # planned for
    state = ar.enabled(model)
    state.tighten = lambda: True  # what is tried is the second run
    model.load_state_dict(plain.state_dict())
    run(plain, plainly)
    run(model, lambda function: ar.retry_step(model)(function)())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    ours, theirs = states(model), states(plain)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def notes_of(error):
    return " ".join(error.value.__notes__)


def test_where_nothing_is_tighter_the_error_says_what_was_alive(plain):
    _, batch, _, _, peak = plain
    model = enable()
    with Device(int(0.05 * peak)), pytest.raises(torch.OutOfMemoryError) as error:
        ar.retry_step(model)(step)(model, batch)
    assert "Alive all through the step: parameters" in notes_of(error)
    assert "No plan needs less" in notes_of(error)
    assert "no tighter plan" in notes_of(error)


def test_an_error_in_forward_says_it_without_the_decorator(plain):
    _, batch, _, _, peak = plain
    model = enable()
    with Device(int(0.1 * peak)), pytest.raises(torch.OutOfMemoryError) as error:
        model(batch)
    assert "The plan's peak is" in notes_of(error)
    assert "activation" in notes_of(error)
    assert "retry_step" in notes_of(error)
    assert "the smallest possible is" in notes_of(error)


class FailsIn(TorchDispatchMode):
    """A device without memory for one operator."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith(self.name):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def test_an_error_in_recompute_says_it_once_and_without_the_decorator(plain):
    _, batch, _, _, peak = plain
    model = enable(int(0.6 * peak))
    loss = loss_of(model(batch))
    with FailsIn("gelu.default"), pytest.raises(torch.OutOfMemoryError) as error:
        loss.backward()  # which recomputes
    assert "The plan's peak is" in notes_of(error)

    def step():
        loss = loss_of(model(batch))
        with FailsIn("gelu.default"):
            loss.backward()

    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError) as error:
        ar.retry_step(model)(step)()
    assert notes_of(error).count("Alive all through the step") == 1


def test_what_cannot_be_run_again_is_not(plain):
    _, batch, _, _, _ = plain
    model = enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = torch.OutOfMemoryError("out of memory")

    @ar.retry_step(model)
    def whole(batch):
        step(model, batch)
        optimizer.step()
        raise fails

    with pytest.raises(torch.OutOfMemoryError) as error:
        whole(batch)
    assert "an optimizer has stepped" in notes_of(error)

    @ar.retry_step(model)
    def second(batch):
        model.head.bias.grad.mul_(2)
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError) as error:
        second(batch)
    assert "gradients that were there before were changed" in notes_of(error)

    @ar.retry_step(model)
    def other(batch):
        raise ValueError("no memory of that")

    with pytest.raises(ValueError, match="no memory"):
        other(batch)


def test_out_of_memory_is_known_on_every_device():
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 46)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
