"""What ends a device that somebody waits for, and what the others say of it each time; on real
sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_device import Device
from fleetlearn_device.__main__ import main
from fleetlearn_device.driver.address import Address
from fleetlearn_device.driver.addresses import Place
from fleetlearn_device.driver.dead_ends import (
    NoConnectionError,
    dead_end_of,
    dead_end_of_refusal,
    header,
    refusal,
)
from fleetlearn_device.driver.timing import Timing
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import CheckIn, ComeBack
from processes import free_port
from scripted import PATIENCE, scripted
from silent_server import silent_server
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

QUICK = Timing(open=2.0, base=0.001, cap=0.01, slow_cap=0.01, give_up=0.05)
DATA = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
TOKEN = "t" * 43


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, ["127.0.0.1"], 30)
    return folder


def refusing(status: int, text: str) -> Callable[[Any, Request], Response]:
    return lambda connection, request: connection.respond(status, text)


def served(url: str, folder: Path, **options: Any) -> Device:
    return Device(url, DATA, folder / "state", timing=QUICK, **options)


async def warned(device: Device, text: str, times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Serve until the log has said this so often; the device goes on meanwhile.

    What is said again within ten minutes is at the level DEBUG."""
    caplog.set_level(logging.DEBUG, "fleetlearn.device")
    running = asyncio.create_task(device.serve())
    async with asyncio.timeout(PATIENCE):
        while sum(text in record.getMessage() for record in caplog.records) < times:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.005)
    device.stop()
    await running


TLS_CASES = {
    "an unknown CA": ("wss", {}, {}, "give the CA's file, ca.pem of the coordinator, with --ca"),
    "another name": (
        "wss",
        {"ca": True, "host": "localhost"},
        {},
        "for another name than the one in this address",
    ),
    "plain to TLS": ("ws", {}, {}, "the coordinator speaks TLS at this address: use wss://"),
    "TLS to plain": (
        "wss",
        {"ca": True},
        {"plain": True},
        "speaks no TLS at this address: use ws://",
    ),
    "no certificate": ("wss", {"ca": True}, {"asks": True}, "with --certificate and --key"),
}


@pytest.mark.parametrize("case", TLS_CASES)
@pytest.mark.parametrize("until_finished", [True, False])
def test_tls_that_fails_is_explained_each_time_and_ends_a_device_that_somebody_waits_for(
    case: str, until_finished: bool, tls: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheme, given, kind, text = TLS_CASES[case]

    async def test() -> None:
        options = {} if kind.get("plain") else {"tls": tls, **kind}
        async with silent_server(**options) as port:
            url = f"{scheme}://{given.get('host', '127.0.0.1')}:{port}"
            ca = tls / "ca.pem" if given.get("ca") else None
            device = served(url, tmp_path, ca=ca, until_finished=until_finished)
            if not until_finished:
                await warned(device, text, 2, caplog)
                return
            with pytest.raises(NoConnectionError, match=text) as caught:
                await device.serve()
            assert caught.value.kind == "tls"

    asyncio.run(test())
    assert text in caplog.text


def test_a_certificate_of_the_past_or_the_future_blames_the_clock_too() -> None:
    def refused(code: int) -> ssl.SSLCertVerificationError:
        error = ssl.SSLCertVerificationError(1, "certificate verify failed")
        error.verify_code, error.verify_message = code, "certificate has expired"
        return error

    address = Address("wss://coordinator.example", ssl.create_default_context())
    for code, text in ((10, "it has expired, or the clock"), (9, "it is not valid yet: the clock")):
        found = asyncio.run(dead_end_of(refused(code), address, None))
        assert found is not None
        assert text in found.text


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (403, "<html>blocked by a proxy</html>", None),
        (401, "this credential is not known here", "not-admitted"),
        (403, "this token is used up: ask for a new one", "not-admitted"),
        (400, "invalid subprotocol; expected one of fleetlearn.v2", "version"),
        (400, "<html>The plain HTTP request was sent to HTTPS port</html>", "tls"),
        (400, "the token in the request is not one", None),
        (429, "too many connections", None),
        (502, "Bad Gateway", None),
    ],
)
def test_a_refused_handshake_is_final_where_waiting_does_not_help(
    status: int, text: str, kind: str | None
) -> None:
    response = Response(status, "", Headers(), bytearray(text.encode()))
    found = dead_end_of_refusal(status, refusal(response))
    assert (found and found.kind) == kind
    if found is not None and kind != "tls":
        assert text in found.text


@pytest.mark.parametrize(
    ("headers", "body", "text"),
    [
        ({}, "busy", "busy"),
        ({}, "", "HTTP 503 Out"),
        (
            {"Content-Type": "text/html"},
            "<html><head><Title lang=en>\n Hotel\n  WiFi</title>" + 9000 * "x",
            'HTTP 503 Out, with the web page "Hotel WiFi": a proxy or another server answers '
            "there, and no fleetlearn coordinator",
        ),
        (
            {"Content-Type": "text/html", "Server": "squid/5.2" + 9000 * "x"},
            "<html>",
            "HTTP 503 Out, with a web page: a proxy or another server answers there, and no "
            "fleetlearn coordinator (it calls itself squid/5.2" + 71 * "x" + ")",
        ),
        (
            {"Location": "https://login.example/?next=1"},
            "",
            "HTTP 503 Out, which leads to https://login.example/?next=1 and is not followed: a "
            "proxy or another server answers there, and no fleetlearn coordinator",
        ),
    ],
)
def test_what_answered_is_said_in_one_short_line(
    headers: dict[str, str], body: str, text: str
) -> None:
    assert refusal(Response(503, "Out", Headers(headers), bytearray(body.encode()))) == text


def test_a_header_that_comes_twice_is_no_error() -> None:
    response = Response(503, "Out", Headers([("Retry-After", "3"), ("Retry-After", "5")]))
    assert (header(response, "Retry-After"), header(response, "Server")) == ("3", "")


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), TimeoutError(), OSError("no route"), ssl.SSLEOFError()]
)
def test_a_network_that_fails_is_no_dead_end(error: OSError) -> None:
    port = free_port()
    address = Address(f"wss://127.0.0.1:{port}", ssl.create_default_context())
    for place in (None, Place(socket.AF_INET, ("127.0.0.1", port))):
        assert asyncio.run(dead_end_of(error, address, place)) is None


def test_a_token_that_is_refused_ends_a_device_that_was_never_let_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with silent_server(
            process_request=refusing(403, "this token is used up: ask for a new one")
        ) as port:
            with pytest.raises(NoConnectionError, match="used up") as caught:
                await served(f"ws://127.0.0.1:{port}", tmp_path, token=TOKEN).serve()
            assert caught.value.kind == "not-admitted"

    asyncio.run(test())


def test_a_device_that_was_let_in_once_waits_until_it_is_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its coordinator may have lost its database for an hour; the token of its first start is still
    in its service."""

    async def test() -> None:
        async with scripted() as coordinator:
            device = served(coordinator.url, tmp_path, token=TOKEN)
            running = asyncio.create_task(device.serve())
            await (await coordinator.line()).check_in()
            device.stop()
            await running
        refuse = refusing(403, "this token is used up: ask for a new one")
        async with silent_server(process_request=refuse) as port:
            await warned(
                served(f"ws://127.0.0.1:{port}", tmp_path, token=TOKEN), "used up", 3, caplog
            )

    asyncio.run(test())


def test_another_version_in_the_handshake_ends_a_device_that_somebody_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with silent_server(subprotocols=[Subprotocol("fleetlearn.v2")]) as port:
            url = f"ws://127.0.0.1:{port}"
            with pytest.raises(
                ProtocolError, match=r"another version of the protocol .*fleetlearn\.v2"
            ) as caught:
                await served(url, tmp_path, until_finished=True).serve()
            assert caught.value.code is Code.BAD_VERSION
            await warned(served(url, tmp_path), "install the version of fleetlearn", 3, caplog)

    asyncio.run(test())


def test_a_coordinator_that_is_gone_with_the_training_ends_a_device_that_waits_for_the_end(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with scripted() as coordinator:
            url = coordinator.url
            running = asyncio.create_task(served(url, tmp_path, until_finished=True).serve())
            line = await coordinator.line()
            await line.expect(CheckIn)
            await line.say(ComeBack(0.01, "busy"))
            await line.closed()
        with pytest.raises(NoConnectionError, match=r"may have ended with the training") as caught:
            await running
        assert caught.value.kind == "unreachable"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("kind", "status"), [("not-admitted", 4), ("tls", 5), ("version", 6), ("unreachable", 7)]
)
def test_each_has_an_exit_status(
    kind: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "data.npz", x=DATA[0], y=DATA[1])

    def run(device: Device) -> None:
        if kind == "version":
            raise ProtocolError(Code.BAD_VERSION, "what to do")
        raise NoConnectionError(kind, "what to do")  # type: ignore[arg-type]

    monkeypatch.setattr(Device, "run", run)
    arguments = ["run", "--coordinator", "ws://127.0.0.1:9", "--data", str(tmp_path / "data.npz")]
    assert main([*arguments, "--state", str(tmp_path / "state")]) == status
    assert capsys.readouterr().err == "fleetlearn-device: what to do\n"
