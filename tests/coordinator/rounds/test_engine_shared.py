"""The engine of one of several runs: devices that are taken away, devices that are free again, a
pause, a drain."""

from __future__ import annotations

from fleetlearn_coordinator.rounds.commands import (
    STOPPED,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Opened,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, PaceSettings, Phase, Settings

SYNCHRONOUS = Settings(goal=2, minimum=2, cohort=2, deadline=100.0, grace=5.0, gather=10.0)
ASYNCHRONOUS = SYNCHRONOUS._replace(asynchronous=True, cohort=3, max_staleness=9)


def shared(settings: Settings = SYNCHRONOUS) -> Engine:
    engine = Engine(settings)
    engine.selection.freed = []
    return engine


def tasks(commands: list[Command]) -> dict[str, str]:
    return {each.device: each.task for each in commands if isinstance(each, Assign)}


def joined(engine: Engine, *devices: str, now: float = 0.0) -> dict[str, str]:
    """Check these devices in. Returns the tasks that are given meanwhile."""
    return tasks([each for device in devices for each in engine.check_in(device, None, now)])


def test_a_device_that_was_withdrawn_is_given_nothing() -> None:
    for settings in (SYNCHRONOUS, SYNCHRONOUS._replace(pace=PaceSettings(connected=5))):
        engine = shared(settings)
        assert joined(engine, "a") == {}
        engine.withdraw("a", 0.0)
        assert engine.waiting() == 0
        assert joined(engine, "b") == {}
        assert joined(engine, "a").keys() == {"a", "b"}, "it came back"


def test_devices_whose_tasks_end_are_to_be_offered_to_others_first() -> None:
    engine = shared()
    given = joined(engine, "a", "b")
    engine.count_report("a", given["a"], 1.0)
    assert engine.selection.freed == ["a"]
    assert any(isinstance(each, Commit) for each in engine.count_report("b", given["b"], 2.0))
    assert engine.selection.freed == ["a", "b"]
    assert engine.committed(3.0, change=1.0, metrics={}) == [], "no round opens with them"
    assert joined(engine, "a", "b", now=4.0).keys() == {"a", "b"}


def test_asynchronous_rounds_do_the_same() -> None:
    engine = shared(ASYNCHRONOUS)
    given = joined(engine, "a")
    assert tasks(engine.count_report("a", given["a"], 1.0)) == {}
    assert engine.selection.freed == ["a"]
    assert joined(engine, "a", now=2.0).keys() == {"a"}


def test_a_cancelled_device_is_free_and_one_that_stops_is_not() -> None:
    engine = shared(SYNCHRONOUS._replace(goal=1, minimum=1, cohort=3, gather=0.0))
    given = joined(engine, "a", "b", "c")
    assert len(given) == 3
    engine.end("c", given["c"], STOPPED, 1.0)
    assert engine.selection.freed == []
    commands = engine.count_report("a", given["a"], 2.0)
    assert [each.device for each in commands if isinstance(each, CancelTask)] == ["b"]
    assert engine.selection.freed == ["a", "b"]


def test_a_device_of_the_sample_measures_before_others_have_it() -> None:
    engine = shared(SYNCHRONOUS._replace(evaluation=EvaluationSettings(devices=2)))
    for device in ("a", "b"):
        engine.exchanges[EVALUATION].join(device)
    given = joined(engine, "a", "b")
    assert engine.request_exchange(EVALUATION, 1.0)
    commands = engine.count_report("a", given["a"], 2.0)
    measure = next(each for each in commands if isinstance(each, Ask))
    assert engine.has_task("a")
    engine.selection.freed = []
    engine.count_answer("a", measure.task, 3.0)
    assert engine.selection.freed == ["a"]


def test_a_paused_run_gives_nothing_and_counts_what_is_out() -> None:
    for settings in (SYNCHRONOUS._replace(cohort=3), ASYNCHRONOUS):
        engine = shared(settings)
        given = joined(engine, "a", "b")
        engine.paused = True
        assert joined(engine, "c") == {}
        assert engine.request_exchange(EVALUATION, 1.0) == []
        for device in ("a", "b"):
            commands = engine.count_report(device, given[device], 2.0)
        assert any(isinstance(each, Commit) for each in commands)
        after = engine.committed(3.0, change=1.0, metrics={})
        assert not [each for each in after if isinstance(each, Opened | Assign)]
        joined(engine, "a", "b", now=4.0)
        engine.paused = False
        commands = engine.begin(5.0)
        assert tasks(commands)
        assert engine.exchanges[EVALUATION].is_open, "somebody asked for it meanwhile"


def test_a_drained_run_fills_its_round_and_opens_no_other() -> None:
    engine = shared(SYNCHRONOUS._replace(cohort=3))
    given = joined(engine, "a", "b")
    engine.draining = True
    assert joined(engine, "c").keys() == {"c"}
    for device in ("a", "b"):
        engine.count_report(device, given[device], 2.0)
    engine.committed(3.0, change=1.0, metrics={})
    assert joined(engine, "a", "b", "c", now=4.0) == {}
    assert engine.phase is Phase.GATHERING
