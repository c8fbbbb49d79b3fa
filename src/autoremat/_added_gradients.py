"""A backward that failed half-way, run again where there were gradients before: each gets its share once.

Backward adds to a parameter's gradient in place, and what was added cannot be taken off again to the bit. But a step
that runs again computes the same: what the failed run has added may stay, and where the second run would add it once
more, the gradient is put aside for that moment. That takes no memory beyond what backward takes anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class AddedGradients:
    """Knows which gradients a step has added to, over all runs of that step.

    Args:
        model: Its parameters are watched.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> added = AddedGradients(model)
        >>> for _ in range(2):  # twice the same step
        ...     with added.watched():
        ...         model(torch.ones(1, 1)).sum().backward()
        >>> model.weight.grad.item()
        1.0
    """

    def __init__(self, model: nn.Module) -> None:
        self._gradients = [_Added(parameter) for parameter in model.parameters() if parameter.requires_grad]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, the step runs: for the first time, or again."""
        for gradient in self._gradients:
            gradient.start()
        try:
            yield
        finally:
            for gradient in self._gradients:
                gradient.stop()

    @property
    def are_known(self) -> bool:
        """Whether gradients are as backward has left them: what else changed them cannot be told from what it added."""
        return all(gradient.is_known for gradient in self._gradients)

    def put_back(self) -> None:
        """After something else has set gradients back: those with what was added."""
        for gradient in self._gradients:
            gradient.parameter.grad = gradient.latest


class _Added:
    """The gradient of one parameter.

    Attributes:
        parameter: Whose it is.
        latest: As backward has left it.
    """

    __slots__ = ("_aside", "_handles", "_num_added", "_num_seen", "_version", "latest", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._num_added = self._num_seen = 0
        self._aside: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._note()

    def _note(self) -> None:
        self.latest = self.parameter.grad
        self._version = None if self.latest is None else self.latest._version

    @property
    def is_known(self) -> bool:
        now = self.parameter.grad if self._aside is None else self._aside
        return now is self.latest and (now is None or now._version == self._version)

    def start(self) -> None:
        self._num_seen = 0
        self._handles = [
            self.parameter.register_hook(self._before),
            self.parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def _before(self, _gradient: Tensor) -> None:
        if self._num_seen < self._num_added and self._aside is None:
            self._aside, self.parameter.grad = self.parameter.grad, None

    def _after(self, _parameter: Tensor) -> None:
        self._num_seen += 1
        if self._num_seen > self._num_added:
            self._num_added = self._num_seen
            self._note()
        else:
            self._put_back()

    def _put_back(self) -> None:
        if self._aside is not None:
            self.parameter.grad, self._aside = self._aside, None

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._put_back()
