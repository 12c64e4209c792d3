"""`finished`, and the factor that is answered: on a connection, after another one, and where no
factor is to be had."""

from __future__ import annotations

from typing import Any

from conversing import UPDATE, Device, Room, begun, chunks, granted, one
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    Held,
    Refused,
    TaskFinished,
    TaskWeighing,
    Uploaded,
    encode,
)

STALE: dict[str, Any] = {
    "asynchronous": True,
    "goal": 1,
    "cohort": 2,
    "max_staleness": 2,
}


def commit(device: Device, room: Room) -> None:
    """The device's update makes a model, and it has another task."""
    task = device.task
    device.say(*chunks(granted(device, task, UPDATE), UPDATE), Uploaded(task.task))


def fresh(room: Room, *names: str) -> list[Device]:
    """Devices with a task each, whose last effect it is."""
    devices = [Device(room, name) for name in names]
    for device in devices:
        device.conversation.received(encode(CheckIn(1, device.name, 10)), room.now)
    room.tick(room.now)
    return devices


def test_a_finished_task_is_told_its_factor_at_this_moment() -> None:
    room = Room(**STALE)
    a, b = fresh(room, "a", "b")
    task = a.task.task
    assert a.say(TaskFinished(task)) == [TaskWeighing(task, 1.0)]
    commit(b, room)
    assert room.engine.version == 1
    assert a.say(TaskFinished(task), TaskFinished(task)) == 2 * [TaskWeighing(task, 0.5)]
    assert room.engine.leases["a"] == task, "nothing has changed"


def test_it_is_said_again_after_another_connection() -> None:
    room = Room(**STALE)
    a, b = fresh(room, "a", "b")
    task = a.task
    a.disconnect()
    commit(b, room)
    again = Device(room, "a")
    again.check_in(Held(task.task, task.round))
    assert again.say(TaskFinished(task.task)) == [TaskWeighing(task.task, 0.5)]


def test_a_lost_device_s_task_goes_on() -> None:
    """It finished while it was away for longer than its grace, and did not say what it holds."""
    room = Room(**STALE | {"grace": 1.0, "cohort": 1})
    (a,) = fresh(room, "a")
    task = a.task.task
    a.disconnect()
    room.tick(100.0)
    assert room.engine.leases == {}
    (b,) = fresh(room, "b")
    again = Device(room, "a")
    again.check_in()
    assert again.say(TaskFinished(task)) == [TaskWeighing(task, 1.0)]
    assert room.engine.leases["a"] == task
    assert b.task.task in room.engine.leases.values()


def test_a_task_whose_report_has_counted_is_accepted() -> None:
    room = Room(minimum=2)
    (a, task), _ = begun(room, "a", "b")
    grant = granted(a, task, UPDATE)
    a.say(*chunks(grant, UPDATE), Uploaded(task.task))
    assert a.say(TaskFinished(task.task)) == [Accepted(task.task)]


def test_another_device_s_task_or_none_is_refused_and_changes_nothing() -> None:
    room = Room(**STALE)
    a, b = fresh(room, "a", "b")
    own, other = a.task.task, b.task.task
    for task in (other, "5eed-1-1", "x", "-"):
        if task == "-":
            assert one(a.say('{"type":"finished","task":"-"}'), Refused).code is Code.BAD_MESSAGE
            continue
        refused = one(a.say(TaskFinished(task)), Refused)
        assert (refused.code, refused.task) == (Code.STALE_ROUND, task)
    assert room.engine.leases == {"a": own, "b": other}


def test_a_task_that_is_over_is_refused() -> None:
    room = Room(**STALE | {"max_staleness": 0})
    a, b = fresh(room, "a", "b")
    task = a.task.task
    commit(b, room)
    a.did()
    assert one(a.say(TaskFinished(task)), Refused).code is Code.NOT_WANTED


def test_in_rounds_without_stale_updates_it_ends_the_task() -> None:
    """The device would wait for ever: no factor is asked for."""
    room = Room()
    (a, task), _ = begun(room, "a", "b")
    assert one(a.say(TaskFinished(task.task))[:1], Refused).code is Code.BAD_MESSAGE
    assert room.engine.causes() == {"rejected: bad-message": 1}
