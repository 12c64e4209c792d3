"""Errors of TOML tables: of lists of tables, of values of several types, and of a part of a file."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from fleetlearn_coordinator.plan.toml_errors import Section, explain, near, refuse_unknown
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]


class Leak(Section, frozen=True, kw_only=True):
    rate: Share


class Pipe(Section, frozen=True, kw_only=True):
    leak: Share | Leak = 0.0
    wall: Share | Literal["thick", "thin"] | None = None


class House(Section, frozen=True, kw_only=True):
    name: str
    pipes: tuple[Pipe, ...] = ()
    rooms: tuple[int, ...] = ()


SECTIONS = {"pipes": Pipe, "pipes.leak": Leak}


def read(raw: dict[str, Any], prefix: str = "") -> str:
    """What is said about these tables."""
    try:
        refuse_unknown(raw, "house", House, SECTIONS, hidden=("rooms",))
    except ValueError as error:
        return str(error)
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(raw, House)
    return explain(refused.value, raw, "house", House, SECTIONS, prefix)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "name is missing; a house must have it"),
        ({"name": 3}, "name = 3 is refused: expected `str`, got `int`"),
        ({"name": "a", "rooms": []}, "rooms is not a key of a house. Allowed here: name, pipes."),
        ({"nam": "a"}, "nam is not a key of a house; did you mean name? Allowed here: name, pipes."),
        ({"wall": 1}, "wall is not a key of a house; did you mean pipes.wall? Allowed here: name, pipes."),
        (
            {"name": "a", "pipes": [{}, {"leek": 1}]},
            "pipes.leek is not a key of a house; did you mean pipes.leak? Allowed here: leak, wall.",
        ),
        (
            {"name": "a", "pipes": [{}, {"leak": 2}]},
            "pipes[1].leak = 2 is refused: it takes a number, at least 0 and at most 1, or a table of rate",
        ),
        (
            {"name": "a", "pipes": [{"leak": {"rate": 2}}]},
            "pipes[0].leak.rate = 2 is refused: it takes a number, at least 0 and at most 1",
        ),
        (
            {"name": "a", "pipes": [{"wall": "x"}]},
            'pipes[0].wall = \'x\' is refused: it takes a number, at least 0 and at most 1, or "thick" or "thin"',
        ),
        ({"name": "a", "pipes": [{"leak": {}}]}, "pipes[0].leak.rate is missing; a house must have it"),
        ({"name": "a", "pipes": [3]}, "pipes[0] = 3 is refused: expected a table, got `int`"),
    ],
)
def test_a_mistake_is_named_by_its_place(raw: dict[str, Any], said: str) -> None:
    assert read(raw) == said


def test_a_part_of_a_file_is_named_by_the_whole() -> None:
    assert read({"name": 3}, "town.x.") == "town.x.name = 3 is refused: expected `str`, got `int`"
    assert read({}, "town.x.") == "town.x.name is missing; a house must have it"


def test_what_is_near() -> None:
    assert near("gaol", ["goal", "grace"], "round.") == "; did you mean round.goal?"
    assert near("zzz", ["goal"]) == "."
