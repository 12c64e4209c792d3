"""One lease's watch, second by second."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.progress_watch import MAX_RETURNS, Watch

GRACE = 8.0


def test_only_more_of_the_same_is_progress() -> None:
    watch = Watch("t1", 10.0, GRACE)
    for now, what, amount, counts in (
        (11.0, "steps", 0, False),
        (12.0, "steps", 3, True),
        (13.0, "steps", 3, False),
        (14.0, "steps", 2, False),
        (15.0, "upload", 1, True),
        (16.0, "steps", 4, True),
    ):
        watch.progress(what, amount, GRACE, now)
        assert (watch.moved == now) == counts
        assert watch.progressed == (now >= 12.0)


def test_time_of_the_coordinator_is_not_the_devices() -> None:
    watch = Watch("t1", 10.0, GRACE)
    watch.begin_wait(12.0)
    watch.begin_wait(15.0)  # it waits since 12
    watch.end_wait(20.0)
    assert watch.moved == 18.0, "2 s of its own have passed"
    watch.end_wait(30.0)
    assert watch.moved == 18.0


def test_progress_while_the_device_waits_counts_from_then_on() -> None:
    watch = Watch("t1", 10.0, GRACE)
    watch.begin_wait(12.0)
    watch.progress("model", 1, GRACE, 14.0)
    watch.end_wait(20.0)
    assert watch.moved == 20.0


@pytest.mark.parametrize(
    ("away", "taken"), [(0.0, GRACE / MAX_RETURNS), (1.0, GRACE / MAX_RETURNS), (3.0, 3.0)]
)
def test_an_absence_is_taken_off_the_grace_and_progress_restores_it(
    away: float, taken: float
) -> None:
    watch = Watch("t1", 10.0, GRACE)
    watch.begin_wait(12.0)
    watch.leave(14.0)
    assert watch.waits is None
    watch.come_back(GRACE, 14.0 + away)
    assert watch.grace == GRACE - taken
    assert watch.moved == 12.0 + away
    watch.come_back(GRACE, 50.0)  # it was there
    assert watch.grace == GRACE - taken
    watch.progress("steps", 1, GRACE, 51.0)
    assert watch.grace == GRACE
