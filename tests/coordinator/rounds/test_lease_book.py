"""The lease book against a simple model, in any order of events."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from fleetlearn_coordinator.rounds.commands import LATE, LOST, STALLED, SURPLUS
from fleetlearn_coordinator.rounds.lease_book import CHECKS_PER_STALL, LeaseBook, Terms
from fleetlearn_coordinator.rounds.progress_watch import MAX_RETURNS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

GRACE, STALL = 4.0, 8.0
TERMS = Terms(3, 60.0)
DEVICES = st.sampled_from([f"d{number}" for number in range(6)])


def book_of(*devices: str, stall: float = STALL) -> LeaseBook:
    book = LeaseBook(GRACE, stall)
    book.give(devices, [f"task-{device}" for device in devices], TERMS, 0.0)
    return book


class Model:
    """One lease, as it is understood: every second is the device's, the coordinator's, or an
    absence."""

    def __init__(self, task: str, terms: Terms, now: float) -> None:
        self.task, self.terms = task, terms
        self.idle_since, self.grace, self.progressed, self.steps = now, GRACE, False, 0
        self.waits: float | None = None
        self.gone: float | None = None

    def proceed(self, now: float) -> None:
        if self.waits is not None:
            self.idle_since += now - max(self.waits, self.idle_since)
            self.waits = None

    def is_lost(self, now: float) -> bool:
        return self.gone is not None and now >= self.gone + self.grace

    def is_stalled(self, now: float) -> bool:
        return self.waits is None and self.gone is None and now >= self.idle_since + STALL


class AnyOrder(RuleBasedStateMachine):
    """Leases of several versions at a time, which go on while others begin: no round ends them
    all."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.number = LeaseBook(GRACE, STALL), 0.0, 0
        self.leases: dict[str, Model] = {}
        self.accepted: dict[str, str] = {}
        self.dropped: dict[str, tuple[str, str]] = {}
        self.versions: dict[str, int] = {}

    @rule(devices=st.sets(DEVICES), version=st.integers(0, 9), short=st.booleans())
    def give(self, devices: set[str], version: int, short: bool) -> None:
        free = sorted(devices - self.leases.keys())
        tasks = [f"t{self.number + place}" for place in range(len(free))]
        self.number += len(free)
        terms = Terms(version, self.now + 60.0, short)
        self.book.give(free, tasks, terms, self.now)
        self.leases |= {
            device: Model(task, terms, self.now) for device, task in zip(free, tasks, strict=True)
        }

    @rule(devices=st.sets(DEVICES))
    def complete(self, devices: set[str]) -> None:
        over = sorted(devices & self.leases.keys())
        tasks = [self.leases[device].task for device in over]
        there = [device for device in over if self.leases.pop(device).gone is None]
        assert [*self.book.complete(over, tasks)] == there
        self.accepted |= dict(zip(tasks, over, strict=True))

    @rule(device=DEVICES, cause=st.sampled_from([LATE, SURPLUS, "failed: diverged"]))
    def drop(self, device: str, cause: str) -> None:
        lease = self.leases.get(device)
        if lease is not None:
            blame = cause == LATE and not lease.terms.short and lease.waits is None
            assert self.book.held_up(device, cause) == blame
            self.end(device, cause)

    def end(self, device: str, cause: str) -> None:
        lease = self.leases.pop(device)
        assert [*self.book.drop(device, cause)] == ([device] if lease.gone is None else [])
        self.dropped[lease.task] = device, cause
        self.versions[lease.task] = lease.terms.version

    @rule(device=DEVICES, data=st.data())
    def revive(self, device: str, data: st.DataObject) -> None:
        """The device says that its work of some old task is done."""
        if device in self.leases or not self.dropped:
            return
        task = data.draw(st.sampled_from(sorted(self.dropped)))
        was_lost = self.dropped[task] == (device, LOST)
        ends = self.now + 60.0
        assert self.book.revive(device, task, ends) == was_lost
        if was_lost:
            del self.dropped[task]
            self.book.watch(device, self.now)
            self.leases[device] = Model(task, Terms(self.versions[task], ends), self.now)

    @rule(device=DEVICES)
    def leave(self, device: str) -> None:
        self.book.leave(device, self.now)
        lease = self.leases.get(device)
        if lease is not None and lease.gone is None:
            lease.proceed(self.now)
            lease.gone = self.now

    @rule(device=DEVICES)
    def come_back(self, device: str) -> None:
        lease = self.leases.get(device)
        if lease is not None:
            self.book.come_back(device, self.now)
            lease.proceed(self.now)
            if lease.gone is not None:
                away = self.now - lease.gone
                lease.idle_since += away
                lease.grace -= max(away, GRACE / MAX_RETURNS)
                lease.gone = None

    @rule(device=DEVICES, steps=st.integers(0, 5))
    def progress(self, device: str, steps: int) -> None:
        lease = self.leases.get(device)
        if lease is not None and lease.gone is None:
            self.book.watches[device].progress("steps", steps, GRACE, self.now)
            if steps > lease.steps:
                lease.steps, lease.idle_since, lease.grace, lease.progressed = (
                    steps,
                    self.now,
                    GRACE,
                    True,
                )

    @rule(device=DEVICES)
    def wait(self, device: str) -> None:
        lease = self.leases.get(device)
        if lease is not None and lease.gone is None:
            self.book.watch(device, self.now).begin_wait(self.now)
            lease.waits = self.now if lease.waits is None else lease.waits

    @rule(device=DEVICES)
    def proceed(self, device: str) -> None:
        lease = self.leases.get(device)
        if lease is not None:
            self.book.watch(device, self.now).end_wait(self.now)
            lease.proceed(self.now)

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5, 7.0]))
    def time_passes(self, seconds: float) -> None:
        """Waking at each moment that the book names: nobody is found late."""
        until = self.now + seconds
        while (wake := self.book.wake_at()) is not None and wake <= until:
            assert wake >= self.now
            self.now = wake
            while (device := self.book.next_lost(self.now)) is not None:
                lease = self.leases[device]
                assert lease.is_lost(self.now)
                blame = not lease.progressed and lease.grace < GRACE
                assert self.book.held_up(device, LOST) == blame
                self.end(device, LOST)
            while (device := self.book.next_stalled(self.now)) is not None:
                assert self.leases[device].is_stalled(self.now)
                assert self.book.held_up(device, STALLED)
                self.end(device, STALLED)
            self.nobody_is_overdue()
        self.now = until

    @rule()
    def restart(self) -> None:
        """Another process knows the leases and how others ended; all devices are away."""
        self.book = LeaseBook(GRACE, STALL)
        expires = self.now + 9.0
        leases = [(lease.task, device, TERMS) for device, lease in self.leases.items()]
        dropped = [(task, device, cause) for task, (device, cause) in self.dropped.items()]
        self.versions = dict.fromkeys(self.dropped, TERMS.version)
        lost = [(task, device, TERMS) for task, device, cause in dropped if cause == LOST]
        self.book.restore(leases, self.accepted.items(), dropped, lost, expires)
        assert [*self.book.absent.values()] == [expires] * len(leases)
        # the model's lease begins when its device is back
        for device, lease in [*self.leases.items()]:
            self.book.come_back(device, self.now)
            self.leases[device] = Model(lease.task, TERMS, self.now)

    def nobody_is_overdue(self) -> None:
        assert not [device for device, lease in self.leases.items() if lease.is_lost(self.now)]
        late = [
            lease
            for lease in self.leases.values()
            if lease.is_stalled(self.now - STALL / CHECKS_PER_STALL)
        ]
        assert not late

    @invariant()
    def knows_whose_lost_leases_are(self) -> None:
        counts = Counter(device for device, _ in self.book.lost.values())
        assert +self.book.lost_of == counts

    @invariant()
    def the_book_is_the_model(self) -> None:
        book = self.book
        assert book.tasks == {device: lease.task for device, lease in self.leases.items()}
        assert book.terms == {device: lease.terms for device, lease in self.leases.items()}
        assert book.absent == {
            device: lease.gone + lease.grace
            for device, lease in self.leases.items()
            if lease.gone is not None
        }
        assert (book.accepted, book.dropped) == (self.accepted, self.dropped)
        versions = [lease.terms.version for lease in self.leases.values()]
        assert book.oldest_version() == (min(versions) if versions else None)
        assert book.watches.keys() == self.leases.keys()
        assert sum(book.causes().values()) == len(self.dropped)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestAnyOrderForLong(AnyOrder.TestCase):
    settings = settings(TestAnyOrder.settings, max_examples=1000)


def test_the_oldest_version_is_needed_until_its_last_lease_ends() -> None:
    book = book_of("a", "b")
    book.give(["c"], ["task-c"], TERMS._replace(version=5), 1.0)
    assert book.oldest_version() == 3
    book.complete(["a"], ["task-a"])
    assert book.oldest_version() == 3
    book.drop("b", LATE)
    assert book.oldest_version() == 5
    book.drop("c", LATE)
    assert book.oldest_version() is None


def test_devices_have_their_own_time_to_return_after_a_restart() -> None:
    """One that returns and leaves has its usual grace, which is over before that of the restart."""
    book = LeaseBook(GRACE)
    book.restore(
        [("t2", "b", TERMS), ("t1", "a", TERMS)], [("t3", "c")], [("t4", "d", LOST)], [], 90.0
    )
    book.come_back("a", 10.0)
    book.leave("a", 11.0)
    assert book.wake_at() == 15.0
    assert book.next_lost(15.0) == "a"
    book.drop("a", LOST)
    assert book.next_lost(89.0) is None
    assert book.next_lost(90.0) == "b"


def test_a_device_that_came_back_and_left_again_is_lost_by_its_last_absence() -> None:
    book = book_of("a")
    book.leave("a", 1.0)
    book.come_back("a", 2.0)
    book.leave("a", 3.0)
    assert book.absent == {"a": 6.0}
    assert book.next_lost(5.0) is None
    assert book.wake_at() == 6.0
    assert book.next_lost(6.0) == "a"


def test_a_lease_that_stalls_soon_after_a_wait_ends_at_the_next_check() -> None:
    book = book_of("a")
    watch = book.watches["a"]
    watch.begin_wait(STALL - 1.0)
    assert book.next_stalled(STALL) is None
    watch.end_wait(STALL)
    assert watch.moved + STALL == STALL + 1.0
    assert book.wake_at() == STALL + STALL / CHECKS_PER_STALL
    assert book.next_stalled(STALL + STALL / CHECKS_PER_STALL) == "a"


@pytest.mark.parametrize("stall", [STALL, inf], ids=["watched", "not watched"])
def test_a_round_ends_and_nothing_is_left(stall: float) -> None:
    book = book_of("a", "b", stall=stall)
    book.leave("a", 1.0)
    book.complete(["b"], ["task-b"])
    book.drop("a", LOST)
    assert book.causes() == {LOST: 1}
    book.end_round(0)
    assert book == LeaseBook(GRACE, stall)
    assert book.wake_at() is None
