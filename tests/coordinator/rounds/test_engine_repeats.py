"""What is said to the engine twice, or at the wrong time."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.engine import Assign, Engine, Settings

SETTINGS = Settings(goal=2, cohort=2, minimum=1, deadline=60.0, grace=5.0, gather=4.0, seed=7)


def test_a_device_that_checks_in_twice_is_given_one_task() -> None:
    engine = Engine(SETTINGS)
    assert engine.check_in("a", None, 0.0) == []
    assert engine.check_in("a", None, 1.0) == []
    given = [command.device for command in engine.check_in("b", None, 2.0) if isinstance(command, Assign)]
    assert sorted(given) == ["a", "b"]


def test_a_task_ends_once() -> None:
    engine = Engine(SETTINGS)
    engine.check_in("a", None, 0.0)
    tasks = {command.device: command.task for command in engine.check_in("b", None, 1.0) if isinstance(command, Assign)}
    assert engine.end("a", tasks["a"], "failed", 2.0) != []
    assert engine.end("a", tasks["a"], "failed", 3.0) == []
    assert list(engine.leases) == ["b"]


def test_a_model_cannot_be_committed_while_no_round_is_complete() -> None:
    engine = Engine(SETTINGS)
    with pytest.raises(ValueError, match="no round is being committed"):
        engine.committed(1.0, change=0.1, metrics={})
    assert engine.version == 0
