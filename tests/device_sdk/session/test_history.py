"""What the session says of its tasks, and of none, to the owner of the device."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from fleetlearn_device.session.commands import Commands, Note
from fleetlearn_device.session.history import History
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.session_state import QUIET
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    ComeBack,
    Evaluation,
    FromCoordinator,
    Part,
    Question,
    Refused,
    Reply,
    Report,
    Task,
    VectorReference,
    Welcome,
    encode,
)

VECTORS = (VectorReference("model", hashlib.sha256(b"model").hexdigest(), 8, "float32"),)
WELCOME = Welcome("the coordinator of a test", 10.0, 8)


def task(name: str) -> Task:
    return Task(name, 7, "b" * 64, VECTORS, {"update": "float32"}, {"lr": 0.1}, 2, 8, 5, 100.0)


def report(name: str) -> Report:
    return Report(name, 7, (Part("update", "float32", 8, 12),), 7, 3, 2.0, True, 0.5)


def tell(session: Session, message: FromCoordinator, now: float = 0.0) -> list[str]:
    """Tell the session. Returns the lines of the log."""
    return notes(session.received(encode(message), now))


def notes(commands: Commands) -> list[str]:
    return [command.text for command in commands if isinstance(command, Note)]


def online(welcome: Welcome = WELCOME, now: float = 0.0) -> Session:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(now)
    tell(session, welcome, now)
    return session


def holding(session: Session, name: str) -> None:
    """Bring the session to where the update of a task is finished."""
    tell(session, task(name))
    session.located(name, [], 0.0)
    session.trained(report(name))
    session.saved(name)


def test_a_device_that_checked_in_says_what_it_does_next() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    assert tell(session, WELCOME) == [
        "checked in with the coordinator of a test as dev; waiting for a task"
    ]
    tell(session, task("A"))
    session.disconnected()
    session.connected(1.0)
    assert tell(session, WELCOME) == [
        "checked in with the coordinator of a test as dev; going on with task A"
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "task A: round 7, 2 epochs, 100 s to the deadline"),
        ({"epochs": 1}, "task A: round 7, 1 epoch, 100 s to the deadline"),
        ({"algorithm": "statistics"}, "task A: round 7, statistics, 100 s to the deadline"),
    ],
)
def test_a_task_is_said_as_it_begins(changes: dict[str, Any], said: str) -> None:
    assert tell(online(), msgspec.structs.replace(task("A"), **changes))[0] == said


def test_each_end_of_a_task_is_counted_and_said() -> None:
    session = online()
    assert session.history == History()
    holding(session, "A")
    assert session.history == History(task="A", what="round 7", round=7)
    assert tell(session, Accepted("A")) == [
        "task A: update accepted; the coordinator has it for the next model (1 accepted so far)"
    ]
    assert session.history == History(
        accepted=1, task="A", what="round 7", round=7, end="its update was accepted"
    )

    tell(session, task("B"))
    assert tell(session, Cancel("B", Code.ROUND_OVER, "round 7 is over")) == [
        "task B is cancelled, and its work does not count: round 7 is over"
    ]
    assert session.history.end == "does not count: round 7 is over"
    assert session.history.reason == "task B does not count: round 7 is over"

    holding(session, "C")
    (line,) = tell(session, Refused(Code.STALE_ROUND, "the round was 5", task="C"))
    assert line == "task C is forgotten, and its work does not count: the round was 5 [stale-round]"

    tell(session, task("D"))
    assert (
        tell(session, task("E"))[0] == "task D is dropped: the coordinator gave task E in its place"
    )
    session.located("E", [], 0.0)
    said = notes(session.ended("E", "diverged", "the loss is nan"))
    assert said == ["task E failed: the loss is nan"]
    assert msgspec.structs.asdict(session.history) == {
        "accepted": 1, "answered": 0, "uncounted": 3, "failed": 1, "task": "E",
        "what": "round 7", "round": 7,
        "end": "failed: the loss is nan", "reason": "task E failed: the loss is nan",
        "privacy": None, "secure": None,
    }  # fmt: skip


def test_what_the_run_waits_for_is_said_until_there_was_a_task() -> None:
    session = online()
    session.disconnected()
    session.connected(0.0)
    tell(session, msgspec.structs.replace(WELCOME, waits="round 12 has its devices"))
    (note,) = session.tick(QUIET + 1.0)[-1:]
    while not isinstance(note, Note) or "no task for" not in note.text:
        (note,) = session.tick(QUIET + 1.0)[-1:]
    assert note.text.endswith("since then; at the check-in: round 12 has its devices")
    tell(session, task("A"))
    assert session.waits == ""


def test_an_accepted_update_leaves_the_reason_of_the_task_before() -> None:
    session = online()
    tell(session, task("A"))
    tell(session, Cancel("A", Code.ROUND_OVER))
    holding(session, "B")
    tell(session, Accepted("B"))
    assert session.history.reason == "task A does not count: round-over"


def test_a_measurement_is_counted_by_itself() -> None:
    session = online()
    tell(session, Question("A", "evaluation", 100.0, bundle="b" * 64, vectors=VECTORS))
    assert session.history.what == "evaluation"
    session.located("A", [], 0.0)
    session.answered(Reply("A", "evaluation", fields_of(Evaluation(7, 3.5, {})), 1.0))
    assert tell(session, Accepted("A")) == ["task A: answer accepted (evaluation)"]
    assert (session.history.answered, session.history.accepted) == (1, 0)


def test_an_update_of_the_process_before_has_no_round_here() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report("A"))
    session.history = History(accepted=3, task="Z", what="round 2", end="its update was accepted")
    session.connected(0.0)
    tell(session, WELCOME)
    tell(session, Accepted("A"))
    assert session.history == History(accepted=4, task="A", what="", end="its update was accepted")


def test_a_stopped_device_says_what_became_of_its_task() -> None:
    session = online()
    tell(session, task("A"))
    session.stop()
    assert session.history.end == "does not count: the device was stopped"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("no-task", "the coordinator has no task for this device now"),
        ("busy", "the coordinator is busy"),
        ("stopping", "the coordinator is stopping"),
        ("finished", "the training is finished, and may be continued later"),
    ],
)
def test_a_device_that_is_sent_away_says_why_and_for_how_long(reason: str, text: str) -> None:
    session = online()
    (close,) = session.received(encode(ComeBack(90.0, reason)), 1.0)  # type: ignore[arg-type]
    assert close.reason == f"{text}; the device comes back in about 90 s ({reason})"  # type: ignore[union-attr]


def quiet_lines(session: Session, until: float) -> list[tuple[float, str]]:
    """When the session says what, while its owner does nothing but wait."""
    said = []
    now = 0.0
    while (due := session.due()) is not None and due <= until:
        now = max(now, due)
        said += [(now, text) for text in notes(session.tick(now))]
    return said


def test_a_device_without_a_task_says_so_now_and_then() -> None:
    """After 10 minutes, 20, 40 and so on: a device that is never called has some ten lines of them
    after a week."""
    lines = quiet_lines(online(), 7 * 86400.0)
    assert [time / QUIET for time, _ in lines[:5]] == pytest.approx([1, 2, 4, 8, 16], abs=0.05)
    assert len(lines) < 16
    assert lines[1][1] == (
        "no task for 20 min; the device is connected and ready: the coordinator has not chosen it "
        "for a round since then"
    )
    gaps = [after - before for (before, _), (after, _) in pairwise(lines)]
    assert max(gaps) == pytest.approx(86400.0, rel=0.01)


def test_a_device_that_gets_no_task_says_the_coordinator_s_reason() -> None:
    session = online(Welcome("c", 10.0, 8, ineligible="the plan wants the tag roof"))
    ((_, text),) = quiet_lines(session, 1000.0)
    assert (
        text == "no task for 10 min; the device is connected and ready: the plan wants the tag roof"
    )


def test_a_warning_of_the_welcome_is_kept_and_said() -> None:
    """Over a new connection and a new process the status keeps it as the last reason."""
    text = "the helper refused this device's last update: unknown-device"
    session = Session("dev", 7)
    session.connected(0.0)
    commands = session.received(encode(Welcome("c", 10.0, 8, warning=text)), 0.0)
    (note,) = [each for each in commands if isinstance(each, Note) and each.warning]
    assert (note.event, note.text) == ("warned", f"the coordinator warns: {text}")
    assert session.history.reason == text


def test_the_wait_is_counted_from_the_end_of_the_last_task() -> None:
    session = online()
    tell(session, task("A"), 500.0)
    assert not [text for time, text in quiet_lines(session, 590.0) if "no task" in text]
    tell(session, Cancel("A", Code.ROUND_OVER), 595.0)
    ((time, text),) = quiet_lines(session, 1500.0)
    assert time == pytest.approx(595.0 + QUIET, abs=10.0)
    assert text.startswith("no task for 10 min; ")
