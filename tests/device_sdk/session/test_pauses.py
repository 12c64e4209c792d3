"""What a session does in each state when a condition ends, and when it holds again."""

from __future__ import annotations

import pytest
from fleetlearn_device.session.commands import (
    Close,
    Command,
    FinishEarly,
    Note,
    SavePending,
    Send,
    StartTraining,
    StopTraining,
)
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Closing, Holding, Idle, Saving, Training
from fleetlearn_protocol.messages import (
    Accepted,
    Failed,
    Grant,
    Part,
    Report,
    Task,
    VectorReference,
    Welcome,
    encode,
)

SHA = "a" * 64
LOW = Pause(("battery",), "on battery (12 %, needs 30 %)")
METERED = Pause(("unmetered",), "on a metered network", sends=False)
GIVEN_BACK = Send(Failed("A", "paused", "on battery (12 %, needs 30 %)"))
CLOSE = Close("paused: on battery (12 %, needs 30 %)", 0.0)


def task(name: str = "A", budget: float | None = None) -> Task:
    vector = VectorReference("model", SHA, 40, "float32")
    return Task(
        name, 1, "b" * 64, (vector,), {"update": "float32"}, {}, 1, 8, 0, 100.0, budget
    )  # fmt: skip


def report(name: str = "A") -> Report:
    return Report(name, 1, (Part("update", "float32", 40, 12),), 7, 3, 0.5, False, 0.5)


def tell(session: Session, message: object) -> list[Command]:
    return session.received(encode(message), 0.0)  # type: ignore[arg-type]


def brought_to(state: str, budget: float | None = None) -> Session:
    session = Session("dev", 7)
    session.connected(0.0)
    tell(session, Welcome("test", 10.0, 8))
    for name, act in {
        "idle": lambda: None,
        "locating": lambda: tell(session, task(budget=budget)),
        "training": lambda: session.located("A", [], 0.0),
        "saving": lambda: session.trained(report()),
        "holding": lambda: session.saved("A"),
        "uploading": lambda: tell(session, Grant("A", 9, 0)),
        "sent": lambda: session.update_sent(9, 0.0),
    }.items():
        act()
        if name == state:
            break
    return session


def acts(commands: list[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, Note)]


@pytest.mark.parametrize(
    ("state", "pause", "commands"),
    [
        ("idle", LOW, [CLOSE]),
        ("locating", LOW, [GIVEN_BACK, CLOSE]),
        ("training", LOW, [GIVEN_BACK, StopTraining("A"), CLOSE]),
        ("saving", LOW, []),
        ("holding", LOW, []),
        ("uploading", LOW, []),
        ("sent", LOW, []),
        ("holding", METERED, [Close("paused: on a metered network", 0.0)]),
        ("uploading", METERED, [Close("paused: on a metered network", 0.0)]),
    ],
)
def test_each_state(state: str, pause: Pause, commands: list[Command]) -> None:
    session = brought_to(state)
    note, *done = session.begin_pause(pause)
    assert note == Note(pause.in_words)
    assert done == commands


def test_partial_work_is_reported_where_the_plan_has_a_time_budget() -> None:
    session = brought_to("training", budget=50.0)
    assert acts(session.begin_pause(LOW)) == [FinishEarly("A")]
    assert isinstance(session.work, Training)
    assert session.trained(report()) == [SavePending(report())]
    assert isinstance(session.work, Saving)
    assert session.saved("A") == [Send(report())]
    tell(session, Grant("A", 9, 0))
    session.update_sent(9, 0.0)
    *_, close = tell(session, Accepted("A"))
    assert close == CLOSE
    assert session.history.accepted == 1
    assert isinstance(session.link, Closing)


def test_partial_work_that_cannot_be_sent_is_given_back() -> None:
    session = brought_to("training", budget=50.0)
    failed, stop, close = acts(session.begin_pause(METERED))
    assert failed == Send(Failed("A", "paused", "on a metered network"))
    assert (stop, type(close)) == (StopTraining("A"), Close)


def test_a_training_that_paused_before_its_first_step_is_given_back_and_is_no_fault() -> None:
    session = brought_to("training", budget=50.0)
    session.begin_pause(LOW)
    assert acts(session.ended("A")) == [GIVEN_BACK, CLOSE]
    assert session.faults == 0
    assert session.history.failed == 0
    assert session.history.uncounted == 1


def test_it_is_given_back_too_if_the_pause_is_over_before_the_training_has_ended() -> None:
    session = brought_to("training", budget=50.0)
    session.begin_pause(LOW)
    session.end_pause()
    failed, *_ = acts(session.ended("A"))
    assert failed == Send(Failed("A", "paused", "a condition did not hold for a moment"))


def test_the_reason_is_logged_when_it_changes_and_not_with_each_percent() -> None:
    session = brought_to("idle")
    assert Note("paused: on battery (12 %, needs 30 %)") in session.begin_pause(LOW)
    lower = LOW._replace(text="on battery (11 %, needs 30 %)")
    assert session.begin_pause(lower) == []
    assert session.pause == lower
    both = Pause(("battery", "load"), "on battery (11 %, needs 30 %); busy")
    assert session.begin_pause(both) == [Note(both.in_words)]
    assert session.end_pause() == [Note("no longer paused: all conditions hold")]
    assert session.end_pause() == []


def test_a_pause_that_worsens_stops_the_upload() -> None:
    session = brought_to("uploading")
    session.begin_pause(LOW)
    both = Pause(("battery", "unmetered"), "on battery; on a metered network", sends=False)
    assert acts(session.begin_pause(both)) == [Close(both.in_words, 0.0)]
    assert isinstance(session.work, Holding)


@pytest.mark.parametrize("state", ["holding", "uploading", "sent"])
def test_a_task_that_crosses_with_the_pause_is_given_back_at_once(state: str) -> None:
    session = brought_to(state)
    session.begin_pause(LOW)
    first, *_, close = acts(tell(session, task("B")))
    assert first == Send(Failed("B", "paused", LOW.text))
    assert close == CLOSE
    assert session.task_id is None


def test_offline_the_task_is_dropped_and_begun_again_if_it_is_given_again() -> None:
    session = brought_to("training")
    session.disconnected()
    assert acts(session.begin_pause(LOW)) == [StopTraining("A", keep=True)]
    assert isinstance(session.work, Idle)
    session.ended("A")
    session.end_pause()
    session.connected(5.0)
    assert acts(tell(session, Welcome("test", 10.0, 8))) == []
    tell(session, task())
    assert acts(session.located("A", [], 5.0)) == [StartTraining(task(), 85.0)]


def test_a_connection_that_opens_in_a_pause_is_closed() -> None:
    session = Session("dev", 7)
    session.begin_pause(LOW)
    assert session.connected(0.0) == [CLOSE]


def test_a_paused_device_can_be_stopped() -> None:
    session = brought_to("idle")
    session.begin_pause(LOW)
    session.disconnected()
    session.stop()
    assert session.over
