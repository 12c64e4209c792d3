"""Connections that are refused before they are open are counted by cause, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fleetlearn_coordinator.network.gate import CAUSES, RefusalError
from fleetlearn_coordinator.network.host import Host
from fleetlearn_coordinator.service.monitoring.gauges import host_gauges
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_protocol.messages import PROTOCOL_NAME
from peers import PlanMaker, serving
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.typing import Subprotocol

from benchmarks._raw_peer import open_stream

UNKNOWN = {"Authorization": f"Bearer {'x' * 43}"}


def series(host: Host) -> dict[str, float]:
    """Return cause -> connections, of the causes that came, as a scrape has them."""
    found = {
        sample.labels[0]: sample.value
        for name, sample in host_gauges(host)
        if name == "fleetlearn_handshakes_refused_total"
    }
    assert tuple(found) == CAUSES, "all of them from the start"
    return {cause: value for cause, value in found.items() if value}  # type: ignore[misc]


async def ask(address: str, **options: Any) -> None:
    """Ask to connect, and be refused."""
    options = {"subprotocols": [Subprotocol(PROTOCOL_NAME)], **options}
    with suppress(InvalidHandshake, InvalidMessage, ssl.SSLError, EOFError, ConnectionError):
        async with connect(address, **options):
            raise AssertionError("the connection is open")


async def send(address: str, content: bytes) -> None:
    """Send bytes, and read until the end."""
    reader, writer = await open_stream(address)
    with suppress(ConnectionError):
        writer.write(content)
        await reader.read()
    writer.close()


async def until(host: Host, expected: dict[str, float]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(10):
            while series(host) != expected:
                await asyncio.sleep(0.01)
    assert series(host) == expected


def test_each_cause_is_counted(make_plan: PlanMaker, tmp_path: Path) -> None:
    Identities(tmp_path / "ids").close()
    context = ssl.create_default_context()

    async def test() -> None:
        async with serving(make_plan(), identities=str(tmp_path / "ids")) as coordinator:
            host, address = coordinator.host, coordinator.host.address
            await until(host, {})
            await ask(address)
            await ask(address, additional_headers=UNKNOWN)
            await until(host, {"credentials": 2})
            await ask(address, additional_headers={"Authorization": "Bearer short"})
            await send(address, b"what is this\r\n\r\n")
            await send(address, b"x" * 100_000)
            await until(host, {"credentials": 2, "bad-request": 3})
            await ask(address, origin="http://evil.example")
            await ask(address.replace("ws", "wss"), ssl=context)
            await until(host, {"credentials": 2, "bad-request": 3, "web-page": 1, "tls": 1})

    asyncio.run(asyncio.wait_for(test(), 30))


def test_another_protocol_is_no_request_of_this_one(make_plan: PlanMaker) -> None:
    async def test() -> None:
        async with serving(make_plan()) as coordinator:
            await ask(coordinator.host.address, subprotocols=[Subprotocol("mqtt")])
            await until(coordinator.host, {"bad-request": 1})
            reader, writer = await open_stream(coordinator.host.address)
            writer.close()  # it came and went: nothing was refused
            assert await reader.read() == b""
            await until(coordinator.host, {"bad-request": 1})

    asyncio.run(asyncio.wait_for(test(), 30))


def test_who_speaks_no_tls_is_counted(make_plan: PlanMaker, tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    tls = {name: str(tmp_path / f"{name}.pem") for name in ("certificate", "key")}

    async def test() -> None:
        async with serving(make_plan(), tls=tls) as coordinator:
            await send(coordinator.host.address.replace("wss", "ws"), b"GET / HTTP/1.1\r\n\r\n")
            await until(coordinator.host, {"tls": 1})
            # A device that does not trust the CA.
            await ask(coordinator.host.address, ssl=ssl.create_default_context())
            await until(coordinator.host, {"tls": 2})

    asyncio.run(asyncio.wait_for(test(), 30))


def test_too_many_connections_of_one_address_are_counted(make_plan: PlanMaker) -> None:
    async def test() -> None:
        limits = {"connections": 1, "exempt": []}
        async with serving(make_plan(), limits=limits) as coordinator:
            address = coordinator.host.address
            async with connect(address, subprotocols=[Subprotocol(PROTOCOL_NAME)]):
                await ask(address)
                await until(coordinator.host, {"too-many": 1})

    asyncio.run(asyncio.wait_for(test(), 30))


def test_every_status_of_a_refusal_has_a_cause() -> None:
    assert RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "busy").cause == "unavailable"
    assert RefusalError(HTTPStatus.FORBIDDEN, "who").cause == "credentials"
    assert RefusalError(HTTPStatus.FORBIDDEN, "who", "web-page").cause == "web-page"
