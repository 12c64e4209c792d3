"""Fetching what a task lacks: a bundle's files and the task's vectors, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer, unpack_chunk
from fleetlearn_protocol.messages import Content, Fetch, Refused

from fleetlearn_device.session.commands import (
    Commands,
    FetchByHttp,
    FinishContent,
    Note,
    Send,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.session_state import SessionState
from fleetlearn_device.session.states import Fetching, Locating, Online, Storing, UnfinishedTask

MAX_ARRIVALS = 2
"""How often one content may arrive for a task: a second time where its SHA-256 was wrong the first
time."""
HTTP_PROGRESS = 2**16
"""Bytes that an attempt by HTTP must bring, for another to follow."""
HTTP_REST = 600.0
"""Seconds for which all is fetched by the WebSocket after HTTP did not work."""


def fetch(
    session: SessionState, work: UnfinishedTask, wanted: tuple[Wanted, ...], now: float
) -> Commands:
    """Ask for the first wanted content."""
    first = wanted[0]
    if work.assignment.arrived.count(first.place) >= MAX_ARRIVALS:
        text = f"{first.name} arrived twice with another SHA-256 than its name"
        return session.fail_task(work, "bad-bundle", text)
    if first.have == first.size and first.expected:
        return store(session, work, wanted)
    if not isinstance(session.link, Online):
        session.work = Locating(work.assignment)  # the next welcome asks again
        return []
    http = may_use_http(session, now)
    session.work, session.last_progress = Fetching(work.assignment, wanted, http), now
    size = "" if first.size is None else f" of {first.size}"
    text = f"fetching {first.name} ({first.sha256[:12]}) from byte {first.have}{size}"
    return [
        Note(text, event="fetching"),
        Send(
            Fetch(
                first.sha256,
                first.have,
                http=http and first.selection is None,
                selection=first.selection,
            )
        ),
    ]


def may_use_http(session: SessionState, now: float) -> bool:
    """Return whether the coordinator may name a URL in place of sending the bytes."""
    return bool(session.sources.hosts) and now >= session.no_http_until


def store(session: SessionState, work: UnfinishedTask, wanted: tuple[Wanted, ...]) -> Commands:
    """Have the first wanted content checked, all of whose bytes are there."""
    arrived = (*work.assignment.arrived, wanted[0].place)
    session.work = Storing(replace(work.assignment, arrived=arrived), wanted)
    return [FinishContent(wanted[0])]


def receive_content(session: SessionState, content: Content, now: float) -> Commands:
    """Expect the chunks of the content that was asked for, or fetch it where it is."""
    work = session.work
    # The answer to an earlier fetch, whose task was cancelled, may still come; the later fetch
    # replaces it.
    if not isinstance(work, Fetching) or content.sha256 != work.wanted[0].sha256:
        return [Note(f"content {content.sha256} is not awaited; ignored")]
    wanted = work.wanted[0]
    if content.offset != wanted.have:
        return [
            Note(
                f"{wanted.name} from byte {content.offset} is ignored; {wanted.have} was asked for"
            )
        ]
    if wanted.selection is not None:
        if content.selected is None:
            note = Note(f"{wanted.name} cannot be had, so the whole content is fetched", True)
            assert wanted.instead is not None
            return [note, *fetch(session, work, (wanted.instead, *work.wanted[1:]), now)]
        wanted = replace(wanted, selected=content.selected)
        work = replace(work, wanted=(wanted, *work.wanted[1:]))
    if content.size > wanted.limit or (wanted.size is not None and content.size != wanted.size):
        expected = f"at most {wanted.limit}" if wanted.size is None else wanted.size
        text = f"{wanted.name} has {content.size} bytes; expected {expected}"
        return session.fail_task(work, "bad-bundle", text)
    if content.offset > content.size:
        raise ProtocolError(
            Code.WRONG_OFFSET, f"{wanted.name} begins at {content.offset}, behind its end"
        )
    session.work = replace(work, content=content, end=content.offset)
    if content.offset == content.size:
        return store(session, work, work.wanted)
    if content.url is None:
        return []
    if not work.http:
        raise ProtocolError(Code.OUT_OF_TURN, f"a URL came for {wanted.name}, and none was wanted")
    why = session.sources.why_not(content.url, content.sha256)
    if why is not None:
        return without_http(session, work, work.wanted, why, now)
    return [FetchByHttp(wanted, content.url, content.offset, content.size)]


def without_http(
    session: SessionState, work: Fetching, wanted: tuple[Wanted, ...], why: str, now: float
) -> Commands:
    """Fetch by the WebSocket, and for a while all that follows."""
    session.no_http_until = now + HTTP_REST
    name = wanted[0].name
    note = Note(f"{name} is fetched by the WebSocket, and not by HTTP: {why}", True, "no-http")
    return [note, *fetch(session, work, wanted, now)]


def receive_http(
    session: SessionState, sha256: str, offset: int, payload: memoryview, now: float
) -> Commands:
    """Have bytes written that came by HTTP. There are at most as many as the content has."""
    work = session.work
    if (
        not isinstance(work, Fetching)
        or work.content is None
        or (work.content.sha256, work.end) != (sha256, offset)
    ):
        return []  # of an earlier fetch
    end = offset + len(payload)
    session.work, session.last_progress = replace(work, end=end), now
    written = StoreChunk(work.wanted[0], offset, payload)
    return [written, *(store(session, work, work.wanted) if end == work.content.size else [])]


def end_http(session: SessionState, sha256: str, why: str, now: float) -> Commands:
    """HTTP brought no more bytes: ask again, which gives another URL. Where there were hardly any,
    go on by the WebSocket."""
    work = session.work
    if (
        not isinstance(work, Fetching)
        or work.content is None
        or work.content.url is None
        or work.content.sha256 != sha256
    ):
        return []
    first, *others = work.wanted
    wanted = (replace(first, have=work.end), *others)
    if work.end - first.have < HTTP_PROGRESS:
        return without_http(session, work, wanted, why, now)
    note = Note(f"{first.name} goes on from byte {work.end}: {why}")
    return [note, *fetch(session, work, wanted, now)]


def receive_chunk(session: SessionState, frame: Buffer) -> Commands:
    """Have the bytes of a chunk written. Raises ProtocolError where they are not the next ones of
    what is fetched."""
    chunk = unpack_chunk(frame)
    work = session.work
    if (
        not isinstance(work, Fetching)
        or work.content is None
        or chunk.transfer != work.content.transfer
        or work.content.url is not None
    ):
        return []  # the rest of an earlier fetch, whose task was cancelled
    wanted, size, end = work.wanted[0], work.content.size, chunk.offset + len(chunk.payload)
    if chunk.offset != work.end:
        text = f"a chunk of {wanted.name} begins at {chunk.offset}; expected {work.end}"
        raise ProtocolError(Code.WRONG_OFFSET, text)
    if end > size:
        text = f"a chunk of {wanted.name} ends behind its {size} bytes"
        raise ProtocolError(Code.WRONG_LENGTH, text)
    session.work = replace(work, end=end)
    written = StoreChunk(wanted, chunk.offset, chunk.payload)
    return [written, *store(session, work, work.wanted)] if end == size else [written]


def content_refused(
    session: SessionState, refused: Refused, sha256: str, said: str, now: float
) -> Commands:
    """Fetch a content in another way, or fail the task that needs it."""
    work = session.work
    if not isinstance(work, Fetching) or sha256 != work.wanted[0].sha256:
        return session.ignore(refused, sha256)
    wanted, *others = work.wanted
    if refused.code is Code.WRONG_OFFSET and wanted.have:
        note = Note(f"{wanted.name} is fetched from its beginning: {said}", True)
        return [note, *fetch(session, work, (replace(wanted, have=0), *others), now)]
    if wanted.instead is not None:
        note = Note(f"{wanted.name} cannot be had, so the whole content is fetched: {said}")
        return [note, *fetch(session, work, (wanted.instead, *others), now)]
    return session.fail_task(work, "bad-bundle", f"fetching {wanted.name} was refused: {said}")
