"""Selection: who is chosen of those who wait, and where each device is kept."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.commands import LATE, LOST, PAUSED, SURPLUS
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.reliability import DOUBT
from fleetlearn_coordinator.rounds.selection import (
    MAX_COPIED_NAMES,
    REBUILD_RATIO,
    Selection,
    put_back,
    take,
)
from fleetlearn_coordinator.rounds.settings import Settings
from hypothesis import given
from hypothesis import strategies as st
from sortedcontainers import SortedList

SETTINGS = Settings(
    goal=3, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=4.0, seed=7, stall=10.0
)
BOOK = LeaseBook(SETTINGS.grace, SETTINGS.stall)


def waiting(devices: str, seed: int = 7) -> Selection:
    selection = Selection(SETTINGS._replace(seed=seed))
    for device in devices:
        selection.add(device)
    return selection


@given(st.sets(st.text(max_size=3)), st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_names_are_taken_by_their_place(names: set[str], draws: list[int]) -> None:
    """As from a plain list, in which each draw takes the name at the number modulo the length."""
    plain, sorted_names = sorted(names), SortedList(names)
    expected = [plain.pop(number % len(plain)) for number in draws[: len(plain)]]
    assert take(sorted_names, draws) == expected
    assert [*sorted_names] == plain


@pytest.mark.parametrize(
    "size",
    [1, 40, REBUILD_RATIO * 10, REBUILD_RATIO * 10 + 1, MAX_COPIED_NAMES, MAX_COPIED_NAMES + 1],
)
def test_however_many_wait_ten_are_taken_and_put_back(size: int) -> None:
    plain = [f"d{number:05d}" for number in range(size)]
    names, draws = SortedList(plain), [7**number for number in range(10, 20)]
    expected = [plain.pop(number % len(plain)) for number in draws[:size]]
    taken = take(names, draws)
    assert taken == expected
    assert [*names] == plain
    put_back(names, taken)
    assert [*names] == sorted([*plain, *taken])
    names._check()


def test_the_choice_follows_from_the_seed_the_round_and_the_devices_alone() -> None:
    chosen = waiting("abcdefgh").choose(3, 1, 1, BOOK)
    assert waiting("hgfedcba").choose(3, 1, 1, BOOK) == chosen
    assert len({tuple(waiting("abcdefgh", seed).choose(3, 1, 1, BOOK)) for seed in range(20)}) > 10
    assert len({tuple(waiting("abcdefgh").choose(3, round, 1, BOOK)) for round in range(20)}) > 10


def test_one_after_the_other_are_those_of_one_choice() -> None:
    together, alone = waiting("abcdefgh"), waiting("abcdefgh")
    chosen = together.choose(5, 2, 1, BOOK)
    assert [device for first in range(1, 6) for device in alone.choose(1, 2, first, BOOK)] == chosen
    assert alone == together
    assert together.waiting() == 3
    assert together.choose(9, 2, 6, BOOK) == alone.choose(9, 2, 6, BOOK)
    assert together.waiting() == 0


def test_a_device_is_in_one_place() -> None:
    selection = waiting("abc")
    selection.add("a")  # it has connected again
    assert selection.waiting() == 3
    selection.reliability.fail("a", DOUBT)
    selection.remove("a")
    selection.add("a")
    assert [*selection.idle] == ["b", "c"]
    assert [*selection.doubted[1]] == ["a"]
    selection.reliability.fail("a", DOUBT)
    selection.add("a")
    assert [*selection.doubted[1]] == []
    assert [*selection.doubted[2]] == ["a"]
    selection.remove("a")
    assert selection.waiting() == 2


def test_devices_in_doubt_fill_what_is_left_below_the_minimum() -> None:
    selection = waiting("ab")
    for device in "xyz":
        selection.reliability.fail(device, DOUBT)
        selection.add(device)
    chosen = selection.choose(4, 1, 1, BOOK)
    assert {*chosen[:2]} == {*"ab"}
    assert {*chosen[2:]} < {*"xyz"}
    book = LeaseBook(SETTINGS.grace)
    book.accepted.update({"t1": "p", "t2": "q"})
    assert selection.choose(4, 1, 5, book) == []


def test_all_may_be_chosen_again_when_a_round_ends() -> None:
    selection = waiting("abc")
    chosen = selection.choose(2, 1, 1, BOOK)
    assert selection.had_turn == {*chosen}
    selection.resting.update(chosen)
    selection.reliability.fail(chosen[0], DOUBT)
    selection.end_round(chosen[1:])
    assert not selection.had_turn | selection.resting
    assert [*selection.idle] == sorted({*"abc"} - {chosen[0]})
    assert [*selection.doubted[1]] == [chosen[0]]


@pytest.mark.parametrize(
    ("cause", "held_up", "points"),
    [
        (SURPLUS, False, None),
        (LATE, False, None),
        (PAUSED, False, None),
        (LATE, True, DOUBT),
        (LOST, False, 1),
        ("failed: bad-data", False, 1),
    ],
)
def test_what_a_lease_that_ended_is_remembered_for(
    cause: str, held_up: bool, points: int | None
) -> None:
    selection = waiting("")
    selection.fail("a", cause, held_up)
    assert selection.reliability.points.get("a") == points
    assert selection.held_up == held_up
