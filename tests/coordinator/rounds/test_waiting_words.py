"""What a run waits for, in one sentence."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, Phase, Settings
from fleetlearn_coordinator.rounds.waiting_words import waits_for, waits_for_in_general

SETTINGS = Settings(goal=3, cohort=3, minimum=2, deadline=600.0, grace=10.0, gather=4.0, seed=7)


def connected(devices: str, rules: Settings = SETTINGS) -> Engine:
    engine = Engine(rules)
    for device in devices:
        engine.check_in(device, None, 0.0)
    return engine


def failed(engine: Engine, device: str, *, back: bool = True) -> None:
    engine.end(device, engine.leases[device], "failed: bad-data", 10.0)
    engine.disconnect(device, 10.0)
    if back:
        engine.check_in(device, None, 11.0)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("", "a round needs 2 devices (round.minimum), and none can take part"),
        ("a", "a round needs 2 devices (round.minimum), and 1 can take part"),
        ("ab", "a round begins in 4 s, or when 3 devices (round.goal) are there; 2 are"),
        ("abc", "round 1 has 0 of 3 reports, and waits for a, b, c, for 600 s more at most"),
    ],
)
def test_a_round_waits_for_devices_and_then_for_reports(devices: str, said: str) -> None:
    assert waits_for(connected(devices), 0.0) == said


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("", "round 1 begins when enough devices are there"),
        ("ab", "round 1 begins when enough devices are there"),
        ("abc", "round 1 has its devices"),
        ("abcd", "round 1 has its devices"),
    ],
)
def test_a_device_without_a_task_is_told_why_and_of_no_other(devices: str, said: str) -> None:
    engine = connected(devices)
    assert waits_for_in_general(engine) == said
    engine.paused = True
    assert waits_for_in_general(engine) == "the run is paused"
    engine.paused, engine.phase = False, Phase.COMMITTING
    assert waits_for_in_general(engine) == f"the model of round {engine.round} is being made"
    engine.phase, engine.draining = Phase.GATHERING, True
    assert waits_for_in_general(engine) == "the run is drained: no other round opens"
    engine.phase, engine.draining = Phase.FINISHED, False
    assert waits_for_in_general(engine) == ""


def test_asynchronously_a_device_may_have_a_task_at_once() -> None:
    engine = connected("abc", SETTINGS._replace(asynchronous=True))
    assert engine.phase is Phase.OPEN
    assert waits_for_in_general(engine) == ""


def test_asynchronously_one_device_is_enough() -> None:
    engine = connected("", SETTINGS._replace(asynchronous=True))
    assert waits_for(engine, 0.0) == "a round needs 1 device, and none can take part"


def test_many_devices_are_not_all_named() -> None:
    rules = SETTINGS._replace(goal=8, cohort=8)
    engine = connected("abcdefgh", rules)
    engine.count_report("a", engine.leases["a"], 5.0)
    engine.disconnect("c", 5.0)
    said = (
        "round 1 has 1 of 8 reports, and waits for b, c, d, e, f and 2 more (1 of them not "
        "connected), for 595 s more"
    )
    assert waits_for(engine, 5.0) == f"{said} at most"


def test_who_failed_is_named_with_what_may_help() -> None:
    engine = connected("abc")
    engine.count_report("a", engine.leases["a"], 5.0)
    failed(engine, "b", back=False)
    failed(engine, "c", back=False)
    begin, end = (
        "round 1 has 1 of 3 reports, and waits until another device",
        "for 590 s more at most",
    )
    assert waits_for(engine, 10.0) == f"{begin}, or one whose task failed (b, c), connects, {end}"
    for device in "bc":
        engine.check_in(device, None, 10.0)
        while device in engine.leases:
            failed(engine, device)
    assert engine.selection.failures == {"b": 1 + SECOND_CHANCES, "c": 1 + SECOND_CHANCES}
    assert (
        waits_for(engine, 10.0)
        == f"{begin} connects, {end}; b, c failed {1 + SECOND_CHANCES} times in this round"
    )


def test_a_run_at_rest_says_so() -> None:
    engine = connected("abc", SETTINGS._replace(rounds=1, evaluation=EvaluationSettings(every=1)))
    engine.paused = True
    assert waits_for(engine, 0.0) == "the run is paused"
    engine.paused = False
    for device, task in [*engine.leases.items()]:
        engine.count_report(device, task, 5.0)
    assert waits_for(engine, 5.0) == "the model of round 1 is being made"
    engine.exchanges[EVALUATION].join("a")
    engine.committed(6.0, change=1.0, metrics={})
    assert waits_for(engine, 6.0) == "the training is over, and its last model is being measured"
    engine.phase, engine.finishing = Phase.FINISHED, None
    assert waits_for(engine, 6.0) == ""
    drained = connected("")
    drained.draining = True
    assert waits_for(drained, 0.0) == "the run is drained: no other round opens"
