"""The Plan: what to recompute and what to keep, as a small readable file.

A plan names regions (module calls) and, inside each, the op outputs that are stored (`SavedOutput`) and the ops that
recompute leaves out. An op call is named by its operator and its *occurrence*: how many calls of the same operator
came before it inside the same region (over all calls of a span), counted as a dispatch mode sees them
(``aten.detach`` and casts of parameters are not counted, see `UNCOUNTED_OPS`). The module path of a saved output is
there for the reader.

The file is JSON with a published schema (`plan_schema`). Readers accept every released `SCHEMA_VERSION`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from autoremat._errors import PlanError
from autoremat._shown import Shown
from autoremat._units import format_bytes, format_percent

SCHEMA_VERSION: Literal[1] = 1
UNCOUNTED_OPS = frozenset({"aten.detach.default", "prim.device.default"})
"""Ops that forward and recompute may run a different number of times; never stored, never skipped.

Casts of parameters (``aten._to_copy.default`` of a leaf parameter) are not counted either: under autocast, forward
finds them in a cache that recompute does not have.
"""

_CONFIG = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class OpCall:
    """One op call inside a region call.

    Attributes:
        op: Operator with overload, ``"aten.addmm.default"``.
        occurrence: How many calls of this operator came before it in the region call, counted from 0.
    """

    op: str
    occurrence: int


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SavedOutput:
    """An op output that a region stores, so that the op does not run again.

    Attributes:
        op: Operator with overload.
        occurrence: As in `OpCall`.
        output: Which of the op's tensor outputs.
        module: Path of the module that called it, for the reader.
        num_bytes: Bytes of its storage.
    """

    op: str
    occurrence: int
    output: int
    module: str
    num_bytes: int


@dataclass(frozen=True, slots=True, config=_CONFIG)
class CallName:
    """A module call, or a call of a function that a module's forward makes by itself.

    Attributes:
        path: Module path; of a function that of the module, its name and ``()``: ``"up.0.cat()"``.
        number: Which call of that path within one forward of the model; None for every call. Functions are counted
            where an argument requires a gradient.
    """

    path: str
    number: int | None = None


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Region:
    """A call, or a span of calls, whose saved tensors are dropped and recomputed in backward.

    Calls are those of modules and of functions between them (`CallName`). Those of a span follow one another in one
    forward of the model, none inside another; they may be made by several modules. What forward does between them is
    not part of the region. An argument that is the very tensor which an
    earlier call of the span returned is made again by recompute; every other argument is stored.

    Attributes:
        path: Path of the first call, as in `CallName`.
        number: Which call of that path within one forward of the model; None for every call.
        then: Further calls of a span, in order.
        saved: Op outputs stored instead of recomputed.
        skipped: Ops that recompute does not run: their outputs are stored, or only skipped ops need them.
        children: Regions inside this one, which its recompute drops again: calls of modules inside its own, or some
            of the calls of a span.
    """

    path: str
    number: int | None = None
    then: tuple[CallName, ...] = ()
    saved: tuple[SavedOutput, ...] = ()
    skipped: tuple[OpCall, ...] = ()
    children: tuple[Region, ...] = ()

    @property
    def calls(self) -> tuple[CallName, ...]:
        """All module calls of the region, in order."""
        return (CallName(self.path, self.number), *self.then)

    @property
    def name(self) -> str:
        """For people: ``"h.0"``, ``"h.0 call 1"``, ``"h.0 .. h.3"``."""
        ends = [self.calls[0], self.calls[-1]] if self.then else [self.calls[0]]
        return " .. ".join(c.path if c.number is None else f"{c.path} call {c.number}" for c in ends)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Prediction:
    """What a step is predicted to take.

    Attributes:
        peak_bytes: Largest live bytes in the step (allocated, not reserved).
        peak_by_cause: The same by cause; sums to `peak_bytes`.
        peak_at: Where the peak is: phase, module and op.
        flops: Floating point operations of the step, recomputation included.
        seconds: Predicted step time on the target, from the cost model.
        reserved_bytes: What the caching allocator reserves for the step on a CUDA device; None where there is none.
    """

    peak_bytes: int
    peak_by_cause: dict[str, int]
    peak_at: str
    flops: int
    seconds: float
    reserved_bytes: int | None = None

    @property
    def fragmentation_bytes(self) -> int | None:
        """Reserved less allocated bytes, at their peaks; None where nothing is reserved."""
        return None if self.reserved_bytes is None else self.reserved_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Plan(Shown):
    """Regions to recompute, with what the step is predicted to take plain and planned.

    Attributes:
        regions: Disjoint regions, in order of first execution.
        budget_bytes: Budget for the whole step, bytes; None for a plan written by hand.
        budget_is: Whether the budget holds for "allocated" or for "reserved" bytes.
        plain: The step without the plan.
        planned: The step with it.
        smallest_bytes: Smallest budget that the planner can reach for this step.
        static_bytes: Parameters, buffers, inputs and optimizer state: bytes that no plan changes.
        model: Class name of the model.
        model_signature: Hash over names, shapes and dtypes of parameters and buffers.
        input_signature: Names, shapes and dtypes of the batch.
        optimizer: Name of the optimizer in the step, "" for none.
        precision: Precision of the step, "" for the model's own.
        around: What else stands around the model in the step, in words: "scaler, ema"; "" for nothing.
        parallel: How the step is spread over devices, in words; "" for one device. Bytes are those of one of them.
        accumulate: Micro-steps in an optimizer step.
        target: Name of the device planned for.
        objective: What was minimised: "time" or "flops".
        bound: A proved lower limit on the overhead of any plan at this budget, as a fraction of the plain step; None
            where none was computed.
        allocator: Settings of the caching allocator that reserved bytes are predicted for, as ``PYTORCH_ALLOC_CONF``
            states them; "" for torch's defaults.
        time_error: Half-width of the range around predicted seconds, as a share of them; None where none is known.
        versions: Versions of autoremat and torch that made it.
        schema_version: Version of this file format.

    Example:
        >>> plan = Plan(regions=(Region(path="0"),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    regions: tuple[Region, ...]
    budget_bytes: int | None = None
    plain: Prediction | None = None
    planned: Prediction | None = None
    smallest_bytes: int | None = None
    static_bytes: int | None = None
    model: str = ""
    model_signature: str = ""
    input_signature: str = ""
    optimizer: str = ""
    precision: str = ""
    around: str = ""
    parallel: str = ""
    accumulate: int = 1
    target: str = ""
    objective: Literal["time", "flops"] = "flops"
    bound: float | None = None
    budget_is: Literal["allocated", "reserved"] = "allocated"
    allocator: str = ""
    time_error: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    schema_version: Literal[1] = SCHEMA_VERSION

    @property
    def overhead_flops(self) -> float | None:
        """Recomputed FLOPs over those of the plain step."""
        if self.plain is None or self.planned is None:
            return None
        return self.planned.flops / max(1, self.plain.flops) - 1

    @property
    def overhead_s(self) -> float | None:
        """Predicted extra step time over that of the plain step."""
        if self.plain is None or self.planned is None:
            return None
        return self.planned.seconds / max(1e-30, self.plain.seconds) - 1

    @property
    def gap(self) -> float | None:
        """Overhead minus its proved lower limit, as a fraction of the plain step; None without a bound."""
        overhead = self.overhead_s if self.objective == "time" else self.overhead_flops
        return None if overhead is None or self.bound is None else max(0.0, overhead - self.bound)

    def to_json(self) -> str:
        """Write the plan as indented JSON; keys are in a fixed order, so that two plans diff well."""
        return json.dumps(_ADAPTER.dump_python(self, mode="json"), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: If the text is not a plan; names the field.
        """
        try:
            return _ADAPTER.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise PlanError(
                f"Not a plan of schema version {SCHEMA_VERSION}: {where}: {first['msg']}. "
                "Make it again with `autoremat plan ... -o plan.json`."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: If it is missing or not a plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"Cannot read the plan {path}: {error.strerror}.") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        parts = [f"{len(self.regions)} regions"]
        if self.planned is not None:
            parts.append(f"peak {format_bytes(self.planned.peak_bytes)}")
        if self.budget_bytes is not None:
            parts.append(f"budget {format_bytes(self.budget_bytes)}")
        if self.overhead_flops is not None:
            parts.append(f"+{format_percent(self.overhead_flops)} FLOPs")
        return f"<Plan for {self.model or 'a model'}: {', '.join(parts)}>"


_ADAPTER = pydantic.TypeAdapter(Plan)


def plan_schema() -> dict[str, Any]:
    """The JSON schema of plan files, as a dict.

    Example:
        >>> plan_schema()["title"]
        'Plan'
    """
    return _ADAPTER.json_schema()
