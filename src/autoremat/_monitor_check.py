"""Check gradients in the middle of a training: one of its forwards again, with checkpointing and without.

What is compared is the gradient that the forward's outputs pass on to the parameters: the outputs' own gradients are
taken from the real backward, so that no loss function is needed. Both runs start from what the real forward started
from (random state, buffers, attributes, autocast), and go through ``torch.autograd.grad``, which leaves ``.grad`` and
its hooks alone. Afterwards everything is put back.

Known limits: the last forward of a step is checked; of outputs that are made from one another (logits, and the loss of
them) the last counts; models in the care of ``fully_shard`` are not checked, whose gathering hangs on ``.grad``. A run
without checkpointing takes the memory of one, which may not be there: then the check says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from autoremat._monitor_results import GradientCheck
from autoremat._state import ModelState
from autoremat._verify import same_bits
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._ambient import flags_set, read_flags
from autoremat.runtime._attached import attached_regions
from autoremat.runtime._links import tensors_in
from autoremat.runtime._module_hooks import regions_off
from autoremat.runtime._module_state import version_of


class ForwardCopy:
    """What it takes to run a forward of a training again: made before it runs.

    Args:
        model: The model whose parameters count.
        module: What is called: the model, or a module of it.
        args: Its arguments; they are held until the check is over.
        kwargs: Its keyword arguments.
    """

    def __init__(self, model: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.module = module
        self._args, self._kwargs = args, kwargs
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        self._versions = [(x, version_of(x)) for x in given]
        self._state = ModelState(model, parameters=False)
        self._flags = read_flags()
        self.gradients: dict[int, Tensor] = {}

    def watch(self, output: Any) -> None:
        """Note the gradients that backward brings to the outputs."""
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, index))

    def _note(self, index: int, gradient: Tensor) -> None:
        self.gradients.setdefault(index, gradient.detach())

    def obstacle(self) -> str:
        """Why it cannot be run again; "" if it can."""
        if not self.gradients:
            return "no gradient came to the outputs of the model's last forward"
        if any(version_of(x) != version for x, version in self._versions):
            return "the batch has been changed in place since forward"
        if any(compat.is_sharded_unit(module) for module in self.model.modules()):
            return "the model is sharded"
        if not any(True for _ in attached_regions(self.model)):
            return "no plan is on the model"
        return ""

    def run(self) -> tuple[list[Tensor | None], list[str]]:
        """Run it again: gradients of parameters and inputs, and their names. Changes the model's state."""
        self._state.restore()
        args, kwargs = tree_map(_own, (self._args, self._kwargs))
        with flags_set(self._flags):
            outputs = list(tensors_in(self.module(*args, **kwargs)))
        chosen = _last_made({i: outputs[i] for i in self.gradients if i < len(outputs) and outputs[i].requires_grad})
        named: list[tuple[str, Tensor]] = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        named += [
            (f"input {i}", x)
            for i, x in enumerate(x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
            if x.requires_grad and not isinstance(x, nn.Parameter)
        ]
        found = torch.autograd.grad(
            [outputs[i] for i in chosen],
            [tensor for _, tensor in named],
            [self.gradients[i] for i in chosen],
            allow_unused=True,
        )
        return list(found), [name for name, _ in named]


def check_gradients(forward: ForwardCopy, step: int) -> GradientCheck:
    """Run a forward and its backward with checkpointing and without, and compare the gradients bit for bit.

    Args:
        forward: Whose real backward is over, and whose parameters have not been changed since.
        step: Number of the step.
    """
    obstacle = forward.obstacle()
    if obstacle:
        return GradientCheck(step, None, note=obstacle)
    now = ModelState(forward.model, parameters=False)
    try:
        before = _count_recomputes(forward.model)
        planned, names = forward.run()
        num_recomputes = _count_recomputes(forward.model) - before
        with regions_off():
            plain, _ = forward.run()
        if _count_recomputes(forward.model) != before + num_recomputes:
            return GradientCheck(step, None, note="checkpointing cannot be switched off")
    except (torch.OutOfMemoryError, MemoryError):
        return GradientCheck(step, None, note="a step without checkpointing does not fit into memory")
    finally:
        now.restore()
    differing = [name for name, a, b in zip(names, planned, plain, strict=True) if not _same(a, b)]
    return GradientCheck(
        step,
        not differing if num_recomputes else None,
        norm=float(gradient_norm(planned)),
        plain_norm=float(gradient_norm(plain)),
        num_compared=len(names),
        differences=tuple(differing),
        num_recomputes=num_recomputes,
        note="" if num_recomputes else "nothing was recomputed",
    )


def gradient_norm(gradients: list[Tensor | None]) -> Tensor:
    """Norm of all gradients together, on their device; of this rank's shards where they are sharded."""
    given = [g if type(g) is Tensor else _local(g) for g in gradients if g is not None]
    dense = [g if g.layout == torch.strided else g.coalesce().values() for g in given]
    if not dense:
        return torch.zeros(())
    first = dense[0].device
    norms = torch._foreach_norm([g.detach() for g in dense])
    if any(n.dtype != torch.float32 or n.device != first for n in norms):
        norms = tuple([n.to(first, torch.float32) for n in norms])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _local(gradient: Tensor) -> Tensor:
    """The part of a sharded gradient that this process has."""
    part: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)


def _own(value: Any) -> Any:
    """A tensor of the batch, out of the graph that made it."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _count_recomputes(model: nn.Module) -> int:
    return sum(recipe.num_recomputes for _, recipe in attached_regions(model))


def _last_made(outputs: dict[int, Tensor]) -> list[int]:
    """Those outputs from which no other one is made: the gradient of an inner one contains that of the outer one."""
    inner: set[int] = set()
    for index, tensor in outputs.items():
        others = {o.grad_fn: i for i, o in outputs.items() if i != index and o.grad_fn is not tensor.grad_fn}
        inner.update(others[node] for node in _nodes_before(tensor.grad_fn) if node in others)
    return [i for i in outputs if i not in inner]


def _nodes_before(last: Any) -> Iterator[Any]:
    seen: set[Any] = set()
    waiting = [last]
    while waiting:
        current = waiting.pop()
        for node, _ in current.next_functions if current is not None else ():
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                yield node
