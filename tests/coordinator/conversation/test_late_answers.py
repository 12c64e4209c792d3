"""Conversations whose run is in another process, and answers later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversing import UPDATE, WELCOME, Device, chunks, one
from fleetlearn_coordinator.conversation.conversation import UPLOAD_TIMEOUT
from fleetlearn_coordinator.conversation.effects import (
    CheckedIn,
    CloseConnection,
    End,
    HandOnMessages,
    HoldMessages,
    SendMessage,
)
from fleetlearn_coordinator.conversation.limits import CHECK_IN_TIMEOUT
from fleetlearn_coordinator.conversation.pending import Pending, ask
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import EvaluationSettings
from fleetlearn_protocol import Code, ProtocolError
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.frames import CHUNK_BYTES
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Evaluation,
    Grant,
    Heartbeat,
    Held,
    Question,
    Refused,
    Reply,
    Task,
    Uploaded,
    Welcome,
    encode,
)
from late_port import LateRoom
from peers import report_of


def have_tasks(room: LateRoom, *names: str) -> list[tuple[Device, Task]]:
    """Devices that checked in and were given a task, as far as they are needed."""
    devices = [Device(room, name) for name in names]
    for device in devices:
        device.conversation.received(encode(CheckIn(1, device.name, 10)), room.now)
        room.far.go_on()
    room.tick(room.now)
    found = [(device, device.task) for device in devices]
    for device in devices:
        device.did()
    return found


def say(device: Device, *messages: Any) -> list[Any]:
    """Say these, and return what is answered once the run has heard all."""
    answers = device.say(*messages)
    assert isinstance(device.room, LateRoom)
    device.room.far.go_on()
    return answers + device.heard()


def sent_all(device: Device, task: Task) -> None:
    """The device sends its whole update, and the run has heard all of it."""
    grant = one(say(device, report_of(task, UPDATE)), Grant)
    assert say(device, *chunks(grant, UPDATE)) == []


# Pending


def test_an_answer_that_is_here_is_returned_at_once() -> None:
    with pytest.raises(StopIteration) as done:
        next(ask(5))
    assert done.value.value == 5


@pytest.mark.parametrize("before", [True, False], ids=["before it is asked for", "later"])
def test_an_answer_that_comes_later(before: bool) -> None:
    pending: Pending[int] = Pending()
    times: list[float] = []
    if before:
        pending.answer(7, 3.0)
        asks = ask(pending)
    else:
        asks = ask(pending)
        assert next(asks) is pending
        pending.then(times.append)
        pending.answer(7, 3.0)
    with pytest.raises(StopIteration) as done:
        next(asks)
    assert done.value.value == 7
    assert times == ([] if before else [3.0])


def test_a_refusal_that_comes_later_is_raised_where_it_was_asked() -> None:
    pending: Pending[int] = Pending()
    asks = ask(pending)
    next(asks)
    pending.fail(ProtocolError(Code.STALE_ROUND, "too late"), 0.0)
    with pytest.raises(ProtocolError, match="too late"):
        next(asks)


# The order of things


def test_a_round_in_order() -> None:
    """The device hears the same as of a run that answers at once (test_conversation.py)."""
    room = LateRoom(goal=1, cohort=1)
    a = Device(room)
    a.conversation.received(encode(CheckIn(1, "a", 10)), 0.0)
    assert a.did() == [HoldMessages()]
    room.far.go_on(1)
    welcome, checked_in, go_on = a.did()
    assert (welcome, checked_in) == (SendMessage(WELCOME), CheckedIn("a", 1000, 2000))
    assert go_on == HandOnMessages()
    room.far.go_on()
    task = a.task
    sent_all(a, task)
    accepted, following = say(a, Uploaded(task.task))
    assert accepted == Accepted(task.task)
    assert isinstance(following, Task)
    assert (following.round, room.engine.version) == (2, 1)
    np.testing.assert_array_equal(room.saved[task.task], UPDATE)


def test_what_a_device_says_meanwhile_waits_in_order() -> None:
    room = LateRoom(minimum=2)
    (a, task), _ = have_tasks(room, "a", "b")
    a.did()
    report = encode(report_of(task, UPDATE))
    for message in (report, encode(Heartbeat(task.task, 3)), report, encode(Heartbeat("t9", 1))):
        a.conversation.received(message, room.now)
    assert a.conversation.asks
    assert a.did() == [HoldMessages()]
    heard: list[int] = []
    room.steps_done = lambda device, task, steps, now: heard.append(steps)  # type: ignore[method-assign]
    room.far.go_on(1)
    first, held_again = a.did()
    assert isinstance(first, SendMessage)
    assert isinstance(first.message, Grant)
    assert held_again == HoldMessages(), "the second report is asked about"
    room.far.go_on()
    assert a.did() == [HandOnMessages()]
    assert heard == [3, 1]
    assert not a.conversation.asks


def test_what_the_run_tells_meanwhile_is_said_at_once() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    assert a.say(report_of(task, UPDATE)) == []
    cancel = Cancel(task.task, Code.STALE_ROUND, "the round is over")
    a.conversation.tell(cancel)
    assert a.heard() == [cancel]
    room.engine.end("a", task.task, "test", room.now)
    room.far.go_on()
    assert one(a.heard(), Refused).code is Code.NOT_WANTED
    assert a.conversation.upload is None


def test_a_refused_question_is_answered_as_at_once() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    refused = one(say(a, report_of(task, UPDATE[:5])), Refused)
    assert (refused.code, refused.task) == (Code.WRONG_LENGTH, task.task)
    room.far.go_on()
    assert room.engine.causes() == {"rejected: wrong-length": 1}


# Time


def test_while_the_run_is_asked_nobody_is_overdue() -> None:
    room = LateRoom()
    new = Device(room, "new")
    new.conversation.received(encode(CheckIn(1, "new", 10)), 0.0)
    assert new.conversation.overdue(CHECK_IN_TIMEOUT + 1, 5.0) is None
    room.now = CHECK_IN_TIMEOUT + 1
    room.far.go_on()
    assert isinstance(new.heard()[0], Welcome)
    assert new.conversation.overdue(room.now + 4.9, 5.0) is None
    assert new.conversation.overdue(room.now + 5.1, 5.0) is not None


def test_an_upload_that_waited_for_its_run_has_its_whole_time() -> None:
    room = LateRoom(stall=10_000.0, deadline=10_000.0)
    (a, task), _ = have_tasks(room, "a", "b")
    a.say(report_of(task, UPDATE))
    room.now = 10 * UPLOAD_TIMEOUT
    room.far.go_on()
    assert isinstance(one(a.heard(), Grant), Grant)
    assert a.conversation.overdue(room.now + UPLOAD_TIMEOUT - 1, 1e9) is None
    assert a.conversation.overdue(room.now + UPLOAD_TIMEOUT + 1, 1e9) is not None


# Connections that are lost meanwhile


def test_an_update_that_is_being_saved_counts_though_the_connection_is_lost() -> None:
    room = LateRoom(uploads=1, minimum=2)
    (a, task), (b, other) = have_tasks(room, "a", "b")
    sent_all(a, task)
    assert say(b, report_of(other, UPDATE)) == [], "it waits for the only place"
    assert a.say(Uploaded(task.task)) == []
    assert isinstance(one(b.heard(), Grant), Grant), "the place is free while the run is asked"
    a.disconnect()
    assert len(room.spool.files) == 2
    room.far.go_on()
    assert a.did() == [HandOnMessages()]
    assert room.engine.accepted == {task.task: "a"}
    assert len(room.spool.files) == 2, "the first is the run's now"
    assert room.uploads.active.keys() == {other.task}


def test_an_update_that_is_refused_after_its_connection_is_lost_frees_its_file() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    sent_all(a, task)
    a.say(Uploaded(task.task))
    a.disconnect()
    room.engine.end("a", task.task, "test", room.now)
    room.far.go_on()
    assert a.did() == [HandOnMessages()]
    assert room.saved == {}
    assert room.spool.files == {}
    assert not room.uploads.active


def test_a_cancel_beside_an_update_that_is_being_saved_leaves_its_file_alone() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    sent_all(a, task)
    a.say(Uploaded(task.task))
    cancel = Cancel(task.task, Code.STALE_ROUND, "over")
    a.conversation.tell(cancel)
    assert len(room.spool.files) == 1, "the run is asked to save it"
    room.engine.end("a", task.task, "test", room.now)
    room.far.go_on()
    assert a.heard()[0] == cancel
    assert room.spool.files == {}


def test_an_answer_that_is_being_saved_counts_though_the_connection_is_lost() -> None:
    room = LateRoom(goal=1, cohort=1, evaluation=EvaluationSettings(devices=1))
    a = Device(room)
    *_, task = say(a, CheckIn(1, "a", 10, exchanges=("evaluation",)))
    room.carry_out(room.engine.request_exchange(EVALUATION, room.now))
    sent_all(a, task)
    *_, question = say(a, Uploaded(task.task))
    assert isinstance(question, Question)
    a.say(Reply(question.task, "evaluation", fields_of(Evaluation(10, 7.0, {}))))
    a.disconnect()
    room.far.go_on()
    assert room.measured.keys() == {question.task}
    assert not room.engine.exchanges[EVALUATION].is_open


def test_what_else_was_asked_is_dropped_with_the_connection() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    assert a.say(report_of(task, UPDATE), Heartbeat()) == []
    a.disconnect()
    room.far.go_on()
    assert a.did() == [HandOnMessages()]
    assert a.conversation.upload is None
    assert not room.uploads.active
    assert room.spool.files == {}


def test_a_device_that_left_before_it_was_welcomed_does_not_join() -> None:
    room = LateRoom()
    a = Device(room)
    assert a.check_in() == []
    a.disconnect()
    room.far.go_on()
    assert a.did() == [HandOnMessages()]
    assert room.devices == {}
    assert room.engine.waiting() == 0


def test_a_device_that_connects_again_while_it_is_asked_about() -> None:
    room = LateRoom(minimum=2)
    (a, task), _ = have_tasks(room, "a", "b")
    sent_all(a, task)
    a.say(Uploaded(task.task), Heartbeat())
    a.conversation.replaced()
    refused, *go_on, close = a.did()
    assert refused == SendMessage(Refused(Code.REPLACED, "device a has connected again"))
    assert HandOnMessages() in go_on
    assert close == CloseConnection(1008, "replaced")
    room.far.go_on()
    assert a.heard() == []
    again = Device(room)
    assert say(again, CheckIn(1, "a", 10, held=Held(task.task, task.round))) == [WELCOME]
    assert say(again, report_of(task, UPDATE)) == [Accepted(task.task)]
    assert room.engine.accepted == {task.task: "a"}


def test_a_flood_while_the_run_is_asked_ends_the_connection() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    a.say(report_of(task, UPDATE))
    a.conversation.flooded()
    refused, go_on, end = a.did()
    assert isinstance(refused, SendMessage)
    assert (end, go_on) == (End("too many messages"), HandOnMessages())
    room.far.go_on()
    assert a.heard() == []
    assert not room.uploads.active


def test_a_device_that_is_sent_away_while_it_is_asked_about() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    a.say(report_of(task, UPDATE), Heartbeat())
    away = ComeBack(60.0, "no-task")
    a.conversation.tell(away)
    assert away in a.heard()
    room.far.go_on()
    assert a.heard() == []
    assert not room.uploads.active


def test_what_is_here_of_an_upload_is_given_back_where_its_announcer_is_gone() -> None:
    room = LateRoom()
    (a, task), _ = have_tasks(room, "a", "b")
    grant = one(say(a, report_of(task, UPDATE)), Grant)
    say(a, chunks(grant, UPDATE)[0])
    a.disconnect()
    room.far.go_on()
    held = Held(task.task, task.round)
    again = Device(room)
    say(again, CheckIn(1, "a", 10, held=held))
    again.say(report_of(task, UPDATE))
    again.disconnect()
    room.far.go_on()
    assert room.begun.bytes_kept == CHUNK_BYTES
    last = Device(room)
    say(last, CheckIn(1, "a", 10, held=held))
    grant = one(say(last, report_of(task, UPDATE)), Grant)
    assert grant.offset == CHUNK_BYTES
    assert say(last, *chunks(grant, UPDATE), Uploaded(task.task)) == [Accepted(task.task)]
    np.testing.assert_array_equal(room.saved[task.task], UPDATE)
