"""A run's clock stands still while the run is paused."""

from __future__ import annotations

from fleetlearn_coordinator.service.run_clock import RunClock


def test_a_pause_takes_no_time() -> None:
    now = 100.0
    clock = RunClock(lambda: now)
    assert clock.now() == clock.read(100.0) == clock.when(100.0) == 100.0
    for pause in (20.0, 5.0):
        before = clock.now()
        clock.stop()
        now += pause
        clock.stop()
        assert clock.now() == clock.read(now - 1) == before
        clock.go_on()
        clock.go_on()
        assert clock.now() == before
        now += 1.0
        assert clock.now() == before + 1.0
    assert clock.read(127.0) == 102.0
    assert clock.when(102.0) == 127.0
