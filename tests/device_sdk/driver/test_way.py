"""Devices on networks as people have them: proxies, names of this machine, IPv6 that leads
nowhere."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_device import Device
from fleetlearn_device.driver.connection import RepeatedLine
from fleetlearn_device.driver.timing import Timing
from networks import black_hole, give_names, http_proxy
from processes import free_port
from scripted import PATIENCE, scripted

QUICK = Timing(open=5.0, close=0.5, base=0.01)
TOKEN = 43 * "t"
ELSEWHERE = "192.0.2.1"
"""The address of another machine, which is never connected to."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, ["fleet.test"], 1)
    return folder


def tls(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
    return context


@asynccontextmanager
async def serving(url: str, folder: Path, **options: Any) -> AsyncIterator[None]:
    data = (np.zeros((3, 2), np.float32),)
    device = Device(url, data, folder / "state", **({"timing": QUICK, "token": TOKEN} | options))
    running = asyncio.create_task(device.serve())
    try:
        yield
    finally:
        device.stop()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def failure(url: str, folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """What the device warns of first."""

    def warnings() -> list[str]:
        return [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]

    async def test() -> None:
        async with serving(url, folder, **options):
            await until(lambda: bool(warnings()))

    asyncio.run(test())
    return warnings()[0]


@pytest.mark.parametrize(
    "variable",
    ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ws_proxy", "SOCKS_PROXY"],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "fleet.localhost"])
def test_loopback_is_connected_to_directly(
    host: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_names(
        monkeypatch, {"localhost": [("127.0.0.1", None)], "fleet.localhost": [("127.0.0.1", None)]}
    )

    async def test() -> None:
        async with http_proxy() as proxy, scripted() as coordinator:
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
            async with serving(coordinator.url.replace("127.0.0.1", host), tmp_path):
                line = await coordinator.line()
                assert (await line.check_in()).examples == 3
            assert line.connection.request is not None
            assert line.connection.request.headers["Fleetlearn-Enrolment"] == TOKEN
            assert not proxy.requests

    asyncio.run(test())


def test_a_credential_never_goes_to_a_proxy_in_clear_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address without TLS is connected to directly, on another machine, too."""
    give_names(monkeypatch, {"fleet.test": [("127.0.0.1", None)]})

    async def test() -> None:
        async with http_proxy() as proxy, scripted() as coordinator:
            for variable in ("http_proxy", "https_proxy", "ws_proxy"):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
            async with serving(
                coordinator.url.replace("127.0.0.1", "fleet.test"), tmp_path, insecure=True
            ):
                await (await coordinator.line()).check_in()
            assert not proxy.requests

    asyncio.run(test())


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_another_machine_is_reached_through_the_proxy_with_tls(
    scheme: str,
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_names(monkeypatch, {"fleet.test": [(ELSEWHERE, None)]})

    async def test() -> None:
        async with (
            scripted(ssl=tls(certificates)) as coordinator,
            http_proxy(coordinator.port) as proxy,
        ):
            monkeypatch.setenv("HTTPS_PROXY", f"{scheme}owner:se%20cret@127.0.0.1:{proxy.port}")
            async with serving("wss://fleet.test:8443", tmp_path, ca=certificates / "ca.pem"):
                await (await coordinator.line()).check_in()
            (request,) = proxy.requests
            assert request.startswith("CONNECT fleet.test:8443 HTTP/1.1\r\n")
            assert base64.b64encode(b"owner:se cret").decode() in request
            assert TOKEN not in request
            place = f"(through the proxy http://127.0.0.1:{proxy.port} of HTTPS_PROXY)"
            assert f"connected to wss://fleet.test:8443 {place}" in caplog.messages

    with caplog.at_level(logging.DEBUG, "fleetlearn.device"):
        asyncio.run(test())
    assert "cret" not in caplog.text


def test_a_proxy_with_a_dead_first_address_is_reached_by_the_second(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with (
            scripted(ssl=tls(certificates)) as coordinator,
            http_proxy(coordinator.port) as proxy,
        ):
            with black_hole("::1") as hole:
                names = {
                    "fleet.test": [(ELSEWHERE, None)],
                    "proxy.test": [("::1", hole), ("127.0.0.1", proxy.port)],
                }
                give_names(monkeypatch, names)
                monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test:3128")
                async with serving("wss://fleet.test:8443", tmp_path, ca=certificates / "ca.pem"):
                    await (await coordinator.line()).check_in()

    asyncio.run(test())


@pytest.mark.parametrize("exempt", ["", "fleet.test", ".test", "*"])
def test_a_name_of_this_machine_or_of_no_proxy_is_connected_to_directly(
    exempt: str, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name of a Raspberry Pi is found on the Pi itself: 127.0.1.1."""
    give_names(monkeypatch, {"fleet.test": [("127.0.0.1", None)]})
    monkeypatch.setenv("NO_PROXY", exempt)

    async def test() -> None:
        async with (
            scripted(ssl=tls(certificates)) as coordinator,
            http_proxy(coordinator.port) as proxy,
        ):
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
            async with serving(
                f"wss://fleet.test:{coordinator.port}", tmp_path, ca=certificates / "ca.pem"
            ):
                await (await coordinator.line()).check_in()
            assert not proxy.requests

    asyncio.run(test())


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            "403 Forbidden",
            "the proxy refuses to connect to fleet.test:8443 (HTTP 403 Forbidden): check "
            "HTTPS_PROXY, or set NO_PROXY=fleet.test to connect without the proxy",
        ),
        (
            "407 Proxy Authentication Required",
            "it asks for a name and a password, as in HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
        ),
    ],
)
def test_a_proxy_that_refuses_is_named(
    answer: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_names(monkeypatch, {"fleet.test": [(ELSEWHERE, None)]})

    async def test() -> str:
        async with http_proxy(
            answer=f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode()
        ) as proxy:
            place = f"127.0.0.1:{proxy.port}"
            monkeypatch.setenv("HTTPS_PROXY", f"http://owner:secret@{place}")
            async with serving("wss://fleet.test:8443", tmp_path):
                await until(lambda: "cannot connect" in caplog.text)
            return place

    place = asyncio.run(test())
    assert (
        f"cannot connect to wss://fleet.test:8443 (through the proxy http://{place} of "
        "HTTPS_PROXY): "
    ) in caplog.text
    assert text in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "http://owner:secret@127.0.0.1:{port}",
            "(through the proxy http://127.0.0.1:{port} of https_proxy): the proxy "
            "refused the connection: check https_proxy, or",
        ),
        (
            "http://owner:secret@nowhere.test",
            "(through the proxy http://nowhere.test:80 of https_proxy): the proxy's name "
            "was not found (name or service not known): check https_proxy, or",
        ),
        (
            "ftp://owner:secret@host:1",
            "https_proxy names a proxy that cannot be used: scheme ftp isn't supported. Expect",
        ),
        (
            "http://owner:secret@host:port",
            "https_proxy names a proxy with no port that can be used. Expected http://HOST",
        ),
        ("owner:sec/ret@host:1", "https_proxy names a proxy"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_and_its_password_is_not(
    setting: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_names(monkeypatch, {"fleet.test": [(ELSEWHERE, None)]})
    port = free_port()
    monkeypatch.setenv("https_proxy", setting.format(port=port))
    said = failure("wss://fleet.test", tmp_path, caplog)
    assert text.format(port=port) in said
    assert "set NO_PROXY=fleet.test to connect without" in said
    assert "sec" not in said


@pytest.mark.skipif(find_spec("python_socks") is not None, reason="SOCKS can be spoken here")
@pytest.mark.parametrize("scheme", ["socks5h", "socks5", "socks4", "http"])
def test_a_socks_proxy_without_its_package_is_said(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = give_names(monkeypatch, {"fleet.test": [(ELSEWHERE, None)]})
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("SOCKS_PROXY", f"{scheme}://owner:secret@127.0.0.1:9")
    said = failure("wss://fleet.test", tmp_path, caplog)
    shown = scheme.replace("http", "socks5h")
    assert (
        f"the proxy {shown}://127.0.0.1:9 of SOCKS_PROXY speaks SOCKS, which needs: pip install "
        in said
    )
    # which says that the proxy looks names up
    assert ("fleet.test" in asked) == (shown != "socks5h")


def test_a_proxy_that_is_not_used_without_tls_is_named_where_the_device_cannot_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", "http://owner:secret@127.0.0.1:9")
    with black_hole() as hole:
        give_names(monkeypatch, {"fleet.test": [("127.0.0.1", hole)]})
        options = {"insecure": True, "timing": QUICK._replace(open=0.3)}
        said = failure("ws://fleet.test", tmp_path, caplog, **options)
    assert said.endswith(
        "http_proxy names a proxy, which is not used for ws://: it would read the device's "
        "credential; use wss:// where the way leads through a proxy"
    )
    assert "secret" not in said


@pytest.mark.parametrize("dead", ["::1", "127.0.0.2"])
def test_a_dead_first_address_does_not_keep_a_device_away(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with scripted() as coordinator:
            with black_hole(dead) as hole:
                give_names(
                    monkeypatch,
                    {"fleet.localhost": [(dead, hole), ("127.0.0.1", coordinator.port)]},
                )
                async with serving("ws://fleet.localhost:1", tmp_path):
                    await (await coordinator.line()).check_in()
            assert (
                f"connected to ws://fleet.localhost:1 (127.0.0.1 port {coordinator.port})"
                in caplog.messages
            )

    with caplog.at_level(logging.INFO, "fleetlearn.device"):
        asyncio.run(test())
    assert "cannot connect" not in caplog.text


def test_an_address_that_connects_and_then_answers_nothing_makes_way_at_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a network loses large packets on IPv6 alone."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def test() -> None:
        async with (
            scripted() as coordinator,
            await asyncio.start_server(silent, "127.0.0.1", 0) as server,
        ):
            port = server.sockets[0].getsockname()[1]
            give_names(
                monkeypatch, {"a.localhost": [("127.0.0.1", port), ("127.0.0.1", coordinator.port)]}
            )
            async with serving("ws://a.localhost:1", tmp_path, timing=QUICK._replace(open=0.5)):
                await (await coordinator.line()).check_in()
            place = f"127.0.0.1 port {port}"
            assert (
                f"cannot connect to ws://a.localhost:1 ({place}): it took the connection, but gave "
                "no"
            ) in caplog.text

    asyncio.run(test())


def test_a_wrong_address_is_named_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    assert failure(f"ws://127.0.0.1:{port}", tmp_path, caplog) == (
        f"cannot connect to ws://127.0.0.1:{port}: 127.0.0.1 port {port} refused the connection: "
        "nothing listens there. Check the port, and that the coordinator runs on this machine"
    )


def test_the_same_failure_is_not_written_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(
            f"ws://127.0.0.1:{free_port()}", tmp_path, timing=Timing(base=0.001, cap=0.01)
        ):
            await until(lambda: caplog.text.count("cannot connect") > 4)  # at the level DEBUG
            written = [record for record in caplog.records if record.levelno >= logging.INFO]
            assert sum("cannot connect" in record.getMessage() for record in written) == 1
            assert sum("connecting again" in record.getMessage() for record in written) == 1
            assert (
                sum("the device goes on trying" in record.getMessage() for record in written) == 1
            )
            monkeypatch.setattr(RepeatedLine, "AGAIN", 0.0)
            await until(
                lambda: any(
                    " times in a row)" in row.getMessage() and row.levelno == logging.WARNING
                    for row in caplog.records
                )
            )

    with caplog.at_level(logging.DEBUG, "fleetlearn.device"):
        asyncio.run(test())
