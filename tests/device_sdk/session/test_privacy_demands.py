from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleetlearn_device.session.commands import Note, Send
from fleetlearn_device.session.privacy_demands import (
    NO_DEMANDS,
    NOT_TOLD,
    PrivacyDemands,
    check_demands,
    is_counted,
    refusal,
)
from fleetlearn_device.session.session import Session
from fleetlearn_protocol.messages import (
    CheckIn,
    Failed,
    FailureCode,
    FromCoordinator,
    PrivacyNote,
    Question,
    Task,
    VectorReference,
    Welcome,
    encode,
)

VECTORS = (VectorReference("model", "b" * 64, 8, "float32"),)
PLAIN = Task("5eed-4-1", 4, "a" * 64, VECTORS, {"update": "float32"}, {}, 1, 0, 5, 60.0)
PRIVATE = msgspec.structs.replace(PLAIN, clip=0.5, privacy=PrivacyNote(0.5, 1e-6, 8.0))
QUESTION = Question("5eed-e1-1", "evaluation", 60.0, bundle="a" * 64, vectors=VECTORS)
REQUIRE = PrivacyDemands(require=True)


def changed(**changes: Any) -> Task:
    return msgspec.structs.replace(PRIVATE, **changes)


@pytest.mark.parametrize("task", [PLAIN, PRIVATE, QUESTION])
def test_whoever_demands_nothing_refuses_nothing(task: Task | Question) -> None:
    assert refusal(NO_DEMANDS, task, 1000) is None


def test_a_private_task_is_what_an_owner_may_require() -> None:
    assert refusal(REQUIRE, PRIVATE, 1000) is None
    assert refusal(REQUIRE, changed(parts={"sums": "int64"}), 1000) is None


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (PLAIN, "the task does not bound the update"),
        (changed(clip=None), "the task does not bound the update"),
        (changed(privacy=None), "does not say what the run has spent"),
        (changed(parts={"update": "float32", "buffers": "float32"}), "asks for the part buffers"),
        (changed(parts={"sums": "int64"}, clip=None), "the task does not bound the update"),
        (QUESTION, "its answer to the question evaluation would have no noise"),
    ],
)
def test_others_are_refused_with_the_reason(task: Task | Question, words: str) -> None:
    text = refusal(REQUIRE, task, 0)
    assert text is not None
    assert "only in runs with differential privacy (privacy.require)" in text
    assert words in text


def test_a_question_whose_answer_tells_nothing_of_data_is_answered() -> None:
    assert refusal(REQUIRE, msgspec.structs.replace(QUESTION, kind="pairwise"), 0) is None


def test_a_limit_counts_the_updates_of_a_run() -> None:
    limited = PrivacyDemands(participations=2)
    assert refusal(limited, PLAIN, 1) is None
    assert refusal(limited, PLAIN, 2) == (
        "this device has made 2 updates in the run 5eed, and its owner allows 2 "
        "(privacy.participations)"
    )
    assert refusal(limited, QUESTION, 2) is None
    with pytest.raises(ValueError, match="participations is 0; expected at least 1"):
        check_demands(PrivacyDemands(participations=0))


def test_updates_are_counted_in_private_runs_and_where_they_are_limited() -> None:
    assert is_counted(NO_DEMANDS, PRIVATE)
    assert is_counted(NO_DEMANDS, msgspec.structs.replace(PLAIN, clip=1.0))
    assert not is_counted(NO_DEMANDS, PLAIN)
    assert is_counted(PrivacyDemands(participations=9), PLAIN)


def hear(session: Session, message: FromCoordinator) -> list[Any]:
    commands = session.received(encode(message), 0.0)
    return [command.message for command in commands if isinstance(command, Send)]


def online(demands: PrivacyDemands, took_part: int = 0) -> tuple[Session, CheckIn]:
    session = Session(
        "dev", 7, exchanges=("evaluation",), demands=demands, took_part=lambda run: took_part
    )
    (sent,) = session.connected(0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, CheckIn)
    hear(session, Welcome("c", 10.0, 8))
    return session, sent.message


def test_the_session_says_what_is_required_and_gives_the_rest_back() -> None:
    session, check_in = online(REQUIRE)
    assert check_in.privacy == ("clip", "local-noise", "required")
    assert check_in.exchanges == ()
    (failed,) = hear(session, PLAIN)
    assert isinstance(failed, Failed)
    assert (failed.task, failed.code) == ("5eed-4-1", "unsupported")
    assert "privacy.require" in failed.text
    assert hear(session, msgspec.structs.replace(PRIVATE, task="5eed-4-2")) == []


def test_the_session_takes_part_as_often_as_its_owner_allows() -> None:
    session, check_in = online(PrivacyDemands(participations=3), took_part=2)
    assert "required" not in check_in.privacy
    assert hear(session, PRIVATE) == []
    session, _ = online(PrivacyDemands(participations=3), took_part=3)
    (failed,) = hear(session, PRIVATE)
    assert isinstance(failed, Failed)
    assert failed.code == "unsupported"
    assert "its owner allows 3" in failed.text


def test_an_update_with_its_own_noise_is_made_once() -> None:
    """It was made and is lost, such as on a damaged disk. Without noise it is made again."""
    noised = msgspec.structs.replace(PRIVATE, local_noise=0.5)
    for task, given_back in ((noised, True), (PRIVATE, False)):
        session = Session("dev", 7, was_made=lambda name: name == "5eed-4-1")
        session.connected(0.0)
        hear(session, Welcome("c", 10.0, 8))
        sent = hear(session, task)
        assert len(sent) == given_back
        if given_back:
            assert "made an update with its own noise for this task already" in sent[0].text
    session = Session("dev", 7, was_made=lambda name: name == "5eed-4-1")
    session.connected(0.0)
    hear(session, Welcome("c", 10.0, 8))
    assert hear(session, msgspec.structs.replace(noised, task="5eed-4-2")) == []


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        ("diverged", "the loss was 0.345 and is nan now", NOT_TOLD),
        ("bad-data", "row 7 has the label 12", NOT_TOLD),
        ("untrusted", "the task is not signed", "the task is not signed"),
    ],
)
def test_a_failure_with_noise_on_the_device_tells_the_coordinator_no_data(
    code: FailureCode, text: str, told: str
) -> None:
    noised = msgspec.structs.replace(PRIVATE, local_noise=0.5)
    for task, expected in ((noised, told), (PRIVATE, text)):
        session, _ = online(NO_DEMANDS, took_part=0)
        assert hear(session, task) == []
        commands = session.abandon(ValueError(text), code)
        (failed,) = (each.message for each in commands if isinstance(each, Send))
        assert failed == Failed(task.task, code, expected)
        notes = [each.text for each in commands if isinstance(each, Note)]
        assert any(text in note for note in notes), "the owner is told"
