"""The engine: rounds worked by hand, then any order of events under Hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from itertools import chain

import pytest
from fleetlearn_coordinator.rounds.commands import (
    GIVEN_BACK,
    LATE,
    LOST,
    SURPLUS,
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    Finish,
    Opened,
    Revived,
)
from fleetlearn_coordinator.rounds.engine import RESTART_GRACE, Engine
from fleetlearn_coordinator.rounds.lease_book import CHECKS_PER_STALL
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.rounds.settings import Phase, ReleaseBudget, Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_protocol import Code, ProtocolError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)
from waking import let_time_pass

SETTINGS = Settings(goal=2, cohort=3, minimum=1, deadline=60.0, grace=5.0, gather=4.0, seed=7)


def started(
    devices: Iterable[str] = "abc", rules: Settings = SETTINGS
) -> tuple[Engine, dict[str, Assign]]:
    """An engine whose first round is open with these devices; device -> its task."""
    engine = Engine(rules)
    commands = [command for device in devices for command in engine.check_in(device, None, 0.0)]
    commands += engine.tick(rules.gather)
    return engine, {command.device: command for command in commands if isinstance(command, Assign)}


def restored(
    round: int,
    leases: Iterable[tuple[str, str]],
    accepted: Iterable[tuple[str, str]] = (),
    dropped: Iterable[tuple[str, str, str]] = (),
) -> Restored:
    """An open round as it was stored; the lost devices may go on."""
    rows = list(dropped)
    lost = [(task, device, None) for task, device, cause in rows if cause == LOST]
    return Restored(round, [(*row, None) for row in leases], accepted, rows, lost)


def of_type(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_a_round_opens_with_goal_devices_and_later_ones_fill_the_cohort() -> None:
    engine = Engine(SETTINGS)
    assert engine.check_in("a", None, 1.0) == []
    commands = engine.check_in("b", None, 2.0)
    assert commands[0] == Opened(1)
    assert sorted(command.device for command in commands[1:] if isinstance(command, Assign)) == [
        "a",
        "b",
    ]
    assert engine.deadline == 62.0
    (late,) = engine.check_in("c", None, 3.0)
    assert isinstance(late, Assign)
    assert late.device == "c"
    assert engine.check_in("d", None, 4.0) == []  # the cohort is full


def test_a_smaller_round_opens_when_gathering_took_long_enough() -> None:
    engine = Engine(SETTINGS)
    engine.check_in("a", None, 1.0)
    assert engine.wake_at() == 5.0
    assert engine.tick(4.9) == []
    assert engine.tick(5.0)[0] == Opened(1)


def test_gathering_starts_again_when_too_few_are_left() -> None:
    engine = Engine(SETTINGS)
    engine.check_in("a", None, 1.0)
    engine.disconnect("a", 2.0)
    assert engine.wake_at() is None
    engine.check_in("b", None, 9.0)
    assert engine.wake_at() == 13.0


def test_the_goal_closes_the_round_and_cancels_the_rest() -> None:
    engine, tasks = started()
    engine.count_report("a", tasks["a"].task, 10.0)
    commands = engine.count_report("b", tasks["b"].task, 11.0)
    assert commands == [
        Ended("c", tasks["c"].task, 1, SURPLUS),
        CancelTask("c", tasks["c"].task, Code.ROUND_OVER, "round 1 is over: it has its 2 reports"),
        Commit(1, {SURPLUS: 1}),
    ]
    assert engine.phase is Phase.COMMITTING
    after = engine.committed(11.0, change=1.0, metrics={})
    assert after[0] == Opened(2)
    assert len(of_type(after, Assign)) == 3
    assert engine.version == 1


def release(engine: Engine, now: float) -> list[Command]:
    """Close the open round with its goal of reports, and commit it."""
    for device, task in list(engine.leases.items())[: engine.settings.goal]:
        engine.count_report(device, task, now)
    return engine.committed(now, change=1.0, metrics={})


def test_no_round_opens_once_the_privacy_budget_is_spent() -> None:
    spent = Finish("the privacy budget is spent", "privacy budget", 7.96, 8.0)
    rules = SETTINGS._replace(budget=ReleaseBudget(releases=5, spent=spent))
    engine = Engine(rules, version=7, releases=3)  # an earlier process rolled back four times
    for device in "abc":
        engine.check_in(device, None, 0.0)
    engine.roll_back()  # the open round is given up, and releases nothing
    engine.go_on_from_model(1.0)
    assert engine.releases == 3
    assert of_type(release(engine, 2.0), Opened) == [Opened(3)]
    assert release(engine, 3.0) == [spent]
    assert (engine.version, engine.releases) == (10, 5)
    assert engine.check_in("d", None, 4.0) == engine.tick(99.0) == []
    assert not engine.leases


def test_a_roll_back_gives_nothing_of_the_privacy_budget_back() -> None:
    spent = Finish("the privacy budget is spent", "privacy budget", 7.96, 8.0)
    engine, _ = started("ab", SETTINGS._replace(budget=ReleaseBudget(releases=1, spent=spent)))
    release(engine, 1.0)
    engine.roll_back()
    assert engine.go_on_from_model(2.0) == [spent]


@pytest.mark.parametrize("counts", [False, True])
def test_abandoned_rounds_count_where_updates_are_seen_as_they_are_sent(counts: bool) -> None:
    spent = Finish("the privacy budget is spent", "privacy budget", 7.96, 8.0)
    rules = SETTINGS._replace(budget=ReleaseBudget(releases=2, spent=spent, abandoned=counts))
    engine, _ = started("ab", rules)
    engine.roll_back()  # gives the first round up
    after = engine.go_on_from_model(1.0)
    assert of_type(after, Opened) == [Opened(2)]
    after = engine.tick(1.0 + rules.deadline)
    assert isinstance(after[-1], Finish) is counts
    assert engine.releases == 2 * counts


def test_an_abandoned_round_may_leave_fewer_than_it_counts() -> None:
    """Seven releases are left, and none once the open round is abandoned."""
    spent = Finish("the privacy budget is spent", "privacy budget", 7.96, 8.0)
    after = ReleaseBudget(releases=1, spent=spent)
    budget = ReleaseBudget(releases=7, spent=spent, abandoned=True, if_abandoned=after)
    engine, _ = started("ab", SETTINGS._replace(budget=budget))
    assert engine.tick(SETTINGS.deadline)[-1] == spent
    assert engine.settings.budget == after
    engine, _ = started("ab", SETTINGS._replace(budget=budget._replace(if_abandoned=None)))
    assert of_type(engine.tick(SETTINGS.deadline), Opened) == [Opened(2)]
    engine, _ = started("ab", SETTINGS._replace(budget=budget))
    assert of_type(release(engine, 1.0), Opened) == [Opened(2)], "a release is counted as one"


def test_a_snapshot_has_the_releases() -> None:
    engine, tasks = started()
    engine.releases = 4
    engine.count_report("a", tasks["a"].task, 1.0)
    engine.count_report("b", tasks["b"].task, 1.0)
    assert Engine.from_snapshot(SETTINGS, "t", engine.snapshot(), "abc").releases == 4


def test_the_deadline_commits_what_is_there() -> None:
    engine, tasks = started()
    engine.count_report("a", tasks["a"].task, 10.0)
    engine.disconnect("b", 58.0)
    commands = engine.tick(60.0)
    assert {
        (command.device, command.cause) for command in commands if isinstance(command, Ended)
    } == {
        ("b", LOST),
        ("c", LATE),
    }
    assert commands[-1] == Commit(1, {LOST: 1, LATE: 1})


def test_below_the_minimum_the_round_is_abandoned_and_the_next_opens() -> None:
    engine, _ = started(rules=SETTINGS._replace(minimum=2))
    commands = engine.tick(60.0)
    assert of_type(commands, Abandon) == [
        Abandon(1, {LATE: 3}, "0 reports at the deadline, 2 are the minimum")
    ]
    assert engine.version == 0
    assert engine.round == 2
    assert engine.phase is Phase.OPEN


def test_a_lost_device_gives_its_slot_to_another() -> None:
    engine, _ = started("abcd")
    spare = next(iter(engine.selection.idle))
    lost = next(iter(engine.leases))
    task = engine.leases[lost]
    engine.disconnect(lost, 10.0)
    assert engine.tick(14.9) == []
    ended, assign = engine.tick(15.0)
    assert ended == Ended(lost, task, 1, LOST)
    assert isinstance(assign, Assign)
    assert assign.device == spare


def test_a_device_that_returns_in_time_keeps_its_task() -> None:
    engine, tasks = started()
    engine.disconnect("a", 10.0)
    (again,) = engine.check_in("a", None, 12.0)
    assert again == tasks["a"]._replace(again=True)
    engine.tick(16.0)
    assert "a" in engine.leases
    engine.disconnect("a", 17.0)
    assert engine.check_in("a", tasks["a"].task, 18.0) == []  # it has its work and reports it now


def test_grace_counts_from_the_last_disconnection() -> None:
    engine, _ = started()
    engine.disconnect("a", 10.0)
    engine.check_in("a", None, 12.0)
    engine.disconnect("a", 13.0)
    assert engine.tick(15.0) == []
    assert of_type(engine.tick(18.0), Ended)


def test_a_lost_device_with_its_work_done_gets_a_free_slot_back() -> None:
    engine, tasks = started()
    engine.disconnect("a", 10.0)
    engine.tick(15.0)
    assert engine.causes() == {LOST: 1}
    assert engine.check_in("a", tasks["a"].task, 20.0) == [Revived("a", tasks["a"].task, 1)]
    assert engine.announce("a", tasks["a"].task, 1, 0.0) == []
    engine.count_report("a", tasks["a"].task, 21.0)
    assert engine.causes() == {}


def test_a_device_whose_new_connection_replaces_the_old_one_is_in_one_place() -> None:
    engine, tasks = started()
    engine.disconnect("a", 10.0)
    engine.tick(15.0)
    engine.check_in("a", None, 16.0)
    assert engine.check_in("a", tasks["a"].task, 17.0) == [Revived("a", tasks["a"].task, 1)]
    assert "a" in engine.leases
    assert "a" not in engine.selection.resting


def test_a_lost_device_that_trains_on_gets_a_free_slot_back_when_it_reports() -> None:
    engine, tasks = started()
    engine.disconnect("a", 10.0)
    engine.tick(15.0)
    assert engine.check_in("a", None, 20.0) == []
    assert engine.announce("a", tasks["a"].task, 1, 0.0) == [Revived("a", tasks["a"].task, 1)]
    assert engine.causes() == {}
    engine.count_report("a", tasks["a"].task, 21.0)
    assert engine.accepted == {tasks["a"].task: "a"}


def test_a_lost_device_is_not_wanted_once_its_slot_is_taken() -> None:
    engine, tasks = started("abcd")
    lost = next(iter(engine.leases))
    engine.disconnect(lost, 10.0)
    engine.tick(15.0)
    engine.check_in(lost, tasks[lost].task, 20.0)
    with pytest.raises(ProtocolError) as caught:
        engine.announce(lost, tasks[lost].task, 1, 0.0)
    assert caught.value.code is Code.NOT_WANTED


def test_a_device_has_one_turn_in_a_round() -> None:
    engine, tasks = started()
    engine.end("a", tasks["a"].task, "failed: diverged", 10.0)
    assert "a" not in engine.leases
    assert "a" in engine.selection.resting
    engine.disconnect("a", 11.0)
    assert engine.check_in("a", None, 12.0) == []
    assert engine.causes() == {"failed: diverged": 1}


def test_the_round_closes_when_nobody_is_left_to_wait_for() -> None:
    engine, tasks = started()
    engine.count_report("a", tasks["a"].task, 10.0)
    engine.end("b", tasks["b"].task, "failed: bad-data", 10.0)
    commands = engine.end("c", tasks["c"].task, "failed: bad-data", 10.0)
    assert commands[-1] == Commit(1, {"failed: bad-data": 2})


@pytest.mark.parametrize(
    ("device", "task", "round", "code"),
    [
        ("a", "t1-99", 1, Code.UNKNOWN_TASK),
        ("x", "t1-1", 1, Code.UNKNOWN_TASK),
        ("a", "t0-1", 0, Code.STALE_ROUND),
        ("a", "t9-1", 9, Code.STALE_ROUND),
    ],
)
def test_reports_that_are_refused(device: str, task: str, round: int, code: Code) -> None:
    engine, _ = started()
    with pytest.raises(ProtocolError) as caught:
        engine.announce(device, task, round, 0.0)
    assert caught.value.code is code


def test_a_report_counts_once() -> None:
    engine, tasks = started()
    engine.count_report("a", tasks["a"].task, 10.0)
    assert not engine.takes_report("a", tasks["a"].task)
    with pytest.raises(ValueError, match="not wanted"):
        engine.count_report("a", tasks["a"].task, 11.0)


def together(engine: Engine, reports: Iterable[tuple[str, str]], now: float) -> list[Command]:
    """The reports, (device, task), in one call."""
    devices, tasks = zip(*reports, strict=True)
    return engine.count_reports(devices, tasks, now)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_reports_that_come_together_are_those_one_after_the_other(data: st.DataObject) -> None:
    """With devices that are idle, gone, or failed meanwhile; some close the round, by its goal or
    by its end."""
    devices = [f"d{number}" for number in range(data.draw(st.integers(2, 8)))]
    goal = data.draw(st.integers(1, len(devices)))
    cohort = data.draw(st.integers(goal, len(devices)))
    minimum = data.draw(st.integers(1, goal))
    engine, tasks = started(
        devices, SETTINGS._replace(goal=goal, cohort=cohort, minimum=minimum, rounds=3)
    )
    for device in data.draw(st.lists(st.sampled_from(sorted(tasks)), unique=True)):
        if data.draw(st.booleans()):
            engine.disconnect(device, 5.0)
        elif len(engine.leases) > 1:
            more = engine.end(device, tasks[device].task, "failed: diverged", 6.0)
            tasks |= {command.device: command for command in more if isinstance(command, Assign)}
    wanted = [(device, tasks[device].task) for device in engine.leases]
    if not wanted:
        return
    room = goal - len(engine.accepted)
    reports = data.draw(st.permutations(wanted))[
        : data.draw(st.integers(1, min(room, len(wanted))))
    ]
    one, many = deepcopy(engine), deepcopy(engine)
    said = [one.count_report(*report, 10.0 + place) for place, report in enumerate(reports)]
    assert not any(said[:-1])
    assert together(many, reports, 9.0 + len(reports)) == said[-1]
    assert many == one
    if one.phase is Phase.COMMITTING:
        assert many.committed(20.0, change=1.0, metrics={}) == one.committed(
            20.0, change=1.0, metrics={}
        )
    assert many.tick(200.0) == one.tick(200.0)
    assert many == one


def test_reports_that_come_together_close_the_round_as_its_last_does() -> None:
    engine, tasks = started("abcd", SETTINGS._replace(goal=3, cohort=4, minimum=3))
    engine.disconnect("b", 5.0)
    assert together(engine, [("c", tasks["c"].task)], 10.0) == []
    assert together(engine, [("a", tasks["a"].task), ("b", tasks["b"].task)], 11.0) == [
        Ended("d", tasks["d"].task, 1, SURPLUS),
        CancelTask("d", tasks["d"].task, Code.ROUND_OVER, "round 1 is over: it has its 3 reports"),
        Commit(1, {SURPLUS: 1}),
    ]
    assert list(engine.accepted.values()) == ["c", "a", "b"]
    assert engine.selection.resting == {"a", "c", "d"}, "not who is gone"


@pytest.mark.parametrize(
    ("devices", "refused"),
    [("ax", "x"), ("aa", "a"), ("aba", "a"), ("abc", "c"), ("x", "x"), ("d", "d")],
    ids=[
        "unknown",
        "twice",
        "twice-and-more-than-the-goal",
        "more-than-the-goal",
        "unknown-alone",
        "idle",
    ],
)
def test_reports_that_are_not_wanted_are_refused_together_as_alone(
    devices: str, refused: str
) -> None:
    engine, tasks = started("abcd", SETTINGS._replace(goal=2, cohort=3, minimum=2))
    leased = sorted(tasks)  # whoever they are: a, b, c stand for them, d for the one that is idle
    (resting,) = engine.selection.idle
    names = dict(zip("abcdx", [*leased, resting, "x"], strict=True))
    reports = [
        (names[one], tasks[names[one]].task if names[one] in tasks else "t1-1") for one in devices
    ]
    with pytest.raises(
        ValueError, match=rf"task \S+ of {names[refused]} is not wanted in round 1 \(open\)"
    ):
        together(engine, reports, 10.0)


def test_a_report_is_of_the_devices_own_task() -> None:
    engine, tasks = started()
    for other in ("t0-1", tasks["b"].task):
        for reports in ([("a", other)], [("c", tasks["c"].task), ("a", other)]):
            with pytest.raises(ValueError, match=f"task {other} of a is not wanted in round 1"):
                together(deepcopy(engine), reports, 10.0)


def test_no_report_is_wanted_of_a_round_that_is_closed() -> None:
    engine, tasks = started()
    together(engine, [(device, tasks[device].task) for device in "ab"], 10.0)
    with pytest.raises(ValueError, match=r"not wanted in round 1 \(committing\)"):
        together(engine, [("c", tasks["c"].task)], 11.0)


def test_selection_follows_from_the_seed_and_the_devices_alone() -> None:
    def cohort(devices: str, seed: int) -> list[tuple[str, int]]:
        """Everybody waits before the round opens, so that all of them are candidates."""
        engine = Engine(
            SETTINGS._replace(goal=len(devices), cohort=3, minimum=len(devices), seed=seed)
        )
        for device in devices[:-1]:
            engine.check_in(device, None, 0.0)
        return [
            (c.device, c.seed)
            for c in engine.check_in(devices[-1], None, 0.0)
            if isinstance(c, Assign)
        ]

    assert cohort("abcdefgh", 1) == cohort("hgfedcba", 1)
    assert len({tuple(cohort("abcdefgh", seed)) for seed in range(20)}) > 10
    assert all(0 <= seed < 2**53 for _, seed in cohort("abcdefgh", 1))


def test_every_device_is_selected_about_equally_often() -> None:
    """Chi-square with 9 degrees of freedom: 27.9 is its 99.9 % point."""
    counts = dict.fromkeys("abcdefghij", 0)
    engine = Engine(SETTINGS._replace(goal=3, cohort=3, minimum=3))
    commands = [command for device in counts for command in engine.check_in(device, None, 0.0)]
    for _ in range(1000):
        chosen = [
            (command.device, command.task) for command in commands if isinstance(command, Assign)
        ]
        for device, task in chosen:
            counts[device] += 1
            engine.count_report(device, task, 0.0)
        commands = engine.committed(0.0, change=1.0, metrics={})
    assert sum((count - 300) ** 2 / 300 for count in counts.values()) < 27.9


def test_a_stop_rule_ends_the_run() -> None:
    engine, tasks = started(rules=SETTINGS._replace(rounds=1))
    together(engine, [(device, tasks[device].task) for device in "ab"], 1.0)
    assert engine.committed(1.0, change=1.0, metrics={}) == [
        Finish("1 rounds done", "rounds", 1, 1)
    ]
    assert engine.phase is Phase.FINISHED
    assert engine.check_in("z", None, 2.0) == []
    assert engine.wake_at() is None


def test_a_snapshot_goes_on_as_the_engine_that_it_was_taken_of() -> None:
    engine, tasks = started("abcd")
    with pytest.raises(ValueError, match=r"no round is being committed \(open\)"):
        engine.snapshot()
    together(engine, [(device, tasks[device].task) for device in list(tasks)[:2]], 10.0)
    taken = engine.snapshot()
    assert taken[:2] == (0, 1)
    other = Engine.from_snapshot(SETTINGS, "t", taken, "abcd")
    expected = engine.committed(11.0, change=1.0, metrics={})
    assert expected[0] == Opened(2)
    assert other.committed(11.0, change=1.0, metrics={}) == expected
    assert other == engine


def test_nobody_is_lost_from_round_to_round() -> None:
    devices = [f"d{number:03}" for number in range(400)]
    rules = SETTINGS._replace(goal=20, cohort=25, minimum=20)
    engine, _ = started(devices, rules)
    for number in range(6):
        now = 10.0 * number + 5
        gone, *failed = sorted(engine.leases)[:3]
        engine.disconnect(gone, now)
        engine.tick(now := now + rules.grace)
        for device in failed:  # its slot is another's
            engine.end(device, engine.leases[device], "failed: diverged", now)
        assert len(engine.leases) == rules.cohort
        together(engine, list(engine.leases.items())[: rules.goal], now)
        engine.committed(now, change=1.0, metrics={})
        assert len(engine.leases) == rules.cohort
        waiting = [*engine.selection.idle, *engine.leases]
        assert len(waiting) == len({*waiting}) == 400 - number - 1
        assert engine.waiting() == 400 - number - 1 - rules.cohort


def test_an_update_of_another_run_is_not_taken_for_one_of_this() -> None:
    old, tasks = started("ab", SETTINGS)
    assert old.round == 1
    engine = Engine(SETTINGS, prefix="other-")
    engine.check_in("a", tasks["a"].task, 0.0)
    engine.check_in("b", None, 0.0)
    assert engine.leases["a"].startswith("other-1-")
    with pytest.raises(ProtocolError) as caught:
        engine.announce("a", tasks["a"].task, 1, 0.0)
    assert caught.value.code is Code.UNKNOWN_TASK


def test_a_restart_goes_on_with_the_round() -> None:
    engine = Engine(SETTINGS, version=4, round=5)
    commands = engine.restore(
        restored(5, [("t5-1", "a"), ("t5-2", "b")], [("t5-3", "c")], [("t5-4", "d", LOST)]), 1000.0
    )
    assert commands == []
    assert engine.deadline == 1060.0
    assert engine.check_in("a", "t5-1", 1001.0) == []
    (again,) = engine.check_in("b", None, 1002.0)
    assert isinstance(again, Assign)
    assert again.task == "t5-2"
    assert engine.accepted == {"t5-3": "c"}  # it reported before the restart
    assert engine.check_in("d", None, 1003.0) == []  # it had its turn
    assert engine.count_report("a", "t5-1", 1004.0)[-1] == Commit(5, {LOST: 1, SURPLUS: 1})


def test_a_restart_gives_devices_time_to_return() -> None:
    engine = Engine(SETTINGS._replace(deadline=600.0), round=5)
    engine.restore(restored(5, [("t5-1", "a")]), 0.0)
    assert engine.tick(RESTART_GRACE - 1) == []
    assert engine.tick(RESTART_GRACE) == [Ended("a", "t5-1", 5, LOST)]


def test_a_restart_with_the_goal_reached_commits_at_once() -> None:
    engine = Engine(SETTINGS, round=5)
    assert engine.restore(restored(5, [], [("t5-1", "a"), ("t5-2", "b")]), 0.0) == [Commit(5, {})]


DEVICES = st.sampled_from([f"d{number}" for number in range(7)])


class AnyOrder(RuleBasedStateMachine):
    """Devices, losses, duplicates, time and restarts in any order, against a record made of the
    commands alone."""

    tasks = Bundle("tasks")
    """(device, task, round) of every lease ever given, for late and repeated reports."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = Settings(
            goal=2, cohort=3, minimum=2, deadline=20.0, grace=3.0, gather=2.0, seed=3, stall=6.0
        )
        self.engine = Engine(self.rules)
        self.now = 0.0
        self.connected: set[str] = set()
        self.open: int | None = None
        self.running: dict[str, str] = {}
        self.ended: dict[str, tuple[str, str]] = {}
        self.counted: dict[str, str] = {}
        self.given: list[tuple[str, str, int]] = []
        self.versions = 0

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Opened(number):
                    assert self.open is None, "two rounds are open"
                    assert not self.running
                    self.open, self.counted, self.ended = number, {}, {}
                case Assign(device, task, number, again=again):
                    assert device in self.connected
                    assert number == self.open
                    assert (
                        (self.running.get(task) == device) if again else (task not in self.running)
                    )
                    self.running[task] = device
                    self.given.append((device, task, number))
                case Ended(device, task, number, cause):
                    assert number == self.open
                    assert self.running.pop(task) == device
                    self.ended[task] = (device, cause)
                case Revived(device, task, number):
                    assert number == self.open
                    assert self.ended.pop(task) == (device, LOST)
                    self.running[task] = device
                case CancelTask(device, task):
                    assert device in self.connected
                    assert task in self.ended
                case Commit(number):
                    assert number == self.open
                    assert not self.running, "a lease outlived its round"
                    assert len(self.counted) >= self.rules.minimum
                    self.open, self.counted = None, {}
                    self.versions += 1
                    self.do(self.engine.committed(self.now, change=1.0, metrics={}))
                case Abandon(number):
                    assert number == self.open
                    assert not self.running
                    assert len(self.counted) < self.rules.minimum
                    self.open, self.counted = None, {}

    @rule(device=DEVICES)
    def check_in(self, device: str) -> None:
        self.connected.add(device)
        self.do(self.engine.check_in(device, None, self.now))

    @rule(target=tasks, data=st.data())
    @precondition(lambda self: self.given)
    def remember(self, data: st.DataObject) -> tuple[str, str, int]:
        return data.draw(st.sampled_from(self.given[-12:]))

    @rule(given=tasks)
    def check_in_with_work_done(self, given: tuple[str, str, int]) -> None:
        device, task, _ = given
        self.connected.add(device)
        self.do(self.engine.check_in(device, task, self.now))

    @rule(device=DEVICES)
    def disconnect(self, device: str) -> None:
        self.connected.discard(device)
        self.do(self.engine.disconnect(device, self.now))

    @rule(given=tasks)
    def report(self, given: tuple[str, str, int]) -> None:
        """Announced and uploaded, by a device that is connected: wanted, refused or counted
        already."""
        device, task, number = given
        if device not in self.connected:
            return
        if self.engine.accepted.get(task) == device:
            return
        try:
            self.do(self.engine.announce(device, task, number, self.now))
        except ProtocolError:
            assert task not in self.running
            assert task not in self.counted
            return
        assert self.running.pop(task) == device
        assert task not in self.counted, "a report counted twice"
        self.counted[task] = device
        self.do(self.engine.count_report(device, task, self.now))

    @rule(given=consumes(tasks))
    def fail(self, given: tuple[str, str, int]) -> None:
        self.do(self.engine.end(given[0], given[1], "failed: diverged", self.now))

    @rule(given=tasks, what=st.sampled_from(["steps", "model", "upload"]), amount=st.integers(0, 3))
    def progress(self, given: tuple[str, str, int], what: str, amount: int) -> None:
        """A device makes progress in a task that runs, or in one that is over, where it does not
        count."""
        device, task, _ = given
        if device in self.connected:
            self.engine.progress(device, task, what, amount, self.now)

    @rule(device=DEVICES)
    def wait(self, device: str) -> None:
        if device in self.connected:
            self.engine.wait(device, self.now)

    @rule(device=DEVICES)
    def proceed(self, device: str) -> None:
        if device in self.connected:
            self.engine.proceed(device, self.now)

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.engine, seconds)

    @rule()
    def restart(self) -> None:
        """The process dies; another one knows what the commands said, and nobody is connected."""
        version, number = self.versions, self.engine.round
        self.engine = Engine(self.rules, version=version, round=number)
        self.connected.clear()
        if self.open is not None:
            leases = [(task, device) for task, device in self.running.items()]
            dropped = [(task, device, cause) for task, (device, cause) in self.ended.items()]
            self.do(
                self.engine.restore(
                    restored(self.open, leases, list(self.counted.items()), dropped), self.now
                )
            )

    @invariant()
    def leases_are_what_the_commands_said(self) -> None:
        assert {task: device for device, task in self.engine.leases.items()} == self.running
        assert self.engine.accepted == self.counted

    @invariant()
    def the_cohort_is_bounded(self) -> None:
        assert len(self.running) + len(self.engine.accepted) <= self.rules.cohort
        assert len(set(self.running.values())) == len(self.running), "a device with two leases"

    @invariant()
    def a_round_ends_by_its_deadline(self) -> None:
        if self.open is not None:
            assert self.engine.deadline <= self.now + self.rules.deadline
            wake = self.engine.wake_at()
            assert wake is not None
            assert wake <= self.engine.deadline

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        waiting = [
            *self.engine.selection.idle,
            *chain.from_iterable(self.engine.selection.doubted.values()),
        ]
        idle, resting = set(waiting), self.engine.selection.resting
        assert len(idle) == len(waiting)
        leased = {device for device in self.engine.leases if device not in self.engine.book.absent}
        assert not idle & resting
        assert not leased & (idle | resting)
        assert idle | resting | leased == self.connected

    @invariant()
    def no_slot_is_free_while_a_device_waits(self) -> None:
        doubted = (
            any(self.engine.selection.doubted.values()) and len(self.counted) < self.rules.minimum
        )
        if self.open is not None and (self.engine.selection.idle or doubted):
            assert len(self.running) + len(self.counted) == self.rules.cohort

    @invariant()
    def no_round_that_lacks_a_device_waits_beside_one_that_may_try_again(self) -> None:
        selection = self.engine.selection
        assert selection.again <= selection.resting
        if self.open is not None and selection.again:
            assert len(self.running) + len(self.counted) >= self.rules.minimum

    @invariant()
    def no_device_fails_again_and_again_in_a_round(self) -> None:
        failed = Counter(device for device, cause in self.ended.values() if cause not in GIVEN_BACK)
        assert max(failed.values(), default=0) <= 1 + SECOND_CHANCES

    @invariant()
    def every_lease_is_watched_while_its_device_is_there(self) -> None:
        """It may stall: nobody holds a slot in silence for longer than a stall and the time between
        two checks."""
        longest = self.rules.stall * (1 + 1 / CHECKS_PER_STALL)
        looked_at = {task for _, _, task in self.engine.book._stall_checks}
        for device, task in self.engine.leases.items():
            watch = self.engine.book.watches.get(device)
            if device not in self.engine.book.absent:
                assert watch is not None
                assert watch.task == task
                assert watch.gone is None
                assert task in looked_at
                assert watch.waits is not None or self.now - watch.moved <= longest + 1e-9
            elif watch is not None:
                assert watch.task == task
        assert self.engine.book.watches.keys() <= self.engine.leases.keys()

    @invariant()
    def a_grace_is_never_longer_than_the_rules_say(self) -> None:
        for device, expires in self.engine.book.absent.items():
            watch = self.engine.book.watches.get(device)
            assert expires <= self.now + (self.rules.grace if watch is not None else RESTART_GRACE)

    @invariant()
    def every_lease_is_of_the_rounds_model(self) -> None:
        assert self.engine.book.terms.keys() == self.engine.leases.keys()
        assert self.engine.book.oldest_version() in (None, self.versions)

    @invariant()
    def versions_count_commits(self) -> None:
        assert self.engine.version == self.versions


AnyOrder.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.slow
class TestAnyOrderForLong(AnyOrder.TestCase):
    settings = settings(AnyOrder.TestCase.settings, max_examples=5000)


@pytest.mark.parametrize("cause", GIVEN_BACK)
def test_a_device_that_stopped_in_order_frees_its_slot_at_once_and_may_have_another_turn(
    cause: str,
) -> None:
    engine, tasks = started("ab", SETTINGS._replace(minimum=2))
    ended, *rest = engine.end("a", tasks["a"].task, cause, 10.0)
    assert ended == Ended("a", tasks["a"].task, 1, cause)
    assert rest == []  # not while it is still connected
    engine.disconnect("a", 10.1)
    (again,) = engine.check_in("a", None, 12.0)
    assert isinstance(again, Assign)
    assert (again.device, again.round, again.seed) == ("a", 1, tasks["a"].seed)
    assert again.task != tasks["a"].task
    for device, task in (("b", tasks["b"].task), ("a", again.task)):
        commands = engine.count_report(device, task, 13.0)
    assert of_type(commands, Commit)


@pytest.mark.parametrize("cause", GIVEN_BACK)
def test_the_slot_of_a_device_that_stopped_goes_to_one_that_waits(
    cause: str,
) -> None:
    engine, tasks = started("abcd")
    waits = next(device for device in "abcd" if device not in tasks)
    stops = next(iter(tasks))
    _, given = engine.end(stops, tasks[stops].task, cause, 10.0)
    assert isinstance(given, Assign)
    assert given.device == waits
    engine.disconnect(stops, 10.1)
    assert engine.check_in(stops, None, 12.0) == []  # all slots are taken


@pytest.mark.parametrize("cause", GIVEN_BACK)
def test_a_device_that_stops_and_stays_connected_is_given_nothing_in_later_rounds_either(
    cause: str,
) -> None:
    engine, tasks = started("ab", SETTINGS._replace(minimum=2))
    engine.end("a", tasks["a"].task, cause, 10.0)
    later = tasks["b"].deadline
    engine.tick(later)  # the round is abandoned
    assigned = of_type(engine.check_in("c", None, later), Assign)
    assert {command.device for command in assigned} == {"b", "c"}
    engine.disconnect("a", later)
    assert [command.device for command in of_type(engine.check_in("a", None, later), Assign)] == [
        "a"
    ]


def test_a_device_that_failed_has_had_its_turn() -> None:
    engine, tasks = started("ab")
    engine.end("a", tasks["a"].task, "failed: diverged", 10.0)
    engine.disconnect("a", 10.1)
    assert engine.check_in("a", None, 12.0) == []


# Second chances


def fail(engine: Engine, device: str, now: float) -> list[Command]:
    """The device fails its task, and has checked in again a second later."""
    said = engine.end(device, engine.leases[device], "failed: bad-data", now)
    return [*said, *engine.disconnect(device, now), *engine.check_in(device, None, now + 1.0)]


def test_a_round_that_needs_a_device_that_failed_gives_it_another_task() -> None:
    """Two devices, of which a round needs both: one reports, the other fails, is mended, and is
    back a second later. Both waited until the deadline; then the report was thrown away."""
    engine, tasks = started("ab", SETTINGS._replace(minimum=2))
    engine.count_report("a", tasks["a"].task, 9.0)
    ended, again = fail(engine, "b", 10.0)
    assert ended == Ended("b", tasks["b"].task, 1, "failed: bad-data")
    assert isinstance(again, Assign)
    assert (again.device, again.task, again.again, again.seed) == (
        "b",
        "t1-3",
        False,
        tasks["b"].seed,
    )
    assert of_type(engine.count_report("b", "t1-3", 12.0), Commit)


def test_a_device_that_fails_has_no_other_task_before_it_checks_in_again() -> None:
    engine, tasks = started("ab", SETTINGS._replace(minimum=2))
    engine.end("b", tasks["b"].task, "failed: bad-data", 10.0)
    assert engine.tick(11.0) == []
    engine.count_report("a", tasks["a"].task, 12.0)
    assert set(engine.leases) == set()


def test_a_device_that_crashes_each_time_cannot_keep_a_round_open() -> None:
    engine, tasks = started("abc", SETTINGS._replace(minimum=2))
    engine.count_report("a", tasks["a"].task, 9.0)
    assert not of_type(fail(engine, "b", 10.0), Assign), (
        "c is at a task, with which the round has enough"
    )
    said = fail(engine, "c", 20.0)
    assert [row.device for row in of_type(said, Assign)] == ["b"], (
        "that c fails leaves the slot to b"
    )
    for turn in range(2 * SECOND_CHANCES):
        (device,) = engine.leases
        fail(engine, device, 30.0 + turn)
    assert not engine.leases
    assert engine.selection.failures == {"b": 1 + SECOND_CHANCES, "c": 1 + SECOND_CHANCES}
    assert engine.wake_at() == engine.deadline
    assert of_type(engine.tick(engine.deadline), Abandon)
    assert engine.selection.failures == {}, "the next round begins without them"


def test_other_devices_come_first() -> None:
    engine, tasks = started("abc", SETTINGS._replace(cohort=2, minimum=2))
    first, second = tasks
    (spare,) = {*"abc"} - {*tasks}
    said = fail(engine, first, 10.0)
    assert [row.device for row in of_type(said, Assign)] == [spare]
    said = fail(engine, second, 20.0)
    assert [row.device for row in of_type(said, Assign)] == [first], "which has waited since before"


def test_a_lost_device_that_returns_without_its_update_gets_its_task_back() -> None:
    """It may still be at it; a process that was started again begins it again."""
    engine, tasks = started("ab", SETTINGS._replace(minimum=2))
    engine.disconnect("b", 10.0)
    assert engine.tick(15.0) == [Ended("b", tasks["b"].task, 1, LOST)]
    revived, again = engine.check_in("b", None, 20.0)
    assert revived == Revived("b", tasks["b"].task, 1)
    assert again == tasks["b"]._replace(again=True)
    engine.disconnect("b", 21.0)
    assert engine.tick(26.0) == [Ended("b", tasks["b"].task, 1, LOST)], (
        "its grace is counted from the beginning"
    )


def test_where_tasks_outlive_their_round_a_lost_device_that_returns_gets_another_task() -> None:
    """The one that it had may become too stale while it goes on."""
    engine, tasks = started("ab", SETTINGS._replace(minimum=2, carry=True, max_staleness=1))
    engine.disconnect("b", 10.0)
    engine.tick(15.0)
    (given,) = engine.check_in("b", None, 20.0)
    assert isinstance(given, Assign)
    assert (given.again, given.task) == (False, "t1-3")
    assert not engine.has_counted("b", tasks["b"].task)


def test_a_restart_gives_a_device_that_failed_before_it_another_task() -> None:
    engine = Engine(SETTINGS._replace(minimum=2))
    engine.restore(restored(3, [], [("t3-1", "a")], [("t3-2", "b", "failed: bad-data")]), 0.0)
    (given,) = engine.check_in("b", None, 1.0)
    assert isinstance(given, Assign)
    assert given.task == "t3-3"


@pytest.mark.parametrize(
    "rules",
    [
        SETTINGS._replace(minimum=2),
        SETTINGS._replace(minimum=2, cohort=2, asynchronous=True, max_staleness=5, max_updates=1),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_a_report_makes_up_for_an_earlier_failure_after_a_restart_too(rules: Settings) -> None:
    """The device fails, its next report counts, and the coordinator restarts: the device is done
    with this round."""
    engine = Engine(rules, round=3)
    failed, counted = ("t3-1", "b", "failed: bad-data"), ("t3-2.2", "b")
    engine.restore(restored(3, [], [counted], [failed]), 0.0)
    assert engine.check_in("b", None, 1.0) == []
    assert engine.selection.failures == {}
    (given,) = of_type(engine.check_in("a", None, 2.0), Assign)
    assert (given.device, given.task) == ("a", "t3-3")


def test_a_failure_after_a_report_counts_after_a_restart() -> None:
    rules = SETTINGS._replace(minimum=2, asynchronous=True, max_staleness=5, max_updates=2)
    engine = Engine(rules, round=3)
    failed, counted = ("t3-2.2", "b", "failed: bad-data"), ("t3-1", "b")
    engine.restore(restored(3, [], [counted], [failed]), 0.0)
    assert engine.selection.failures == {"b": 1}
    (again,) = engine.check_in("b", None, 1.0)
    assert isinstance(again, Assign)


def test_a_buffer_that_nobody_else_can_fill_waits_for_no_rest() -> None:
    """Asynchronously a device that failed rests until the round's time is over; here the other is
    at its limit."""
    rules = SETTINGS._replace(
        minimum=2, cohort=2, asynchronous=True, max_staleness=5, max_updates=1
    )
    engine, _ = started("ab", rules)
    engine.count_report("a", engine.leases["a"], 9.0)
    said = fail(engine, "b", 10.0)
    assert [(row.device, row.task) for row in of_type(said, Assign)] == [("b", "t1-3.2")]
    assert of_type(engine.count_report("b", "t1-3.2", 12.0), Commit)


@pytest.mark.parametrize("cause", GIVEN_BACK)
def test_who_stopped_may_have_another_turn_after_a_restart_too(cause: str) -> None:
    engine = Engine(SETTINGS)
    engine.restore(
        restored(3, [("t3-2", "b")], [], [("t3-1", "a", cause), ("t3-3", "c", "failed: diverged")]),
        0.0,
    )
    (given,) = engine.check_in("a", None, 1.0)
    assert isinstance(given, Assign)
    assert given.task == "t3-4"
    assert engine.check_in("c", None, 1.0) == []
