"""All best choices by dynamic programming against the integer program."""

from __future__ import annotations

import random
from typing import Any

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve import _pareto
from autoremat.solve._options import TIE_BREAK, _knees, _thinned
from autoremat.solve._pareto import Choices, best_choices
from autoremat.solve._program import Program
from autoremat.solve._units import Unit


@st.composite
def unit_lists(draw: st.DrawFn) -> list[Unit]:
    """Up to eight units of one or two storages, each of which may be asked for, unstorable, or read later."""
    units: list[Unit] = []
    for _ in range(draw(st.integers(1, 8))):
        made = [s for unit in units for s in unit.storages]
        first = 2 * len(units)
        unit = Unit(ops=[len(units)], storages=[first, first + 1][: draw(st.integers(1, 2))])
        unit.reads = set(draw(st.lists(st.sampled_from(made), max_size=3))) if made else set()
        unit.needed = [s for s in unit.storages if draw(st.booleans())]
        unit.always_runs = draw(st.integers(0, 9)) == 0
        unit.cost = float(draw(st.integers(0, 20)))
        unit.moved_bytes = draw(st.integers(0, 9))
        units.append(unit)
    read = set().union(*(unit.reads for unit in units))
    for unit in units:
        unit.bytes_of = {s: draw(st.integers(0, 6)) for s in unit.storages if s in read or s in unit.needed}
        unit.unstorable = {s for s in unit.bytes_of if unit.always_runs or draw(st.integers(0, 9)) == 0}
    return units


@settings(deadline=None, max_examples=60)
@given(unit_lists())
def test_no_choice_of_the_integer_program_is_cheaper(units: list[Unit]) -> None:
    choices = best_choices(units, tie_break=TIE_BREAK)
    assert choices is not None
    assert choices.num_bytes[0] == 0
    assert choices.num_bytes == sorted(set(choices.num_bytes))
    assert choices.cost == sorted(set(choices.cost), reverse=True)
    program = Program(units, tie_break=TIE_BREAK)
    size = {s: num_bytes for unit in units for s, num_bytes in unit.bytes_of.items()}
    for position, num_bytes in enumerate(choices.num_bytes):
        least, _ = program.optimum(num_bytes)
        assert choices.cost[position] / 2**40 == pytest.approx(least, abs=2e-6)
        stored = choices.stored(position)
        assert sum(size[s] for s in stored) == num_bytes
        assert not any(stored & unit.unstorable for unit in units)
    least, _ = program.optimum(10**6)
    assert choices.cost[-1] / 2**40 == pytest.approx(least, abs=2e-6)


def chain(num_units: int) -> list[Unit]:
    return [
        Unit(
            ops=[i], storages=[i], reads={i - 1} if i else set(), needed=[i], bytes_of={i: 2**i}, cost=float(3**i % 101)
        )
        for i in range(num_units)
    ]


def test_a_circle_and_too_many_choices_are_left_to_the_integer_program(monkeypatch) -> None:
    units = chain(6)
    assert best_choices(units, tie_break=TIE_BREAK) is not None
    monkeypatch.setattr(_pareto, "MAX_CHOICES", 20)
    assert best_choices(units, tie_break=TIE_BREAK) is None
    units[0].reads = {5}
    monkeypatch.undo()
    assert best_choices(units, tie_break=TIE_BREAK) is None


def test_sixteen_branches_are_few_enough() -> None:
    """Spans of a few layers of a Llama have as many choices."""
    draw, depth, num_branches = random.Random(1), 6, 16
    units = [
        Unit(
            ops=[i],
            storages=[i],
            reads={i - 1} if i % depth else set(),
            needed=[i],
            bytes_of={i: draw.randint(1, 10**6)},
            cost=draw.random(),
        )
        for i in range(num_branches * depth)
    ]
    last = len(units)
    ends = set(range(depth - 1, last, depth))
    units.append(Unit(ops=[last], storages=[last], reads=ends, needed=[last], bytes_of={last: 5}, cost=1.0))
    assert best_choices(units, tie_break=TIE_BREAK) is not None


def test_where_there_are_many_some_at_knees_and_some_in_equal_steps_are_taken() -> None:
    choices = Choices()
    choices.num_bytes = list(range(100))
    choices.cost = [100 - size if size < 50 else 30 - size // 4 for size in choices.num_bytes]
    assert {0, 50, 99} <= set(_knees(choices))
    assert len(_thinned(choices, 100)) == 100
    taken = []
    choices.stored = lambda position: taken.append(position) or frozenset()  # type: ignore[method-assign]
    _thinned(choices, 9)
    assert {0, 50, 99} <= set(taken)
    assert len(taken) <= 9
    assert taken == sorted(taken, reverse=True)


class Losing:
    """HiGHS that says after a change of the limit that it knows nothing, until it starts anew."""

    def __init__(self, highs: Any) -> None:
        self._highs = highs
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._highs, name)

    def changeRowBounds(self, *args: Any) -> None:  # noqa: N802 (its name there)
        self._is_lost = True
        self._highs.changeRowBounds(*args)

    def clearSolver(self) -> None:  # noqa: N802
        self._is_lost = False
        self._highs.clearSolver()

    def getModelStatus(self) -> Any:  # noqa: N802
        return highspy.HighsModelStatus.kUnknown if self._is_lost else self._highs.getModelStatus()


def test_a_solver_that_loses_its_way_starts_anew() -> None:
    program, lost = (Program(chain(6), tie_break=TIE_BREAK, is_integer=False) for _ in range(2))
    lost._highs = Losing(lost._highs)
    for limit in (20, 10, 5):
        assert lost.rounded(limit) == program.rounded(limit)
