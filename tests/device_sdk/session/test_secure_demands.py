"""Secure aggregation in the session: what an owner demands, what cannot be masked, and when an
update is masked that waits for what it counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleetlearn_device.session.abilities import SECURE_NEEDS, unsupported
from fleetlearn_device.session.commands import (
    Command,
    Commands,
    DropPending,
    MaskPending,
    Note,
    SavePending,
    Send,
)
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.privacy_demands import MASKED_NOT_TOLD, PrivacyDemands
from fleetlearn_device.session.secure_demands import (
    NO_SECURE_DEMANDS,
    SecureDemands,
    check_secure_demands,
    factor_refusal,
    secure_refusal,
)
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Holding, Idle, Masking, Unmasked
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    Failed,
    FromCoordinator,
    Heartbeat,
    Held,
    Part,
    PrivacyNote,
    Question,
    Refused,
    Report,
    SecureTask,
    Task,
    TaskFinished,
    TaskWeighing,
    VectorReference,
    Welcome,
    encode,
)

KEY, OTHER = "0a" * 32, "0b" * 32
VECTORS = (VectorReference("model", "b" * 64, 8, "float32"),)
SECURE = SecureTask("helper", 20, 20, helper=KEY)
MASKED = Task(
    "5eed-4-1", 4, "a" * 64, VECTORS, {"update": "masked"}, {}, 1, 0, 5, 60.0, clip=0.5,
    secure=SECURE,
)  # fmt: skip
PLAIN = msgspec.structs.replace(MASKED, secure=None, parts={"update": "float32"})
QUESTION = Question("5eed-e1-1", "evaluation", 60.0, bundle="a" * 64, vectors=VECTORS)
REQUIRE = SecureDemands(require=True)
REPORT = Report("5eed-4-1", 4, (Part("update", "masked", 12, 7),), 1, 1, 1.0, True, 0.0)


def changed(base: Task = MASKED, **changes: Any) -> Task:
    return msgspec.structs.replace(base, **changes)


def secure(**changes: Any) -> Task:
    return changed(secure=msgspec.structs.replace(SECURE, **changes))


def short(**changes: Any) -> Task:
    """A task whose words travel in 3 bytes each."""
    return changed(secure(bits=12, **changes), parts={"update": "masked24"})


LATE = secure(least_factor=0.25)


# What its owner demands


@pytest.mark.parametrize("task", [PLAIN, MASKED, LATE, QUESTION])
def test_whoever_demands_nothing_refuses_nothing(task: Task | Question) -> None:
    assert secure_refusal(NO_SECURE_DEMANDS, task) is None


@pytest.mark.parametrize(
    ("demands", "task"),
    [
        (REQUIRE, MASKED),
        (SecureDemands(helper=KEY), MASKED),
        (SecureDemands(helper=KEY), PLAIN),
        (SecureDemands(minimum=20), MASKED),
        (SecureDemands(minimum=20), QUESTION),
        (SecureDemands(least_factor=0.25), LATE),
        (SecureDemands(least_factor=0.25), MASKED),
        (SecureDemands(require=True, least_factor=0.25), LATE),
        (REQUIRE, msgspec.structs.replace(QUESTION, kind="pairwise")),
    ],
)
def test_what_is_allowed(demands: SecureDemands, task: Task | Question) -> None:
    assert secure_refusal(demands, task) is None


@pytest.mark.parametrize(
    ("demands", "task", "code", "words"),
    [
        (REQUIRE, PLAIN, "unsupported", "the task asks for the update as it is"),
        (REQUIRE, QUESTION, "unsupported", "the answer to the question evaluation tells of"),
        (SecureDemands(helper=OTHER), MASKED, "untrusted", f"the helper with the key {KEY}, and"),
        (SecureDemands(helper=OTHER), secure(helper=None), "untrusted", "names no helper"),
        (REQUIRE, LATE, "untrusted", "of other models, each for as little as 0.25 of itself"),
        (REQUIRE, secure(least_factor=1.0), "untrusted", "for as little as 1 of itself"),
        (SecureDemands(minimum=21), MASKED, "untrusted", "of 20 devices be added up, and this"),
        (SecureDemands(least_factor=0.3), LATE, "untrusted", "0.25 of itself, and this device's"),
    ],
)
def test_what_is_refused(
    demands: SecureDemands, task: Task | Question, code: str, words: str
) -> None:
    refused = secure_refusal(demands, task)
    assert refused is not None
    assert refused.code == code
    assert words in refused.text
    assert "secure." in refused.text, "the setting is named"


@pytest.mark.parametrize(
    ("demands", "text"),
    [
        (SecureDemands(helper="0A" * 32), "expected 64 of 0-9 and a-f"),
        (SecureDemands(helper="0a" * 31), "expected 64 of 0-9 and a-f"),
        (SecureDemands(minimum=1), "minimum is 1; expected 2 to 65537"),
        (SecureDemands(minimum=65538), "expected 2 to 65537"),
        (SecureDemands(least_factor=0.0), "least_factor is 0.0; expected above 0"),
        (SecureDemands(least_factor=float("nan")), "expected above 0"),
    ],
)
def test_demands_that_make_no_sense(demands: SecureDemands, text: str) -> None:
    check_secure_demands(NO_SECURE_DEMANDS)
    check_secure_demands(SecureDemands(True, KEY, 2, 1.0))
    with pytest.raises(ValueError, match=text):
        check_secure_demands(demands)


@pytest.mark.parametrize(("factor", "good"), [(0.25, True), (1.0, True), (0.2499, False)])
def test_what_an_update_may_count(factor: float, good: bool) -> None:
    assert (factor_refusal(0.25, factor) is None) == good


# What cannot be masked


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (changed(clip=None), "does not bound it (`clip`)"),
        (changed(parts={"update": "masked", "buffers": "float32"}), "for the part buffers"),
        (changed(parts={"update": "float32"}), "for it as float32; expected masked"),
        (changed(parts={"update": "topk-0.01"}), "for it as topk-0.01; expected masked"),
        (secure(mode="pairwise", helper=None), "in the mode pairwise, and names no session"),
        (
            secure(mode="pairwise", helper=None, session="00" * 32, least_factor=0.5),
            "in the mode pairwise, and may count it for less later",
        ),
        (secure(helper=None), "names no helper's key"),
        (
            secure(minimum=4097),
            "of which 4096 can be added modulo 2^32, for a sum of at least 4097",
        ),
        (secure(bits=12), "of 12 bits, and for it as masked; expected masked24"),
        (changed(parts={"update": "masked24"}), "20 bits, and for it as masked24; expected masked"),
        (short(minimum=4098), "of which 4097 can be added modulo 2^24, for a sum of at least 4098"),
        (short(noise=5.0), "of 12 bits with noise, which such short words have no room for"),
        (changed(local_noise=1.0), "noise has no largest element"),
        (secure(noise=5.0, minimum=9000), "such a sum has no room in 32 bits"),
        (secure(noise=3.9), "noise of 3.9 words: expected 4 or more"),
    ],
)
def test_what_cannot_be_masked_is_refused_with_the_reason(task: Task, words: str) -> None:
    assert words in str(unsupported(task, (), (), can_mask=True))


@pytest.mark.parametrize(
    "task",
    [
        MASKED,
        LATE,
        secure(minimum=4096),
        secure(noise=5.0),
        secure(bits=16, minimum=65537),
        short(minimum=4097),
    ],
)
def test_what_can_be_masked(task: Task) -> None:
    assert unsupported(task, (), (), can_mask=True) is None
    assert SECURE_NEEDS in str(unsupported(task, (), (), can_mask=False))


def test_an_update_is_masked_where_the_task_says_how_and_nowhere_else() -> None:
    task = changed(secure=None)
    assert "asks for the parts update (masked)" in str(unsupported(task, (), (), can_mask=True))


# The conversation


def acts(commands: Commands) -> list[Command]:
    return [command for command in commands if not isinstance(command, Note)]


def sent(commands: Commands) -> list[Any]:
    return [command.message for command in commands if isinstance(command, Send)]


def tell(session: Session, message: FromCoordinator) -> Commands:
    return session.received(encode(message), 0.0)


def online(
    session: Session | None = None, **options: Any
) -> tuple[Session, CheckIn, list[Command]]:
    """A session that is welcomed: itself, its check-in, and what it does then."""
    if session is None:
        session = Session("dev", 7, exchanges=("evaluation",), can_mask=True, **options)
    (check_in,) = sent(session.connected(0.0))
    return session, check_in, acts(tell(session, Welcome("c", 10.0, 8)))


def waiting() -> Session:
    """A session whose update is saved and not masked yet."""
    session, _, _ = online()
    tell(session, LATE)
    session.located("5eed-4-1", [], 0.0)
    (save,) = session.trained(REPORT, 30, 0.25)
    assert isinstance(save, SavePending)
    assert sent(session.saved("5eed-4-1")) == [TaskFinished("5eed-4-1")]
    assert type(session.work) is Unmasked
    return session


def test_the_check_in_says_what_the_device_can_and_its_owner_demands() -> None:
    _, check_in, _ = online()
    assert check_in.privacy == ("clip", "local-noise", "secure", "secure-noise")
    assert "masked" in check_in.encodings
    assert check_in.exchanges == ("evaluation",)
    _, check_in, _ = online(secure_demands=REQUIRE, demands=PrivacyDemands(require=True))
    assert check_in.privacy[4:] == ("required", "secure-required")
    assert check_in.exchanges == ()
    session = Session("dev", 7, exchanges=("evaluation", "pairwise"), secure_demands=REQUIRE)
    assert online(session)[1].exchanges == ("pairwise",), "its answers tell nothing of the data"
    _, check_in, _ = online(Session("dev", 7))
    assert check_in.privacy == ("clip", "local-noise")
    assert "masked" not in check_in.encodings


def test_a_task_that_the_owner_does_not_allow_is_given_back() -> None:
    session, _, _ = online(secure_demands=SecureDemands(helper=OTHER))
    (failed,) = sent(tell(session, MASKED))
    assert (failed.task, failed.code) == ("5eed-4-1", "untrusted")
    session, _, _ = online(secure_demands=REQUIRE)
    (failed,) = sent(tell(session, QUESTION))
    assert (failed.task, failed.code) == ("5eed-e1-1", "unsupported")


def test_an_update_that_was_masked_once_is_not_masked_again() -> None:
    for task in (MASKED, LATE):
        session, _, _ = online(was_made=lambda name: name == "5eed-4-1")
        (failed,) = sent(tell(session, task))
        assert failed.code == "unsupported"
        assert "made a masked update for this task already" in failed.text
    session, _, _ = online(was_made=lambda name: name == "5eed-4-1")
    assert not sent(tell(session, PLAIN)), "the same bytes again do no harm"


def test_why_a_masked_task_failed_is_not_told() -> None:
    session, _, _ = online()
    tell(session, MASKED)
    session.located("5eed-4-1", [], 0.0)
    commands = session.ended("5eed-4-1", "diverged", "the loss is 0.123")
    assert sent(commands) == [Failed("5eed-4-1", "diverged", MASKED_NOT_TOLD)]
    assert any("0.123" in each.text for each in commands if isinstance(each, Note))


def test_a_masked_update_of_a_round_is_reported_at_once() -> None:
    session, _, _ = online()
    tell(session, MASKED)
    session.located("5eed-4-1", [], 0.0)
    session.trained(REPORT, 30)
    assert sent(session.saved("5eed-4-1")) == [REPORT]
    assert session.examples == 30


def test_an_update_that_waits_is_masked_when_it_is_known_what_it_counts() -> None:
    session = waiting()
    assert acts(tell(session, TaskWeighing("5eed-4-1", 0.5))) == [MaskPending("5eed-4-1", 0.5)]
    assert isinstance(session.work, Masking)
    assert session.running_task_id == "5eed-4-1"
    again = tell(session, TaskWeighing("5eed-4-1", 0.75))
    assert acts(again) == [], "what it counts does not change any more"
    assert sent(session.masked(REPORT)) == [REPORT]
    assert isinstance(session.work, Holding)
    assert acts(tell(session, TaskWeighing("5eed-4-1", 0.75))) == []
    assert acts(tell(session, Accepted("5eed-4-1"))) == [DropPending("5eed-4-1")]


@pytest.mark.parametrize("factor", [0.0, 0.2])
def test_an_update_that_would_count_for_less_is_given_back(factor: float) -> None:
    session = waiting()
    commands = acts(tell(session, TaskWeighing("5eed-4-1", factor)))
    (failed,) = sent(commands)
    assert (failed.task, failed.code) == ("5eed-4-1", "untrusted")
    assert DropPending("5eed-4-1") in commands
    assert not any(isinstance(command, MaskPending) for command in commands)
    assert isinstance(session.work, Idle)


@pytest.mark.parametrize("cut", ["before it is told", "while it is masked", "at a restart"])
def test_the_question_outlives_connections(cut: str) -> None:
    session = waiting()
    if cut == "while it is masked":
        tell(session, TaskWeighing("5eed-4-1", 0.5))
    session.disconnected()
    if cut == "at a restart":
        waits = session.work
        assert isinstance(waits, Unmasked)
        session = Session("dev", 7, can_mask=True, unmasked=waits)
    _, check_in, then = online(session)
    assert check_in.held == Held("5eed-4-1", 4)
    if cut == "while it is masked":
        assert sent(then) == [Heartbeat("5eed-4-1", 0)], "a second answer would change nothing"
        assert sent(session.masked(REPORT)) == [REPORT]
    else:
        assert sent(then) == [TaskFinished("5eed-4-1")]
        assert acts(tell(session, TaskWeighing("5eed-4-1", 1.0))) == [MaskPending("5eed-4-1", 1.0)]


def test_what_is_masked_offline_is_reported_at_the_next_connection() -> None:
    session = waiting()
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    session.disconnected()
    assert session.masked(REPORT) == []
    _, check_in, then = online(session)
    assert check_in.held == Held("5eed-4-1", 4)
    assert sent(then) == [REPORT]


@pytest.mark.parametrize(
    "message",
    [Cancel("5eed-4-1", Code.ROUND_OVER), Refused(Code.STALE_ROUND, "over", task="5eed-4-1")],
)
def test_a_task_that_is_not_wanted_any_more_is_forgotten(message: FromCoordinator) -> None:
    session = waiting()
    assert DropPending("5eed-4-1") in tell(session, message)
    assert isinstance(session.work, Idle)
    session = waiting()
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    assert DropPending("5eed-4-1") not in tell(session, message), "a thread writes there"
    assert session.masked(REPORT) == [DropPending("5eed-4-1")]
    assert session.running_task_id is None


def test_another_task_waits_for_the_end_of_the_masking() -> None:
    session = waiting()
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    tell(session, changed(task="5eed-5-1"))
    assert session.located("5eed-5-1", [], 0.0) == []
    first, then = session.masked(REPORT)
    assert first == DropPending("5eed-4-1")
    assert then == type(then)(changed(task="5eed-5-1"))


def test_an_update_that_came_back_after_it_was_accepted_is_forgotten() -> None:
    """A power cut may bring a deleted file back. It is not masked a second time."""
    session = waiting()
    assert DropPending("5eed-4-1") in tell(session, Accepted("5eed-4-1"))
    assert session.history.accepted == 1


def test_a_masking_that_fails_gives_the_task_back() -> None:
    session = waiting()
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    commands = session.ended("5eed-4-1", "unsupported", SECURE_NEEDS)
    (failed,) = sent(commands)
    assert (failed.code, failed.text) == ("unsupported", SECURE_NEEDS)
    assert DropPending("5eed-4-1") in commands
    session = waiting()
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    (failed,) = sent(session.abandon(OSError("no room"), "disk-full"))
    assert failed.code == "disk-full"


def test_a_paused_device_sends_what_waits_first() -> None:
    session = waiting()
    assert acts(session.begin_pause(Pause(("load",), "other programs use 90 %"))) == []
    tell(session, TaskWeighing("5eed-4-1", 0.5))
    assert sent(session.masked(REPORT)) == [REPORT]
    assert any("other programs" in str(each) for each in tell(session, Accepted("5eed-4-1")))


def test_what_is_said_of_the_task_s_run_is_kept_for_its_owner() -> None:
    session, _, _ = online()
    said = tell(session, changed(privacy=PrivacyNote(0.5, 1e-6)))
    notes = [each.text for each in said if isinstance(each, Note)]
    assert "masked, for a sum of at least 20 devices' updates" in notes[0]
    assert session.history.secure == SECURE
    tell(session, changed(PLAIN, task="5eed-5-1"))
    assert session.history.secure is None
