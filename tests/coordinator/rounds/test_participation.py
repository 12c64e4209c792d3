"""Synchronous rounds: what the policy says of a book, worked by hand."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.participation import SynchronousRounds
from fleetlearn_coordinator.rounds.settings import Settings

SETTINGS = Settings(goal=3, cohort=4, minimum=2, deadline=60.0, grace=5.0, gather=4.0)


def book_of(running: str, reported: str = "", dropped: str = "") -> LeaseBook:
    book, devices = LeaseBook(SETTINGS.grace), [*reported, *dropped, *running]
    book.give(devices, [f"task-{device}" for device in devices], Terms(0, 60.0), 0.0)
    book.complete([*reported], [f"task-{device}" for device in reported])
    for device in dropped:
        book.drop(device, "failed: diverged")
    return book


def test_a_round_opens_at_once_with_its_goal_of_devices_that_are_not_in_doubt() -> None:
    policy = SynchronousRounds(SETTINGS)
    assert policy.may_open(3, 3, 10.0)
    assert not policy.may_open(2, 50, 10.0)
    assert policy.gather_until == 14.0


def test_a_round_opens_with_its_minimum_after_the_time_to_gather() -> None:
    policy = SynchronousRounds(SETTINGS)
    assert not policy.may_open(1, 1, 9.0)
    assert policy.gather_until is None
    assert not policy.may_open(1, 2, 10.0)
    assert not policy.may_open(2, 2, 13.9)
    assert policy.may_open(0, 2, 14.0)
    assert policy.gather_until is None
    assert not policy.may_open(2, 2, 20.0)


def test_gathering_begins_again_when_too_few_are_left() -> None:
    policy = SynchronousRounds(SETTINGS)
    policy.may_open(2, 2, 10.0)
    assert not policy.may_open(1, 1, 20.0)
    assert not policy.may_open(2, 2, 21.0)
    assert policy.gather_until == 25.0


@pytest.mark.parametrize(
    ("running", "reported", "dropped", "free", "wanted", "nobody", "commit"),
    [
        ("", "", "", 4, 3, False, False),
        ("abcd", "", "", 0, 3, False, False),
        ("abc", "", "d", 1, 3, False, False),
        ("a", "bc", "d", 1, 1, False, True),
        ("", "bc", "ad", 2, 1, True, True),
        ("", "b", "acd", 3, 2, False, False),
        ("d", "abc", "", 0, 0, False, True),
    ],
)
def test_slots_reports_and_ends(
    running: str, reported: str, dropped: str, free: int, wanted: int, nobody: bool, commit: bool
) -> None:
    policy, book = SynchronousRounds(SETTINGS), book_of(running, reported, dropped)
    assert policy.free_slots(book) == free
    assert policy.wanted_reports(book) == wanted
    assert policy.nobody_is_left(book) == nobody
    assert policy.may_commit(book) == commit
    assert policy.ends_with_round(book) == [*running]
