"""What a run keeps of its devices' fits, and which model each device then trains."""

from __future__ import annotations

import pytest
from answering import NOW, Fleet
from fleetlearn_coordinator.rounds.commands import Ask, Assign
from fleetlearn_coordinator.service.training_run.fit_records import BestFit, FitRecords
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import FIT, FitAnswer, content_of, fields_of
from fleetlearn_protocol.messages import CheckIn, Question, Reply
from peers import PlanMaker

SETTINGS = {"clusters__count": 3, "round__goal": 2, "round__minimum": 2, "local__lr": 0.1}
LOSSES = {"a": (2.0, 0.5, 1.0), "b": (1.0, 1.0, 3.0)}


def open_fleet(make_plan: PlanMaker) -> Fleet:
    return Fleet(make_plan("ifca", **SETTINGS))


def records_of(fleet: Fleet) -> FitRecords:
    records = fleet.run.exchanges[FIT]
    assert isinstance(records, FitRecords)
    return records


def ask(fleet: Fleet, *devices: str) -> list[Ask]:
    for device in devices:
        fleet.run.engine.exchanges[FIT].join(device)
    heard = fleet.check_in(*devices)
    return [command for command in heard if isinstance(command, Ask)]


def answer(fleet: Fleet, asked: Ask, losses: tuple[float, ...]) -> list[Assign]:
    """Save and count a device's answer. Returns the tasks that follow."""
    reply = Reply(asked.task, FIT, fields_of(FitAnswer(5, losses)))
    fleet.run.save_answer(asked.device, reply)
    counted = fleet.run.engine.count_answer(asked.device, asked.task, 0.0)
    return [each for each in fleet.carry_out(counted) if isinstance(each, Assign)]


def test_each_device_trains_what_fits_it_after_a_restart_too(make_plan: PlanMaker) -> None:
    """The least loss, and of equal ones the first. A process that dies between the answers leaves
    the first one, and the task's row says which model it is for."""
    fleet = open_fleet(make_plan)
    first, second = ask(fleet, "a", "b")
    question = Question(first.task, FIT, 9.0, content=records_of(fleet).content(first))
    assert content_of(question).models == ("c1", "c2", "c3")
    assert not answer(fleet, first, LOSSES[first.device])
    fleet.store.close()

    fleet = open_fleet(make_plan)
    assert [*records_of(fleet).answers[0]] == [first.device]
    fleet.carry_out(fleet.run.resume(NOW))
    again = {each.device: each for each in ask(fleet, "a", "b")}
    assert [*again] == [second.device]
    tasks = answer(fleet, again[second.device], LOSSES[second.device])
    names = {each.device: fleet.run.members.of_task(each.task).name for each in tasks}
    assert names == {"a": "c2", "b": "c1"}
    fleet.store.close()

    fleet = open_fleet(make_plan)
    fleet.carry_out(fleet.run.resume(NOW))
    for task in tasks:
        assert fleet.run.members.of_task(task.task).name == names[task.device]
    fleet.store.close()


def test_an_answer_about_other_models_is_refused(make_plan: PlanMaker) -> None:
    fleet = open_fleet(make_plan)
    (asked, *_) = ask(fleet, "a", "b")
    reply = Reply(asked.task, FIT, fields_of(FitAnswer(5, (1.0, 2.0))))
    with pytest.raises(ProtocolError, match="2 losses came for 3 models") as caught:
        fleet.run.save_answer(asked.device, reply)
    assert caught.value.code is Code.BAD_MESSAGE
    assert not records_of(fleet).answers[0]
    fleet.store.close()


def test_a_device_that_cannot_choose_is_told_so(make_plan: PlanMaker) -> None:
    fleet = open_fleet(make_plan)
    policy = fleet.run.members.policy
    assert isinstance(policy, BestFit)
    assert "does not know how" in policy.why_not(CheckIn(1, "old", 10))
    assert policy.why_not(CheckIn(1, "new", 10, exchanges=(FIT,))) == ""
    assert policy.member_of("unknown") == "c1"
    fleet.store.close()
