"""The engine and devices that hold slots and never report: flapping, silent, lying. Time is
virtual."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from math import inf

import pytest
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    STALLED,
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    Opened,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.reliability import DOUBT, Reliability
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_protocol import Code

SETTINGS = Settings(
    goal=2, cohort=3, minimum=1, deadline=600.0, grace=10.0, gather=4.0, seed=7, stall=60.0
)


def started(
    devices: Iterable[str] = "abc", rules: Settings = SETTINGS
) -> tuple[Engine, dict[str, str]]:
    """An engine whose first round is open since 0 with these devices; device -> its task."""
    engine = Engine(rules)
    for device in devices:
        engine.check_in(device, None, 0.0)
    assert engine.phase is Phase.OPEN
    return engine, dict(engine.leases)


def of_type(commands: Iterable[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def awake(engine: Engine, until: float) -> list[tuple[float, Command]]:
    """Tick whenever the engine wants it; what it said, and when."""
    said = []
    while (wake := engine.wake_at()) is not None and wake <= until:
        said += [(wake, command) for command in engine.tick(wake)]
    return said


# Returns without progress


@pytest.mark.parametrize("stall", [60.0, inf], ids=["watched", "not watched"])
def test_a_device_that_crashes_and_returns_does_not_hold_its_slot(stall: float) -> None:
    """Back every 0.5 s, with a grace of 1 s: each return began the grace again, up to the round's
    deadline."""
    engine, tasks = started("abcd", SETTINGS._replace(grace=1.0, stall=stall))
    crashing, task = next(iter(tasks.items()))
    ended, now = list[tuple[float, Command]](), 4.0
    while not ended and now < 600:
        engine.disconnect(crashing, now)
        ended = awake(engine, now + 0.5)
        now += 0.5
        engine.check_in(crashing, None, now)
        engine.tick(now)
    assert ended[0] == (5.0, Ended(crashing, task, 1, LOST))
    assert of_type([ended[1][1]], Assign), "its slot is another's"


def test_each_absence_takes_a_part_of_the_grace_however_short_it_is() -> None:
    engine, tasks = started()
    for number in range(4):
        engine.disconnect("a", 10.0 + number)
        assert engine.check_in("a", None, 10.0 + number) != []
    engine.disconnect("a", 20.0)
    assert engine.tick(20.0)[0] == Ended("a", tasks["a"], 1, LOST)


def test_progress_restores_the_grace() -> None:
    engine, tasks = started()
    for number in range(30):
        engine.disconnect("a", 10.0 + number)
        engine.check_in("a", None, 10.5 + number)
        engine.progress("a", tasks["a"], "steps", 1 + number, 10.5 + number)
    engine.disconnect("a", 45.0)
    assert awake(engine, 54.9) == []
    assert awake(engine, 55.0) == [(55.0, Ended("a", tasks["a"], 1, LOST))]


def test_a_device_back_within_its_grace_is_not_lost_while_it_is_there() -> None:
    engine, _ = started()
    engine.disconnect("a", 10.0)
    engine.check_in("a", None, 19.0)
    assert awake(engine, 59.0) == []
    assert "a" in engine.leases


def test_a_device_that_holds_another_update_than_its_lease_is_given_its_task_again() -> None:
    """``held`` names X while the lease is Y: X is not wanted, and its report is refused as any
    other's."""
    engine, tasks = started()
    engine.disconnect("a", 10.0)
    (again,) = engine.check_in("a", "t0-9", 11.0)
    assert isinstance(again, Assign)
    assert (again.task, again.again) == (tasks["a"], True)
    assert engine.leases["a"] == tasks["a"]


# Progress


def test_a_lease_without_progress_ends_and_its_slot_goes_to_another() -> None:
    engine, tasks = started("abcd")
    (spare,) = engine.selection.idle
    silent, *others = tasks
    for device in others:
        engine.progress(device, tasks[device], "steps", 1, 30.0)
    assert awake(engine, 59.9) == []
    (at, ended), (_, cancel), (_, assign) = awake(engine, 60.0)
    assert (at, ended) == (60.0, Ended(silent, tasks[silent], 1, STALLED))
    assert cancel == CancelTask(
        silent,
        tasks[silent],
        Code.NOT_WANTED,
        "no step and no byte for 60 s (round.stall); the slot is given to another device",
    )
    assert isinstance(assign, Assign)
    assert assign.device == spare
    assert [at for at, command in awake(engine, 90.0) if isinstance(command, Ended)] == [90.0, 90.0]


def test_only_more_of_the_same_is_progress() -> None:
    """Steps, each content and the upload are counted apart; of an older task, or again, nothing
    is."""
    engine, tasks = started()
    for now, what, amount, counts in (
        (50.0, "steps", 3, True),
        (60.0, "steps", 3, False),
        (70.0, "steps", 2, False),
        (100.0, "model", 1, True),
        (150.0, "graph", 1, True),
        (160.0, "model", 1, False),
        (200.0, "upload", 4096, True),
        (210.0, "upload", 0, False),
    ):
        engine.progress("a", tasks["a"], what, amount, now)
        engine.progress("a", "t0-1", what, amount + 100, now)
        engine.progress("a", None, what, amount + 100, now)
        assert (engine.book.watches["a"].moved == now) == counts
    assert awake(engine, 259.0)[-1][1] != Ended("a", tasks["a"], 1, STALLED)
    assert (260.0, Ended("a", tasks["a"], 1, STALLED)) in awake(engine, 260.0)


def test_a_lease_that_waits_for_the_coordinator_does_not_stall() -> None:
    """It waits for a place to upload or download. The device's own time before and after counts
    together."""
    engine, tasks = started(rules=SETTINGS._replace(minimum=2))
    engine.wait("a", 44.0)
    engine.wait("a", 50.0)  # it is said again, as the device says it again
    assert {
        command.device for _, command in awake(engine, 500.0) if isinstance(command, Ended)
    } == {"b", "c"}
    engine.proceed("a", 500.0)
    engine.proceed("a", 501.0)
    assert awake(engine, 515.9) == []
    assert awake(engine, 516.0)[0] == (516.0, Ended("a", tasks["a"], 1, STALLED))


def test_waits_of_devices_without_a_lease_are_nothing() -> None:
    engine, _ = started("abcd")
    (spare,) = engine.selection.idle
    engine.wait(spare, 5.0)
    engine.proceed(spare, 6.0)
    assert spare not in engine.book.watches


def test_an_absence_does_not_count_as_a_stall_and_ends_a_wait() -> None:
    engine, tasks = started(rules=SETTINGS._replace(grace=300.0))
    engine.wait("a", 5.0)
    engine.disconnect("a", 14.0)
    awake(engine, 200.0)
    engine.check_in("a", tasks["a"], 204.0)
    assert awake(engine, 258.9) == []
    assert awake(engine, 259.0)[0] == (259.0, Ended("a", tasks["a"], 1, STALLED))


def test_progress_is_not_watched_unless_it_is_told() -> None:
    engine, _ = started(rules=SETTINGS._replace(stall=inf))
    assert awake(engine, 599.0) == []
    assert engine.book.wake_at() is None
    assert {command.cause for _, command in awake(engine, 600.0) if isinstance(command, Ended)} == {
        LATE
    }
    assert engine.selection.reliability == Reliability(), "and nothing is remembered"


def test_leases_are_watched_again_once_their_devices_are_back_after_a_restart() -> None:
    engine = Engine(SETTINGS, round=5)
    engine.restore(
        Restored(5, [("t5-1", "a", None), ("t5-2", "b", None)], [], [("t5-3", "c", STALLED)]), 0.0
    )
    assert engine.selection.reliability.level("c") == 1
    engine.check_in("a", None, 30.0)
    assert awake(engine, 89.0) == []
    ended = [(at, command) for at, command in awake(engine, 90.0) if isinstance(command, Ended)]
    assert ended == [(90.0, Ended("b", "t5-2", 5, LOST)), (90.0, Ended("a", "t5-1", 5, STALLED))]


# What is remembered


def test_what_counts_as_a_failure() -> None:
    rules = SETTINGS._replace(goal=4, cohort=6, minimum=1)
    engine, tasks = started("abcdef", rules)
    engine.disconnect("a", 5.0)
    engine.end("b", tasks["b"], "failed: bad-data", 5.0)
    engine.disconnect("f", 5.0)
    engine.check_in("f", None, 6.0)
    engine.disconnect("f", 7.0)
    for now in range(10, 610, 10):
        for device in "cde":
            engine.progress(device, tasks[device], "steps", now, float(now))
        awake(engine, float(now))
    assert dict(engine.selection.reliability.points) == {
        "a": 1,
        "b": 1,
        "c": DOUBT,
        "d": DOUBT,
        "e": DOUBT,
        "f": DOUBT,
    }


def test_who_comes_in_the_second_half_of_a_round_may_be_late() -> None:
    engine, _ = started("ab", SETTINGS._replace(minimum=2))
    engine.check_in("c", None, 400.0)
    engine.progress("c", engine.leases["c"], "steps", 1, 590.0)
    said = [command for _, command in awake(engine, 600.0)]
    assert ("c", LATE) in {
        (command.device, command.cause) for command in said if isinstance(command, Ended)
    }
    assert engine.selection.reliability.level("c") == 0
    assert engine.selection.reliability.level("a") == 1


def test_who_waits_for_the_coordinator_at_the_deadline_has_not_failed() -> None:
    engine, tasks = started(rules=SETTINGS._replace(deadline=50.0, minimum=2))
    engine.wait("a", 20.0)
    assert Ended("a", tasks["a"], 1, LATE) in [command for _, command in awake(engine, 50.0)]
    assert dict(engine.selection.reliability.points) == {"b": DOUBT, "c": DOUBT}


def test_who_is_one_too_many_has_not_failed() -> None:
    engine, tasks = started()
    engine.count_report("a", tasks["a"], 10.0)
    engine.count_report("b", tasks["b"], 10.0)
    assert engine.selection.reliability == Reliability()


def test_devices_in_doubt_take_part_where_nobody_else_is_there_and_a_report_clears_them() -> None:
    """After an outage all devices are in doubt; the fleet goes on training."""
    engine, _ = started("abc")
    said = awake(engine, 604.0)
    assert [at for at, command in said if isinstance(command, Ended)] == [60.0] * 3
    assert [at for at, command in said if isinstance(command, Abandon)] == [600.0]
    assert [at for at, command in said if isinstance(command, Opened)] == [604.0], (
        "others might have come"
    )
    (one, task), (two, other), _ = engine.leases.items()
    engine.count_report(one, task, 605.0)
    engine.count_report(two, other, 605.0)
    assert engine.selection.reliability.points.keys() == {*"abc"} - {one, two}


def test_the_choice_is_the_same_as_ever_where_nobody_fails() -> None:
    """Watched or not, device by device; the picks themselves are tested in test_random_draws.py."""

    def rounds(stall: float) -> list[Command]:
        engine = Engine(SETTINGS._replace(goal=20, cohort=30, minimum=20, stall=stall))
        said = [
            command
            for number in range(100)
            for command in engine.check_in(f"d{number:03}", None, 0.0)
        ]
        for now in range(1, 50):
            for device, task in list(engine.leases.items())[:20]:
                said += engine.count_report(device, task, float(now))
            said += engine.committed(float(now), change=1.0, metrics={})
        return said

    assert rounds(60.0) == rounds(inf)


# Fleets of honest devices and ghosts


class Fleet:
    """Honest devices report a second after they were told; a ghost does as its kind does. All of
    them stay around."""

    def __init__(
        self,
        ghosts: dict[str, str],
        honest: Iterable[str],
        rules: Settings,
        *,
        renamed: bool = False,
    ) -> None:
        self.kinds = {**ghosts, **dict.fromkeys(honest, "honest")}
        self.engine, self.renamed = Engine(rules), renamed
        """``renamed``: a ghost whose task has ended comes back under a new name."""
        self.now, self.serial = 0.0, count()
        self.heap: list[tuple[float, int, Callable[[], list[Command]]]] = []
        self.opened, self.seconds = 0.0, list[float]()
        """How long each round took that was committed; infinite: it was abandoned."""
        self.heard: Counter[str] = Counter()
        for device in self.kinds:
            self.do(self.engine.check_in(device, None, 0.0))

    def later(self, seconds: float, event: Callable[[], list[Command]]) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.serial), event))

    def run(self, rounds: int) -> list[float]:
        while len(self.seconds) < rounds:
            wake = self.engine.wake_at()
            assert wake is not None
            if self.heap and self.heap[0][0] <= wake:
                self.now, _, event = heapq.heappop(self.heap)
                self.do(event())
            else:
                self.now = wake
                self.do(self.engine.tick(wake))
        return self.seconds

    def do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Opened():
                    self.opened = self.now
                case Assign(device, task, again=False):
                    self.begin(device, task)
                case Commit():
                    self.seconds.append(self.now - self.opened)
                    self.do(self.engine.committed(self.now, change=1.0, metrics={}))
                case Abandon():
                    self.seconds.append(inf)
                case Ended(device) if self.renamed and self.kinds.get(device) in (
                    "silent",
                    "returning",
                    "lying",
                ):
                    self.later(0.1, lambda device=device: self.rename(device))  # type: ignore[misc]

    def rename(self, device: str) -> list[Command]:
        if device not in self.kinds:
            return []
        name = f"{device.split('.')[0]}.{next(self.serial)}"
        self.kinds[name] = self.kinds.pop(device)
        return [
            *self.engine.disconnect(device, self.now),
            *self.engine.check_in(name, None, self.now),
        ]

    def begin(self, device: str, task: str) -> None:
        match self.kinds[device]:
            case "honest":
                self.later(1.0, lambda: self.report(device, task))
            case "lying":
                self.later(10.0, lambda: self.lie(device, task, 1))
            case "returning":
                self.later(0.5, lambda: self.flap(device, task))

    def report(self, device: str, task: str) -> list[Command]:
        if not self.engine.takes_report(device, task):
            return []
        self.heard[device] += 1
        return self.engine.count_report(device, task, self.now)

    def lie(self, device: str, task: str, steps: int) -> list[Command]:
        if self.engine.takes_report(device, task):
            self.engine.progress(device, task, "steps", steps, self.now)
            self.later(10.0, lambda: self.lie(device, task, steps + 1))
        return []

    def flap(self, device: str, task: str) -> list[Command]:
        if not self.engine.takes_report(device, task):
            return []
        self.later(0.5, lambda: self.back(device, task))
        return self.engine.disconnect(device, self.now)

    def back(self, device: str, task: str) -> list[Command]:
        if self.engine.takes_report(device, task):
            self.later(0.5, lambda: self.flap(device, task))
        return self.engine.check_in(device, None, self.now)


RULES = Settings(
    goal=6, cohort=8, minimum=3, deadline=600.0, grace=10.0, gather=5.0, seed=3, stall=60.0
)
HONEST = [f"honest-{number}" for number in range(6)]


def ghosts(*kinds: str, each: int) -> dict[str, str]:
    return {f"{kind}-{number}": kind for kind in kinds for number in range(each)}


@pytest.mark.parametrize(
    ("kind", "first"),
    [("silent", 4), ("returning", 4), ("lying", 12)],
    ids=["beating", "returning", "lying"],
)
def test_six_honest_devices_among_fifty_four_ghosts_fill_rounds_after_the_first_few(
    kind: str, first: int
) -> None:
    """Each ghost has to be found out. The slots of the silent and of the returning go on in the
    same round; of the lying ones a round finds as many as it has slots. Then rounds take as long as
    without ghosts."""
    seconds = Fleet(ghosts(kind, each=54), HONEST, RULES).run(200)
    assert {*seconds[first:]} == {1.0}, seconds


def test_without_the_memory_the_same_ghosts_stop_the_training() -> None:
    seconds = Fleet(ghosts("silent", each=54), HONEST, RULES._replace(stall=inf)).run(20)
    assert sum(seconds) > 10 * 600.0


def test_all_kinds_of_ghosts_together_in_a_large_fleet() -> None:
    """Most ghosts are not known yet, so a round of any devices is held up; those between go to
    proven devices."""
    honest = [f"honest-{number}" for number in range(200)]
    fleet = Fleet(ghosts("silent", "returning", "lying", each=600), honest, RULES)
    seconds = fleet.run(400)
    assert sum(taken <= 1.0 for taken in seconds[20:]) > 0.93 * 380
    assert len(fleet.heard) > 20, "not the same few alone"


def test_ghosts_that_come_under_new_names_hold_up_one_round_in_sixty_five() -> None:
    seconds = Fleet(
        ghosts("silent", each=54), HONEST, RULES._replace(goal=3, cohort=4), renamed=True
    ).run(500)
    assert sum(taken <= 1.0 for taken in seconds[50:]) > 0.95 * 450


@pytest.mark.parametrize("spare", [0, 2])
def test_an_honest_device_in_doubt_gets_another_chance(spare: int) -> None:
    """Though there are always others. With each it reports, and is chosen as any other from then
    on."""
    honest = [f"honest-{number}" for number in range(30)]
    fleet = Fleet({}, honest, RULES._replace(cohort=6 + spare))
    fleet.run(1)
    fleet.engine.disconnect("honest-7", fleet.now)
    fleet.engine.selection.reliability.fail("honest-7", DOUBT)
    fleet.engine.check_in("honest-7", None, fleet.now)
    before = fleet.heard["honest-7"]
    fleet.run(60)
    assert fleet.heard["honest-7"] > before
    assert not fleet.engine.selection.reliability.points


def test_the_same_events_choose_the_same_devices() -> None:
    def heard() -> dict[str, int]:
        fleet = Fleet(ghosts("silent", "returning", "lying", each=20), HONEST, RULES)
        fleet.run(60)
        return fleet.heard

    assert heard() == heard()
