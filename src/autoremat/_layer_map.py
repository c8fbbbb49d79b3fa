"""What each layer of a model keeps, recomputes and costs in one step, plain and planned: plain data, no torch.

Bytes are those that forward leaves behind for backward: what is alive when backward begins and was not there before
the step. Each storage is counted once, for the layer that saved it first (for the one that made it, if none saved it),
so rows add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoremat._results import JsonResult
from autoremat._units import format_bytes

Treatment = Literal["", "region", "inside"]


@dataclass(frozen=True, slots=True)
class LayerCost(JsonResult):
    """What a layer takes in one step.

    Attributes:
        parameter_bytes: Its parameters, shared ones once.
        plain_bytes: What it leaves for backward in the plain step.
        planned_bytes: The same in the planned step.
        flops: FLOPs of its forward and backward, without recomputation.
        recomputed_flops: FLOPs of its recomputation.
        seconds: Predicted time of its forward and backward, without recomputation.
        recomputed_s: Predicted time of its recomputation.
    """

    parameter_bytes: int = 0
    plain_bytes: int = 0
    planned_bytes: int = 0
    flops: int = 0
    recomputed_flops: int = 0
    seconds: float = 0.0
    recomputed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerRow(JsonResult):
    """One layer: all calls of one module path.

    Attributes:
        path: Module path; "" is the model itself, the loss included.
        class_name: Class of the module.
        parent: Place among the rows of the layer whose ``forward`` called it first; -1 for the model.
        num_calls: Calls of it in the step.
        treatment: "region" where a plan recomputes its calls, "inside" where a layer around it is recomputed, "" where
            it runs as in the plain step.
        note: What its region stores, in words.
        own: What it takes itself, without the layers that it calls.
        total: What it takes with all of them.
    """

    path: str
    class_name: str
    parent: int
    num_calls: int
    treatment: Treatment
    note: str
    own: LayerCost
    total: LayerCost


@dataclass(frozen=True, slots=True)
class OpRow(JsonResult):
    """All calls of one operator.

    Attributes:
        name: Operator with overload.
        num_calls: Calls in the plain step.
        num_recomputed: Calls that a plan adds.
        cost: What they take; an operator has no parameters.
    """

    name: str
    num_calls: int
    num_recomputed: int
    cost: LayerCost


@dataclass(frozen=True, slots=True)
class LayerMap(JsonResult):
    """The layers and operators of one step.

    Attributes:
        model: Class name of the model.
        layers: In order of first call; the model itself comes first.
        ops: By falling time.

    Example:
        >>> LayerMap("Net", (LayerRow("", "Net", -1, 1, "", "", LayerCost(), LayerCost(plain_bytes=2048)),), ())
        <LayerMap of Net: 1 layers, 2.00 KiB left for backward, 0 B planned>
    """

    model: str
    layers: tuple[LayerRow, ...]
    ops: tuple[OpRow, ...]

    def __repr__(self) -> str:
        total = self.layers[0].total
        plain, planned = format_bytes(total.plain_bytes), format_bytes(total.planned_bytes)
        layers = f"{len(self.layers)} layers"
        return f"<LayerMap of {self.model or 'a model'}: {layers}, {plain} left for backward, {planned} planned>"
