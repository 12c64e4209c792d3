"""When conditions are looked at, and what is remembered of them."""

from __future__ import annotations

import random

from fleetlearn_device.conditions.condition import Condition, UnreadableError
from fleetlearn_device.conditions.watch import LONGEST_WAIT, SPREAD, ConditionWatch
from fleetlearn_device.session.pause import Pause


class Sensor:
    """A value with a bound, and a count of its looks."""

    def __init__(self, value: float) -> None:
        self.value, self.looks = value, list[bool]()

    def __call__(self, held: bool) -> str | None:
        self.looks.append(held)
        return None if self.value >= (10 if held else 12) else f"{self.value:g} of 10"


def test_a_value_at_its_bound_pauses_once() -> None:
    sensor, now = Sensor(10), 0.0
    watch = ConditionWatch([Condition("level", sensor)], clock=lambda: now)
    seen = []
    for value in (10, 9.9, 10, 10.1, 9.9, 11.9, 12, 11, 10):
        sensor.value, now = value, now + 1.0
        seen.append(watch.look(fresh=False) is None)
    assert seen == [True, False, False, False, False, False, True, True, True]


def test_slow_conditions_are_looked_at_less_often_but_before_each_task() -> None:
    now = 0.0
    quick, slow = Sensor(20), Sensor(20)
    watch = ConditionWatch(
        [Condition("a", quick), Condition("b", slow, every=60.0)], clock=lambda: now
    )
    for _ in range(61):
        watch.look(fresh=False)
        now += 1.0
    assert (len(quick.looks), len(slow.looks)) == (61, 2)
    watch.look(fresh=True)
    assert (len(quick.looks), len(slow.looks)) == (62, 3)


def test_what_does_not_hold_is_said_together() -> None:
    a, b = Sensor(1), Sensor(2)
    watch = ConditionWatch([Condition("a", a), Condition("b", b, sends=False)])
    assert watch.look(fresh=True) == Pause(("a", "b"), "1 of 10; 2 of 10", sends=False)
    b.value = 20
    assert watch.look(fresh=True) == Pause(("a",), "1 of 10", sends=True)
    assert watch.pause == Pause(("a",), "1 of 10")


def test_what_cannot_be_read_any_more_does_not_hold() -> None:
    def gone(held: bool) -> str | None:
        raise UnreadableError("the sensor is gone")

    pause = ConditionWatch([Condition("temperature", gone)]).look(fresh=True)
    assert pause is not None
    assert pause.text == "the condition temperature cannot be read (the sensor is gone)"


def test_a_device_that_waits_wakes_for_nothing_but_its_heartbeats() -> None:
    watch = ConditionWatch([Condition("a", Sensor(20)), Condition("b", Sensor(20), every=60.0)])
    assert watch.look(fresh=True) is None
    assert watch.next_look(works=False) is None
    assert watch.next_look(works=True) == 1.0


def test_a_paused_device_looks_about_once_a_minute() -> None:
    watch = ConditionWatch([Condition("a", Sensor(1))], dice=random.Random(3))
    watch.look(fresh=True)
    waits = [watch.next_look(works=False) for _ in range(100)]
    assert all(wait is not None and 0.5 <= wait / 60.0 <= 1.5 for wait in waits)


def test_where_a_clock_says_when_the_device_sleeps_until_then() -> None:
    hours = Condition("hours", Sensor(1), opens_in=lambda: opens_in)
    watch = ConditionWatch([hours], dice=random.Random(3))
    watch.look(fresh=True)
    opens_in = 200.0
    # not all devices of a fleet in the same second
    waits = [watch.next_look(works=False) or 0.0 for _ in range(100)]
    assert 200.0 <= min(waits) < max(waits) <= 200.0 + SPREAD
    assert max(waits) - min(waits) > SPREAD / 2
    opens_in = 8 * 3600.0  # the clock may be set meanwhile
    assert (watch.next_look(works=False) or 0.0) <= LONGEST_WAIT + SPREAD
    both = ConditionWatch([hours, Condition("a", Sensor(1))], dice=random.Random(3))
    both.look(fresh=True)
    assert (both.next_look(works=False) or 0.0) <= 90.0
