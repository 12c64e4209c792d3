"""The conversation without a socket: its port is a dictionary or two around a real engine, its
files are in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversing import MODEL, SIZE, UPDATE, WELCOME, Device, Room, begun, chunks, granted, one
from fleetlearn_coordinator.conversation.conversation import UPLOAD_TIMEOUT
from fleetlearn_coordinator.conversation.conversation_state import LOST_RACES
from fleetlearn_coordinator.conversation.effects import (
    Allow,
    CheckedIn,
    CloseConnection,
    End,
    LogNote,
    SendMessage,
    StartDownload,
    StopDownload,
)
from fleetlearn_coordinator.conversation.limits import (
    CHECK_IN_TIMEOUT,
    MESSAGES_OF_A_TASK,
    RACES_OF_A_TASK,
    REFUSAL_FORGOTTEN,
)
from fleetlearn_coordinator.conversation.places import WINDOW
from fleetlearn_coordinator.rounds.commands import (
    STALLED,
)
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import EvaluationSettings
from fleetlearn_protocol import Code, ProtocolError
from fleetlearn_protocol.exchanges import content_of, fields_of
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    MAX_SELECTED_BYTES,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    ContentSelection,
    Evaluation,
    Failed,
    Fetch,
    Grant,
    Heartbeat,
    Held,
    Piece,
    Question,
    Refused,
    Reply,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    encode,
)
from peers import report_of

# The order of things


def test_a_round_in_order() -> None:
    """What is allowed comes before the message that asks for it, and `accepted` before the next
    round's task."""
    room = Room(goal=1, cohort=1)
    a = Device(room)
    a.conversation.received(encode(CheckIn(1, "a", 10)), 0.0)
    welcome, checked_in, more, given = a.did()
    assert (welcome, checked_in) == (SendMessage(WELCOME), CheckedIn("a", 1000, 2000))
    assert more == Allow(MESSAGES_OF_A_TASK, 4 * SIZE, 8 * SIZE)
    assert isinstance(given, SendMessage)
    task = given.message
    assert isinstance(task, Task)
    grant = granted(a, task, UPDATE)
    assert (grant.task, grant.offset) == (task.task, 0)
    assert a.say(*chunks(grant, UPDATE)) == []
    assert room.moved == sum(map(len, chunks(grant, UPDATE)))
    accepted, following = a.say(Uploaded(task.task))
    assert accepted == Accepted(task.task)
    assert isinstance(following, Task)
    assert (following.round, room.engine.version) == (2, 1)
    np.testing.assert_array_equal(room.saved[task.task], UPDATE)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (encode(Heartbeat()), Code.OUT_OF_TURN),
        (pack_chunk(1, 0, b"1234"), Code.OUT_OF_TURN),
        ("{}", Code.BAD_MESSAGE),
        (b"", Code.BAD_FRAME),
    ],
)
def test_nothing_comes_before_the_check_in(message: str | bytes, code: Code) -> None:
    a = Device(Room())
    assert one(a.say(message), Refused).code is code
    assert isinstance(a.check_in()[0], Welcome)


def test_a_second_check_in_is_refused() -> None:
    a = Device(Room())
    a.check_in()
    assert one(a.check_in(), Refused).code is Code.DUPLICATE


def test_another_version_is_refused_and_closed() -> None:
    a = Device(Room())
    a.conversation.received(encode(CheckIn(9, "a", 10, newest_protocol=11)), 0.0)
    refused, close = a.did()
    assert isinstance(refused, SendMessage)
    assert isinstance(refused.message, Refused)
    assert refused.message.code is Code.BAD_VERSION
    assert close == CloseConnection(1008, "protocol version")


def test_a_device_that_is_sent_away_is_not_heard_any_more() -> None:
    room = Room()
    room.sent_away = ComeBack(5.0, "busy")
    a = Device(room)
    a.conversation.received(encode(CheckIn(1, "a", 10)), 0.0)
    assert a.did() == [SendMessage(room.sent_away), CloseConnection(1000, "come back later")]
    room.sent_away = None
    assert a.check_in() == []
    assert room.devices == {}


def test_a_connected_device_that_is_not_needed_is_sent_away() -> None:
    room = Room()
    a = Device(room)
    a.check_in()
    a.did()
    away = ComeBack(600.0, "no-task")
    a.conversation.tell(away)
    assert a.did() == [SendMessage(away), CloseConnection(1000, "come back later")]
    a.conversation.received(encode(Heartbeat()), 1.0)
    assert a.did() == []


def test_too_many_refusals_end_the_connection() -> None:
    a = Device(Room())
    for number in range(MAX_REFUSALS + 1):
        assert not a.conversation.over, number
        assert isinstance(one(a.say("{}"), Refused), Refused)
    assert a.check_in() == []
    assert a.conversation.over


def test_refusals_are_forgotten_one_after_the_other() -> None:
    """An error in ten seconds is no reason to throw a device out, however long it stays."""
    a = Device(Room())
    a.check_in()
    for number in range(3 * MAX_REFUSALS):
        a.conversation.received("{}", number * REFUSAL_FORGOTTEN)
        assert not a.conversation.over, number
    now = 3 * MAX_REFUSALS * REFUSAL_FORGOTTEN
    for _ in range(MAX_REFUSALS - 1):
        a.conversation.received("{}", now)
    a.conversation.received("{}", now + REFUSAL_FORGOTTEN - 0.1)
    assert not a.conversation.over
    a.conversation.received("{}", now + REFUSAL_FORGOTTEN - 0.1)
    assert a.conversation.over


@pytest.mark.parametrize("code", sorted(LOST_RACES))
def test_lost_races_at_a_round_s_end_are_no_fault(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 short rounds, of which each costs the device a few refusals: its connection, and its
    task, stay."""
    ((a, task),) = begun(Room(), "a")

    def refuse(*_: Any) -> None:
        raise ProtocolError(code, "too late")

    monkeypatch.setattr(a.conversation.port, "announce", refuse)
    for _ in range(900):
        for _ in range(RACES_OF_A_TASK):
            assert one(a.say(report_of(task, np.zeros(SIZE, np.float32))), Refused).code is code
        a.conversation.tell(task)
        a.did()
        assert not a.conversation.over
    for _ in range(MAX_REFUSALS + RACES_OF_A_TASK):
        a.say(report_of(task, np.zeros(SIZE, np.float32)))
    assert a.conversation.over, (
        "without tasks nobody loses that many races: this costs no more than other faults"
    )


def test_a_flood_is_answered_once_and_ended() -> None:
    a = Device(Room())
    a.conversation.flooded()
    refused, end = a.did()
    assert isinstance(refused, SendMessage)
    assert isinstance(refused.message, Refused)
    assert refused.message.code is Code.BUSY
    assert end == End("too many messages")


# Reports


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"task": "t9-9"}, Code.UNKNOWN_TASK), ({"task": "t0-1", "round": 0}, Code.STALE_ROUND)],
)
def test_a_report_of_another_task_is_refused_and_changes_nothing(
    fields: dict[str, Any], code: Code
) -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    refused = one(a.say(report_of(task, UPDATE, **fields)), Refused)
    assert (refused.code, refused.task) == (code, fields["task"])
    assert room.engine.leases == {"a": task.task}


def test_a_report_of_another_size_ends_the_task() -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    granted(a, task, UPDATE)
    assert one(a.say(report_of(task, UPDATE, size=4)), Refused).code is Code.WRONG_LENGTH
    assert room.engine.causes() == {"rejected: wrong-length": 1}
    assert a.conversation.upload is None
    assert room.spool.files == {}


def test_a_report_said_twice_is_answered_once_and_counts_once() -> None:
    room = Room(minimum=2)
    (a, task), (b, _) = begun(room, "a", "b")
    report = report_of(task, UPDATE)
    grant = one(a.say(report, report), Grant)
    assert a.say(*chunks(grant, UPDATE), report, Uploaded(task.task)) == [Accepted(task.task)]
    assert a.say(Uploaded(task.task)) == [Accepted(task.task)]
    assert a.say(report) == [Accepted(task.task)]
    assert b.heard() == []
    assert room.engine.accepted == {task.task: "a"}


def test_another_report_of_the_task_takes_the_place_of_the_first() -> None:
    (a, task), _ = begun(Room(), "a", "b")
    grant = granted(a, task, UPDATE)
    a.say(chunks(grant, UPDATE)[0])
    again = granted(a, task, UPDATE + 1)
    assert (again.offset, again.transfer != grant.transfer) == (0, True)
    assert a.say(chunks(grant, UPDATE)[1]) == [], "it was on its way"
    assert a.say(*chunks(again, UPDATE + 1), Uploaded(task.task)) == [Accepted(task.task)]


def test_uploaded_without_a_grant_is_out_of_turn() -> None:
    ((a, task),) = begun(Room(), "a")
    assert one(a.say(Uploaded(task.task)), Refused).code is Code.OUT_OF_TURN
    assert one(a.say(pack_chunk(7, 0, b"1234")), Refused).code is Code.OUT_OF_TURN


# Chunks


def test_after_a_gap_the_upload_goes_on_where_it_was() -> None:
    (a, task), _ = begun(Room(), "a", "b")
    grant = granted(a, task, UPDATE)
    first, _, last = chunks(grant, UPDATE)
    refused, again = a.say(first, last)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.task) == (Code.WRONG_OFFSET, task.task)
    assert isinstance(again, Grant)
    assert (again.offset, again.transfer != grant.transfer) == (CHUNK_BYTES, True)
    assert a.say(last, Uploaded(task.task)) == [], "both were on their way"
    assert a.say(*chunks(again, UPDATE), Uploaded(task.task)) == [Accepted(task.task)]


def test_what_is_not_finite_ends_the_task() -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    bad = UPDATE.copy()
    bad[0] = np.nan
    grant = granted(a, task, bad)
    assert one(a.say(*chunks(grant, bad), Uploaded(task.task)), Refused).code is Code.NOT_FINITE
    assert room.engine.causes() == {"rejected: not-finite": 1}
    assert room.spool.files == {}


@pytest.mark.parametrize("saved", [False, True])
def test_a_device_that_takes_part_too_often_is_told_so_and_its_task_ends(saved: bool) -> None:
    """It does not send its update for nothing, nor again."""
    room = Room(separation=2)
    ((a, task),) = begun(room, "a")
    assert room.engine.limits is not None
    if saved:
        grant = granted(a, task, UPDATE)
    room.engine.limits.restore(4, [("a", 4, 1)])
    said = a.say(
        *((*chunks(grant, UPDATE), Uploaded(task.task)) if saved else [report_of(task, UPDATE)])
    )
    refused = one(said, Refused)
    assert (refused.code, refused.task) == (Code.NOT_WANTED, task.task)
    assert refused.text == (
        "the report may not count for release 5: the device took part in release 4, and may again "
        "from release 6 on (privacy.separation = 2); the next is release 5"
    )
    assert room.engine.causes() == {"rejected: privacy-limit": 1}
    assert room.engine.leases == {}
    assert room.saved == {}
    assert room.spool.files == {}


def test_what_arrived_wrong_may_be_sent_once_more() -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    for attempt in range(2):
        grant = one(a.say(report_of(task, UPDATE, crc32=7)), Grant)
        assert grant.offset == 0
        assert (
            one(a.say(*chunks(grant, UPDATE), Uploaded(task.task)), Refused).code is Code.WRONG_HASH
        )
        assert room.engine.causes() == ({"rejected: wrong-hash": 1} if attempt else {})


def test_an_update_that_came_too_late_is_refused() -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    grant = granted(a, task, UPDATE)
    a.say(*chunks(grant, UPDATE))
    room.engine.end("a", task.task, "by a test", 0.0)
    assert one(a.say(Uploaded(task.task)), Refused).code is Code.STALE_ROUND
    assert room.saved == {}


# The end of a task


def test_a_cancelled_upload_is_not_heard_to_its_end() -> None:
    room = Room(goal=1)
    (a, task), (b, late) = begun(room, "a", "b")
    grant, of_b = granted(a, task, UPDATE), granted(b, late, UPDATE)
    b.say(chunks(of_b, UPDATE)[0])
    a.say(*chunks(grant, UPDATE), Uploaded(task.task))
    cancel, following = b.heard()
    assert isinstance(cancel, Cancel)
    assert (cancel.task, cancel.code) == (late.task, Code.ROUND_OVER)
    assert isinstance(following, Task)
    assert b.say(*chunks(of_b, UPDATE)[1:], Uploaded(late.task)) == []
    assert len(room.spool.files) == 1, "the first device's"


def test_a_failed_task_goes_to_another_device() -> None:
    room = Room(goal=1, cohort=1)
    ((a, task),) = begun(room, "a")
    b = Device(room, "b")
    b.check_in()
    granted(a, task, UPDATE)
    assert a.say(Failed("t7-7", "diverged")) == []
    assert a.conversation.upload is not None
    a.conversation.received(encode(Failed(task.task, "diverged", "loss is NaN")), 0.0)
    assert any(isinstance(effect, LogNote) and effect.warning for effect in a.effects)
    assert a.conversation.upload is None
    assert isinstance(one(b.heard(), Task), Task)


def test_a_measurement_is_accepted_before_what_follows_and_counts_once() -> None:
    room = Room(goal=1, cohort=1, evaluation=EvaluationSettings(devices=1))
    a = Device(room)
    task = one(a.say(CheckIn(1, "a", 10, exchanges=("evaluation",)))[1:], Task)
    room.carry_out(room.engine.request_exchange(EVALUATION, room.now))
    assert a.heard() == [], "it trains first"
    grant = granted(a, task, UPDATE)
    accepted, evaluate = a.say(*chunks(grant, UPDATE), Uploaded(task.task))
    assert accepted == Accepted(task.task)
    assert isinstance(evaluate, Question)
    found = Reply(evaluate.task, "evaluation", fields_of(Evaluation(10, 7.0, {})))
    assert one(a.say(Reply("t7-7", "evaluation", found.content)), Refused).code is Code.UNKNOWN_TASK
    accepted, following = a.say(found)
    assert accepted == Accepted(evaluate.task)
    assert isinstance(following, Task)
    assert room.measured == {evaluate.task: content_of(found)}
    assert not room.engine.exchanges[EVALUATION].is_open
    assert a.say(found) == [Accepted(evaluate.task)], "its `accepted` may have got lost"
    assert len(room.engine.exchanges[EVALUATION].book.accepted) == 1


def test_an_answer_that_is_none_of_its_kind_is_refused_and_ends_the_task() -> None:
    """The device would say the same again; another one is asked in its place."""
    room = Room(goal=2, cohort=2, minimum=2, evaluation=EvaluationSettings(devices=1))
    a = Device(room)
    a.say(CheckIn(1, "a", 10, exchanges=("evaluation",)))
    room.carry_out(room.engine.request_exchange(EVALUATION, room.now))
    (question,) = a.heard()
    assert isinstance(question, Question)
    bad = Reply(question.task, "evaluation", {"examples": 10, "loss_sum": "7"})
    assert one(a.say(bad), Refused).code is Code.BAD_MESSAGE
    assert not room.engine.exchanges[EVALUATION].book.tasks
    assert [*room.engine.exchanges[EVALUATION].book.causes()] == ["rejected: bad-message"]


def test_the_end_of_training_is_told_after_the_last_accepted() -> None:
    room = Room(goal=1, cohort=1, rounds=1)
    ((a, task),) = begun(room, "a")
    b = Device(room, "b")
    b.check_in()
    grant = granted(a, task, UPDATE)
    over = ComeBack(5.0, "finished")
    assert a.say(*chunks(grant, UPDATE), Uploaded(task.task)) == [Accepted(task.task), over]
    assert b.heard() == [over]


# Connections that come and go


def test_a_second_connection_goes_on_with_the_upload_of_the_first() -> None:
    room = Room(uploads=1)
    ((a, task),) = begun(room, "a")
    a.say(chunks(granted(a, task, UPDATE), UPDATE)[0], Fetch(MODEL))
    a.did()
    again = Device(room)
    assert again.check_in(Held(task.task, task.round)) == [WELCOME]
    refused, *others = a.did()
    assert isinstance(refused, SendMessage)
    assert isinstance(refused.message, Refused)
    assert refused.message.code is Code.REPLACED
    assert others == [StopDownload(), CloseConnection(1008, "replaced")]
    assert granted(again, task, UPDATE).offset == CHUNK_BYTES
    a.disconnect()
    assert room.devices == {"a": again}


def test_a_device_that_comes_back_without_its_work_is_given_its_task_again() -> None:
    room = Room()
    ((a, task),) = begun(room, "a")
    a.say(chunks(granted(a, task, UPDATE), UPDATE)[0])
    a.disconnect()
    assert room.engine.book.absent
    a = Device(room)
    assert a.check_in() == [WELCOME, task]
    assert not room.engine.book.absent
    assert granted(a, task, UPDATE + 1).offset == 0, "it trained again"


def test_a_connection_that_ends_leaves_its_place_to_the_next() -> None:
    (a, task), (b, other) = begun(Room(uploads=1, minimum=2), "a", "b")
    granted(a, task, UPDATE)
    assert b.say(report_of(other, UPDATE)) == []
    a.disconnect()
    assert isinstance(one(b.heard(), Grant), Grant)


# Whose turn it is


def test_an_upload_that_hardly_moves_is_asked_to_wait_and_goes_on_later() -> None:
    room = Room(uploads=1, minimum=2)
    (a, task), (b, other) = begun(room, "a", "b")
    first = granted(a, task, UPDATE)
    a.say(pack_chunk(first.transfer, 0, UPDATE.tobytes()[:4]))
    assert b.say(report_of(other, UPDATE)) == []
    room.now = WINDOW
    room.uploads.places.measure(WINDOW)
    room.uploads.grant(WINDOW)
    assert a.heard() == [Waiting(task=task.task)]
    grant = one(b.heard(), Grant)
    on_its_way = pack_chunk(first.transfer, 4, UPDATE.tobytes()[4:1004])
    gap = pack_chunk(first.transfer, 2000, UPDATE.tobytes()[2000:2004])
    assert a.say(on_its_way, gap, Uploaded(task.task)) == []
    report = report_of(task, UPDATE)
    assert a.say(report, report) == []
    assert b.say(*chunks(grant, UPDATE), Uploaded(other.task)) == [Accepted(other.task)]
    again = one(a.heard(), Grant)
    assert again.offset == 1004
    assert isinstance(a.say(*chunks(again, UPDATE), Uploaded(task.task))[0], Accepted)


def test_a_lease_does_not_stall_while_its_upload_waits_or_moves() -> None:
    room = Room(uploads=1, minimum=2, stall=10.0)
    (a, task), (b, other) = begun(room, "a", "b")
    grant = granted(a, task, UPDATE)
    b.say(report_of(other, UPDATE))
    for now, chunk in zip((8.0, 16.0, 24.0), chunks(grant, UPDATE), strict=True):
        room.tick(now)
        assert a.say(chunk) == []
    room.tick(33.0)
    assert room.engine.leases == {"a": task.task, "b": other.task}
    room.tick(35.0)
    assert room.engine.causes() == {STALLED: 1}
    assert isinstance(one(a.heard(), Cancel), Cancel)
    assert isinstance(one(b.heard(), Grant), Grant)


def test_steps_are_progress() -> None:
    room = Room(minimum=2, stall=10.0)
    (a, task), _ = begun(room, "a", "b")
    room.tick(9.0)
    assert a.say(Heartbeat(task.task, 5)) == []
    room.tick(11.0)
    assert room.engine.leases == {"a": task.task}


# Fetches


def test_a_fetch_replaces_the_one_before() -> None:
    ((a, _),) = begun(Room(), "a")
    a.say(Fetch(MODEL, 8))
    assert a.conversation.fetching == MODEL
    a.conversation.received(encode(Fetch(MODEL)), 0.0)
    assert a.did() == [StopDownload(), StartDownload(MODEL, 0, 4 * SIZE)]
    a.conversation.fetched()
    a.conversation.received(encode(Fetch(MODEL, 12)), 0.0)
    assert a.did() == [StartDownload(MODEL, 12, 4 * SIZE)]


@pytest.mark.parametrize(("end", "kept"), [(8, 8), (4 * SIZE, 4 * SIZE), (10**9, 4 * SIZE), (2, 4)])
def test_a_part_of_a_content_ends_within_it(end: int, kept: int) -> None:
    ((a, _),) = begun(Room(), "a")
    a.conversation.received(encode(Fetch(MODEL, 4, end, http=True)), 0.0)
    assert a.did() == [StartDownload(MODEL, 4, 4 * SIZE, kept, http=True)]


def test_pieces_of_a_content_are_sent_as_one_of_their_own() -> None:
    """Offsets and sizes are the pieces'; they do not come by HTTP."""
    ((a, _),) = begun(Room(), "a")
    selection = ContentSelection((Piece(0, 4), Piece(4, 4, True)), (1, 0))
    a.conversation.received(encode(Fetch(MODEL, 4, http=True, selection=selection)), 0.0)
    assert a.did() == [StartDownload(MODEL, 4, 12, None, False, selection)]


@pytest.mark.parametrize(
    ("pieces", "offset", "code"),
    [
        (ContentSelection((Piece(4, 4), Piece(0, 4)), ()), 0, Code.BAD_MESSAGE),
        (ContentSelection((Piece(0, 4, True),), (SIZE,)), 0, Code.BAD_MESSAGE),
        (ContentSelection((Piece(0, 4),), ()), 5, Code.WRONG_OFFSET),
    ],
    ids=["not in order", "beyond the end", "an offset beyond the pieces"],
)
def test_pieces_that_are_refused(pieces: ContentSelection, offset: int, code: Code) -> None:
    ((a, _),) = begun(Room(), "a")
    (refused,) = a.say(Fetch(MODEL, offset, selection=pieces))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.sha256) == (code, MODEL)


def test_too_many_bytes_of_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ((a, _),) = begun(Room(), "a")
    monkeypatch.setattr(a.conversation.port, "find", lambda sha256, offset: 2**30)
    large = ContentSelection((Piece(0, MAX_SELECTED_BYTES + 1),), ())
    (refused,) = a.say(Fetch(MODEL, selection=large))
    assert isinstance(refused, Refused)
    assert refused.code is Code.TOO_LARGE


def test_bytes_that_came_by_http_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    ((a, task),) = begun(Room(), "a")
    sent: list[tuple[object, ...]] = []
    monkeypatch.setattr(a.conversation.port, "sent", lambda *given: sent.append(given))
    a.say(Heartbeat(task.task, 0, 4))
    assert not sent, "nothing is fetched"
    a.say(Fetch(MODEL, http=True))
    a.say(Heartbeat(task.task, 0, 4))
    assert not sent, "it comes from here"
    a.conversation.told_where()
    a.say(Heartbeat(task.task, 0, 4), Heartbeat(task.task, 0))
    assert [given[:4] for given in sent] == [("a", MODEL, 4, 0)]
    a.say(Fetch(MODEL), Heartbeat(task.task, 0, 8))
    assert len(sent) == 1, "the rest comes from here again"


def test_a_content_that_is_fetched_elsewhere_is_not_refused_when_it_is_withdrawn() -> None:
    """When the device has it, nobody says here: each commit would refuse every such device the
    model that it has fetched long ago, and a gateway that ends would wait for it."""
    ((a, _),) = begun(Room(), "a")
    a.say(Fetch(MODEL, http=True))
    a.conversation.told_where()
    a.conversation.withdrawn(MODEL)
    assert a.did() == []
    assert a.conversation.fetching is None, "a gateway that ends does not wait for it"
    a.conversation.received(encode(Fetch(MODEL, 4)), 0.0)
    assert a.did() == [StartDownload(MODEL, 4, 4 * SIZE)], "nothing is to be stopped"


def test_a_fetch_of_what_is_not_served_is_refused() -> None:
    ((a, _),) = begun(Room(), "a")
    refused = one(a.say(Fetch("c" * 64)), Refused)
    assert (refused.code, refused.sha256) == (Code.UNKNOWN_CONTENT, "c" * 64)


def test_a_content_that_is_withdrawn_stops_and_is_no_fault() -> None:
    ((a, _),) = begun(Room(), "a")
    a.say(Fetch(MODEL))
    a.conversation.withdrawn("d" * 64)
    assert a.did() == []
    for _ in range(MAX_REFUSALS + 1):
        a.conversation.fetching = MODEL
        a.conversation.withdrawn(MODEL)
        stop, refused = a.did()
        assert stop == StopDownload()
        assert isinstance(refused, SendMessage)
        assert isinstance(refused.message, Refused)
        assert (refused.message.code, refused.message.sha256) == (Code.UNKNOWN_CONTENT, MODEL)
    assert not a.conversation.over


# Time


def test_who_does_not_check_in_is_overdue() -> None:
    a = Device(Room())
    assert a.conversation.overdue(CHECK_IN_TIMEOUT, 60.0) is None
    assert "not checked in" in str(a.conversation.overdue(CHECK_IN_TIMEOUT + 1, 60.0))
    a.conversation.disconnected(5.0)


def test_who_is_silent_is_overdue() -> None:
    room = Room()
    ((a, _),) = begun(room, "a")
    room.now = 50.0
    a.say(Heartbeat())
    assert a.conversation.overdue(110.0, 60.0) is None
    assert "silent" in str(a.conversation.overdue(111.0, 60.0))


def test_a_granted_upload_must_move_and_one_that_waits_need_not() -> None:
    (a, task), (b, other) = begun(Room(uploads=1, minimum=2), "a", "b")
    granted(a, task, UPDATE)
    b.say(report_of(other, UPDATE))
    late = UPLOAD_TIMEOUT + 1
    assert a.conversation.overdue(UPLOAD_TIMEOUT, 1e9) is None
    assert "upload" in str(a.conversation.overdue(late, 1e9))
    assert b.conversation.overdue(late, 1e9) is None
