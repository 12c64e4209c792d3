"""What devices did in each minute: worked by hand, over a restart, and bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from fleetlearn_coordinator.dashboard.live_records import Minute
from fleetlearn_coordinator.dashboard.run_history import MINUTES, MOST_NAMES, FleetNow
from fleetlearn_coordinator.rounds.commands import Ended
from fleetlearn_coordinator.service.fleet_minutes import (
    KEYS,
    FleetMinutes,
    key_of,
    read_minutes,
)
from fleetlearn_coordinator.service.live_run import read_history
from fleetlearn_coordinator.service.observers import RoundEnded, UpdateSaved
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_protocol.messages import Part, Report
from peers import PlanMaker, fleet, update_of

REPORT = Report("t", 1, (Part("update", "float32", 4, 0),), 1, 1, 1.0, True, 1.0)
IDLE = FleetNow(0, 0, 0, 0)


class Watched:
    """A run's minutes, with a clock that stands still."""

    def __init__(self, now: float, rows: Iterable[Minute] = ()) -> None:
        self.now = now
        self.minutes = FleetMinutes(rows, lambda: self.now)

    def second(self, fleet: FleetNow = IDLE, present: int = 0, up: int = 0, down: int = 0) -> None:
        self.minutes.sample(fleet, present, up, down)
        self.now += 1


def values(rows: Iterable[Row]) -> dict[str, Any]:
    """Return what the ledger has once the rows are written."""
    assert all(isinstance(row, Metadata) for row in rows)
    return {row.key: row.value for row in rows if isinstance(row, Metadata)}


def test_seconds_add_up_to_minutes() -> None:
    """The seconds 1020 to 1079 are of the minute that ends at 1080."""
    run = Watched(1015.5)
    for second in range(1015, 1083):
        run.minutes([UpdateSaved("a", REPORT, 1, 0)])
        if second % 30 == 0:
            run.minutes([Ended("a", "t", 1, "lost")])
        run.second(FleetNow(second, 3, 2, 1), 2000 - second, 3 * (second - 1014), second - 1014)
    first, last = run.minutes.rows.rows
    assert first == (1020, 1019, 3, 2, 1, 5, 15, 5, {}, 985)
    assert last == (1080, 1079, 3, 2, 1, 60, 180, 60, {"lost": 2}, 980)


def test_bytes_do_not_fall_when_a_round_closes() -> None:
    """The count of the open round begins at 0 when the round closes, and the event comes later."""
    run = Watched(0.0)
    run.second(up=100, down=40)
    run.second()
    assert (run.minutes.received, run.minutes.sent) == (100, 40)
    run.minutes([RoundEnded(1, "committed", 1, {"bytes_up": 120, "bytes_down": 40}, "")])
    run.second(up=5)
    assert (run.minutes.received, run.minutes.sent) == (125, 40)


def test_a_minute_is_written_once_and_with_its_hour() -> None:
    run = Watched(7200.0)
    written: dict[str, Any] = {}
    for second in range(120):
        run.second(FleetNow(second, 0, 0, 0), second)
        rows = values(run.minutes.take_rows())
        assert list(rows) == ([key_of(2)] if second == 60 else [])
        written |= rows
    written |= values(run.minutes.take_rows(ended=True))
    assert [row.connected for row in read_minutes(written.values())] == [59, 119]


def test_minutes_of_two_hours_are_written_together() -> None:
    """As by a coordinator that could not write for a while."""
    run = Watched(3600.0 - 60)
    for _ in range(180):
        run.second(present=7)
    written = values(run.minutes.take_rows(ended=True))
    assert list(written) == [key_of(0), key_of(1)]
    assert [row.end for row in read_minutes(written.values())] == [3600, 3660, 3720]


def test_a_day_is_kept_and_no_more() -> None:
    """In memory, and in the ledger, whatever devices do."""
    run = Watched(0.0)
    ledger: dict[str, Any] = {}
    causes = [Ended("a", "t", 1, f"failed: {number}") for number in range(100)]
    for minute in range(MINUTES + 190):
        run.now = 60.0 * minute
        if minute > MINUTES + 60:  # the causes of a whole hour
            run.minutes(causes)
        run.second(FleetNow(minute, 0, 0, 0))
        ledger |= values(run.minutes.take_rows())
    assert len(run.minutes.rows.rows) == MINUTES
    assert set(ledger) == set(KEYS)
    assert max(map(len, ledger.values())) < 60 * (100 + 20 * (MOST_NAMES + 1))
    found = read_minutes(ledger.values(), run.now)
    assert found == list(run.minutes.rows.rows)[-len(found) :]
    assert len(found) == MINUTES - 1, "the minute that goes on is the last of the day"


def test_the_most_devices_of_the_last_hour_outlive_a_restart() -> None:
    run = Watched(86_400.0)
    assert run.minutes.most_present() == 0
    run.second(present=40)
    run.second(present=30)
    assert run.minutes.most_present() == 40
    written = values(run.minutes.take_rows(ended=True))
    again = Watched(run.now + 600, read_minutes(written.values(), run.now + 600))
    again.second(present=10)
    assert again.minutes.most_present() == 40
    again.now += 3060
    assert again.minutes.most_present() == 10


def test_rows_of_a_clock_that_was_ahead_are_left_out() -> None:
    row = Minute(10_000_020, 1, 0, 0, 0, 0, 0, 0, {}, 1)
    run = Watched(5_000_000.0, [row])
    assert run.minutes.most_present() == 0
    run.second(present=3)
    written = values(run.minutes.take_rows(ended=True))
    assert [row.present for row in read_minutes(written.values(), run.now)] == [3]


def test_damage_is_named() -> None:
    with pytest.raises(StoreError, match="devices over time is damaged"):
        read_minutes([None, "[[1]]"])


def test_a_run_records_its_minutes(make_plan: PlanMaker) -> None:
    """They are in its records when it ends, and its next process begins with them."""
    plan = make_plan(round__goal=1)

    async def serve(*, work: bool) -> None:
        async with fleet(plan) as (coordinator, join):
            if work:
                peer = await join("a")
                await peer.do_round(update_of(1.0))
                coordinator.add_second()
            known.append(coordinator.minutes.most_present())

    known: list[int] = []
    asyncio.run(asyncio.wait_for(serve(work=True), 30))
    (row,) = read_history(plan.data_dir).minutes.rows
    assert (row.connected, row.reports, row.present) == (1, 1, 1)
    assert row.received >= update_of(1.0).nbytes
    asyncio.run(asyncio.wait_for(serve(work=False), 30))
    assert known == [1, 1]


def test_a_minute_is_recorded_while_the_run_goes_on(make_plan: PlanMaker) -> None:
    """A process that is killed loses the minute that goes on, and no other."""
    plan, begin = make_plan(round__goal=1), time.time() // 60 * 60 + 3600

    def recorded() -> list[tuple[int, int]]:
        rows = read_history(plan.data_dir).minutes.rows
        return [(row.connected, row.present) for row in rows if row.end == begin + 60]

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            await join("a")
            coordinator.minutes._now = lambda: begin
            coordinator.add_second()
            coordinator.minutes._now = lambda: begin + 60
            coordinator.add_second()
            await join("b")  # an event: the run's state is recorded
            async with asyncio.timeout(20):
                while not recorded():
                    await asyncio.sleep(0.05)
            assert recorded() == [(1, 1)]

    asyncio.run(test())
