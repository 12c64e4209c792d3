"""A session whose device was given keys: what is signed is done, all else is refused, and what it
works on stays."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.network.signing import Signer, make_signing_key
from fleetlearn_device.driver.signatures import find_verifier
from fleetlearn_device.session.commands import Close, Commands, Locate, Note, SaveTrusted, Send
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.statement import Statement
from fleetlearn_device.session.states import Closing, Holding, Idle, Locating, Training
from fleetlearn_device.session.trust import Trusted
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import (
    Cancel,
    CheckIn,
    Failed,
    FromCoordinator,
    Grant,
    Part,
    Question,
    Report,
    Signed,
    Task,
    Trust,
    VectorReference,
    Welcome,
    encode,
)

SHA = hashlib.sha256(b"model").hexdigest()
CHALLENGE, ANOTHER = "c" * 64, "d" * 64


def signer(folder: Path, *names: str) -> Signer:
    for name in names:
        make_signing_key(folder / name)
    return Signer([folder / name for name in names])


@pytest.fixture
def ours(tmp_path: Path) -> Signer:
    return signer(tmp_path, "ours.pem")


def task(name: str = "A") -> Task:
    vectors = (VectorReference("model", SHA, 5, "float32"),)
    return Task(name, 1, "b" * 64, vectors, {"update": "float32"}, {"lr": 0.1}, 2, 8, 5, 100.0)


def session_of(keys: Signer) -> Session:
    return Session("dev", 7, exchanges=("evaluation",), trusted=Trusted(keys.keys, find_verifier()))


def online(session: Session, challenge: str = CHALLENGE) -> CheckIn:
    """Connect. Returns the check-in."""
    [sent] = session.connected(0.0, Statement(challenge=challenge))
    tell(session, Welcome("test", 10.0, 8))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, CheckIn)
    return sent.message


def tell(session: Session, message: FromCoordinator) -> Commands:
    return session.received(encode(message), 0.0)


def signed(
    keys: Signer, message: Task | Question | Trust, challenge: str = CHALLENGE, device: str = "dev"
) -> Signed:
    found = keys.for_device(CheckIn(1, device, 7, trusts=keys.keys, challenge=challenge))
    assert found is not None
    return found.sign(message)


def refused(commands: Commands, name: str = "A") -> str:
    """The words with which a task was given back, and after which the connection was closed."""
    note, sent, close = commands
    assert isinstance(note, Note)
    assert note.warning
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Failed)
    assert (sent.message.task, sent.message.code) == (name, "untrusted")
    assert isinstance(close, Close)
    return sent.message.text


def test_a_signed_task_is_begun(ours: Signer) -> None:
    session = session_of(ours)
    check_in = online(session)
    assert (check_in.trusts, check_in.challenge) == (ours.keys, CHALLENGE)
    commands = tell(session, signed(ours, task()))
    assert commands[-1] == Locate(task())
    evaluate = Question("E", "evaluation", 100.0, bundle="b" * 64, vectors=task().vectors)
    assert tell(session, signed(ours, evaluate))[-1] == Locate(evaluate)


def test_a_task_without_a_signature_is_given_back(ours: Signer) -> None:
    session = session_of(ours)
    online(session)
    assert "it is not signed, and this device does only what is" in refused(tell(session, task()))
    assert isinstance(session.work, Idle)
    assert session.faults == 1


def test_signatures_of_others_for_others_and_from_before_are_refused(
    ours: Signer, tmp_path: Path
) -> None:
    good = signed(ours, task())
    changed = msgspec.structs.replace(good, message=good.message.replace("b" * 64, "c" * 64))
    theirs = signer(tmp_path, "theirs.pem")
    under_our_name = msgspec.structs.replace(signed(theirs, task()), key=ours.keys[0])
    for message, words in (
        (changed, "its signature is wrong"),
        (signed(ours, task(), challenge=ANOTHER), "its signature is wrong"),
        (signed(ours, task(), device="another"), "its signature is wrong"),
        (under_our_name, "its signature is wrong"),
        (
            signed(theirs, task()),
            f"signed with the key {theirs.keys[0]}; this device trusts {ours.keys[0]}",
        ),
    ):
        session = session_of(ours)
        online(session)
        assert words in refused(tell(session, message))
    session = session_of(ours)
    online(session, ANOTHER)  # the connection after: what was signed for the last one is of no use
    assert "its signature is wrong" in refused(tell(session, good))


@pytest.mark.parametrize("name", ["A", "B"])
def test_what_the_device_works_on_stays(ours: Signer, name: str) -> None:
    session = session_of(ours)
    online(session)
    tell(session, signed(ours, task()))
    session.located("A", [], 0.0)
    assert isinstance(session.work, Training)
    commands = tell(session, task(name))
    if name == "A":  # the real task must not be ended by a message about it
        assert [type(command) for command in commands] == [Note, Close]
    else:
        refused(commands, "B")
    assert isinstance(session.work, Training)
    session.disconnected()
    session.trained(Report("A", 1, (Part("update", "float32", 5, 1),), 7, 3, 2.0, True, 0.5))
    session.saved("A")
    assert isinstance(session.work, Holding)
    online(session, ANOTHER)
    tell(session, task("C"))
    assert isinstance(session.work, Holding)


def test_what_is_not_a_task_is_believed_without_a_signature(ours: Signer) -> None:
    """TLS is what protects it (docs/operate/security.md)."""
    session = session_of(ours)
    online(session)
    tell(session, signed(ours, task()))
    tell(session, Cancel("A", Code.ROUND_OVER))
    assert isinstance(session.work, Idle)


def test_only_tasks_are_signed(ours: Signer) -> None:
    session = session_of(ours)
    online(session)
    inner = encode(Grant("A", 1, 0))
    [closed] = tell(session, msgspec.structs.replace(signed(ours, task()), message=inner))
    assert isinstance(closed, Close)
    assert "a message was signed that is no task, question or trust" in closed.reason


def test_a_device_without_keys_cannot_be_sent_what_is_signed(ours: Signer) -> None:
    session = Session("dev", 7)
    check_in = online(session)
    assert check_in.trusts == ()
    [closed] = tell(session, signed(ours, task()))
    assert isinstance(closed, Close)
    assert closed.code == 1002


def test_new_keys_take_the_place_of_those_before(ours: Signer, tmp_path: Path) -> None:
    both, new = signer(tmp_path, "new.pem", "ours.pem"), signer(tmp_path, "new.pem")
    session = session_of(ours)
    online(session)
    assert tell(session, signed(ours, Trust(both.keys)))[-1] == SaveTrusted(both.keys)
    session.disconnected()
    assert online(session).trusts == both.keys
    assert tell(session, signed(new, Trust(new.keys)))[-1] == SaveTrusted(new.keys)
    assert "trusts " + new.keys[0] in refused(tell(session, signed(ours, task())))


def test_new_keys_without_a_good_signature_change_nothing(ours: Signer, tmp_path: Path) -> None:
    theirs = signer(tmp_path, "theirs.pem")
    for message in (
        Trust(theirs.keys),
        signed(theirs, Trust(theirs.keys)),
        signed(ours, Trust(theirs.keys), ANOTHER),
    ):
        session = session_of(ours)
        online(session)
        tell(session, signed(ours, task()))
        commands = tell(session, message)
        assert [type(command) for command in commands if not isinstance(command, Note)] == [Close]
        assert isinstance(session.link, Closing)
        assert isinstance(session.work, Locating)
        assert session.trusted is not None
        assert session.trusted.keys == ours.keys
