"""TLS in the coordinator's process, over real sockets: who is let in, and what happens when the certificate changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest
from fleetlearn_coordinator.network import host, listener
from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, Tls
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import PROTOCOL_NAME
from peers import Peer, PlanMaker, serving, update_of
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from benchmarks._raw_peer import open_stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA and a certificate for this machine."""
    folder = tmp_path_factory.mktemp("tls")
    assert make_certificate(folder, ["127.0.0.1", "localhost"], 30)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {"certificate": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}


async def join(coordinator: RunServer, ca: Path | None, name: str = "a") -> tuple[Peer, ClientConnection]:
    """A device that trusts this CA alone."""
    trusts = ssl.create_default_context(cafile=ca)
    connection = await connect(
        coordinator.host.address, ssl=trusts, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None
    )
    peer = Peer(name, connection)
    await peer.check_in()
    return peer, connection


def test_a_round_over_tls(make_plan: PlanMaker, folder: Path) -> None:
    async def test() -> None:
        async with serving(make_plan(round__goal=1), tls=files(folder)) as coordinator:
            assert coordinator.host.address.startswith("wss://127.0.0.1:")
            peer, connection = await join(coordinator, folder / "ca.pem")
            assert connection.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
            task = await peer.task()
            await peer.upload(task, update_of(1.0))
            await peer.task()
            assert coordinator.engine.version == 1
            await connection.close()

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("whom", ["system", "another"])
def test_a_device_that_does_not_trust_the_ca_does_not_connect(
    make_plan: PlanMaker, folder: Path, tmp_path: Path, whom: str
) -> None:
    make_certificate(tmp_path / "another", ["127.0.0.1"], 30)

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            with pytest.raises(ssl.SSLCertVerificationError):
                await join(coordinator, None if whom == "system" else tmp_path / "another" / "ca.pem")
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_peer_without_tls_gets_nothing(make_plan: PlanMaker, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleetlearn")

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            reader, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in await reader.read(1000)
            writer.close()
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    assert "refused in its TLS handshake" in caplog.text


def test_a_handshake_that_does_not_end_is_given_up(
    make_plan: PlanMaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT", 0.1)

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            reader, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            assert await reader.read() == b""
            writer.close()
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_fewer_connections_may_be_in_the_handshake_than_without_tls(
    make_plan: PlanMaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "TLS_NEWCOMERS", 3)

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            address, connections = coordinator.host.address.replace("wss", "ws"), coordinator.host._listener.connections
            writers = [(await open_stream(address))[1] for _ in range(5)]  # the system accepts them
            while len(connections) < 3:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(connections) == 3
            for writer in writers:
                writer.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_handshake_that_a_standstill_made_overdue_ends_nothing_else(make_plan: PlanMaker, folder: Path) -> None:
    """The process stood still, for a slow disk perhaps: the next sweep finds a connection that is due to have checked
    in, and that has no transport yet."""

    async def test() -> None:
        async with serving(make_plan(round__goal=1), tls=files(folder)) as coordinator:
            _, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            while not (connections := coordinator.host.connections):
                await asyncio.sleep(0.01)
            for driver in connections:
                driver.conversation._since -= 100.0
            coordinator.host.sweep(1.0)
            writer.close()
            peer, _ = await join(coordinator, folder / "ca.pem")
            await peer.do_round(update_of(1.0))

    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_end_does_not_wait_for_a_handshake(make_plan: PlanMaker, folder: Path) -> None:
    async def test() -> float:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            _, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            while not coordinator.host._listener.connections:
                await asyncio.sleep(0.01)
            begin = asyncio.get_running_loop().time()
        writer.close()
        return asyncio.get_running_loop().time() - begin

    assert asyncio.run(asyncio.wait_for(test(), 30)) < listener.HANDSHAKE_TIMEOUT / 2


def test_a_new_certificate_is_for_new_connections_and_a_bad_one_is_for_nobody(
    make_plan: PlanMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fleetlearn")
    make_certificate(tmp_path, ["127.0.0.1"], 30)

    def serial(connection: ClientConnection) -> str:
        return str(connection.transport.get_extra_info("peercert")["serialNumber"])

    async def test() -> None:
        async with serving(make_plan(), tls=files(tmp_path)) as coordinator:
            first, old = await join(coordinator, tmp_path / "ca.pem")
            (tmp_path / "certificate.pem").write_text("no certificate")
            coordinator.host.sweep(1.0)
            _, same = await join(coordinator, tmp_path / "ca.pem", "b")
            assert serial(same) == serial(old)
            make_certificate(tmp_path, ["127.0.0.1"], 30)
            coordinator.host.sweep(1.0)
            _, new = await join(coordinator, tmp_path / "ca.pem", "c")
            assert serial(new) != serial(old)
            await first.task()  # the connection from before goes on
            for connection in (old, same, new):
                connection.transport.abort()

    asyncio.run(asyncio.wait_for(test(), 30))
    assert "the certificate from before stays in use" in caplog.text
    assert "the certificate was read again" in caplog.text


def broken(folder: Path, what: str) -> Tls:
    make_certificate(folder, ["127.0.0.1"], 30)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    if what == "missing":
        key.unlink()
    elif what == "another key":
        make_certificate(folder / "other", ["127.0.0.1"], 30)
        (folder / "other" / "key.pem").replace(key)
    elif what == "no PEM":
        certificate.write_text("hello")
    return Tls(certificate=certificate, key=key)


@pytest.mark.parametrize("what", ["missing", "another key", "no PEM"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, what: str) -> None:
    with pytest.raises(FleetError) as caught:
        Certificates(broken(tmp_path, what))
    assert str(tmp_path / "key.pem") in caught.value.text
    assert "PEM" in caught.value.text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_this_machine_needs_no_tls(address: str) -> None:
    assert ServiceSettings.read({"host": address}).tls is None
