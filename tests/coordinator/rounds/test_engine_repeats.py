"""What is said to the engine twice, or at the wrong time."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.commands import PAUSED, STOPPED, Assign
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored

SETTINGS = Settings(goal=2, cohort=2, minimum=1, deadline=60.0, grace=5.0, gather=4.0, seed=7)


def test_a_device_that_checks_in_twice_is_given_one_task() -> None:
    engine = Engine(SETTINGS)
    assert engine.check_in("a", None, 0.0) == []
    assert engine.check_in("a", None, 1.0) == []
    given = [
        command.device for command in engine.check_in("b", None, 2.0) if isinstance(command, Assign)
    ]
    assert sorted(given) == ["a", "b"]


def test_a_task_ends_once() -> None:
    engine = Engine(SETTINGS)
    engine.check_in("a", None, 0.0)
    tasks = {
        command.device: command.task
        for command in engine.check_in("b", None, 1.0)
        if isinstance(command, Assign)
    }
    assert engine.end("a", tasks["a"], "failed", 2.0) != []
    assert engine.end("a", tasks["a"], "failed", 3.0) == []
    assert list(engine.leases) == ["b"]


def test_a_model_cannot_be_committed_while_no_round_is_complete() -> None:
    engine = Engine(SETTINGS)
    with pytest.raises(ValueError, match="no round is being committed"):
        engine.committed(1.0, change=0.1, metrics={})
    assert engine.version == 0


def test_a_device_that_waits_and_announces_its_lost_task_is_given_no_second() -> None:
    """Asynchronously the lost lease goes on although its slot is another device's by then."""
    rules = SETTINGS._replace(asynchronous=True, cohort=1, goal=1, minimum=1, max_staleness=9)
    engine = Engine(rules)
    (task,) = [
        command for command in engine.check_in("a", None, 0.0) if isinstance(command, Assign)
    ]
    engine.disconnect("a", 1.0)
    engine.tick(10.0)  # lost
    (other,) = [
        command for command in engine.check_in("b", None, 11.0) if isinstance(command, Assign)
    ]
    engine.count_report("b", other.task, 11.0)
    after = engine.committed(11.0, change=1.0, metrics={})
    (other,) = [command for command in after if isinstance(command, Assign)]
    assert engine.check_in("a", None, 12.0) == []
    assert engine.waiting() == 1
    engine.announce("a", task.task, 1, 13.0)
    assert engine.waiting() == 0
    engine.count_report("b", other.task, 14.0)
    again = engine.committed(14.0, change=1.0, metrics={})
    assert not any(isinstance(command, Assign) and command.device == "a" for command in again)
    assert engine.leases["a"] == task.task


def one_task_each(cohort: int = 2) -> tuple[Engine, str]:
    """Return an engine whose devices have one task in a round at most, and a's task in round 1,
    which needs both devices."""
    engine = Engine(SETTINGS._replace(minimum=2, cohort=cohort, one_task=True))
    engine.check_in("a", None, 0.0)
    engine.check_in("b", None, 0.0)
    return engine, engine.leases["a"]


def come_again(engine: Engine) -> list[str]:
    """Let a's connection end and begin once more; return the tasks that it is told of."""
    engine.disconnect("a", 2.0)
    commands = engine.check_in("a", None, 3.0)
    return [command.task for command in commands if isinstance(command, Assign)]


@pytest.mark.parametrize("cause", ["rejected: out-of-range", "failed: diverged", PAUSED, STOPPED])
def test_where_devices_add_noise_a_failed_task_is_the_only_one_of_its_round(cause: str) -> None:
    engine, task = one_task_each()
    engine.end("a", task, cause, 1.0)
    assert come_again(engine) == []
    restored = Restored(1, [(engine.leases["b"], "b", 0)], [], [(task, "a", cause)])
    after = Engine(engine.settings, round=1)
    after.restore(restored, 10.0)
    assert come_again(after) == []  # a restart forgets nothing of it
    engine.tick(60.0)
    assert engine.round == 2
    assert "a" in engine.leases


def test_where_devices_add_noise_a_device_that_pauses_is_given_nothing_until_it_checks_in() -> None:
    engine, task = one_task_each()
    engine.check_in("c", None, 1.0)
    engine.end("a", task, PAUSED, 2.0)
    engine.tick(60.0)
    assert (engine.round, {*engine.leases}) == (2, {"b", "c"})
    engine.disconnect("c", 61.0)
    engine.tick(67.0)
    assert {*engine.leases} == {"b"}
    engine.check_in("a", None, 70.0)
    assert {*engine.leases} == {"a", "b"}


def test_where_devices_add_noise_a_lost_device_gets_its_own_task_back() -> None:
    engine, task = one_task_each()
    engine.disconnect("a", 1.0)
    engine.tick(10.0)
    assert "a" not in engine.leases
    assert [each.task for each in engine.check_in("a", None, 11.0) if isinstance(each, Assign)] == [
        task
    ]


def test_elsewhere_a_round_that_lacks_devices_tries_again() -> None:
    engine = Engine(SETTINGS._replace(minimum=2))
    engine.check_in("a", None, 0.0)
    engine.check_in("b", None, 0.0)
    engine.end("a", engine.leases["a"], "rejected: out-of-range", 1.0)
    assert len(come_again(engine)) == 1
