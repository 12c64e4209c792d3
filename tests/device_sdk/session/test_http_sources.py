"""What a device fetches by HTTP, and when it goes back to its WebSocket: without I/O."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from fleetlearn_device.session.commands import (
    Command,
    Commands,
    FetchByHttp,
    FinishContent,
    Note,
    Send,
    StopHttp,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.contents import HTTP_PROGRESS, HTTP_REST
from fleetlearn_device.session.http_sources import HttpSources, http_sources
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Closing, Fetching
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Cancel,
    Content,
    Fetch,
    FromCoordinator,
    Heartbeat,
    Task,
    VectorReference,
    Welcome,
    encode,
)

MODEL = bytes(range(256)) * 1024
SIZE = len(MODEL)
SHA = hashlib.sha256(MODEL).hexdigest()
WANTED = Wanted(SHA, "the model", f"models/{SHA}", SIZE, SIZE)
OTHER = Wanted("f" * 64, "another file", "files/f", SIZE, SIZE)
URL = f"https://cdn.example.org/fleet/contents/{SHA}?key=secret"
TASK = Task(
    "A",
    1,
    "b" * 64,
    (VectorReference("model", SHA, SIZE, "float32"),),
    {"update": "float32"},
    {"lr": 0.1},
    2,
    8,
    5,
    1000.0,
)


def tell(session: Session, message: FromCoordinator, now: float = 0.0) -> Commands:
    return session.received(encode(message), now)


def acts(commands: Commands) -> list[Command]:
    return [command for command in commands if not isinstance(command, Note)]


def fetching(*, url: str | None = URL, have: int = 0, **sources: object) -> Session:
    """A session that asked for the model, and was told a URL."""
    allowed = {"hosts": frozenset(["cdn.example.org"]), **sources}
    session = Session("dev", 7, sources=HttpSources(**allowed))  # type: ignore[arg-type]
    session.connected(0.0)
    tell(session, Welcome("test", 10.0, 8))
    tell(session, TASK)
    wanted = [replace(WANTED, have=have), OTHER]
    assert acts(session.located("A", wanted, 0.0)) == [Send(Fetch(SHA, have, http=True))]
    if url is not None:
        commands = acts(tell(session, Content(3, SHA, SIZE, have, url=url)))
        assert commands == [FetchByHttp(wanted[0], url, have, SIZE)]
    return session


def test_all_bytes_come_by_http() -> None:
    session = fetching()
    first, rest = memoryview(MODEL)[:1000], memoryview(MODEL)[1000:]
    assert session.http_bytes(SHA, 0, first, 1.0) == [StoreChunk(WANTED, 0, first)]
    commands = session.http_bytes(SHA, 1000, rest, 2.0)
    assert commands == [StoreChunk(WANTED, 1000, rest), FinishContent(WANTED)]
    (fetch,) = acts(session.stored(SHA, True, 3.0))
    assert fetch == Send(Fetch(OTHER.sha256, 0, http=True))


def test_where_bytes_came_another_url_is_asked_for() -> None:
    session = fetching(have=5)
    part = memoryview(MODEL)[5 : 5 + HTTP_PROGRESS]
    session.http_bytes(SHA, 5, part, 1.0)
    (fetch,) = acts(session.http_ended(SHA, "HTTP 403", 1.0))
    assert fetch == Send(Fetch(SHA, 5 + HTTP_PROGRESS, http=True))


def test_where_none_came_the_websocket_brings_what_lacks_and_all_that_follows() -> None:
    session = fetching()
    few = memoryview(MODEL)[: HTTP_PROGRESS - 1]
    session.http_bytes(SHA, 0, few, 1.0)
    note, fetch = session.http_ended(SHA, "it is down", 1.0)[0], None
    assert isinstance(note, Note)
    assert note.warning
    assert note.text == "the model is fetched by the WebSocket, and not by HTTP: it is down"
    assert "secret" not in note.text
    tell(session, Content(3, SHA, SIZE, len(few)), 2.0)
    for begin in range(len(few), SIZE, 8):
        session.received_chunk(pack_chunk(3, begin, MODEL[begin : begin + 8]), 2.0)
    (fetch,) = acts(session.stored(SHA, True, 3.0))
    assert fetch == Send(Fetch(OTHER.sha256, 0))
    session.disconnected()
    session.connected(HTTP_REST)
    tell(session, Welcome("test", 10.0, 8), HTTP_REST)
    assert acts(session.located("A", [OTHER], HTTP_REST + 1.0)) == [
        Send(Fetch(OTHER.sha256, 0, http=True))
    ]


def test_wrong_bytes_come_again_by_the_websocket() -> None:
    session = fetching()
    session.http_bytes(SHA, 0, memoryview(bytes(SIZE)), 1.0)
    assert acts(session.stored(SHA, False, 2.0)) == [Send(Fetch(SHA, 0))]


def test_heartbeats_say_how_far_it_is() -> None:
    session = fetching()
    session.http_bytes(SHA, 0, memoryview(MODEL)[:1000], 1.0)
    assert session.tick(9.0) == [Send(Heartbeat("A", 0, 1000))]
    session.http_bytes(SHA, 1000, memoryview(MODEL)[1000:], 10.0)
    assert session.tick(18.0) == [Send(Heartbeat("A", 0))]


def test_bytes_by_http_are_signs_of_life() -> None:
    session = fetching()
    for number in range(10):
        now = 50.0 * number
        session.http_bytes(SHA, 1000 * number, memoryview(MODEL)[:1000], now)
        session.tick(now + 40.0)
    assert isinstance(session.work, Fetching)
    assert not isinstance(session.link, Closing)


def test_a_cancelled_task_is_fetched_no_further() -> None:
    session = fetching()
    assert acts(tell(session, Cancel("A", Code.ROUND_OVER))) == [StopHttp()]
    assert session.http_bytes(SHA, 0, memoryview(MODEL), 1.0) == []
    assert session.http_ended(SHA, "late", 1.0) == []


def test_chunks_beside_the_url_are_ignored() -> None:
    session = fetching()
    assert session.received_chunk(pack_chunk(3, 0, MODEL[:8]), 1.0) == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (URL.replace("cdn", "router"), "does not allow router.example.org"),
        (URL.replace("https", "http"), "has no TLS"),
        (URL.replace(SHA, "admin"), "does not end with"),
        (URL.replace("cdn", "name:password@cdn"), "user name"),
        (URL.replace(".org", ".org:99999"), "cannot be read"),
    ],
)
def test_where_a_device_does_not_go(url: str, why: str) -> None:
    session = fetching(url=None)
    note, _, fetch = tell(session, Content(3, SHA, SIZE, 0, url=url))
    assert isinstance(note, Note)
    assert why in note.text
    assert fetch == Send(Fetch(SHA, 0))


def test_a_url_that_was_not_asked_for_breaks_the_protocol() -> None:
    session = Session("dev", 7)
    session.connected(0.0)
    tell(session, Welcome("test", 10.0, 8))
    tell(session, TASK)
    assert acts(session.located("A", [WANTED], 0.0)) == [Send(Fetch(SHA, 0))]
    tell(session, Content(3, SHA, SIZE, 0, url=URL))
    assert isinstance(session.link, Closing)


@pytest.mark.parametrize(
    ("coordinator", "named", "hosts"),
    [
        ("wss://Fleet.example:8765/x", (), {"fleet.example"}),
        ("ws://127.0.0.1:8765", (), set()),
        ("ws://localhost:8765", ("127.0.0.1",), {"127.0.0.1"}),
        ("wss://[::1]:8765", (), set()),
        ("wss://[2001:db8::1]:8765", ("CDN.example",), {"2001:db8::1", "cdn.example"}),
    ],
)
def test_the_coordinator_s_own_host_is_one_unless_it_is_this_machine(
    coordinator: str, named: tuple[str, ...], hosts: set[str]
) -> None:
    assert http_sources(coordinator, named).hosts == hosts


@pytest.mark.parametrize("host", ["https://cdn.example", "cdn.example:80", "a/b", "", "*"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ValueError, match="download_from names"):
        http_sources("wss://fleet.example", [host])


@pytest.mark.parametrize(
    "here",
    [
        "localhost.",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0.0.0.0",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:0:0]",
    ],
)
def test_this_machine_is_no_source_however_it_is_written(here: str) -> None:
    """A coordinator behind a tunnel could have the device ask what listens on its own machine."""
    assert not http_sources(f"wss://{here}:8765/").hosts
    assert http_sources(f"wss://{here}:8765/", ["cdn.example.org"]).hosts == {"cdn.example.org"}
