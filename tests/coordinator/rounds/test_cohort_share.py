"""Rounds whose goal is a share of the devices that are there when they open."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.commands import Abandon, Assign, Command, Commit, Opened
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.selection_rules import SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import CohortShare, Phase, RoundSize, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.rounds.waiting_words import waits_for

FIFTH = CohortShare(share=0.2, most=10, least=2, over_selection=1.5, minimum_share=0.5)
RULES = Settings(
    **FIFTH.size_of_goal(10)._asdict(), deadline=60.0, grace=5.0, gather=4.0, seed=7, share=FIFTH
)


def names(count: int, first: int = 0) -> list[str]:
    return [f"d{number:03}" for number in range(first, first + count)]


def opened(engine: Engine, devices: list[str], now: float = 0.0) -> Opened:
    """Let the devices check in, and the first round open; return how it opened."""
    said = [row for device in devices for row in engine.check_in(device, None, now)]
    said += engine.tick(now + engine.settings.gather)
    (found,) = (row for row in said if isinstance(row, Opened))
    return found


def end_round(engine: Engine, now: float) -> list[Command]:
    """Let devices report until the round closes, and commit it. Returns what follows."""
    while engine.phase is Phase.OPEN:
        device, task = next(iter(engine.leases.items()))
        engine.count_report(device, task, now)
    return engine.committed(now, change=1.0, metrics={})


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        (0, RoundSize(2, 3, 2)),  # the least
        (10, RoundSize(2, 3, 2)),
        (11, RoundSize(3, 5, 2)),  # rounded up
        (30, RoundSize(6, 9, 3)),
        (50, RoundSize(10, 15, 5)),
        (10**6, RoundSize(10, 15, 5)),  # the most
    ],
)
def test_the_size_of_a_round(devices: int, size: RoundSize) -> None:
    assert FIFTH.size_for(devices) == size


def test_shares_are_as_they_are_written() -> None:
    share = FIFTH._replace(share=0.07, most=10**6, least=1, over_selection=1.1)
    assert share.size_for(100).goal == 7, "0.07 * 100 is 7.000000000000001 in binary"
    assert share.size_of_goal(100).cohort == 110


def test_a_round_wants_a_share_of_the_devices_that_are_there() -> None:
    engine = Engine(RULES)
    assert opened(engine, names(20)) == Opened(1, 4, 20)
    assert len(engine.leases) == 6  # over-selected
    assert engine.settings.size == RoundSize(4, 6, 2)


def test_the_first_round_waits_for_the_fleet_and_the_next_ones_do_not() -> None:
    """The first two devices after a start are no measure of the fleet."""
    engine = Engine(RULES)
    for device in names(12):
        assert engine.check_in(device, None, 1.0) == []
    assert "0.2 (round.goal_share)" in waits_for(engine, 2.0)
    assert engine.tick(4.9) == []
    assert engine.tick(5.0)[0] == Opened(1, 3, 12)
    assert end_round(engine, 6.0)[0] == Opened(2, 3, 12), "the fleet is there already"


def test_the_largest_round_opens_at_once() -> None:
    engine = Engine(RULES)
    said = [row for device in names(60) for row in engine.check_in(device, None, 1.0)]
    assert said[0] == Opened(1, 10, 46), "later devices would not make it larger"


def test_the_goal_follows_a_fleet_that_grows_and_shrinks() -> None:
    engine = Engine(RULES)
    goals = [opened(engine, names(5)).goal]
    for count, present in [(15, 20), (25, 45), (0, 30), (0, 10)]:
        there = {*engine.selection.idle, *engine.selection.resting, *engine.leases}
        for device in names(count, first=len(there)):
            engine.check_in(device, None, 6.0)
        for device in sorted(there)[present:]:
            engine.disconnect(device, 6.0)
        engine.tick(12.0)  # what the lost devices held is given to others
        found = end_round(engine, 13.0)[0]
        assert isinstance(found, Opened)
        goals.append(found.goal)
        assert found.devices == present
    assert goals == [2, 4, 9, 6, 2]


def test_a_round_keeps_its_goal_while_devices_come_and_go() -> None:
    engine = Engine(RULES)
    opened(engine, names(20))
    for device in names(80, first=20):
        engine.check_in(device, None, 5.0)
    assert engine.settings.goal == 4
    for device in names(70, first=30):
        engine.disconnect(device, 5.5)
    assert engine.settings.goal == 4


def test_below_its_own_minimum_a_round_is_abandoned() -> None:
    engine = Engine(RULES)
    assert opened(engine, names(50)).goal == 10
    for device, task in [*engine.leases.items()][:4]:
        engine.count_report(device, task, 6.0)
    said = engine.tick(engine.deadline)
    (found,) = (row for row in said if isinstance(row, Abandon))
    assert found.text == "4 reports at the deadline, 5 are the minimum"


def test_at_its_own_minimum_a_round_is_committed() -> None:
    engine = Engine(RULES)
    opened(engine, names(20))
    for device, task in [*engine.leases.items()][:2]:
        engine.count_report(device, task, 6.0)
    assert any(isinstance(row, Commit) for row in engine.tick(engine.deadline))


def test_too_few_devices_open_no_round_and_then_the_fleet_is_waited_for_again() -> None:
    engine = Engine(RULES)
    opened(engine, names(10))
    for device in names(9, first=1):
        engine.disconnect(device, 5.0)
    engine.tick(100.0)  # the round is abandoned: one device is there
    assert engine.phase is Phase.GATHERING
    assert [
        row for device in names(30, first=10) for row in engine.check_in(device, None, 101.0)
    ] == []
    assert engine.tick(105.0)[0] == Opened(2, 7, 31)


def test_a_restart_goes_on_with_the_same_goal() -> None:
    engine = Engine(RULES)
    opened(engine, names(20))
    tasks = [(task, device, 0) for device, task in engine.leases.items()]
    again = Engine(RULES, round=1)
    again.restore(Restored(1, tasks, [], [], goal=4), 0.0)
    assert again.settings.size == RoundSize(4, 6, 2)
    for device in names(60):  # the fleet has grown meanwhile
        again.check_in(device, None, 1.0)
    assert again.settings.goal == 4
    assert end_round(again, 2.0)[0] == Opened(2, 10, 60)


def test_after_a_restart_the_next_round_waits_for_the_fleet() -> None:
    """All reports are there already: the round closes before a device is."""
    engine = Engine(RULES, round=1)
    accepted = [(f"t1-{number}", f"d{number:03}") for number in range(4)]
    assert engine.restore(Restored(1, [], accepted, [], goal=4), 0.0) == [Commit(1, {})]
    engine.committed(0.0, change=1.0, metrics={})
    assert [row for device in names(20) for row in engine.check_in(device, None, 1.0)] == []
    assert engine.tick(5.0)[0] == Opened(2, 4, 20)


@pytest.mark.parametrize(("goal", "expected"), [(40, 10), (1, 1), (None, 10)])
def test_a_plan_that_was_changed_in_mid_round(goal: int | None, expected: int) -> None:
    """The open round keeps its goal, unless that is above the new plan's most; a plan that had no
    share wanted the whole goal."""
    engine = Engine(RULES, round=1)
    engine.restore(Restored(1, [("t1-1", "a", 0)], [], [], goal=goal), 0.0)
    assert engine.settings.goal == expected


def test_a_plan_without_a_share_takes_no_goal_from_before() -> None:
    engine = Engine(RULES._replace(share=None), round=1)
    engine.restore(Restored(1, [("t1-1", "a", 0)], [], [], goal=4), 0.0)
    assert engine.settings.goal == 10


def test_a_snapshot_has_the_goal_and_the_next_round_opens_at_once() -> None:
    engine = Engine(RULES)
    opened(engine, names(20))
    for device, task in [*engine.leases.items()][:4]:
        engine.count_report(device, task, 6.0)
    taken = engine.snapshot()
    again = Engine.from_snapshot(RULES, "t", taken, names(20))
    assert again.settings.size == engine.settings.size
    expected = engine.committed(7.0, change=1.0, metrics={})
    assert again.committed(7.0, change=1.0, metrics={}) == expected
    assert expected[0] == Opened(2, 4, 20)


def test_early_reports_all_count_in_the_next_round() -> None:
    """Each was told which round it counts for when it came, before that round had a goal."""
    engine = Engine(RULES._replace(carry=True, max_staleness=2))
    opened(engine, names(50))
    leases = [*engine.leases.items()]
    for device, task in leases[:10]:
        engine.count_report(device, task, 6.0)
    assert engine.phase is Phase.COMMITTING
    for device, task in leases[10:]:
        assert engine.report_terms(device).round == 2
        engine.count_report(device, task, 7.0)
    for device in names(40, first=10):
        engine.disconnect(device, 7.0)
    (found, *_) = engine.committed(8.0, change=1.0, metrics={})
    assert isinstance(found, Opened)
    assert found.goal == 5, "five came early, of the fewer devices that are left"
    assert len(engine.accepted) == 5


def test_quotas_are_of_the_round_s_own_tasks_and_do_not_shrink_its_goal() -> None:
    """All devices have a label of which a round takes a third: counted are all of them."""
    rules = RULES._replace(selection=SelectionRules(quotas={"tag:eu": 0.34}))
    engine = Engine(rules)
    assert isinstance(engine.selection, RuledSelection)
    for device in names(30):
        engine.selection.stated[device] = Stated(10, labels=frozenset({"tag:eu"}))
    assert opened(engine, names(30)) == Opened(1, 6, 30)
    assert len(engine.leases) == 3  # 0.34 of 9 tasks
    for device in names(20, first=10):
        engine.disconnect(device, 5.0)
    said = [*engine.tick(11.0), *engine.tick(100.0), *engine.tick(200.0)]
    assert len([row for row in said if isinstance(row, Assign)]) >= 0
    assert engine.selection.quotas.size == engine.settings.cohort
