"""Many rows at once: what calling the NamedTuple row by row would give."""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

from fleetlearn_simulator.rows import rows_of


class Point(NamedTuple):
    x: int
    name: str
    more: float = 2.0


def test_rows_are_those_of_the_kind() -> None:
    found = rows_of(Point, [1, 2, 3], "abc", [0.5, 1.5, 2.5])
    assert found == [Point(1, "a", 0.5), Point(2, "b", 1.5), Point(3, "c", 2.5)]
    assert {type(row) for row in found} == {Point}
    assert found[1].name == "b"
    assert found[1]._replace(x=7) == Point(7, "b", 1.5)


def test_the_first_column_says_how_many() -> None:
    """Others may be endless, and come from anything that can be gone through once."""
    assert rows_of(Point, iter(range(2)), repeat("a"), map(float, range(2))) == [Point(0, "a", 0.0), Point(1, "a", 1.0)]
    assert rows_of(Point, [], repeat("a"), repeat(1.0)) == []
