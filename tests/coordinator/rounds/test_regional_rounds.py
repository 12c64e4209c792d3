"""Rounds with regions: worked by hand, and with devices, losses, time and restarts in any order."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    SURPLUS,
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    Opened,
    RegionEnded,
    Revived,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.selection_rules import Oort, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import (
    FitSettings,
    RegionSettings,
    RegionsSettings,
    Settings,
)
from fleetlearn_coordinator.rounds.strategies.regional_selection import RegionalSelection
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_protocol import ProtocolError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from waking import let_time_pass

NORTH = RegionSettings("north", goal=2, cohort=3, minimum=2, deadline=30.0)
SOUTH = RegionSettings("south", goal=2, cohort=3, minimum=1, deadline=20.0)
RULES = Settings(
    goal=4,
    cohort=6,
    minimum=1,
    deadline=60.0,
    grace=5.0,
    gather=4.0,
    seed=7,
    stall=70.0,
    regions=RegionsSettings((NORTH, SOUTH), goal=2, minimum=1),
)


def ruled(engine: Engine) -> RegionalSelection:
    assert isinstance(engine.selection, RegionalSelection)
    return engine.selection


def check_in(engine: Engine, device: str, now: float, held: str | None = None) -> list[Command]:
    """A device is in the region that its name begins with: n or s; another one is in none."""
    region = {"n": "north", "s": "south"}.get(device[0], "")
    ruled(engine).stated[device] = Stated(region=region)
    return engine.check_in(device, held, now)


def started(
    devices: str = "n1 n2 n3 s1 s2 s3", rules: Settings = RULES
) -> tuple[Engine, dict[str, str]]:
    """Return an engine whose first round has opened, and device -> task."""
    engine, commands = Engine(rules), list[Command]()
    for device in devices.split():
        commands += check_in(engine, device, 0.0)
    commands += engine.tick(rules.gather)
    return engine, {each.device: each.task for each in commands if isinstance(each, Assign)}


def report(engine: Engine, tasks: dict[str, str], devices: str, now: float) -> list[Command]:
    commands = list[Command]()
    for device in devices.split():
        commands += engine.count_report(device, tasks[device], now)
    return commands


def test_a_round_opens_when_each_region_has_devices_for_its_goal() -> None:
    engine = Engine(RULES)
    for device in ("n1", "n2", "n3", "n4", "s1"):
        assert check_in(engine, device, 0.0) == []
    opened, *assigned = check_in(engine, "s2", 1.0)
    assert opened == Opened(1)
    given = Counter(each.device[0] for each in assigned if isinstance(each, Assign))
    assert given == {"n": 3, "s": 2}, "a region has no more slots than its cohort"


def test_a_round_opens_after_a_time_with_the_minimum_of_regions() -> None:
    engine = Engine(RULES)
    assert check_in(engine, "n1", 0.0) == []
    assert engine.participation.gather_until is None, "north has one of its minimum of two"
    assert check_in(engine, "n2", 1.0) == []
    assert engine.wake_at() == 5.0
    engine.disconnect("n2", 2.0)
    assert engine.participation.gather_until is None
    check_in(engine, "n2", 3.0)
    commands = engine.tick(7.0)
    assert commands[0] == Opened(1)
    late = check_in(engine, "s1", 8.0)
    assert [type(each) for each in late] == [Assign], "a region fills while the round is open"


def test_a_lease_ends_with_its_region() -> None:
    engine, tasks = started()
    ends = {device: engine.book.terms[device].ends for device in tasks}
    assert ends["n1"] == engine.deadline - 30.0
    assert ends["s1"] == engine.deadline - 40.0
    assert not engine.book.terms["s1"].short


def test_a_region_with_its_goal_is_done_and_its_other_devices_are_free() -> None:
    engine, tasks = started()
    ended, cancelled, over = report(engine, tasks, "n1 n2", 10.0)
    assert ended == Ended("n3", tasks["n3"], 1, SURPLUS)
    assert isinstance(cancelled, CancelTask)
    assert cancelled.text == "region north of round 1 is over: it has its goal"
    assert over == RegionEnded(1, "north", True, 2, "it has its goal")
    assert not engine.takes_report("n3", tasks["n3"])
    *_, south, commit = report(engine, tasks, "s1 s2", 11.0)
    assert south == RegionEnded(1, "south", True, 2, "it has its goal")
    assert commit == Commit(1, {SURPLUS: 2}, ("north", "south"))


def test_a_region_ends_at_its_own_deadline_with_its_minimum() -> None:
    engine, tasks = started()
    report(engine, tasks, "s1", 10.0)
    report(engine, tasks, "n1", 12.0)
    at = engine.wake_at()
    assert at == engine.deadline - 40.0
    commands = engine.tick(at)
    assert [each.cause for each in commands if isinstance(each, Ended)] == [LATE, LATE]
    assert commands[-1] == RegionEnded(1, "south", True, 1, "its deadline has passed")
    (*_, over, commit) = engine.tick(engine.deadline - 30.0)
    assert over == RegionEnded(
        1, "north", False, 1, "its deadline has passed: 1 reports, 2 are the minimum"
    )
    assert isinstance(commit, Commit)
    assert commit.regions == ("south",)
    assert commit.dropped == {LATE: 4}


def test_a_region_without_devices_ends_with_its_minimum() -> None:
    engine, tasks = started("n1 n2 n3 s1")
    *_, over = report(engine, tasks, "s1", 10.0)
    assert over == RegionEnded(
        1, "south", True, 1, "it has its minimum, and none of its devices has a task"
    )


def test_too_few_regions_abandon_the_round_at_once() -> None:
    rules = RULES._replace(regions=RegionsSettings((NORTH, SOUTH), goal=2, minimum=2))
    engine, tasks = started(rules=rules)
    report(engine, tasks, "n1 n2", 10.0)
    commands = engine.tick(engine.deadline - 40.0)
    (abandoned,) = [each for each in commands if isinstance(each, Abandon)]
    assert abandoned.text == "1 region is done (north), 2 are the minimum"


def test_no_region_is_done_at_the_deadline() -> None:
    rules = RULES._replace(
        regions=RegionsSettings((NORTH._replace(deadline=60.0), SOUTH), goal=2, minimum=1)
    )
    engine, _ = started("n1 n2 n3", rules)
    engine.tick(engine.deadline - 40.0)
    commands = engine.tick(engine.deadline)
    assert [each.cause for each in commands if isinstance(each, Ended)] == [LATE] * 3
    assert commands[-2:] == [
        RegionEnded(1, "north", False, 0, "the round is over: 0 reports, 2 are the minimum"),
        Abandon(1, {LATE: 3}, "0 regions are done, 1 are the minimum"),
    ]


def test_the_round_closes_with_its_goal_of_regions_and_takes_who_has_the_minimum() -> None:
    third = RegionSettings("west", goal=2, cohort=2, minimum=2, deadline=60.0)
    rules = RULES._replace(regions=RegionsSettings((NORTH, SOUTH, third), goal=1, minimum=1))
    engine, tasks = started(rules=rules)
    report(engine, tasks, "s1", 10.0)
    commands = report(engine, tasks, "n1 n2", 10.0)
    assert [each for each in commands if isinstance(each, RegionEnded)] == [
        RegionEnded(1, "north", True, 2, "it has its goal"),
        RegionEnded(1, "south", True, 1, "the round is over"),
        RegionEnded(1, "west", False, 0, "the round is over: 0 reports, 2 are the minimum"),
    ]
    assert isinstance(commands[-1], Commit)
    assert commands[-1].regions == ("north", "south")


def test_a_lost_device_gets_its_slot_back_in_its_region_alone() -> None:
    engine, tasks = started()
    for device in ("n3", "s3"):
        engine.disconnect(device, 5.0)
    engine.tick(10.0)
    report(engine, tasks, "n1 n2", 11.0)
    assert not any(isinstance(each, Revived) for each in check_in(engine, "n3", 12.0, tasks["n3"]))
    assert not any(isinstance(each, Revived) for each in check_in(engine, "n9", 12.0, tasks["s3"]))
    assert check_in(engine, "s3", 12.0, tasks["s3"]) == [Revived("s3", tasks["s3"], 1)]
    assert engine.book.terms["s3"].region == "south"
    assert engine.book.terms["s3"].ends == engine.deadline - 40.0


def test_a_failed_device_has_another_turn_where_its_region_lacks_one() -> None:
    engine, tasks = started("n1 n2 s1 s2 s3")
    engine.end("n1", tasks["n1"], "failed: diverged", 5.0)
    engine.end("s1", tasks["s1"], "failed: diverged", 5.0)
    assert check_in(engine, "s1", 6.0) == []
    (again,) = check_in(engine, "n1", 6.0)
    assert isinstance(again, Assign)
    assert engine.book.terms["n1"].region == "north"


def test_a_lost_device_that_comes_back_goes_on_where_its_region_lacks_it() -> None:
    engine, tasks = started("n1 n2 s1 s2 s3")
    engine.disconnect("n1", 5.0)
    engine.tick(10.0)
    revived, again = check_in(engine, "n1", 11.0)
    assert revived == Revived("n1", tasks["n1"], 1)
    assert isinstance(again, Assign)
    assert again.again


def test_a_device_without_a_region_is_given_nothing() -> None:
    engine, tasks = started("n1 n2 n3 x1 s1 s2")
    assert "x1" not in tasks
    assert ruled(engine).live()["ineligible_by"] == {"regions": 1}
    ruled(engine).stated["x1"] = Stated(region="south")
    (given,) = engine.check_in("x1", None, 7.0)
    assert isinstance(given, Assign)
    assert ruled(engine).live()["ineligible"] == 0


def test_a_quota_is_one_of_the_whole_round() -> None:
    rules = RULES._replace(selection=SelectionRules(quotas={"tag:old": 0.2}))
    engine = Engine(rules)
    for device in ("n1", "n2", "n3", "n4", "s1", "s2"):
        region = {"n": "north", "s": "south"}[device[0]]
        labels = frozenset(["tag:old"] if device in ("n1", "n2") else [])
        ruled(engine).stated[device] = Stated(region=region, labels=labels)
        engine.check_in(device, None, 0.0)
    assert sorted(engine.leases)[-4:] == ["n3", "n4", "s1", "s2"]
    assert len(engine.leases) == 5, "one of the old ones"


def test_devices_in_doubt_fill_a_region_that_lacks_its_minimum() -> None:
    """All stall. Two others are there for the north then, and nobody else for the south."""
    engine, _ = started("n1 n2 n3 s1 s2", RULES._replace(stall=10.0))
    engine.tick(12.0)
    engine.tick(engine.deadline - 40.0)  # south has failed
    engine.tick(engine.deadline - 30.0)  # and north
    assert engine.round == 1
    doubted = {device for names in ruled(engine).doubted.values() for device in names}
    assert doubted == {"n1", "n2", "n3", "s1", "s2"}
    for device in ("n4", "n5"):
        assert check_in(engine, device, 31.0) == []
    commands = engine.tick(35.0)
    given = {each.device for each in commands if isinstance(each, Assign)}
    assert {"n4", "n5"} < given
    assert {"s1", "s2"} < given, "without them the south would be below its minimum"
    assert Counter(device[0] for device in given) == {"n": 3, "s": 2}


def test_a_restart_goes_on_with_the_regions() -> None:
    engine = Engine(RULES, round=5)
    commands = engine.restore(
        Restored(
            5,
            [("t5-1", "n1", 0), ("t5-5", "s1", 0)],
            [("t5-2", "n2"), ("t5-3", "w1")],
            [],
            regions={"t5-1": "north", "t5-2": "north", "t5-3": "north", "t5-5": "south"},
            over={"north": True},
        ),
        1000.0,
    )
    assert commands == []
    assert engine.book.terms["s1"].ends == 1020.0
    assert check_in(engine, "s1", 1001.0, "t5-5") == []
    *_, commit = engine.count_report("s1", "t5-5", 1002.0)
    assert isinstance(commit, Commit)
    assert commit.regions == ("north", "south")


def test_a_restart_ends_a_region_that_has_its_goal() -> None:
    engine = Engine(RULES, round=5)
    accepted = [("t5-2", "n2"), ("t5-3", "n1")]
    regions = dict.fromkeys(["t5-2", "t5-3"], "north")
    commands = engine.restore(Restored(5, [], accepted, [], regions=regions), 0.0)
    assert commands == [RegionEnded(5, "north", True, 2, "it has its goal")]


def test_what_does_not_go_with_regions() -> None:
    with pytest.raises(ValueError, match="synchronous rounds that discard late updates"):
        Engine(RULES._replace(carry=True))
    with pytest.raises(ValueError, match="synchronous rounds without regions"):
        Engine(RULES._replace(fit=FitSettings(2, 1, 10.0)))


def test_reports_of_a_region_are_counted_together_up_to_the_first_goal() -> None:
    engine, tasks = started()
    assert engine.reports_together() == 2
    report(engine, tasks, "n1", 1.0)
    assert engine.reports_together() == 1
    assert engine.wanted_reports() == 3


def test_a_paused_round_gives_no_task_and_ends_no_region_that_waits_for_devices() -> None:
    engine, tasks = started("n1 n2 n3 s1 s2")
    engine.paused = True
    assert check_in(engine, "s3", 5.0) == []
    assert "s3" not in engine.leases
    report(engine, tasks, "n1 n2", 6.0)
    assert engine.participation.parts() == ["south"]


def test_what_the_run_waits_for_in_words() -> None:
    engine = Engine(RULES)
    check_in(engine, "n1", 0.0)
    assert waits_for(engine, 0.0) == (
        "a round needs 1 region (regions.minimum) with a minimum of devices: north has 1 of 2 to 2;"
        " south has 0 of 1 to 2"
    )
    check_in(engine, "n2", 0.0)
    assert waits_for(engine, 1.0) == (
        "a round begins in 3 s, or when each region has devices for its goal: north has 2 of 2 to "
        "2; south has 0 of 1 to 2"
    )
    engine, tasks = started()
    report(engine, tasks, "n1 n2 s1", 10.0)
    assert waits_for(engine, 10.0) == (
        "round 1 has 3 of 4 reports (north is done, south 1 of 2, for 10 s more), for 50 s more at "
        "most"
    )
    engine.tick(20.0)
    assert waits_for(engine, 20.0) == "the model of round 1 is being made"
    strict = RULES._replace(regions=RegionsSettings((NORTH, SOUTH), goal=2, minimum=2))
    assert "a round needs 2 regions (regions.minimum)" in waits_for(Engine(strict), 0.0)
    engine, _ = started(rules=RULES)
    engine.tick(20.0)
    assert "south has failed" in waits_for(engine, 20.0)
    paused = engine.regional.in_numbers(inf, 20.0) if engine.regional else []
    assert [each.seconds for each in paused] == [None, None]


@pytest.mark.parametrize(
    "chosen_by",
    [
        SelectionRules(strategy="power-of-choice", candidates=4.0),
        SelectionRules(
            strategy="oort", oort=Oort(10.0, 1.0, exploration=0.0, least_exploration=0.0)
        ),
    ],
    ids=lambda rules: str(rules.strategy),
)
def test_the_largest_losses_are_looked_for_in_each_region(chosen_by: SelectionRules) -> None:
    """A region with few devices beside one with many: candidates of both together would nearly all
    be of the large one, and the small one's tasks would go to anybody."""
    rules = RULES._replace(selection=chosen_by)
    engine = Engine(rules)
    small, large = [f"n{number}" for number in range(12)], [f"s{number}" for number in range(600)]
    for place, device in enumerate([*large, *small]):
        # the largest losses of all are in the large region
        loss = 1000.0 if device in large else 100.0 if place >= 609 else 1.0
        ruled(engine).memory.give(device, 0, ())
        ruled(engine).learn(device, 0, loss, 10, 1.0)
    engine.paused = True
    for device in [*large, *small]:
        check_in(engine, device, 0.0)
    engine.paused = False
    commands = engine.tick(rules.gather)
    given = {each.device for each in commands if isinstance(each, Assign)} & {*small}
    assert given == {"n9", "n10", "n11"}


DEVICES = st.sampled_from([f"{region}{number}" for region in "nsx" for number in range(4)])


class AnyOrder(RuleBasedStateMachine):
    """The engine against a record made of its commands alone."""

    tasks = Bundle("tasks")

    def __init__(self) -> None:
        super().__init__()
        self.rules = RULES._replace(grace=3.0, gather=2.0, stall=9.0)
        assert self.rules.regions is not None
        self.regions = {each.name: each for each in self.rules.regions.regions}
        self.engine = Engine(self.rules)
        self.now = 0.0
        self.connected: set[str] = set()
        self.where: dict[str, str] = {}
        """Device -> the region in which the driver finds it."""
        self.open: int | None = None
        self.running: dict[str, str] = {}
        self.in_region: dict[str, str] = {}
        """Task -> the region in which it was given."""
        self.ended: dict[str, tuple[str, str]] = {}
        self.counted: dict[str, str] = {}
        self.over: dict[str, bool] = {}
        self.given: list[tuple[str, str, int]] = []
        self.versions = 0

    def reports(self, region: str) -> int:
        return sum(self.in_region[task] == region for task in self.counted)

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Opened(number):
                    assert self.open is None
                    self.open, self.counted, self.ended, self.over = number, {}, {}, {}
                case Assign(device, task, number, again=again, deadline=ends):
                    assert device in self.connected
                    assert number == self.open
                    if again:
                        assert self.running[task] == device
                        continue
                    region = self.where[device]
                    assert region not in self.over, "a task of a region that is over"
                    assert ends <= self.now + self.regions[region].deadline + 1e-6
                    self.in_region[task] = region
                    self.running[task] = device
                    self.given.append((device, task, number))
                case Ended(device, task, number, cause):
                    assert number == self.open
                    assert self.running.pop(task) == device
                    self.ended[task] = (device, cause)
                case Revived(device, task, number):
                    assert number == self.open
                    assert self.in_region[task] not in self.over
                    assert self.ended.pop(task) == (device, LOST)
                    self.running[task] = device
                case CancelTask(device, task):
                    assert device in self.connected
                    assert task in self.ended
                case RegionEnded(number, region, is_done, count, _):
                    assert number == self.open
                    assert region not in self.over, "a region ended twice"
                    assert count == self.reports(region)
                    assert is_done == (count >= self.regions[region].minimum)
                    assert not any(self.in_region[task] == region for task in self.running)
                    self.over[region] = is_done
                case Commit(number, regions=regions):
                    assert number == self.open
                    assert not self.running
                    assert self.over.keys() == self.regions.keys()
                    assert regions == tuple(name for name in self.regions if self.over[name])
                    assert regions
                    self.open, self.counted = None, {}
                    self.versions += 1
                    self.do(self.engine.committed(self.now, change=1.0, metrics={}))
                case Abandon(number):
                    assert number == self.open
                    assert not self.running
                    assert not any(self.over.values())
                    self.open, self.counted = None, {}

    def come(self, device: str, region: str, held: str | None) -> None:
        self.connected.add(device)
        self.where[device] = region
        ruled(self.engine).stated[device] = Stated(region=region)
        self.do(self.engine.check_in(device, held, self.now))

    @rule(device=DEVICES, moved=st.booleans())
    def check_in(self, device: str, moved: bool) -> None:
        """Mostly in its own region; at times a device has moved."""
        region = {"n": "north", "s": "south"}.get(device[0], "")
        self.come(device, "south" if moved else region, None)

    @rule(target=tasks, data=st.data())
    @precondition(lambda self: self.given)
    def remember(self, data: st.DataObject) -> tuple[str, str, int]:
        return data.draw(st.sampled_from(self.given[-12:]))

    @rule(given=tasks)
    def check_in_with_work_done(self, given: tuple[str, str, int]) -> None:
        device, task, _ = given
        self.come(device, self.where[device], task)

    @rule(device=DEVICES)
    def disconnect(self, device: str) -> None:
        self.connected.discard(device)
        self.do(self.engine.disconnect(device, self.now))

    @rule(given=tasks)
    def report(self, given: tuple[str, str, int]) -> None:
        device, task, number = given
        if device not in self.connected or self.engine.accepted.get(task) == device:
            return
        try:
            self.do(self.engine.announce(device, task, number, self.now))
        except ProtocolError:
            assert task not in self.running
            return
        assert self.running.pop(task) == device
        self.counted[task] = device
        self.do(self.engine.count_report(device, task, self.now))

    @rule(given=consumes(tasks))
    def fail(self, given: tuple[str, str, int]) -> None:
        self.do(self.engine.end(given[0], given[1], "failed: diverged", self.now))

    @rule(seconds=st.floats(0.0, 15.0))
    def time_passes(self, seconds: float) -> None:
        let_time_pass(self, self.engine, seconds)

    @rule()
    def restart(self) -> None:
        self.engine = Engine(self.rules, version=self.versions, round=self.engine.round)
        self.connected.clear()
        if self.open is not None:
            leases = [(task, device, self.versions) for task, device in self.running.items()]
            dropped = [(task, *ended) for task, ended in self.ended.items()]
            found = Restored(
                self.open,
                leases,
                list(self.counted.items()),
                dropped,
                regions=self.in_region,
                over=self.over,
            )
            self.do(self.engine.restore(found, self.now))

    @invariant()
    def leases_are_what_the_commands_said(self) -> None:
        assert {task: device for device, task in self.engine.leases.items()} == self.running
        assert self.engine.accepted == self.counted

    @invariant()
    def each_region_keeps_to_its_cohort_and_its_goal(self) -> None:
        running = Counter(self.in_region[task] for task in self.running)
        for name, region in self.regions.items():
            assert self.reports(name) <= region.goal
            assert running[name] + self.reports(name) <= region.cohort
            assert +self.engine.regional.book.running == running  # type: ignore[union-attr]

    @invariant()
    def no_region_is_open_for_longer_than_it_may(self) -> None:
        if self.open is not None:
            wake = self.engine.wake_at()
            assert wake is not None
            opened = self.engine.deadline - self.rules.deadline
            for name in self.regions.keys() - self.over.keys():
                ends = opened + self.regions[name].deadline + 1e-6
                assert self.now <= ends
                assert wake <= ends
                assert self.reports(name) < self.regions[name].goal

    @invariant()
    def no_slot_is_free_while_a_device_of_its_region_waits(self) -> None:
        if self.open is None:
            return
        running = Counter(self.in_region[task] for task in self.running)
        for name in self.regions.keys() - self.over.keys():
            if ruled(self.engine).ready_in(name):
                there = running[name] + self.reports(name)
                assert there == self.regions[name].cohort

    @invariant()
    def every_connected_device_is_in_one_place(self) -> None:
        selection = ruled(self.engine)
        waiting = [*selection.idle, *(d for names in selection.doubted.values() for d in names)]
        leased = {device for device in self.engine.leases if device not in self.engine.book.absent}
        places = [set(waiting), selection.resting, set(selection.ineligible), leased]
        assert sum(map(len, places)) == len(set().union(*places)) == len(self.connected)


def test_any_order() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AnyOrder, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_any_order_for_longer() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AnyOrder, settings=settings(max_examples=1000, stateful_step_count=80, deadline=None)
    )
