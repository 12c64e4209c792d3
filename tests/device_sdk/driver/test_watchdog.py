"""What systemd is told: a device that gets on is alive, one that stands still is not."""

from __future__ import annotations

import asyncio
import os

import pytest
from fleetlearn_device.driver import watchdog
from fleetlearn_device.driver.watchdog import (
    LONGEST,
    OVERDUE,
    STILL,
    ProgressWatch,
    WorkNow,
    asked_for,
    tell_alive,
)


class Machine:
    """A clock, and the CPU seconds that the process used."""

    def __init__(self) -> None:
        self.now, self.used = 1000.0, 50.0
        self.watch = ProgressWatch(lambda: self.now, lambda: self.used)

    def alive_for(self, seconds: float, work: WorkNow | None, load: float = 0.0) -> float | None:
        """Look every 40 s at the same work, while the process uses this part of a core. Return
        after how many seconds it was not alive, or None."""
        begin = self.now
        while self.now < begin + seconds:
            if not self.watch.gets_on(work):
                return self.now - begin
            self.now += 40.0
            self.used += 40.0 * load
        return None


def test_a_device_without_work_is_alive_for_ever() -> None:
    assert Machine().alive_for(1e6, None) is None


def test_a_long_step_is_alive_while_it_computes() -> None:
    machine = Machine()
    step = WorkNow("t1", 4, machine.now + 50_000.0)
    assert machine.alive_for(50_000.0, step, load=0.9) is None


def test_a_step_that_does_not_compute_stands_still() -> None:
    machine = Machine()
    step = WorkNow("t1", 4, machine.now + 50_000.0)
    assert machine.alive_for(50_000.0, step, load=0.001) == pytest.approx(STILL, abs=40.0)


def test_the_cpu_of_an_earlier_step_does_not_help() -> None:
    machine = Machine()
    machine.alive_for(4000.0, WorkNow("t1", 4, machine.now + 50_000.0), load=1.0)
    step = WorkNow("t1", 5, machine.now + 50_000.0)
    assert machine.alive_for(50_000.0, step) == pytest.approx(STILL, abs=40.0)


def test_slow_steps_that_end_are_alive_without_cpu() -> None:
    """The CPU may be elsewhere: on a GPU, or in a process that gives the data."""
    machine = Machine()
    for batch in range(100):
        work = WorkNow("t1", batch, machine.now + 1e6)
        assert machine.alive_for(STILL - 40.0, work) is None


def test_a_step_that_computes_in_a_circle_ends_with_the_deadline() -> None:
    machine = Machine()
    step = WorkNow("t1", 4, machine.now + 2000.0)
    found = machine.alive_for(50_000.0, step, load=1.0)
    assert found == pytest.approx(2000.0 + OVERDUE, abs=40.0)


def test_the_last_step_of_a_cancelled_task_may_take_its_time_and_not_for_ever() -> None:
    machine = Machine()
    found = machine.alive_for(50_000.0, WorkNow("t1", 4, None), load=1.0)
    assert found == pytest.approx(LONGEST, abs=40.0)


def test_systemd_is_told_while_work_gets_on_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    waits: list[float] = []
    answers = [True, True, False, False]

    class Watch:
        def gets_on(self, work: object) -> bool:
            return answers.pop(0)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if not answers:
            raise asyncio.CancelledError

    monkeypatch.setattr(watchdog, "ProgressWatch", Watch)
    monkeypatch.setattr(watchdog, "notify_systemd", told.append)
    monkeypatch.setattr(watchdog.asyncio, "sleep", sleep)
    monkeypatch.setenv("WATCHDOG_USEC", "120000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(tell_alive(lambda: None))
    assert told == ["WATCHDOG=1", "WATCHDOG=1"]
    assert waits == [40.0] * 4


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "120000000"}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": str(os.getpid())}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_it_is_told_only_if_it_asks_this_process(
    variables: dict[str, str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert asked_for() == seconds
