"""The device's session: each message in each state, then single rules worth reading one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fleetlearn_device.session import session as session_module
from fleetlearn_device.session.abilities import PRIVACY, unsupported
from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
    FinishContent,
    Locate,
    Note,
    SavePending,
    Send,
    SendUpdate,
    StartAnswer,
    StartTraining,
    StopTraining,
    StopUpdate,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.privacy_demands import PrivacyDemands
from fleetlearn_device.session.refusals import VERSION_WAIT
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.statement import Statement
from fleetlearn_device.session.states import (
    Closing,
    Fetching,
    Holding,
    Idle,
    Link,
    Locating,
    Online,
    Work,
)
from fleetlearn_protocol.encodings import FAMILIES
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, ExchangeKind, NoContent, fields_of
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Content,
    ContentSelection,
    Evaluation,
    Failed,
    Fetch,
    FromCoordinator,
    Grant,
    Heartbeat,
    Held,
    Part,
    Piece,
    Question,
    Refused,
    Reply,
    Report,
    Task,
    Uploaded,
    VectorReference,
    Waiting,
    Welcome,
    encode,
)

MODEL = bytes(range(40))
SHA = hashlib.sha256(MODEL).hexdigest()
WANTED = Wanted(SHA, "the model", f"models/{SHA}", len(MODEL), len(MODEL))
WELCOME = Welcome("test", 10.0, 8)


def task(name: str = "A", *, deadline: float = 100.0, budget: float | None = None) -> Task:
    return Task(
        name,
        1,
        "b" * 64,
        (VectorReference("model", SHA, len(MODEL), "float32"),),
        {"update": "float32"},
        {"lr": 0.1},
        2,
        8,
        5,
        deadline,
        budget,
    )


def report(name: str = "A") -> Report:
    return Report(name, 1, (Part("update", "float32", 40, 12),), 7, 3, 2.0, True, 0.5)


def tell(session: Session, message: FromCoordinator, now: float = 0.0) -> Commands:
    return session.received(encode(message), now)


def acts(commands: Commands) -> list[Command]:
    return [command for command in commands if not isinstance(command, Note)]


def name_of(state: Link | Work) -> str:
    return type(state).__name__.lower()


def brought_to(state: str, name: str = "A", *, until_finished: bool = False) -> Session:
    """A session that is online, in this state of work with the task ``name``."""
    session = Session("dev", 7, exchanges=("evaluation",), until_finished=until_finished)
    session.connected(0.0)
    tell(session, WELCOME)
    steps: dict[str, Callable[[], object]] = {
        "idle": lambda: None,
        "locating": lambda: tell(session, task(name)),
        "fetching": lambda: session.located(name, [WANTED], 0.0),
        "receiving": lambda: tell(session, Content(3, SHA, len(MODEL), 0)),
        "storing": lambda: session.received_chunk(pack_chunk(3, 0, MODEL), 0.0),
        "training": lambda: (session.stored(SHA, True, 0.0), session.located(name, [], 0.0)),
        "saving": lambda: session.trained(report(name)),
        "holding": lambda: session.saved(name),
        "uploading": lambda: tell(session, Grant(name, 9, 0)),
        "sent": lambda: session.update_sent(9, 0.0),
    }
    for step, act in steps.items():
        act()
        if step == state:
            break
    assert name_of(session.work) == ("fetching" if state == "receiving" else state)
    return session


STATES = [
    "idle",
    "locating",
    "fetching",
    "receiving",
    "storing",
    "training",
    "saving",
    "holding",
    "uploading",
    "sent",
]

# message -> state -> "commands > work"; "*" is every other state; "-": nothing but a note, and no
# change.
FAULT = "Close > *"
FORGOTTEN = {
    "locating": "> idle",
    "fetching": "> idle",
    "receiving": "> idle",
    "storing": "> idle",
    "training": "StopTraining > idle",
    "saving": "> idle",
    "holding": "DropPending > idle",
    "uploading": "DropPending > idle",
    "sent": "DropPending > idle",
}
TABLE: dict[str, tuple[FromCoordinator | bytes | str, dict[str, str]]] = {
    "a second welcome": (WELCOME, {"*": "-"}),
    "the task": (task("A"), {"idle": "Locate > locating", "*": "-"}),
    "another task": (
        task("B"),
        {
            "idle": "Locate > locating",
            "locating": "Locate > locating",
            "fetching": "Locate > locating",
            "receiving": "Locate > locating",
            "storing": "Locate > locating",
            "training": "StopTraining Locate > locating",
            "saving": "Locate > locating",
            "holding": "DropPending Locate > locating",
            "uploading": "DropPending Locate > locating",
            "sent": "DropPending Locate > locating",
        },
    ),
    "come back": (ComeBack(5.0, "no-task"), {"*": FAULT}),
    "its content": (
        Content(3, SHA, len(MODEL), 0),
        {"fetching": "> fetching", "receiving": "> fetching", "*": "-"},
    ),
    "another content": (Content(4, "d" * 64, 8, 0), {"*": "-"}),
    "content of another size": (
        Content(3, SHA, 44, 0),
        {"fetching": "Send Close > idle", "receiving": "Send Close > idle", "*": "-"},
    ),
    "content from elsewhere": (Content(3, SHA, len(MODEL), 8), {"*": "-"}),
    "its first chunk": (
        pack_chunk(3, 0, MODEL[:8]),
        {"receiving": "StoreChunk > fetching", "*": "-"},
    ),
    "its only chunk": (
        pack_chunk(3, 0, MODEL),
        {"receiving": "StoreChunk FinishContent > storing", "*": "-"},
    ),
    "a chunk too far": (pack_chunk(3, 8, MODEL[8:]), {"receiving": FAULT, "*": "-"}),
    "a chunk too long": (pack_chunk(3, 0, MODEL + b"...."), {"receiving": FAULT, "*": "-"}),
    "another chunk": (pack_chunk(8, 0, MODEL), {"*": "-"}),
    "its grant": (
        Grant("A", 10, 8),
        {
            "idle": "-",
            "holding": "SendUpdate > uploading",
            "uploading": "SendUpdate > uploading",
            "sent": "SendUpdate > uploading",
            "*": FAULT,
        },
    ),
    "its grant again": (
        Grant("A", 9, 0),
        {
            "idle": "-",
            "holding": "SendUpdate > uploading",
            "uploading": "-",
            "sent": "-",
            "*": FAULT,
        },
    ),
    "a grant beyond the end": (Grant("A", 10, 44), {"idle": "-", "*": FAULT}),
    "another grant": (Grant("B", 10, 0), {"*": "-"}),
    "its acknowledgement": (
        Accepted("A"),
        {
            "idle": "-",
            "holding": "DropPending > idle",
            "uploading": "DropPending > idle",
            "sent": "DropPending > idle",
            "*": FAULT,
        },
    ),
    "another acknowledgement": (Accepted("B"), {"*": "-"}),
    "its cancellation": (Cancel("A", Code.ROUND_OVER), {"idle": "-", **FORGOTTEN}),
    "another cancellation": (Cancel("B", Code.ROUND_OVER), {"*": "-"}),
    "its task refused": (Refused(Code.STALE_ROUND, "late", "A"), {"idle": "-", **FORGOTTEN}),
    "another task refused": (Refused(Code.STALE_ROUND, "late", "B"), {"*": "-"}),
    "its task refused as a duplicate": (Refused(Code.DUPLICATE, "twice", "A"), {"*": "-"}),
    "its task refused as too much": (Refused(Code.BUSY, "full", "A"), {"idle": "-", "*": FAULT}),
    "its bytes refused": (
        Refused(Code.WRONG_HASH, "other bytes", "A"),
        {
            "idle": "-",
            **FORGOTTEN,
            "holding": "Send > holding",
            "uploading": "Send > holding",
            "sent": "Send > holding",
        },
    ),
    "its bytes refused as out of order": (
        Refused(Code.WRONG_OFFSET, "a gap", "A"),
        {
            "idle": "-",
            **FORGOTTEN,
            "holding": "StopUpdate > holding",
            "uploading": "StopUpdate > holding",
            "sent": "StopUpdate > holding",
        },
    ),
    "its upload waits": (
        Waiting(task="A"),
        {"uploading": "StopUpdate Send > holding", "sent": "StopUpdate Send > holding", "*": "-"},
    ),
    "another upload waits": (Waiting(task="B"), {"*": "-"}),
    "a fetch waits": (Waiting(sha256=SHA), {"*": "-"}),
    "its content refused": (
        Refused(Code.UNKNOWN_CONTENT, "no such", None, SHA),
        {"fetching": "Send Close > idle", "receiving": "Send Close > idle", "*": "-"},
    ),
    "another content refused": (
        Refused(Code.UNKNOWN_CONTENT, "no such", None, "d" * 64),
        {"*": "-"},
    ),
    "something refused": (Refused(Code.BAD_MESSAGE, "what?"), {"*": FAULT}),
    "another process": (
        Refused(Code.REPLACED, "again"),
        {
            "locating": "Close > idle",
            "fetching": "Close > idle",
            "receiving": "Close > idle",
            "storing": "Close > idle",
            "training": "StopTraining Close > idle",
            "*": FAULT,
        },
    ),
    "no JSON": ("{", {"*": FAULT}),
    "an unknown type": ('{"type":"hello"}', {"*": FAULT}),
    "a number out of bounds": ('{"type":"come-back","after":-1,"reason":"no-task"}', {"*": FAULT}),
    "no chunk": (b"12", {"*": FAULT}),
}
PARKED = {"fetching": "locating", "uploading": "holding", "sent": "holding"}


def deliver(session: Session, message: FromCoordinator | bytes | str) -> Commands:
    if isinstance(message, bytes):
        return session.received_chunk(message, 1.0)
    return session.received(message if isinstance(message, str) else encode(message), 1.0)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", TABLE)
def test_each_message_in_each_state(name: str, state: str) -> None:
    message, cells = TABLE[name]
    session = brought_to(state)
    before = name_of(session.work)

    commands = acts(deliver(session, message))

    expected = cells.get(state, cells.get("*", ""))
    assert expected, "the table has no cell for it"
    if expected == "-":
        assert (commands, name_of(session.work), name_of(session.link)) == ([], before, "online")
        return
    names, _, work = expected.rpartition(">")
    assert [type(command).__name__ for command in commands] == names.split()
    assert name_of(session.work) == (
        PARKED.get(before, before) if work.strip() == "*" else work.strip()
    )
    assert isinstance(session.link, Closing if "Close" in names else Online)


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_heard_without_a_connection_or_while_it_closes(name: str) -> None:
    message, _ = TABLE[name]
    for state in STATES:
        session = brought_to(state)
        tell(session, ComeBack(1.0, "busy"))
        before = session.work
        assert deliver(session, message) == []
        session.disconnected()
        assert deliver(session, message) == []
        assert session.work is before


@pytest.mark.parametrize("name", TABLE)
def test_before_the_welcome_only_three_messages_are_in_turn(name: str) -> None:
    message, _ = TABLE[name]
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    commands = deliver(session, message)
    if isinstance(message, Welcome):
        assert isinstance(session.link, Online)
    else:
        assert isinstance(commands[-1], Close)
        assert session.faults == (
            0 if isinstance(message, ComeBack) or name == "another process" else 1
        )


def test_a_check_in_states_what_the_device_is_and_the_welcome_says_why_it_waits() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    stated = Statement(2**30, ("eu", "roof"), "pi-5", False, "metered")
    (sent,) = session.connected(0.0, stated)
    assert isinstance(sent, Send)
    assert sent.message == CheckIn(
        1,
        "dev",
        7,
        memory=2**30,
        tags=("eu", "roof"),
        tier="pi-5",
        charging=False,
        network="metered",
        exchanges=("evaluation",),
        encodings=FAMILIES,
        newest_protocol=3,
        privacy=PRIVACY,
    )
    notes = tell(session, Welcome("test", 10.0, 8, "not charging (the plan's selection.charging)"))
    (note,) = [row for row in notes if isinstance(row, Note) and row.warning]
    assert "not charging" in note.text
    assert isinstance(session.link, Online), "it waits like any other"


@pytest.mark.parametrize("how", ["refused", "not the vector"])
def test_a_difference_that_cannot_be_had_is_replaced_by_the_whole(how: str) -> None:
    session = brought_to("idle")
    tell(session, task())
    delta = Wanted(
        "d" * 64, "the difference of the model", WANTED.place, 9, 9, base="b" * 64, instead=WANTED
    )
    assert acts(session.located("A", [delta], 0.0)) == [Send(Fetch("d" * 64))]
    if how == "refused":
        commands = tell(session, Refused(Code.UNKNOWN_CONTENT, "of an old round", None, "d" * 64))
    else:
        tell(session, Content(3, "d" * 64, 9, 0))
        assert acts(session.received_chunk(pack_chunk(3, 0, bytes(9)), 0.0))[-1] == FinishContent(
            delta
        )
        commands = session.stored("d" * 64, False, 0.0)
    assert acts(commands) == [Send(Fetch(SHA))]
    assert isinstance(session.work, Fetching)


ROWS = ContentSelection((Piece(0, 4, True),), (1, 3))
OF_ROWS = Wanted(
    SHA, "its rows", "models/r", 8, 8, instead=WANTED, selection=ROWS, name_of_pieces="r"
)


def test_pieces_of_a_content_are_fetched_and_checked_by_what_the_coordinator_says() -> None:
    session = brought_to("idle")
    tell(session, task())
    assert acts(session.located("A", [OF_ROWS], 0.0)) == [Send(Fetch(SHA, selection=ROWS))]
    tell(session, Content(3, SHA, 8, 0, selected="e" * 64))
    commands = acts(session.received_chunk(pack_chunk(3, 0, bytes(8)), 0.0))
    assert isinstance(commands[-1], FinishContent)
    wanted = commands[-1].wanted
    assert (wanted.key, wanted.expected) == ("r", "e" * 64)


def test_pieces_that_are_all_there_are_asked_for_what_their_hash_is() -> None:
    session = brought_to("idle")
    tell(session, task())
    here = replace(OF_ROWS, have=8)
    assert acts(session.located("A", [here], 0.0)) == [Send(Fetch(SHA, 8, selection=ROWS))]
    (finish,) = acts(tell(session, Content(3, SHA, 8, 8, selected="e" * 64)))
    assert isinstance(finish, FinishContent)
    assert finish.wanted.expected == "e" * 64


def test_a_coordinator_that_knows_no_pieces_sends_the_whole() -> None:
    session = brought_to("idle")
    tell(session, task())
    session.located("A", [OF_ROWS], 0.0)
    assert acts(tell(session, Content(3, SHA, WANTED.size or 0, 0))) == [Send(Fetch(SHA))]


def test_who_demands_privacy_says_nothing_of_rows() -> None:
    for demands, expected in ((PrivacyDemands(), True), (PrivacyDemands(require=True), False)):
        session = Session("dev", 7, can_choose_rows=True, demands=demands)
        (send,) = session.connected(0.0)
        assert isinstance(send, Send)
        assert isinstance(send.message, CheckIn)
        assert ("uint32" in send.message.encodings) is expected


@pytest.mark.parametrize("demand", ["clip", "noise"])
def test_rows_are_not_told_beside_a_private_update(demand: str) -> None:
    private = {"clip": 0.5} if demand == "clip" else {"clip": 0.5, "local_noise": 1.0}
    parts = {"rows": "uint32", "update": "float32"}
    given = msgspec.structs.replace(task(), parts=parts, **private)
    told = unsupported(given, (), ())
    assert told is not None
    assert "the rows of tables" in told
    assert unsupported(msgspec.structs.replace(task(), parts=parts), (), ()) is None


def test_a_round_from_the_check_in_to_the_acknowledgement() -> None:
    session = Session(
        "dev", 7, exchanges=("evaluation",), runtime="onnx 1", software="fleetlearn 0"
    )
    assert session.connected(0.0) == [
        Send(
            CheckIn(
                1,
                "dev",
                7,
                "onnx 1",
                "fleetlearn 0",
                None,
                exchanges=("evaluation",),
                encodings=FAMILIES,
                newest_protocol=3,
                privacy=PRIVACY,
            )
        )
    ]
    assert acts(tell(session, WELCOME)) == []
    assert acts(tell(session, task())) == [Locate(task())]
    assert acts(session.located("A", [WANTED], 1.0)) == [Send(Fetch(SHA, 0))]
    assert tell(session, Content(3, SHA, 40, 0)) == []
    assert session.received_chunk(pack_chunk(3, 0, MODEL[:16]), 1.0) == [
        StoreChunk(WANTED, 0, memoryview(MODEL)[:16])
    ]
    assert session.received_chunk(pack_chunk(3, 16, MODEL[16:]), 1.0) == [
        StoreChunk(WANTED, 16, memoryview(MODEL)[16:]),
        FinishContent(WANTED),
    ]
    assert session.stored(SHA, True, 1.0) == [Locate(task())]
    # 100 - 2 - a tenth for the upload
    assert session.located("A", [], 2.0) == [StartTraining(task(), 88.0)]
    assert session.trained(report()) == [SavePending(report())]
    assert session.saved("A") == [Send(report())]
    assert acts(tell(session, Grant("A", 9, 16))) == [SendUpdate("A", 9, 16, 8)]
    assert session.update_sent(9, 3.0) == [Send(Uploaded("A"))]
    assert acts(tell(session, Accepted("A"))) == [DropPending("A")]
    assert isinstance(session.work, Idle)


def test_the_next_check_in_states_what_the_passes_gave() -> None:
    session = brought_to("training")
    found = msgspec.structs.replace(report(), examples=3)
    session.trained(found)
    session.disconnected()
    (sent,) = session.connected(1.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, CheckIn)
    assert sent.message.examples == 3
    session = brought_to("training")
    session.trained(msgspec.structs.replace(report(), examples=1), 3)  # a report that withholds it
    assert session.examples == 3
    session = brought_to("training")
    session.answered(Reply("A", "evaluation", fields_of(Evaluation(4, 1.0, {})), 1.0), 4)
    assert session.examples == 4


def test_the_update_is_saved_before_it_is_reported() -> None:
    session = brought_to("training")
    assert session.trained(report()) == [SavePending(report())]
    assert session.tick(50.0, 3) == [Send(Heartbeat("A", 3))]
    assert session.saved("A") == [Send(report())]


def test_a_held_update_is_checked_in_and_reported_again() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report())
    check_in = session.connected(0.0)
    assert check_in == [
        Send(
            CheckIn(
                1,
                "dev",
                7,
                held=Held("A", 1),
                exchanges=("evaluation",),
                encodings=FAMILIES,
                newest_protocol=3,
                privacy=PRIVACY,
            )
        )
    ]
    assert acts(tell(session, WELCOME)) == [Send(report())]
    assert acts(tell(session, task("A"))) == []  # the coordinator did not look at ``held``
    assert acts(tell(session, Refused(Code.STALE_ROUND, "over", "A"))) == [DropPending("A")]


@pytest.mark.parametrize("state", ["holding", "uploading", "sent"])
def test_a_broken_upload_begins_again_at_its_report(state: str) -> None:
    session = brought_to(state)
    session.disconnected()
    assert session.update_sent(9, 1.0) == []
    assert session.connected(1.0) == [
        Send(
            CheckIn(
                1,
                "dev",
                7,
                held=Held("A", 1),
                exchanges=("evaluation",),
                encodings=FAMILIES,
                newest_protocol=3,
                privacy=PRIVACY,
            )
        )
    ]
    assert acts(tell(session, WELCOME)) == [Send(report())]
    assert acts(tell(session, Grant("A", 11, 24))) == [SendUpdate("A", 11, 24, 8)]


def test_an_upload_that_lost_its_place_is_reported_again_and_goes_on_with_another_grant() -> None:
    session = brought_to("uploading")
    assert acts(tell(session, Waiting(task="A"))) == [StopUpdate(), Send(report())]
    assert session.update_sent(9, 1.0) == []
    assert acts(tell(session, Grant("A", 10, 24))) == [SendUpdate("A", 10, 24, 8)]
    assert session.update_sent(10, 2.0) == [Send(Uploaded("A"))]
    # All bytes were sent before the device heard that it was to wait, and they were enough.
    assert acts(tell(session, Waiting(task="A"))) == [StopUpdate(), Send(report())]
    assert acts(tell(session, Accepted("A"))) == [DropPending("A")]


def test_a_gap_in_an_upload_is_followed_by_another_grant_however_often() -> None:
    session = brought_to("uploading")
    for transfer in range(10, 15):
        assert acts(tell(session, Refused(Code.WRONG_OFFSET, "a gap", "A"))) == [StopUpdate()]
        assert acts(tell(session, Grant("A", transfer, 8))) == [SendUpdate("A", transfer, 8, 8)]


def test_a_fetch_that_is_told_to_wait_is_patient() -> None:
    session = brought_to("fetching")
    for now in (30.0, 60.0, 90.0):
        assert acts(tell(session, Waiting(sha256=SHA), now)) == []
    # patience was over at 60 s, had nothing come
    assert session.tick(99.0) == [Send(Heartbeat("A", 0))]


def test_a_repeated_task_does_not_disturb_a_held_update() -> None:
    """The device finished training after its check-in, which named no update, so the task is given
    again."""
    session = brought_to("training")
    session.disconnected()
    session.connected(1.0)
    session.trained(report())
    session.saved("A")
    assert acts(tell(session, WELCOME)) == [Send(report())]
    assert acts(tell(session, task("A"))) == []
    assert isinstance(session.work, Holding)


def test_another_task_than_the_held_one_replaces_it() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report())
    session.connected(0.0)
    tell(session, WELCOME)
    assert acts(tell(session, task("B"))) == [DropPending("A"), Locate(task("B"))]
    # the answer to its report
    assert acts(tell(session, Refused(Code.NOT_WANTED, "given back", "A"))) == []
    assert session.task_id == "B"


def test_a_broken_download_goes_on_where_the_directory_says() -> None:
    session = brought_to("receiving")
    session.received_chunk(pack_chunk(3, 0, MODEL[:16]), 1.0)
    session.disconnected()
    session.connected(2.0)
    assert acts(tell(session, WELCOME)) == [Send(Heartbeat("A", 0)), Locate(task())]
    partial = Wanted(SHA, "the model", WANTED.place, 40, 40, have=16)
    assert acts(session.located("A", [partial], 2.0)) == [Send(Fetch(SHA, 16))]
    assert tell(session, Content(5, SHA, 40, 16)) == []
    # of the connection before
    assert session.received_chunk(pack_chunk(3, 16, MODEL[16:]), 2.0) == []
    assert acts(session.received_chunk(pack_chunk(5, 16, MODEL[16:]), 2.0))[1:] == [
        FinishContent(partial)
    ]


def test_training_goes_on_without_a_connection() -> None:
    session = brought_to("training")
    session.disconnected()
    assert session.trained(report()) == [SavePending(report())]
    assert session.saved("A") == []
    session.connected(9.0)
    assert acts(tell(session, WELCOME)) == [Send(report())]


def test_a_fetch_that_was_not_begun_waits_for_the_connection() -> None:
    session = brought_to("locating")
    session.disconnected()
    assert session.located("A", [WANTED], 1.0) == []
    session.connected(1.0)
    assert acts(tell(session, WELCOME))[-1] == Locate(task())


def test_a_later_fetch_replaces_that_of_a_cancelled_task() -> None:
    session = brought_to("receiving")
    session.received_chunk(pack_chunk(3, 0, MODEL[:16]), 1.0)
    assert acts(tell(session, Cancel("A", Code.ROUND_OVER))) == []
    assert acts(tell(session, task("B"))) == [Locate(task("B"))]
    partial = Wanted(SHA, "the model", WANTED.place, 40, 40, have=16)
    assert acts(session.located("B", [partial], 1.0)) == [Send(Fetch(SHA, 16))]
    # What was under way carries the same transfer number, which belongs to the content.
    assert session.received_chunk(pack_chunk(3, 16, MODEL[16:24]), 1.0) == []
    assert acts(tell(session, Content(3, SHA, 40, 0))) == []
    assert session.received_chunk(pack_chunk(3, 0, MODEL[:8]), 1.0) == []
    assert acts(tell(session, Content(3, SHA, 40, 16))) == []
    last = session.received_chunk(pack_chunk(3, 16, MODEL[16:]), 1.0)
    assert last == [StoreChunk(partial, 16, memoryview(MODEL)[16:]), FinishContent(partial)]


def test_a_content_announced_again_begins_again() -> None:
    session = brought_to("receiving")
    session.received_chunk(pack_chunk(3, 0, MODEL[:16]), 1.0)
    assert tell(session, Content(3, SHA, 40, 0)) == []
    assert session.received_chunk(pack_chunk(3, 0, MODEL[:8]), 1.0) == [
        StoreChunk(WANTED, 0, memoryview(MODEL)[:8])
    ]


def test_broken_protocol_closes_with_its_own_code() -> None:
    close = brought_to("idle").received("{", 0.0)[-1]
    assert isinstance(close, Close)
    assert close.code == 1002
    assert "bad-message" in close.reason


def test_a_content_is_fetched_twice_and_not_three_times() -> None:
    session = brought_to("storing")
    assert acts(session.stored(SHA, False, 1.0)) == [Send(Fetch(SHA, 0))]
    tell(session, Content(4, SHA, 40, 0))
    session.received_chunk(pack_chunk(4, 0, MODEL), 1.0)
    failed, close = acts(session.stored(SHA, False, 1.0))
    assert isinstance(failed, Send)
    assert isinstance(failed.message, Failed)
    assert failed.message.code == "bad-bundle"
    assert isinstance(close, Close)
    assert isinstance(session.work, Idle)


def test_a_start_beyond_the_content_is_fetched_from_the_beginning() -> None:
    session = brought_to("locating")
    longer = Wanted(SHA, "manifest.json", "m", None, 1000, have=500)
    session.located("A", [longer], 0.0)
    assert acts(tell(session, Refused(Code.WRONG_OFFSET, "beyond", None, SHA))) == [
        Send(Fetch(SHA, 0))
    ]
    assert isinstance(
        acts(tell(session, Refused(Code.WRONG_OFFSET, "beyond", None, SHA)))[-1], Close
    )


def test_a_content_above_its_limit_is_not_stored() -> None:
    session = brought_to("locating")
    session.located("A", [Wanted(SHA, "manifest.json", "m", None, 16)], 0.0)
    failed = acts(tell(session, Content(3, SHA, 17, 0)))[0]
    assert isinstance(failed, Send)
    assert isinstance(failed.message, Failed)
    assert "17 bytes; expected at most 16" in failed.message.text


def test_an_empty_content_has_no_chunks() -> None:
    session = brought_to("locating")
    empty = Wanted(SHA, "graphs/eval.onnx", "m", 0, 0)
    assert session.located("A", [empty], 0.0) == [FinishContent(empty)]


def test_the_next_training_waits_until_the_one_before_has_ended() -> None:
    session = brought_to("training")
    assert acts(tell(session, task("B"))) == [StopTraining("A"), Locate(task("B"))]
    assert session.located("B", [], 1.0) == []
    assert session.ended("A") == [Locate(task("B"))]
    assert acts(session.located("B", [], 2.0)) == [StartTraining(task("B"), 88.0)]


def test_a_training_that_ends_in_spite_of_its_cancellation_is_not_saved() -> None:
    session = brought_to("training")
    tell(session, Cancel("A", Code.ROUND_OVER))
    assert session.trained(report()) == []
    assert session.running_task_id is None


def test_an_update_whose_task_is_cancelled_while_it_is_saved_is_dropped() -> None:
    session = brought_to("saving")
    assert acts(tell(session, Cancel("A", Code.ROUND_OVER))) == []
    assert session.saved("A") == [DropPending("A")]
    assert isinstance(session.work, Idle)


def test_bytes_are_reported_again_once_and_then_forgotten() -> None:
    session = brought_to("sent")
    wrong = Refused(Code.WRONG_HASH, "other bytes", "A")
    assert acts(tell(session, wrong)) == [Send(report())]
    assert acts(tell(session, Grant("A", 10, 0))) == [SendUpdate("A", 10, 0, 8)]
    assert acts(tell(session, wrong)) == [DropPending("A")]


@pytest.mark.parametrize("code", ["diverged", "out-of-time", "bad-bundle", "runtime-error"])
def test_a_failed_training_gives_the_task_back_and_backs_off(
    code: session_module.FailureCode,
) -> None:
    session = brought_to("training")
    send, close = acts(session.ended("A", code, "why" * 500))
    assert isinstance(send, Send)
    assert isinstance(send.message, Failed)
    assert (send.message.task, send.message.code, len(send.message.text)) == ("A", code, 1000)
    assert isinstance(close, Close)
    assert (session.work, session.running_task_id, session.faults) == (Idle(), None, 1)


KNOWN = VectorReference("model", SHA, len(MODEL), "float32")


@pytest.mark.parametrize("name", ["float32", "float16", "int8", "int4", "topk-0.01-int8"])
def test_a_task_that_asks_for_an_encoding_that_the_device_knows_is_done(name: str) -> None:
    session = brought_to("idle")
    model = msgspec.structs.replace(KNOWN, encoding="float16")
    given = msgspec.structs.replace(task(), vectors=(model,), parts={"update": name})
    assert acts(tell(session, given)) == [Locate(given)]


@pytest.mark.parametrize(
    ("vectors", "parts", "text"),
    [
        (
            (KNOWN, VectorReference("control", SHA, 8, "float32")),
            {"update": "float32"},
            "the task sends the vectors model (float32), control (float32); this device knows "
            "model (float32, float16, bfloat16)",
        ),
        (
            (KNOWN, KNOWN),
            {"update": "float32"},
            "the task sends the vectors model (float32), model (float32); this device knows "
            "model (float32, float16, bfloat16)",
        ),
        (
            (VectorReference("model", SHA, 8, "int8"),),
            {"update": "float32"},
            (
                "the task sends the vectors model (int8); this device knows model (float32, "
                "float16, bfloat16)"
            ),
        ),
        (
            (KNOWN,),
            {"update": "int16"},
            "the task asks for the parts update (int16); this device knows update (float32, "
            "float16, bfloat16, int8, int4, topk)",
        ),
        (
            (KNOWN,),
            {"update": "topk-2"},
            "the task asks for the parts update (topk-2); this device knows update (float32, "
            "float16, bfloat16, int8, int4, topk)",
        ),
        (
            (KNOWN,),
            {"update": "float32", "control": "float32"},
            "the task asks for the parts update (float32), control (float32); this device knows "
            "update (float32, float16, bfloat16, int8, int4, topk)",
        ),
    ],
)
def test_a_task_that_asks_for_more_than_the_device_knows_is_given_back(
    vectors: tuple[VectorReference, ...], parts: dict[str, str], text: str
) -> None:
    session = brought_to("idle")
    given = msgspec.structs.replace(task(), vectors=vectors, parts=parts)
    send, close = acts(tell(session, given))
    assert send == Send(Failed("A", "unsupported", text))
    assert isinstance(close, Close)
    assert session.work == Idle()


def test_a_failure_without_a_connection_is_told_on_the_next() -> None:
    session = brought_to("training")
    session.disconnected()
    assert acts(session.ended("A", "diverged", "nan")) == []
    session.connected(1.0)
    assert acts(tell(session, WELCOME)) == [Send(Failed("A", "diverged", "nan"))]
    assert acts(tell(session, task("A"))) == []  # given again before the coordinator knew


def test_faults_end_with_an_accepted_update() -> None:
    session = brought_to("sent")
    session.faults = 3
    tell(session, Accepted("A"))
    assert session.faults == 0


@pytest.mark.parametrize(("budget", "seconds"), [(None, 90.0), (20.0, 20.0), (95.0, 90.0)])
def test_the_time_budget_leaves_time_for_the_upload(budget: float | None, seconds: float) -> None:
    session = brought_to("idle")
    given = task(deadline=100.0, budget=budget)
    tell(session, given)
    assert session.located("A", [], 0.0) == [StartTraining(given, seconds)]


def test_long_deadlines_keep_a_minute_for_the_upload() -> None:
    session = brought_to("idle")
    given = task(deadline=86400.0)
    tell(session, given)
    assert session.located("A", [], 0.0) == [StartTraining(given, 86340.0)]


def test_a_model_that_comes_too_late_is_not_trained() -> None:
    session = brought_to("locating")
    failed = acts(session.located("A", [], 95.0))[0]
    assert isinstance(failed, Send)
    assert isinstance(failed.message, Failed)
    assert failed.message.code == "out-of-time"


@pytest.mark.parametrize("state", ["locating", "fetching", "receiving"])
def test_the_deadline_ends_a_download(state: str) -> None:
    session = brought_to(state)
    due = session.due()
    assert due is not None
    assert due <= 100.0
    failed = acts(session.tick(100.0))[0]
    assert isinstance(failed, Send)
    assert isinstance(failed.message, Failed)
    assert failed.message.code == "out-of-time"


def test_a_task_given_again_by_a_restarted_coordinator_has_its_new_deadline() -> None:
    session = brought_to("fetching")
    session.disconnected()
    session.connected(90.0)
    tell(session, WELCOME, 90.0)
    tell(session, task("A"), 90.0)
    assert acts(session.tick(100.0)) == [Send(Heartbeat("A", 0))]
    assert isinstance(session.work, Locating)


def test_the_next_content_is_fetched_when_one_is_stored() -> None:
    session = brought_to("locating")
    other = replace(WANTED, sha256="c" * 64, name="the other", have=0)
    session.located("A", [replace(WANTED, have=0), other], 0.0)
    tell(session, Content(3, SHA, len(MODEL), 0))
    session.received_chunk(pack_chunk(3, 0, MODEL), 0.0)
    assert acts(session.stored(SHA, True, 0.0)) == [Send(Fetch("c" * 64, 0))]
    assert isinstance(session.work, Fetching)


def test_a_content_that_begins_behind_its_end_breaks_the_protocol() -> None:
    session = brought_to("locating")
    session.located("A", [replace(WANTED, size=None, have=30)], 0.0)
    closed, *_ = acts(tell(session, Content(3, SHA, 20, 30)))
    assert isinstance(closed, Close)
    assert "begins at 30, behind its end" in closed.reason


def test_heartbeats_say_how_far_training_is() -> None:
    session = brought_to("training")
    assert session.due() == 8.0  # 0.8 of the 10 s that the welcome allows
    assert session.tick(7.9, 3) == []
    assert session.tick(8.0, 4) == [Send(Heartbeat("A", 4))]
    assert session.due() == 16.0
    assert brought_to("idle").tick(8.0, 4) == [Send(Heartbeat(None, 0))]


@pytest.mark.parametrize("state", ["fetching", "receiving", "sent"])
def test_a_coordinator_that_does_not_answer_is_left(state: str) -> None:
    session = brought_to(state)
    for second in range(60):
        assert not [
            command for command in session.tick(float(second)) if isinstance(command, Close)
        ]
    assert acts(session.tick(60.0)) == [Close("no answer for 60 s")]


def test_a_check_in_without_an_answer_is_left() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(5.0)
    assert session.due() == 65.0
    assert session.tick(65.0) == [Close("no answer for 60 s")]


def test_waiting_for_a_grant_has_no_limit() -> None:
    session = brought_to("holding")
    assert acts(session.tick(10000.0)) == [Send(Heartbeat("A", 0))]


def test_chunks_are_as_small_as_the_welcome_says() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report())
    session.connected(0.0)
    tell(session, Welcome("test", 10.0, CHUNK_BYTES))
    assert acts(tell(session, Grant("A", 9, 0))) == [SendUpdate("A", 9, 0, CHUNK_BYTES)]


@pytest.mark.parametrize(
    ("code", "until_finished"), [(Code.BAD_VERSION, True), (Code.BAD_MESSAGE, False)]
)
def test_a_refused_check_in_ends_the_device(code: Code, until_finished: bool) -> None:
    session = Session("dev", 7, exchanges=("evaluation",), until_finished=until_finished)
    session.connected(0.0)
    assert isinstance(tell(session, Refused(code, "version 9 is spoken here"))[-1], Close)
    session.disconnected()
    assert session.over
    assert isinstance(session.error, ProtocolError)
    assert "version 9" in str(session.error)


@pytest.mark.parametrize("version", [1, 2])
def test_the_coordinator_chooses_one_of_the_devices_versions(version: int) -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    tell(session, Welcome("test", 10.0, CHUNK_BYTES, protocol=version))
    assert acts(tell(session, task())) == [Locate(task())]


@pytest.mark.parametrize("version", [0, 4])
def test_a_device_leaves_a_coordinator_that_chose_another_version(version: int) -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report())
    session.connected(0.0)
    (close,) = tell(session, Welcome("test", 10.0, CHUNK_BYTES, protocol=version))
    assert isinstance(close, Close)
    said = f"chose version {version} of the protocol; this device speaks versions 1 to 3"
    assert (said in close.reason, close.code) == (True, 1002)
    session.disconnected()
    assert (session.over, session.error, session.task_id) == (False, None, "A")


def test_an_unattended_device_waits_for_a_coordinator_of_its_version() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), held=report())
    session.connected(0.0)
    note, close = tell(session, Refused(Code.BAD_VERSION, "version 9 is spoken here"))
    assert note == Note(
        "the coordinator speaks another version of the protocol: version 9 is spoken here", True
    )
    assert close == Close("another version of the protocol", VERSION_WAIT)
    session.disconnected()
    assert (session.over, session.error, session.task_id) == (False, None, "A")


def test_a_check_in_refused_for_now_is_tried_again() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    tell(session, Refused(Code.BUSY, "full"))
    session.disconnected()
    assert (session.over, session.error, session.faults) == (False, None, 1)


@pytest.mark.parametrize("state", STATES)
def test_stopping_gives_unfinished_work_back_and_keeps_finished(state: str) -> None:
    session = brought_to(state)
    commands = acts(session.stop())
    assert commands[-1] == Close("stopping")
    told = [command.message for command in commands if isinstance(command, Send)]
    if state in ("locating", "fetching", "receiving", "storing", "training"):
        assert told == [Failed("A", "stopping", "the device is stopping")]
    else:
        assert told == []
    assert not [command for command in commands if isinstance(command, DropPending)]
    session.disconnected()
    if state == "training":
        assert not session.over
        session.ended("A")
    if state == "saving":
        assert not session.over
        assert session.saved("A") == []
    assert session.over


@pytest.mark.parametrize("state", STATES)
def test_stopping_with_a_task_that_is_worth_keeping(state: str) -> None:
    """A task in training is kept for the next start; whatever else is done as ever."""
    kept, other = brought_to(state), brought_to(state)
    commands = kept.stop(keep=True)
    if state != "training":
        assert commands == other.stop()
        return
    stop, close = acts(commands)
    assert (stop, close) == (StopTraining("A", keep=True), Close("stopping"))
    kept.disconnected()
    assert not kept.over
    assert kept.ended("A") == [], "nothing of the task is looked up again"
    assert kept.over
    assert (kept.history.failed, kept.history.uncounted, kept.history.end) == (0, 0, "")


def test_a_training_that_ends_as_its_task_is_kept_is_saved() -> None:
    session = brought_to("training")
    session.stop(keep=True)
    assert session.trained(report()) == [SavePending(report())]
    session.disconnected()
    assert session.saved("A") == []
    assert session.over


def test_a_connection_that_opens_while_stopping_is_closed() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.stop()
    assert session.connected(0.0) == [Close("stopping")]


@pytest.mark.parametrize("state", STATES)
def test_a_device_that_was_replaced_ends_and_keeps_what_is_finished(state: str) -> None:
    session = brought_to(state)
    commands = acts(tell(session, Refused(Code.REPLACED, "again")))
    assert not [command for command in commands if isinstance(command, Send | DropPending)]
    session.disconnected()
    if state == "training":
        session.ended("A")
    if state == "saving":
        assert session.saved("A") == []
    assert session.over
    assert isinstance(session.error, ProtocolError)
    assert session.error.code is Code.REPLACED
    assert (
        "delete identity.json and, if they are there, credential.json and device_key.json in the "
        "copy" in session.error.text
    )
    finished = state in ("saving", "holding", "uploading", "sent")
    assert isinstance(session.work, Holding if finished else Idle)


def test_finished_ends_a_device_that_waits_for_it_alone() -> None:
    waits = brought_to("training", until_finished=True)
    assert acts(tell(waits, ComeBack(3600.0, "finished"))) == [
        StopTraining("A"),
        Close("the training is finished", 3600.0),
    ]
    waits.disconnected()
    waits.ended("A")
    assert waits.over
    assert waits.finished
    stays = brought_to("idle")
    tell(stays, ComeBack(3600.0, "finished"))
    stays.disconnected()
    assert not stays.over
    busy = brought_to("idle", until_finished=True)
    tell(busy, ComeBack(3600.0, "busy"))
    busy.disconnected()
    assert not busy.over


def test_data_that_do_not_fit_are_told_and_end_the_device() -> None:
    session = brought_to("training")
    error = ValueError("array x has shape (7, 3)")
    failed, stop, _ = acts(session.abandon(error, "bad-data"))
    assert failed == Send(Failed("A", "bad-data", "array x has shape (7, 3)"))
    assert stop == StopTraining("A")
    session.ended("A")
    session.disconnected()
    assert session.over
    assert session.error is error


def test_a_full_disk_keeps_a_finished_update() -> None:
    session = brought_to("uploading")
    assert acts(session.abandon(OSError("full"), "runtime-error")) == [Close("full")]
    assert isinstance(session.work, Holding)


def test_a_bundle_that_cannot_be_used_fails_its_task() -> None:
    session = brought_to("locating")
    failed = acts(session.unusable("A", "too new"))[0]
    assert failed == Send(Failed("A", "bad-bundle", "too new"))
    assert session.unusable("A", "too new") == []


@pytest.mark.parametrize("state", STATES)
def test_answers_to_commands_of_another_task_change_nothing(state: str) -> None:
    session = brought_to(state)
    before = session.work
    assert session.located("Z", [], 1.0) == []
    assert session.located("Z", [WANTED], 1.0) == []
    assert session.unusable("Z", "x") == []
    assert session.stored("d" * 64, True, 1.0) == []
    assert session.update_sent(77, 1.0) == []
    assert session.work is before


MODEL_SENT = (VectorReference("model", SHA, 40, "float32"),)
EVALUATE = Question("E", "evaluation", 100.0, bundle="b" * 64, vectors=MODEL_SENT)
EVALUATED = Reply("E", "evaluation", fields_of(Evaluation(7, 3.5, {"accuracy": 6.0})), 1.0)


def evaluating() -> Session:
    """A session whose evaluation runs."""
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    tell(session, WELCOME)
    assert acts(tell(session, EVALUATE)) == [Locate(EVALUATE)]
    assert session.located("E", [], 2.0) == [StartAnswer(EVALUATE, 88.0)]
    return session


def test_an_evaluation_is_answered_and_forgotten_when_it_is_accepted() -> None:
    session = evaluating()
    assert session.tick(50.0, 3) == [Send(Heartbeat("E", 3))]
    assert session.answered(EVALUATED) == [Send(EVALUATED)]
    assert session.running_task_id is None
    assert acts(tell(session, EVALUATE)) == [], "the coordinator's restart crossed with it"
    assert acts(tell(session, Accepted("E"))) == []
    assert isinstance(session.work, Idle)
    assert acts(tell(session, task())) == [Locate(task())]


def test_a_measurement_is_sent_again_on_the_next_connection() -> None:
    session = evaluating()
    session.disconnected()
    assert session.answered(EVALUATED) == []
    assert session.connected(3.0) == [
        Send(
            CheckIn(
                1,
                "dev",
                7,
                exchanges=("evaluation",),
                encodings=FAMILIES,
                newest_protocol=3,
                privacy=PRIVACY,
            )
        )
    ]
    assert acts(tell(session, WELCOME)) == [Send(EVALUATED)]
    assert acts(tell(session, Refused(Code.UNKNOWN_TASK, "over", "E"))) == []
    assert isinstance(session.work, Idle)


def test_an_evaluation_that_is_cancelled_stops_and_one_that_fails_is_given_back() -> None:
    session = evaluating()
    assert acts(tell(session, Cancel("E", Code.ROUND_OVER))) == [StopTraining("E")]
    assert session.answered(EVALUATED) == []
    session = evaluating()
    assert Send(Failed("E", "diverged", "the loss is nan")) in session.ended(
        "E", "diverged", "the loss is nan"
    )
    assert isinstance(session.work, Idle)


def test_a_task_takes_the_place_of_a_measurement() -> None:
    session = evaluating()
    session.answered(EVALUATED)
    assert acts(tell(session, task())) == [Locate(task())]
    assert acts(tell(session, Accepted("E"))) == []


def test_an_evaluation_of_what_the_device_does_not_know_is_given_back() -> None:
    session = Session("dev", 7, exchanges=("evaluation",))
    session.connected(0.0)
    tell(session, WELCOME)
    other = msgspec.structs.replace(
        EVALUATE, vectors=(VectorReference("control", SHA, 40, "int8"),)
    )
    (failed,) = [row.message for row in tell(session, other) if isinstance(row, Send)]
    assert isinstance(failed, Failed)
    assert failed.code == "unsupported"


SCAFFOLD = msgspec.structs.replace(
    task(),
    algorithm="scaffold",
    kept="t7",
    vectors=(VectorReference("control", SHA, 8, "float32"), KNOWN),
    parts={"control": "float32", "update": "float32"},
)


def test_the_check_in_says_which_algorithms_the_device_knows() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), algorithms=("scaffold", "feddyn"))
    (sent,) = session.connected(0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, CheckIn)
    assert sent.message.algorithms == ("scaffold", "feddyn")


def test_a_task_of_an_algorithm_that_the_device_knows_is_begun() -> None:
    session = Session("dev", 7, exchanges=("evaluation",), algorithms=("scaffold",))
    session.connected(0.0)
    tell(session, WELCOME)
    assert acts(tell(session, SCAFFOLD)) == [Locate(SCAFFOLD)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"algorithm": "gossip"},
            "the task asks for the algorithm gossip; this device knows plain, scaffold",
        ),
        (
            {"vectors": (KNOWN,)},
            (
                "the task sends the vectors model (float32); this device knows model, control "
                "(float32, float16, bfloat16)"
            ),
        ),
        (
            {"parts": {"update": "float32"}},
            "the task asks for the parts update (float32); this device knows update, control "
            "(float32, float16, bfloat16, int8, int4, topk)",
        ),
        (
            {"parts": {"update": "float32", "control": "base64"}},
            "the task asks for the parts update (float32), control (base64); this device knows "
            "update, control (float32, float16, bfloat16, int8, int4, topk)",
        ),
    ],
)
def test_a_task_that_does_not_fit_its_algorithm_is_given_back(
    changes: dict[str, Any], text: str
) -> None:
    session = Session("dev", 7, exchanges=("evaluation",), algorithms=("scaffold",))
    session.connected(0.0)
    tell(session, WELCOME)
    send, close = acts(tell(session, msgspec.structs.replace(SCAFFOLD, **changes)))
    assert send == Send(Failed("A", "unsupported", text))
    assert isinstance(close, Close)


def test_a_question_that_names_no_bundle_is_answered_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one of secure aggregation's: the device looks up what is lacking, and nothing is."""
    monkeypatch.setitem(EXCHANGE_KINDS, "count", ExchangeKind(NoContent, NoContent))
    session = Session("dev", 7, exchanges=("count",))
    session.connected(0.0)
    tell(session, WELCOME)
    question = Question("Q", "count", 100.0, phase=2)
    assert acts(tell(session, question)) == [Locate(question)]
    assert session.located("Q", [], 2.0) == [StartAnswer(question, 88.0)]
    assert session.answered(Reply("Q", "count")) == [Send(Reply("Q", "count"))]
    assert acts(tell(session, Accepted("Q"))) == []
    assert (session.history.answered, session.examples, session.task_id) == (1, 7, None)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (
            msgspec.structs.replace(EVALUATE, kind="gossip"),
            "the kind gossip; this device knows evaluation",
        ),
        (msgspec.structs.replace(EVALUATE, bundle=None), "the kind evaluation names no bundle"),
        (
            msgspec.structs.replace(EVALUATE, vectors=()),
            "sends the vectors ; this device knows model",
        ),
    ],
)
def test_a_question_that_the_device_does_not_know_is_given_back(
    question: Question, text: str
) -> None:
    session = brought_to("idle")
    sent = [row for row in tell(session, question) if isinstance(row, Send)]
    assert [row.message.code for row in sent if isinstance(row.message, Failed)] == ["unsupported"]
    assert text in session.history.reason


def test_a_question_whose_content_is_not_as_its_kind_says_breaks_the_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(EXCHANGE_KINDS, "evaluation", ExchangeKind(Evaluation, Evaluation))
    session = brought_to("idle")
    closed = [row for row in tell(session, EVALUATE) if isinstance(row, Close)]
    assert closed[0].code == 1002
    assert "content of a question of the kind evaluation does not fit" in closed[0].reason
