"""What a training step is given, as a model sees it: which calls can share a plan.

Two calls are of one *kind* if their arguments differ in sizes alone. Sizes are ordered, element by element: a plan for
larger ones keeps the budget for smaller ones, since the schedule is the same and no storage is larger.

Known limit: that holds as long as a model's code does the same for smaller inputs. One that takes another way (another
attention kernel, say) may need more for less.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from autoremat._errors import BatchError
from autoremat._step import Batch

HEADROOM = Fraction(5, 4)
"""Where sizes are seen to vary, a plan is made for this much more than what came, so that the next one needs none."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What decides which plan a training step needs.

    Attributes:
        kind: Everything but sizes: structure, dtypes, devices, flags among the arguments, autocast, which parameters
            are trained.
        sizes: All dimensions of all tensors, in order; last, 1 if there are gradients already, else 0 (a plan for
            gradients that are there serves where there are none).
    """

    kind: Hashable
    sizes: tuple[int, ...]

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients before the step, kept or accumulated."""
        return bool(self.sizes[-1])

    def serves(self, other: Observed) -> bool:
        """Whether a plan for this is within the budget for the other, too."""
        return self.kind == other.kind and all(a >= b for a, b in zip(self.sizes, other.sizes, strict=True))

    def share_of(self, other: Observed) -> float:
        """How large the largest dimension-by-dimension product of this is beside the other's, 0 to 1 if served."""
        share = 1.0
        for own, theirs in {(a, b) for a, b in zip(self.sizes[:-1], other.sizes[:-1], strict=True) if a != b}:
            share *= own / max(1, theirs)
        return share

    def with_headroom(self, beyond: Sequence[Observed], factor: Fraction = HEADROOM) -> Observed:
        """Larger sizes, where these are larger than all others that have been planned for.

        Args:
            beyond: What has been planned for.
            factor: How much larger.
        """
        known = [max(sizes) for sizes in zip(*(other.sizes for other in beyond), strict=True)]
        sizes = [
            -int(-size * factor // 1) if known and size > most else size
            for size, most in zip(self.sizes, known or self.sizes, strict=True)
        ]
        return Observed(self.kind, (*sizes[:-1], self.sizes[-1]))

    def with_largest(self, other: Observed) -> Observed:
        """The larger of both in each size."""
        return Observed(self.kind, tuple(map(max, self.sizes, other.sizes)))

    def up_to(self, reached: Observed) -> Observed:
        """These sizes, but with no more than the usual room beyond others."""
        sizes = [min(a, -int(-b * HEADROOM // 1)) for a, b in zip(self.sizes[:-1], reached.sizes[:-1], strict=True)]
        return Observed(self.kind, (*sizes, self.sizes[-1]))

    def halved(self, smaller: Observed) -> Observed:
        """These sizes, each halved as often as the other's allow."""
        sizes = []
        for size, least in zip(self.sizes[:-1], smaller.sizes[:-1], strict=True):
            half = size
            while 0 < least <= (half + 1) // 2 < half:
                half = (half + 1) // 2
            sizes.append(half)
        return Observed(self.kind, (*sizes, smaller.sizes[-1]))


def observe(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, surroundings: Hashable, has_gradients: bool
) -> Observed:
    """Sort what a model is called with into kind and sizes.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        surroundings: What else tells kinds of steps apart.
        has_gradients: Whether there are gradients already.

    Example:
        >>> one = observe((torch.ones(2, 8),), {}, surroundings=None, has_gradients=False)
        >>> two = observe((torch.ones(2, 6),), {}, surroundings=None, has_gradients=False)
        >>> one.sizes, one.serves(two), two.serves(one)
        ((2, 8, 0), True, False)
    """
    kind: list[Hashable] = [surroundings]
    sizes: list[int] = []
    for value in (*args, *kwargs.values()):
        _walk(value, kind, sizes)
    kind += [len(args), *kwargs]
    sizes.append(int(has_gradients))
    return Observed(tuple(kind), tuple(sizes))


def _walk(value: Any, kind: list[Hashable], sizes: list[int]) -> None:
    if isinstance(value, Tensor):
        kind.append((value.dtype, value.device.type, value.dim(), value.requires_grad))
        sizes.extend(value.shape)
    elif isinstance(value, Mapping):
        kind.append(("mapping", *value))
        for item in value.values():
            _walk(item, kind, sizes)
    elif isinstance(value, tuple | list):
        kind.append(("sequence", len(value)))
        for item in value:
            _walk(item, kind, sizes)
    elif value is None or isinstance(value, bool | str):
        kind.append(value)  # a flag; other numbers (a loss's divisor) change from step to step and mean no other step
    else:
        kind.append(type(value).__qualname__)


def as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """The arguments of a call as the batch that `trace` takes.

    Raises:
        BatchError: If positional and keyword arguments are mixed in a way that one of the two cannot say.
    """
    if not kwargs:
        return args
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    batch: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            batch.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise BatchError(
                f"{type(model).__name__}.forward is called with keywords beside {name!r}, which has none. Call the "
                "model with positional or with keyword arguments alone."
            )
        else:
            batch[name] = value
    return batch


def resized(batch: Batch, sizes: tuple[int, ...]) -> Batch:
    """The batch with other sizes; what it has is repeated or cut.

    Args:
        batch: Arguments as `observe` saw them.
        sizes: As in `Observed.sizes`.
    """
    left = iter(sizes)
    if isinstance(batch, Tensor):
        return _resized_tensor(batch, left)
    if isinstance(batch, Mapping):
        return {name: _resized(value, left) for name, value in batch.items()}
    return tuple(_resized(value, left) for value in batch)


def _resized(value: Any, left: Iterator[int]) -> Any:
    if isinstance(value, Tensor):
        return _resized_tensor(value, left)
    if isinstance(value, Mapping):
        return {name: _resized(item, left) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_resized(item, left) for item in value])
    return value


def _resized_tensor(tensor: Tensor, left: Iterator[int]) -> Tensor:
    changed = tensor.detach()
    for dim, size in enumerate(tensor.shape):
        new = next(left)
        if new != size:
            changed = changed.index_select(dim, torch.arange(new, device=tensor.device) % size)
    return changed if changed.shape == tensor.shape else changed.requires_grad_(tensor.requires_grad)


def batch_bytes(batch: Batch) -> int:
    """Bytes of a batch's tensors."""
    return sum(x.nbytes for x in tree_iter(batch) if isinstance(x, Tensor))
