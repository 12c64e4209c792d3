"""What the policies say of a book, worked by hand."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.participation import BufferedAsynchronous, SynchronousRounds
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


@pytest.mark.parametrize(
    ("concurrency", "running", "free", "together"),
    [
        (100, 100, 0, 1),
        (100, 99, 1, 1),
        (199, 198, 1, 1),
        (200, 199, 0, 1),
        (200, 198, 2, 1),
        (200, 200, 0, 2),
        (1000, 1000, 0, 10),
        (1000, 997, 0, 7),
        (1000, 991, 0, 1),
        (1000, 990, 10, 1),
        (1000, 0, 1000, 1),
    ],
)
def test_slots_of_many_are_given_together(
    concurrency: int, running: int, free: int, together: int
) -> None:
    """Asynchronously, as soon as a hundredth of them is free; until then reports have no
    consequence."""
    policy = BufferedAsynchronous(SETTINGS._replace(goal=20, cohort=concurrency, asynchronous=True))
    book = book_of("")
    names = [f"device-{number}" for number in range(running)]
    book.give(names, names, Terms(0, 60.0), 0.0)
    assert policy.free_slots(book) == free
    assert policy.reports_together(book) == together
    book.accepted = dict.fromkeys(map(str, range(17)), "")
    assert policy.reports_together(book) == min(together, 3)
