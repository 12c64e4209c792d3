"""The helper's port and the coordinator's client of it, over TLS on real sockets."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.secure import helper_port
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_client import (
    HelperAddress,
    HelperRefusedError,
    NoHelperError,
    WrongHelperError,
    ask_for_card,
    ask_for_sum,
)
from fleetlearn_coordinator.secure.helper_port import listening_helper
from fleetlearn_coordinator.secure.helper_settings import HelperSettings
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.secure.helper_views import helper_view
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate
from fleetlearn_protocol.secure.helper_messages import (
    CARD_PATH,
    REPORT_BYTES,
    SUM_PATH,
    HelperCard,
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
    read_message,
    write_message,
)
from helper_fleet import MINIMUM, exact_sum, fleet, ordinary, seeds_of, terms_of

DEVICES = fleet([f"d{number}" for number in range(6)])
TIMEOUT = 30.0


class Served(NamedTuple):
    folder: Path
    settings: HelperSettings
    pinned: HelperAddress
    key: bytes

    @property
    def by_ca(self) -> HelperAddress:
        return HelperAddress(self.pinned.url, ca=self.folder / CA)

    def request(self, round: int = 1, count: int = 6) -> MaskSumRequest:
        return ordinary(terms_of(self.key), DEVICES[:count], round)

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        """Status and message of a request that the client would not send."""
        port = int(self.pinned.url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=str(self.folder / CA))
        with closing(
            http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT, context=context)
        ) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()


@contextmanager
def loop_thread(settings: HelperSettings) -> Iterator[str]:
    """Serve in another thread. Yields the address."""
    ready: list[str] = []
    listens, over = threading.Event(), threading.Event()

    async def main() -> None:
        async with listening_helper(settings) as address:
            ready.append(address)
            listens.set()
            await asyncio.get_running_loop().run_in_executor(None, over.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert listens.wait(TIMEOUT)
        yield ready[0]
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("helper")
    make_certificate(folder, ["127.0.0.1"], 2)
    make_helper_store(folder / "helper.sqlite", 1.0)
    file = folder / "helper.toml"
    file.write_text(
        f'minimum = {MINIMUM}\ndatabase = "helper.sqlite"\nport = 0\nmost_devices = 20\n'
        f'[tls]\ncertificate = "{CERTIFICATE}"\nkey = "{KEY}"\n'
    )
    settings = HelperSettings.load(file)
    with closing(HelperStore(settings.database)) as store:
        store.enrol([(device.name, device.public) for device in DEVICES], 2.0)
    view = helper_view(file)
    with loop_thread(settings) as url:
        pinned = HelperAddress(url, certificate=view.certificate)
        yield Served(folder, settings, pinned, bytes.fromhex(view.key))


def test_a_sum_by_the_pinned_certificate_and_by_the_ca(served: Served) -> None:
    request = served.request()
    expected = exact_sum(seeds_of(request), request.size)
    for address in (served.pinned, served.by_ca):
        words = ask_for_sum(address, request, TIMEOUT)
        assert words.dtype == np.uint32
        assert (words == expected).all()
    assert ask_for_card(served.pinned, served.key, TIMEOUT).minimum == MINIMUM


def test_a_refusal_has_its_name(served: Served) -> None:
    with pytest.raises(HelperRefusedError, match="too-few-devices") as refused:
        ask_for_sum(served.pinned, served.request(2, count=2), TIMEOUT)
    assert refused.value.refusal.name is RefusalName.TOO_FEW_DEVICES
    assert refused.value.without == frozenset()
    request = served.request(3)
    forged = msgspec.structs.replace(request.reports[0], signature=bytes(64))
    request = msgspec.structs.replace(request, reports=(forged, *request.reports[1:]))
    with pytest.raises(HelperRefusedError, match="bad-signature") as refused:
        ask_for_sum(served.pinned, request, TIMEOUT)
    assert refused.value.without == {"d0"}


def test_a_helper_that_cannot_write_is_asked_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = MaskSumRefusal(RefusalName.BUSY, "the disk is full")
    monkeypatch.setattr(Helper, "answer", lambda self, body: busy)
    with pytest.raises(NoHelperError, match="cannot answer now: the disk is full"):
        ask_for_sum(served.pinned, served.request(4), TIMEOUT)


def test_another_certificate_or_key_is_no_helper(served: Served, tmp_path: Path) -> None:
    other = served.pinned._replace(certificate="0" * 64)
    with pytest.raises(WrongHelperError, match=r"certificate with the SHA-256 .* was expected"):
        ask_for_sum(other, served.request(5), TIMEOUT)
    make_certificate(tmp_path, ["127.0.0.1"], 2)
    foreign = HelperAddress(served.pinned.url, ca=tmp_path / CA)
    with pytest.raises(WrongHelperError, match="not the helper's"):
        ask_for_sum(foreign, served.request(5), TIMEOUT)
    named_otherwise = HelperAddress(
        served.pinned.url.replace("127.0.0.1", "localhost"), ca=served.folder / CA
    )
    with pytest.raises(WrongHelperError, match="not the helper's"):
        ask_for_sum(named_otherwise, served.request(5), TIMEOUT)
    with pytest.raises(WrongHelperError, match="has the key"):
        ask_for_card(served.pinned, bytes(32), TIMEOUT)


def test_nothing_is_sent_to_another_certificate(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(Helper, "answer", lambda self, body: asked.append(body))
    with pytest.raises(WrongHelperError):
        ask_for_sum(served.pinned._replace(certificate="0" * 64), served.request(5), TIMEOUT)
    assert not asked


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": bytes(32)}, "for another set of updates"),
        ({"words": bytes(19)}, "sent 19 bytes of a sum; 20 were expected"),
        ({"words": bytes(2**20)}, "sent more than"),
    ],
)
def test_an_answer_to_something_else_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, change: dict[str, bytes], words: str
) -> None:
    request = served.request(6)
    wrong = msgspec.structs.replace(MaskSumAnswer(request.digest(), bytes(20)), **change)
    monkeypatch.setattr(Helper, "answer", lambda self, body: wrong)
    with pytest.raises(WrongHelperError, match=words):
        ask_for_sum(served.pinned, request, TIMEOUT)


def test_an_answer_that_is_none_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    card = HelperCard(bytes(32), 3, 4)
    monkeypatch.setattr(Helper, "answer", lambda self, body: card)
    with pytest.raises(WrongHelperError, match=r"status 200 and .* no MaskSumAnswer"):
        ask_for_sum(served.pinned, served.request(7), TIMEOUT)


def test_nobody_answers(served: Served) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoHelperError, match=r"does not answer: .*timed out"):
            ask_for_sum(HelperAddress(url, "0" * 64), served.request(8), 0.05)
    with pytest.raises(NoHelperError, match="does not answer: connection refused"):
        ask_for_sum(HelperAddress(url, "0" * 64), served.request(8), TIMEOUT)


def read_request(connected: ssl.SSLSocket) -> None:
    """Read a whole request: whoever closes a connection with bytes unread resets it, and what was
    answered may be lost."""
    content = b""
    while piece := connected.recv(2**16):
        content += piece
        head, ended, body = content.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if ended and len(body) >= (int(length[1]) if length else 0):
            return


@contextmanager
def raw_server(served: Served, answer: Callable[[ssl.SSLSocket], None]) -> Iterator[HelperAddress]:
    """A program with the helper's certificate, which says anything to one request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(served.folder / CERTIFICATE, served.folder / KEY)

    def serve() -> None:
        accepted, _ = listening.accept()
        with suppress(OSError), context.wrap_socket(accepted, server_side=True) as connected:
            read_request(connected)
            answer(connected)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        yield served.pinned._replace(url=url)
        thread.join()


def test_an_answer_that_is_cut_off_is_asked_for_again(served: Served) -> None:
    def half(connected: ssl.SSLSocket) -> None:
        connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

    with (
        raw_server(served, half) as address,
        pytest.raises(NoHelperError, match="in the middle of its answer"),
    ):
        ask_for_sum(address, served.request(8), TIMEOUT)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b""])
def test_an_answer_that_never_ends_is_given_up(served: Served, begin: bytes) -> None:
    """A byte now and then: each read has its answer in time."""

    def drip(connected: ssl.SSLSocket) -> None:
        connected.sendall(begin)
        while True:  # until the client is gone
            connected.sendall(b"x")
            time.sleep(0.01)

    with raw_server(served, drip) as address, pytest.raises(NoHelperError):
        ask_for_sum(address, served.request(8), 0.3)


def test_a_program_that_speaks_no_http_is_no_answer(served: Served) -> None:
    with (
        raw_server(served, lambda connected: connected.sendall(b"hello\r\n")) as address,
        pytest.raises(NoHelperError, match="does not answer"),
    ):
        ask_for_sum(address, served.request(8), TIMEOUT)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (HelperAddress("http://h:1", "0" * 64), '"https://host:port" is expected'),
        (HelperAddress("https://h:x", "0" * 64), '"https://host:port" is expected'),
        (HelperAddress("https://h:1/path", "0" * 64), '"https://host:port" is expected'),
        (HelperAddress("https://h:1"), "give one of them"),
        (HelperAddress("https://h:1", "0" * 64, Path("ca.pem")), "give one of them"),
        (HelperAddress("https://h:1", "0" * 63), "is no SHA-256"),
        (HelperAddress("https://h:1", ca=Path("nowhere.pem")), "cannot be used as the helper's CA"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(address: HelperAddress, words: str) -> None:
    with pytest.raises(WrongHelperError, match=words):
        ask_for_card(address, bytes(32), TIMEOUT)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("GET", SUM_PATH, {}, 405),
        ("POST", CARD_PATH, {}, 405),
        ("POST", SUM_PATH, {"Transfer-Encoding": "chunked"}, 411),
        ("POST", SUM_PATH, {"Content-Length": str(30 * REPORT_BYTES)}, 413),
        ("POST", SUM_PATH, {"Content-Length": "0"}, 409),
    ],
)
def test_other_requests_are_refused_before_their_body(
    served: Served, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    found, content = served.raw(method, path, None, **headers)
    assert found == status
    assert read_message(content, MaskSumRefusal).name is RefusalName.BAD_REQUEST


def test_whoever_says_nothing_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_port, "REQUEST_TIMEOUT", 0.05)
    port = int(served.pinned.url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(served.folder / CA))
    with (
        socket.create_connection(("127.0.0.1", port), TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connected,
    ):
        connected.sendall(b"POST /v1/sum HTTP/1.1\r\n")
        assert connected.recv(1) == b""


def test_a_coordinator_s_largest_request_is_read_whole(served: Served) -> None:
    """20 devices' worth of bytes in one body, in many pieces."""
    body = write_message(served.request(9)) + bytes(10 * REPORT_BYTES)
    status, content = served.raw("POST", SUM_PATH, body)
    assert status == 409
    assert "no MaskSumRequest" in read_message(content, MaskSumRefusal).text
