"""Pace steering: by hand, in any order, and over many rounds: is everybody's turn as likely?"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from itertools import pairwise
from math import exp, isclose, sqrt
from statistics import mean, pvariance

import pytest
from fleetlearn_coordinator.rounds.commands import Assign, Command, Commit, SendAway
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.pace import (
    BIN,
    FINISHED_LONGEST,
    MARGIN,
    MEMORY,
    SHORTEST,
    Bookings,
    FinishedReturns,
    Names,
    Pace,
)
from fleetlearn_coordinator.rounds.selection_rules import Eligibility, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import PaceSettings, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from hypothesis import given
from hypothesis import strategies as st

NO_LEASES = LeaseBook(grace=1.0)
RULES = PaceSettings(connected=3, longest=1000.0, check_ins=2.0)


def test_bookings_follow_each_other_at_the_highest_rate_while_nothing_is_known() -> None:
    bookings = Bookings(RULES)
    assert isclose(bookings.rate(0.0), 2.0)
    waits = [bookings.book(0.0) for _ in range(4)]
    # a hundredth of the longest wait, then two a second
    assert waits == pytest.approx([10.0, 10.5, 11.0, 11.5])
    assert bookings.book(100.0) == 10.0, "times that nobody was given are over"


def test_the_rate_follows_the_need() -> None:
    bookings, begin = Bookings(RULES), 10**6  # no clock of a machine begins at 0
    bookings.need(0, begin)
    assert isclose(bookings.rate(begin), 2.0)
    assert isclose(bookings.rate(begin + 2 * MEMORY), 2.0 * exp(-2))
    for second in range(begin, begin + 20 * 3600):
        bookings.need(1, second)
    assert isclose(bookings.rate(second), MARGIN, rel_tol=1e-3)  # one a second is needed
    assert isclose(bookings.rate(second + MEMORY), MARGIN * exp(-1), rel_tol=1e-3)
    bookings.need(10**6, second)
    assert bookings.rate(second) == 2.0


def test_where_little_is_needed_nobody_waits_longer_than_the_longest_wait() -> None:
    bookings, now = Bookings(RULES), 30 * MEMORY
    bookings.need(0, 0.0)
    assert bookings.rate(now) == 1 / 1000.0
    # 10 s, then in turns a booking far away and, as that is too far, half a second later the next.
    assert [bookings.book(now) for _ in range(4)] == pytest.approx([10.0, 1010.0, 1010.5, 1011.0])
    assert bookings.book(now + 100.0) == pytest.approx(911.5)


def test_those_who_are_away_are_counted_until_their_time() -> None:
    bookings = Bookings(PaceSettings(connected=1, longest=10 * BIN, check_ins=1.0))
    for _ in range(3 * int(BIN)):
        bookings.book(0.0)
    assert bookings.away(0.0) == 3 * BIN
    assert bookings.away(BIN) == 2 * BIN + SHORTEST * 10 * BIN
    assert bookings.away(9 * BIN) == 0


def test_a_restart_goes_on_with_the_bookings() -> None:
    before, after = Bookings(RULES), Bookings(RULES)
    before.need(300, 50.0)
    for _ in range(50):
        before.book(60.0)
    state = json.loads(json.dumps(before.state(100.0)))
    after.restore(state, 7.0)  # on another clock
    assert isclose(after.rate(7.0), before.rate(100.0))
    assert isclose(after.book(17.0), before.book(110.0))
    assert after.away(17.0) == before.away(110.0)


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 500), st.integers(0, 30)), max_size=30))
def test_bookings_are_never_too_dense_nor_too_far(steps: list[tuple[float, int, int]]) -> None:
    bookings, now, booked = Bookings(RULES), 0.0, list[float]()
    for seconds, needed, books in steps:
        now += seconds
        bookings.need(needed, now)
        for _ in range(books):
            wait = bookings.book(now)
            before = booked[-1] if booked else 0.0
            # Longer than the longest wait only by what check_ins demands: never so with one booking
            # at a time.
            assert (
                SHORTEST * RULES.longest
                <= wait
                <= max(2 * RULES.longest, before - now + 1 / RULES.check_ins + 1e-6)
            )
            booked.append(now + wait)
    for first, second in pairwise(booked):
        assert second - first >= 1 / RULES.check_ins - 1e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_names_are_a_set(steps: list[tuple[bool, int]]) -> None:
    names, expected = Names(), set[str]()
    for adds, number in steps:
        (names.add if adds else names.discard)(str(number))
        (expected.add if adds else expected.discard)(str(number))
        assert sorted(names[place] for place in range(len(names))) == sorted(expected)


# --- who stays ---


def arrive(pace: Pace, device: str, book: LeaseBook, *, has_update: bool = False) -> list[str]:
    return [
        row.device for row in pace.check_in(device, [book, NO_LEASES], 0.0, has_update=has_update)
    ]


def test_who_had_a_task_goes_first() -> None:
    pace, book = Pace(RULES, seed=1), LeaseBook(grace=1.0)
    for device in "abc":
        assert arrive(pace, device, book) == []
    book.give(["a", "b"], ["t1", "t2"], Terms(0, 10.0), 0.0)
    pace.free(book.complete(["b"], ["t2"]))
    assert arrive(pace, "d", book) == ["b"]
    assert arrive(pace, "e", book)[0] in "cde"  # a has a task
    assert pace.present >= {"a"}
    assert len(pace.present) == 3


def test_who_may_have_no_task_goes_first() -> None:
    """A rule that keeps half of the fleet out does not fill the places with that half."""
    rules = SelectionRules(eligibility=Eligibility(least_examples=10))
    settings = Settings(
        goal=9,
        cohort=9,
        minimum=9,
        deadline=9.0,
        grace=1.0,
        gather=0.0,
        selection=rules,
        pace=RULES,
    )
    engine = Engine(settings)
    assert isinstance(engine.selection, RuledSelection)
    for number in range(12):
        engine.selection.stated[f"d{number}"] = Stated(20 if number % 3 == 2 else 5)
        engine.check_in(f"d{number}", None, 0.0)
    assert engine.pace is not None
    assert engine.pace.present < {"d2", "d5", "d8", "d11"}
    assert len(engine.pace.present) == 3


def test_a_device_with_a_task_or_an_update_is_never_sent_away() -> None:
    pace, book = Pace(RULES, seed=1), LeaseBook(grace=1.0)
    book.give(["a", "b"], ["t1", "t2"], Terms(0, 10.0), 0.0)
    for device in "ab":
        assert arrive(pace, device, book) == []
    assert arrive(pace, "c", book, has_update=True) == []
    assert [arrive(pace, device, book) for device in "defg"] == [["d"], ["e"], ["f"], ["g"]]
    assert arrive(pace, "h", book, has_update=True) == []
    pace.free(book.complete(["a", "b"], ["t1", "t2"]))
    assert {*arrive(pace, "i", book), *arrive(pace, "j", book)} <= {"a", "b", "i", "j"}


def test_a_device_that_may_get_its_lost_task_back_is_not_sent_away() -> None:
    pace, book = Pace(RULES._replace(connected=1), seed=1), LeaseBook(grace=1.0)
    book.give(["a"], ["t1"], Terms(0, 10.0), 0.0)
    book.leave("a", 0.0)
    book.drop("a", "lost")
    assert arrive(pace, "b", book) == []
    assert arrive(pace, "a", book) == ["b"]  # a trains on
    assert arrive(pace, "c", book) == ["c"]


def test_a_device_with_an_update_that_measured_meanwhile_is_not_sent_away() -> None:
    pace, book = Pace(RULES._replace(connected=1), seed=1), LeaseBook(grace=1.0)
    assert arrive(pace, "a", book, has_update=True) == []
    pace.measured(["a"])
    assert arrive(pace, "b", book) == ["b"]
    pace.free(["a"])  # its report counted
    assert arrive(pace, "c", book) == ["a"]


def test_who_leaves_by_itself_is_replaced_and_who_was_sent_away_is_not() -> None:
    pace, book = Pace(RULES._replace(connected=1), seed=1), LeaseBook(grace=1.0)
    arrive(pace, "a", book)
    (leaving,) = arrive(pace, "b", book)
    pace.disconnect(leaving)
    assert pace.needed == 0
    pace.disconnect("a" if leaving == "b" else "b")
    assert pace.needed == 1
    assert arrive(pace, "c", book) == []
    assert pace.status(0.0) == {"sent_away": 1, "away": 1, "all_back_in": pytest.approx(10.5)}


def test_the_draw_is_fair_to_the_newcomer_and_to_those_who_wait() -> None:
    gone: Counter[str] = Counter()
    for seed in range(4000):
        pace, book = Pace(RULES, seed), LeaseBook(grace=1.0)
        for device in "abcd":
            gone.update(arrive(pace, device, book))
    assert all(abs(gone[device] - 1000) < 4 * sqrt(4000 * 0.25 * 0.75) for device in "abcd")


# --- many rounds ---


class Population:
    """Devices that do what they are told, with an engine. They come back after 0.5 to 1.5 times
    what they were told."""

    def __init__(self, rules: Settings, devices: int) -> None:
        self.engine, self.now, self.luck = Engine(rules), 0.0, random.Random(2)
        self.tasks: Counter[str] = Counter()
        self.connected: set[str] = set()
        self.most = 0
        self.sizes: list[int] = []
        self.returns: list[float] = []
        self.first_sent_away: set[str] = set()
        self.events: list[tuple[float, int, str, str]] = []
        for number in range(devices):
            self.expect(number * 0.01, f"d{number:03}", "")

    def expect(self, seconds: float, device: str, task: str) -> None:
        heapq.heappush(self.events, (self.now + seconds, len(self.events), device, task))

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Assign(device, task):
                    assert device in self.connected
                    self.tasks[device] += 1
                    self.expect(self.luck.uniform(5.0, 15.0), device, task)
                case SendAway(device, after):
                    self.connected.remove(device)
                    if len(self.sizes) < 3:
                        self.first_sent_away.add(device)
                    self.expect(after * self.luck.uniform(0.5, 1.5), device, "")
                    self.do(self.engine.disconnect(device, self.now))
                case Commit():
                    self.sizes.append(len(self.engine.accepted))
                    self.do(self.engine.committed(self.now, change=1.0, metrics={}))

    def run(self, rounds: int) -> None:
        while len(self.sizes) < rounds:
            wake = self.engine.wake_at()
            if wake is not None and (not self.events or wake < self.events[0][0]):
                self.now = max(self.now, wake)
                self.do(self.engine.tick(self.now))
                continue
            self.now, _, device, task = heapq.heappop(self.events)
            if not task:
                self.connected.add(device)
                self.returns.append(self.now)
                self.do(self.engine.check_in(device, None, self.now))
                self.most = max(self.most, len(self.connected))
            elif self.engine.takes_report(device, task):
                self.do(self.engine.count_report(device, task, self.now))


SYNCHRONOUS = Settings(
    goal=8, cohort=10, minimum=8, deadline=60.0, grace=5.0, gather=5.0, seed=5,
    pace=PaceSettings(connected=24, longest=200.0, check_ins=4.0),
)  # fmt: skip
ASYNCHRONOUS = SYNCHRONOUS._replace(asynchronous=True, max_staleness=20)


@pytest.mark.parametrize("rules", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_each_device_has_as_many_tasks_whether_it_stayed_at_first_or_not(rules: Settings) -> None:
    devices, rounds = 200, 600
    fleet = Population(rules, devices)
    fleet.run(rounds)
    assert fleet.most <= 24
    assert set(fleet.sizes) == {8}
    counts = [fleet.tasks[f"d{number:03}"] for number in range(devices)]
    usual = mean(counts)
    assert usual > 20
    # Tasks drawn at random for each round would spread as a Poisson number does; turns in order
    # spread less.
    assert pvariance(counts) < 1.5 * usual
    sent = [fleet.tasks[device] for device in fleet.first_sent_away]
    assert len(sent) > 100
    assert abs(mean(sent) - usual) < 4 * sqrt(usual / len(sent))


def test_all_rounds_are_as_full_as_with_all_connected_and_as_quick() -> None:
    fleet, all_connected = (
        Population(SYNCHRONOUS, 200),
        Population(SYNCHRONOUS._replace(pace=None), 200),
    )
    fleet.run(300)
    all_connected.run(300)
    assert fleet.sizes == all_connected.sizes
    assert fleet.now < 1.02 * all_connected.now
    assert all_connected.most == 200


def test_no_moment_has_too_many_check_ins() -> None:
    fleet = Population(SYNCHRONOUS, 200)
    fleet.run(300)
    later = [when for when in fleet.returns if when > 20.0]
    seconds = Counter(int(when) for when in later)
    assert max(seconds.values()) <= 4.0 * 1.1 + 6 * sqrt(4.0 * 1.1)
    assert len(later) / (fleet.now - 20.0) < 4.0 * 1.1


def test_fewer_devices_than_may_be_connected_all_stay() -> None:
    fleet = Population(SYNCHRONOUS, 24)
    fleet.run(50)
    assert len(fleet.returns) == 24
    assert len(fleet.connected) == 24


# Finished runs


def test_a_small_finished_fleet_is_back_within_two_minutes() -> None:
    """It was gone for up to 90: a device waits 1.5 times as long as it is told at most."""
    returns = FinishedReturns(60.0)
    assert [returns.book(1e6) for _ in range(20)] == [60.0 + number for number in range(20)]
    assert returns.book(1e6 + 3600.0) == 60.0, "what was booked is over"


def test_a_large_finished_fleet_comes_within_an_hour_one_a_second() -> None:
    returns = FinishedReturns(60.0)
    waits = [returns.book(0.0) for _ in range(10_000)]
    assert waits[:3600] == sorted(waits[:3600])
    assert max(waits) == FINISHED_LONGEST
    assert waits.count(FINISHED_LONGEST) == 10_000 - 3540
    assert returns.book(7200.0) == 60.0


def test_a_finished_run_that_is_to_be_left_alone_is() -> None:
    assert FinishedReturns(86400.0).book(0.0) == 86400.0
