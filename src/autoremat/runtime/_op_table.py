"""What a selective region does with its op calls: for each planned operator, what to do at which occurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoremat._errors import PlanError
from autoremat._plan import UNCOUNTED_OPS, Region

_aten = torch.ops.aten
_TO_COPY = _aten._to_copy.default
_MIRRORS: dict[Any, Any] = {
    _aten.le.Tensor: _aten.ge.Tensor,
    _aten.ge.Tensor: _aten.le.Tensor,
    _aten.lt.Tensor: _aten.gt.Tensor,
    _aten.gt.Tensor: _aten.lt.Tensor,
}


@dataclass(slots=True)
class Planned:
    """What to do with one op call.

    Attributes:
        saved: Which of its tensor outputs are stored, in order.
        is_skipped: Whether recompute leaves it out.
    """

    saved: tuple[int, ...] = ()
    is_skipped: bool = False


@dataclass(slots=True)
class Operator:
    """A planned, random or uncounted operator and its place in the count.

    Attributes:
        name: Operator with overload.
        slot: Index of its counter.
        calls: Planned calls by occurrence.
        is_random: Whether it draws random numbers.
        is_uncounted: Whether forward and recompute may run it a different number of times.
        is_cast: Whether it may be autocast's cast of a parameter, which is not counted either.
        returns_argument: Index of the argument that it returns (in-place ops), None if it makes a new tensor.
        mirror: For ``a >= b``, the operator of ``b <= a``: Python turns a comparison round if the right side is of a
            subclass, as a `StandIn` is.
    """

    name: str
    slot: int
    calls: dict[int, Planned]
    is_random: bool
    is_uncounted: bool = False
    is_cast: bool = False
    returns_argument: int | None = None
    mirror: Any = None


class OpTable(dict[Any, "Operator | None"]):
    """Planned calls by operator; other operators are looked at once and mapped to None unless they need care."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.by_id: dict[int, Operator | None] = {}
        """The same by identity: an operator's hash is a Python function, and it is taken at every op."""
        self.num_slots = 0
        self.has_skipped_random = False
        planned: dict[str, dict[int, Planned]] = {}
        for output in region.saved:
            call = planned.setdefault(output.op, {}).setdefault(output.occurrence, Planned())
            call.saved = tuple(sorted({*call.saved, output.output}))
        for skipped in region.skipped:
            planned.setdefault(skipped.op, {}).setdefault(skipped.occurrence, Planned()).is_skipped = True
        self.num_planned = sum(len(calls) for calls in planned.values())
        for name in UNCOUNTED_OPS:
            operator = _resolve(name, region.path)
            self[operator] = Operator(name, 0, {}, is_random=False, is_uncounted=True)
        for name in planned:
            if name in UNCOUNTED_OPS:
                raise PlanError(f"Region {region.path!r}: {name} cannot be stored or skipped. Make the plan again.")
        operators = {_resolve(name, region.path): calls for name, calls in planned.items()}
        for operator, calls in operators.items():
            known = self.get(operator)
            if known is None:
                self._add(operator, calls)
            else:
                known.calls = calls  # added before as the mirror of another
        if _TO_COPY not in self:
            self._add(_TO_COPY, {})

    def _add(self, operator: Any, calls: dict[int, Planned]) -> Operator:
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        self.num_slots += 1
        self.has_skipped_random |= is_random and any(call.is_skipped or call.saved for call in calls.values())
        mirror = _MIRRORS.get(operator)
        entry = Operator(
            str(operator), self.num_slots, calls, is_random=is_random, is_cast=operator is _TO_COPY,
            returns_argument=_returned_argument(operator), mirror=mirror,
        )  # fmt: skip
        self[operator] = entry
        if mirror is not None and mirror not in self:
            self._add(mirror, {})
        return entry

    def __missing__(self, operator: Any) -> Operator | None:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) and self.has_skipped_random:
            return self._add(operator, {})
        self[operator] = None
        return None

    def learn(self, operator: Any) -> Operator | None:
        """What is known of an operator that is not in `by_id` yet."""
        found = self.by_id[id(operator)] = self[operator]
        return found

    def unmatched(self, seen: set[tuple[int, int]]) -> list[str]:
        """Planned op calls that are not among these."""
        operators = [operator for operator in self.values() if operator is not None]
        return [f"{o.name} #{call}" for o in operators for call in o.calls if (o.slot, call) not in seen]


def _resolve(name: str, path: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise PlanError(
            f"Region {path!r} names the operator {name}, which this torch ({torch.__version__}) does not have. "
            "Make the plan again with this version, or import the library that defines the operator."
        )
    return found


def _returned_argument(operator: Any) -> int | None:
    """Which argument an in-place op returns."""
    schema = operator._schema
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or not schema.returns[0].alias_info.is_write:
        return None
    names = schema.returns[0].alias_info.before_set
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == names:
            return index
    return None
