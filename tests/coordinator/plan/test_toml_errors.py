"""Errors of TOML tables: of lists of tables, of values of several types, and of a part of a
file."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from fleetlearn_coordinator.plan.toml_errors import Section, near, read_tables, refuse_unknown
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=1)]


class Leak(Section, frozen=True, kw_only=True):
    rate: Share


class Pipe(Section, frozen=True, kw_only=True):
    leak: Share | Leak = 0.0
    wall: Share | Literal["thick", "thin"] | None = None


class House(Section, frozen=True, kw_only=True):
    name: str
    street: Annotated[str, Meta(min_length=1, max_length=9)] = "High St"
    sold: bool = False
    size: tuple[int, float] = (1, 1.0)
    owners: dict[Annotated[str, Meta(pattern="^[A-Z]")], Share] = msgspec.field(
        default_factory=dict
    )
    plan: Path | None = None
    pipes: tuple[Pipe, ...] = ()
    rooms: tuple[int, ...] = ()


KEYS = "name, street, sold, size, owners, plan, pipes"
SECTIONS = {"pipes": Pipe, "pipes.leak": Leak}


def to_path(_: type, given: Any) -> Path:
    if not isinstance(given, str):
        raise TypeError("not a path")
    return Path(given)


def read(raw: dict[str, Any], prefix: str = "") -> str:
    """Return the error that these tables cause."""
    try:
        refuse_unknown(raw, "house", House, SECTIONS, hidden=("rooms",))
        read_tables(raw, "house", House, to_path, prefix)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "name is missing; a house must have it"),
        ({"name": 3}, "name = 3 is refused: it takes a string"),
        (
            {"name": "a", "street": ""},
            "street = '' is refused: it takes a string of 1 to 9 characters",
        ),
        ({"name": "a", "sold": 0}, "sold = 0 is refused: it takes true or false"),
        (
            {"name": "a", "size": [1]},
            "size = [1] is refused: it takes a list of 2 entries: an integer; a number",
        ),
        ({"name": "a", "size": [1, "x"]}, "size[1] = 'x' is refused: it takes a number"),
        ({"name": "a", "plan": 3}, "plan = 3 is refused: it takes a path"),
        (
            {"name": "a", "pipes": 3},
            "pipes = 3 is refused: it takes a list; each entry is a table of leak, wall",
        ),
        (
            {"name": "a", "owners": {"Ann": 2}},
            "owners.Ann = 2 is refused: it takes a number, at least 0 and at most 1",
        ),
        (
            {"name": "a", "owners": {"ann": 1}},
            "owners = {'ann': 1} is refused: it takes a table; each key is a string matching "
            "^[A-Z], each value a number, at least 0 and at most 1",
        ),
        (
            {"name": "a", "rooms": []},
            f"rooms is not a key of a house. Allowed here: {KEYS}.",
        ),
        (
            {"nam": "a"},
            f"nam is not a key of a house; did you mean name? Allowed here: {KEYS}.",
        ),
        (
            {"wall": 1},
            f"wall is not a key of a house; did you mean pipes.wall? Allowed here: {KEYS}.",
        ),
        (
            {"name": "a", "pipes": [{}, {"leek": 1}]},
            (
                "pipes.leek is not a key of a house; did you mean pipes.leak? Allowed here: leak, "
                "wall."
            ),
        ),
        (
            {"name": "a", "pipes": [{}, {"leak": 2}]},
            (
                "pipes[1].leak = 2 is refused: it takes a number, at least 0 and at most 1, or a "
                "table of rate"
            ),
        ),
        (
            {"name": "a", "pipes": [{"leak": {"rate": 2}}]},
            "pipes[0].leak.rate = 2 is refused: it takes a number, at least 0 and at most 1",
        ),
        (
            {"name": "a", "pipes": [{"wall": "x"}]},
            (
                "pipes[0].wall = 'x' is refused: it takes a number, at least 0 and at most 1, or "
                '"thick" or "thin"'
            ),
        ),
        (
            {"name": "a", "pipes": [{"leak": {}}]},
            "pipes[0].leak.rate is missing; a house must have it",
        ),
        ({"name": "a", "pipes": [3]}, "pipes[0] = 3 is refused: it takes a table of leak, wall"),
    ],
)
def test_a_mistake_is_named_by_its_place(raw: dict[str, Any], said: str) -> None:
    assert read(raw) == said


def test_a_part_of_a_file_is_named_by_the_whole() -> None:
    assert read({"name": 3}, "town.x.") == "town.x.name = 3 is refused: it takes a string"
    assert read({}, "town.x.") == "town.x.name is missing; a house must have it"


def test_what_is_near() -> None:
    assert near("gaol", ["goal", "grace"], "round.") == "; did you mean round.goal?"
    assert near("zzz", ["goal"]) == "."
