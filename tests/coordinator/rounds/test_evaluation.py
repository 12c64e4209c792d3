"""Evaluations beside the rounds of an engine, worked by hand. test_engine_policies.py has any order
of events."""

from __future__ import annotations

from collections import Counter

import pytest
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    ExchangeClosed,
    ExchangeOpened,
    Finish,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import RESTART_GRACE, Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.rounds.random_draws import shuffled
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, Phase, Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_protocol import ProtocolError

RULES = Settings(
    goal=2, cohort=2, minimum=2, deadline=60.0, grace=5.0, gather=1.0, seed=7,
    evaluation=EvaluationSettings(every=1, devices=3, minimum=2, deadline=30.0),
)  # fmt: skip
BUFFERED = RULES._replace(asynchronous=True, cohort=8, gather=0.0, max_staleness=10)


def engine_with(
    devices: str, rules: Settings = RULES, able: str | None = None
) -> tuple[Engine, dict[str, str]]:
    """An engine with these devices; device -> its task of the first round."""
    engine, tasks = Engine(rules), dict[str, str]()
    for device in devices:
        if able is None or device in able:
            engine.exchanges[EVALUATION].join(device)
        tasks |= assigned(engine.check_in(device, None, 0.0))
    return engine, tasks


def assigned(commands: list[Command]) -> dict[str, str]:
    return {command.device: command.task for command in commands if isinstance(command, Assign)}


def measuring(commands: list[Command]) -> dict[str, str]:
    return {command.device: command.task for command in commands if isinstance(command, Ask)}


def of_type(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def report_all(engine: Engine, tasks: dict[str, str], now: float) -> list[Command]:
    commands: list[Command] = []
    for device, task in tasks.items():
        if engine.takes_report(device, task):
            commands += engine.count_report(device, task, now)
    return commands


def commit_round(engine: Engine, tasks: dict[str, str], now: float) -> list[Command]:
    assert of_type(report_all(engine, tasks, now), Commit)
    return engine.committed(now, change=1.0, metrics={})


def test_training_comes_first_and_devices_of_the_sample_measure_when_their_tasks_are_over() -> None:
    """Two devices, both of which the round needs and the evaluation wants."""
    engine, tasks = engine_with("ab")
    commands = commit_round(engine, tasks, 1.0)
    tasks = assigned(commands)
    assert sorted(tasks) == ["a", "b"], "the next round is open, and has both"
    assert of_type(commands, ExchangeOpened) == [ExchangeOpened(1, 1, EVALUATION)]
    assert not measuring(commands)
    commands = engine.count_report("a", tasks["a"], 2.0)
    assert measuring(commands) == {"a": "te1-1"}, "it rests in the round, and measures meanwhile"
    assert engine.has_task("a")
    assert not measuring(engine.count_answer("a", "te1-1", 3.0))
    assert "a" in engine.selection.resting
    assert measuring(engine.count_report("b", tasks["b"], 4.0)) == {"b": "te1-2"}, (
        "while the model is made"
    )
    assert assigned(engine.committed(4.0, change=1.0, metrics={})) == {}, (
        "the round waits for its minimum"
    )
    commands = engine.count_answer("b", "te1-2", 5.0)
    assert of_type(commands, ExchangeClosed) == [ExchangeClosed(1, 1, {}, True, EVALUATION)], (
        "nobody else is there"
    )
    assert sorted(assigned(commands)) == ["a", "b"]


def test_idle_devices_measure_at_once_and_are_given_tasks_afterwards() -> None:
    engine, tasks = engine_with("abcde")
    commands = commit_round(engine, tasks, 1.0)
    busy, free = assigned(commands), measuring(commands)
    assert len(busy) == 2
    assert not busy.keys() & free.keys()
    assert len(free) + len(engine.exchanges[EVALUATION].chosen) == 3
    for device, task in free.items():
        assert device not in engine.selection.idle
        engine.count_answer(device, task, 2.0)
        assert device in engine.selection.idle


def test_the_sample_is_drawn_from_all_devices_asynchronously_too() -> None:
    names = [f"d{number}" for number in range(8)]
    drawn = Counter(
        device for number in range(2000) for device in shuffled(7, number, names, EVALUATION)[:3]
    )
    assert all(abs(count - 750) < 100 for count in drawn.values())
    engine, tasks = engine_with("abcdefgh", BUFFERED)
    assert len(tasks) == 8, "none is ever idle"
    commands = commit_round(engine, {device: tasks[device] for device in "ab"}, 1.0)
    assert engine.exchanges[EVALUATION].chosen | measuring(commands).keys() == {
        *shuffled(7, 1, "abcdefgh", EVALUATION)[:3]
    }
    for device in sorted(engine.exchanges[EVALUATION].chosen - {"a", "b"}):
        commands = engine.count_report(device, tasks[device], 2.0)
        assert [*measuring(commands)] == [device], "it measures before it is given another task"
        assert device not in assigned(commands)


def test_only_devices_that_can_evaluate_are_asked() -> None:
    engine, tasks = engine_with("abcdef", able="cf")
    commands = commit_round(engine, tasks, 1.0)
    assert {*measuring(commands), *engine.exchanges[EVALUATION].chosen} == {"c", "f"}


def test_a_device_that_fails_or_is_lost_is_replaced_and_not_asked_again() -> None:
    engine, _ = engine_with("abcdefg", RULES._replace(evaluation=EvaluationSettings(0, 2, 1, 30.0)))
    engine.tick(1.0)
    for device, task in dict(engine.leases).items():
        engine.end(device, task, "failed: diverged", 1.0)
    first = measuring(engine.request_exchange(EVALUATION, 1.0))
    while len(first) < 2:
        (busy,) = engine.exchanges[EVALUATION].chosen
        first |= measuring(engine.end(busy, engine.leases[busy], "failed: diverged", 1.0))
    (one, one_task), (two, two_task) = first.items()
    commands = engine.end(one, one_task, "failed: diverged", 2.0)
    assert commands[0] == Unanswered(one, one_task, "failed: diverged", EVALUATION)
    assert engine.end(one, one_task, "failed: diverged", 2.0) == []
    assert one not in measuring(commands)
    engine.disconnect(two, 3.0)
    commands = engine.tick(8.0)
    assert Unanswered(two, two_task, LOST, EVALUATION) in commands
    assert not {one, two} & {*measuring(commands), *engine.exchanges[EVALUATION].chosen}


def test_an_evaluation_that_needs_a_device_that_failed_asks_it_again_when_it_is_back() -> None:
    engine, _ = engine_with(
        "ab", RULES._replace(goal=9, minimum=9, evaluation=EvaluationSettings(0, 2, 2, 30.0))
    )
    given = measuring(engine.request_exchange(EVALUATION, 1.0))
    engine.count_answer("a", given["a"], 2.0)
    task = given["b"]
    for turn in range(SECOND_CHANCES):
        assert not measuring(engine.end("b", task, "failed: diverged", 3.0 + turn)), (
            "it has not checked in again"
        )
        engine.disconnect("b", 3.0 + turn)
        engine.exchanges[EVALUATION].join("b")
        task = measuring(engine.check_in("b", None, 3.5 + turn))["b"]
    engine.end("b", task, "failed: diverged", 10.0)
    engine.disconnect("b", 10.0)
    engine.exchanges[EVALUATION].join("b")
    assert not measuring(engine.check_in("b", None, 11.0)), "it fails each time"
    assert of_type(engine.tick(31.0), ExchangeClosed) == [
        ExchangeClosed(1, 0, {"failed: diverged": 1 + SECOND_CHANCES}, False, EVALUATION)
    ]


def test_a_device_that_is_to_measure_again_does_so_when_its_training_is_over() -> None:
    rules = RULES._replace(
        goal=3, cohort=3, gather=0.0, evaluation=EvaluationSettings(0, 2, 2, 30.0)
    )
    engine = Engine(rules)
    engine.request_exchange(EVALUATION, 0.0)
    engine.exchanges[EVALUATION].join("a")
    (task,) = measuring(engine.check_in("a", None, 0.0)).values()
    engine.check_in("b", None, 0.0)
    engine.end("a", task, "failed: diverged", 1.0)
    assert {"a", "b"} == engine.leases.keys()
    engine.exchanges[EVALUATION].join("a")
    engine.check_in("a", None, 2.0)
    assert "a" in measuring(engine.count_report("a", engine.leases["a"], 3.0)), "b's task goes on"


def test_a_valid_evaluation_does_not_wait_for_a_device_that_failed() -> None:
    engine, _ = engine_with(
        "ab", RULES._replace(goal=9, minimum=9, evaluation=EvaluationSettings(0, 2, 1, 30.0))
    )
    given = measuring(engine.request_exchange(EVALUATION, 1.0))
    engine.end("b", given["b"], "failed: diverged", 2.0)
    engine.disconnect("b", 2.0)
    engine.exchanges[EVALUATION].join("b")
    assert not measuring(engine.check_in("b", None, 3.0))
    assert of_type(engine.count_answer("a", given["a"], 4.0), ExchangeClosed)


@pytest.mark.parametrize(("counted", "valid"), [(1, False), (2, True)])
def test_an_evaluation_ends_at_its_deadline_with_what_there_is(counted: int, valid: bool) -> None:
    engine, _ = engine_with("abc", RULES._replace(goal=9, minimum=9))
    given = measuring(engine.request_exchange(EVALUATION, 1.0))
    assert len(given) == 3
    devices = list(given)
    for device in devices[:counted]:
        engine.count_answer(device, given[device], 3.0)
    engine.disconnect(devices[2], 30.5)
    commands = engine.tick(31.0)
    (closed,) = of_type(commands, ExchangeClosed)
    assert closed == ExchangeClosed(
        1, 0, {LOST: 1} if valid else {LOST: 1, LATE: 1}, valid, EVALUATION
    )
    assert [row.device for row in commands if isinstance(row, CancelTask)] == devices[counted:2]
    assert not engine.exchanges[EVALUATION].book.tasks


def test_a_device_that_comes_back_is_told_again_and_a_restart_gives_the_time_again() -> None:
    engine, _ = engine_with("abcd", RULES._replace(goal=9, minimum=9))
    device, task = next(iter(measuring(engine.request_exchange(EVALUATION, 1.0)).items()))
    engine.disconnect(device, 2.0)
    assert engine.check_in(device, None, 3.0) == [Ask(device, task, 1, 0, 31.0, True, EVALUATION)]

    again = Engine(RULES, version=1, round=1)
    again.restore_exchange(
        EVALUATION, SavedExchange(1, 1, True, [(task, device)], [("te1-9", "x")], []), 100.0
    )
    assert again.begin(100.0) == []
    again.exchanges[EVALUATION].join(device)
    assert again.check_in(device, None, 101.0) == [Ask(device, task, 1, 1, 130.0, True, EVALUATION)]
    again.exchanges[EVALUATION].join("x")
    assert not measuring(again.check_in("x", None, 101.0)), "it has measured"
    again = Engine(
        RULES._replace(evaluation=EvaluationSettings(1, 3, 2, 500.0)), version=1, round=1
    )
    again.restore_exchange(EVALUATION, SavedExchange(1, 1, True, [(task, device)], [], []), 100.0)
    assert again.tick(100.0 + RESTART_GRACE) == [Unanswered(device, task, LOST, EVALUATION)]


def test_a_request_is_carried_out_when_the_evaluation_before_it_is_over() -> None:
    engine, tasks = engine_with("abc", RULES._replace(evaluation=EvaluationSettings(0, 1, 1, 30.0)))
    assert not of_type(commit_round(engine, tasks, 1.0), ExchangeOpened), "there is no schedule"
    assert engine.request_exchange(EVALUATION, 2.0)[0] == ExchangeOpened(1, 1, EVALUATION)
    assert engine.request_exchange(EVALUATION, 3.0) == []
    assert of_type(engine.tick(32.0), ExchangeClosed)
    assert engine.request_exchange(EVALUATION, 33.0)[0] == ExchangeOpened(2, 1, EVALUATION)


def test_evaluations_are_due_every_few_versions_and_one_that_was_missed_is_made_up_for() -> None:
    found = []
    for last in range(7):
        engine = Engine(RULES._replace(evaluation=EvaluationSettings(every=3)))
        engine.restore_exchange(EVALUATION, SavedExchange(1, last, False, [], [], []), 0.0)
        found.append(
            [
                version
                for version in range(last, 8)
                if engine.exchanges[EVALUATION].due(version, last=False)
            ]
        )
    assert found == [[3, 4, 5, 6, 7]] * 3 + [[6, 7]] * 3 + [[]]


def test_the_run_finishes_when_its_last_model_is_measured() -> None:
    engine, tasks = engine_with("abc", RULES._replace(rounds=1))
    commands = commit_round(engine, tasks, 1.0)
    assert engine.phase is Phase.FINISHED
    assert not of_type(commands, Finish)
    assert sorted(measuring(commands)) == ["a", "b", "c"]
    for number, (device, task) in enumerate(measuring(commands).items(), 1):
        found = engine.count_answer(device, task, 2.0)
        assert bool(of_type(found, Finish)) == (number == 3)
    assert engine.wake_at() is None


def test_devices_that_train_are_free_to_measure_the_last_model() -> None:
    engine, tasks = engine_with("abcd", BUFFERED._replace(rounds=1))
    commands = commit_round(engine, {device: tasks[device] for device in "ab"}, 1.0)
    assert {command.device for command in commands if isinstance(command, Ended)} >= {"c", "d"}
    assert len(measuring(commands)) == 3
    assert not engine.leases


@pytest.mark.parametrize("rules", [RULES, BUFFERED])
def test_a_metric_that_arrives_later_finishes_the_run_and_leaves_the_open_round(
    rules: Settings,
) -> None:
    rules = rules._replace(metric="accuracy", target=0.9, evaluation=EvaluationSettings())
    engine, tasks = engine_with("abc", rules)
    device, task = next(iter(tasks.items()))
    engine.count_report(device, task, 1.0)
    assert engine.measured({"accuracy": 0.8}, 1, 1.0) == []
    (finish,) = engine.measured({"accuracy": 0.95}, 1, 2.0)
    assert isinstance(finish, Finish)
    assert (finish.rule, finish.metric, finish.value, finish.limit) == (
        "metric",
        "accuracy",
        0.95,
        0.9,
    )
    assert engine.accepted == {task: device}, "what counted still counts if the run is resumed"
    assert engine.measured({"accuracy": 0.99}, 1, 3.0) == []


def test_devices_whose_tasks_a_finished_run_ended_train_again_if_it_is_resumed() -> None:
    """They were needed to measure the last model, in the middle of a round."""
    engine, _ = engine_with("ab", RULES._replace(metric="accuracy", target=0.9))
    engine.tick(1.0)
    engine.exchanges[
        EVALUATION
    ].version = -1  # so that the newest model, version 0, is still to be measured
    commands = engine.measured({"accuracy": 0.95}, 1, 2.0)
    ended = [command for command in commands if isinstance(command, Ended)]
    assert {(row.device, row.cause, row.round) for row in ended} == {
        ("a", "surplus", 1),
        ("b", "surplus", 1),
    }
    resumed = Engine(RULES, round=1)
    resumed.restore(Restored(1, [], [], [(row.task, row.device, row.cause) for row in ended]), 10.0)
    found = assigned([*resumed.check_in("a", None, 10.0), *resumed.check_in("b", None, 10.0)])
    assert sorted(found) == ["a", "b"]


def test_a_metric_that_arrives_while_a_model_is_made_finishes_the_run_then() -> None:
    rules = RULES._replace(metric="accuracy", target=0.9, evaluation=EvaluationSettings())
    engine, tasks = engine_with("ab", rules)
    assert of_type(report_all(engine, tasks, 1.0), Commit)
    assert engine.measured({"accuracy": 0.95}, 1, 1.5) == []
    (finish,) = engine.committed(2.0, change=1.0, metrics={})
    assert isinstance(finish, Finish)
    assert (finish.value, finish.version) == (0.95, 1)


def test_a_lost_update_gives_no_second_lease_to_a_device_that_measures() -> None:
    engine, tasks = engine_with("ab")
    engine.disconnect("a", 1.0)
    engine.tick(6.0)
    assert measuring(engine.request_exchange(EVALUATION, 6.0)) == {}, "b trains, and a is away"
    engine.exchanges[EVALUATION].join("a")
    assert measuring(engine.check_in("a", None, 7.0)) == {"a": "te1-1"}
    with pytest.raises(ProtocolError, match="slot was given back"):
        engine.announce("a", tasks["a"], 1, 7.0)
    assert "a" not in engine.leases
