"""TLS in the coordinator's process, over real sockets: who is let in, and what happens when the
certificate changes."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from fleetlearn_coordinator.network import host, listener, peer_log
from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, Tls
from fleetlearn_coordinator.service import private_ca
from fleetlearn_coordinator.service.private_ca import make_certificate, make_device_certificate
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import PROTOCOL_NAME
from peers import Peer, PlanMaker, serving, update_of
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage
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


async def join(
    coordinator: RunServer, ca: Path | None, name: str = "a"
) -> tuple[Peer, ClientConnection]:
    """A device that trusts this CA alone."""
    trusts = ssl.create_default_context(cafile=ca)
    connection = await connect(
        coordinator.host.address,
        ssl=trusts,
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        compression=None,
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
                await join(
                    coordinator, None if whom == "system" else tmp_path / "another" / "ca.pem"
                )
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_peer_without_tls_gets_nothing(
    make_plan: PlanMaker,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_log, "_said", {})

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            reader, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in await reader.read(1000)
            writer.close()
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "failed in its TLS handshake" in text)
    assert line == (
        "a connection of 127.0.0.1 failed in its TLS handshake: it speaks without TLS, and this "
        "port has TLS: it must connect to wss:// (or https://) instead of ws://"
    )


DAY = timedelta(days=1)


def made_at(
    monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], when: timedelta
) -> Path:
    """Make a certificate for 30 days as if it were another time than now. Returns its folder."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + when

    make_certificate(folder, names, 30)  # its CA is of today
    with monkeypatch.context() as patch:
        patch.setattr(private_ca, "datetime", Then)
        make_certificate(folder, names, 30)
    return folder


HERE = ["127.0.0.1", "localhost"]
REFUSED = {
    "expired": (
        HERE,
        -100 * DAY,
        "127.0.0.1",
        r"The certificate .*certificate.pem ended on 20..-..-.. ..:..:..Z",
    ),
    "not yet valid": (
        HERE,
        100 * DAY,
        "127.0.0.1",
        r"The certificate .* is valid from 20.* on, and by this machine's clock it is 20",
    ),
    "another name": (
        HERE,
        0 * DAY,
        "fleet.example",
        r"The device asks for fleet\.example, and the certificate is for localhost, 127\.0\.0\.1",
    ),
    "another address": (
        ["fleet.example"],
        0 * DAY,
        "127.0.0.1",
        (
            r"The device connects to the address 127\.0\.0\.1, and the certificate is for "
            r"fleet\.example"
        ),
    ),
    "another CA": (
        HERE,
        0 * DAY,
        "127.0.0.1",
        r"Most likely the device does not trust the CA that made it \(\"fleet",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_why_devices_refuse_the_certificate_is_in_the_log_once(
    make_plan: PlanMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """Although Python's devices end the connection without saying why. They try again and again."""
    names, when, asked, words = REFUSED[what]
    folder = made_at(monkeypatch, tmp_path, names, when)
    ca = folder / "ca.pem"
    if what == "another CA":
        make_certificate(tmp_path / "another", names, 30)
        ca = tmp_path / "another" / "ca.pem"
    monkeypatch.setattr(peer_log, "_said", {})

    async def test() -> None:
        trusts = ssl.create_default_context(cafile=ca)
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            for _ in range(3):
                with pytest.raises(ssl.SSLCertVerificationError):
                    await connect(coordinator.host.address, ssl=trusts, server_hostname=asked)
                while coordinator.host._listener.connections:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "failed in its TLS handshake" in text)
    assert re.search(
        rf"a connection of 127.0.0.1 failed in its TLS handshake: it .* certificate\. {words}", line
    ), line


def test_a_peer_that_only_comes_and_goes_is_not_worth_a_line(
    make_plan: PlanMaker, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fleetlearn")

    async def test() -> None:
        async with serving(make_plan(), tls=files(folder)) as coordinator:
            _, writer = await open_stream(coordinator.host.address.replace("wss", "ws"))
            writer.close()
            await asyncio.sleep(0.01)
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    assert "TLS handshake" not in caplog.text


@pytest.mark.parametrize(
    ("days", "host", "words"),
    [
        (-31, "", "certificate.pem ended on 20"),
        (+3, "", "certificate.pem is valid from 20"),
        (
            -20,
            "",
            (
                "in 9 days; then devices refuse it. `fleetlearn-coordinator certificate` writes a "
                "new one"
            ),
        ),
        (
            0,
            "127.0.0.2",
            'certificate.pem is for localhost, 127.0.0.1, and not for host = "127.0.0.2": devices',
        ),
        (0, "127.0.0.1", ""),
        (-10, "0.0.0.0", ""),
    ],
)
def test_what_is_wrong_with_the_certificate_is_said_at_the_start_and_once_a_day(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    days: int,
    host: str,
    words: str,
) -> None:
    folder = made_at(monkeypatch, tmp_path, HERE, days * DAY)
    certificates, now = (
        Certificates(Tls(certificate=folder / "certificate.pem", key=folder / "key.pem")),
        time.time(),
    )
    for seconds in (0, 1, 3600, 80_000, 86_401):
        certificates.say_remarks(host, now + seconds)
    if not words:
        assert not caplog.messages
        return
    assert len(caplog.messages) == 2
    assert words in caplog.messages[0]
    make_certificate(folder, [*HERE, "127.0.0.2"], 30)
    certificates.check()
    certificates.say_remarks(host, now + 86_402)
    assert len(caplog.messages) == 2, "it was renewed"


def test_the_ca_of_devices_certificates_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, good = made_at(monkeypatch, tmp_path / "old", HERE, -40 * DAY), tmp_path / "good"
    make_certificate(good, HERE, 30)
    settings = Tls(
        certificate=good / "certificate.pem", key=good / "key.pem", clients=old / "certificate.pem"
    )
    Certificates(settings).say_remarks("", time.time())
    (line,) = caplog.messages
    assert re.search(
        r"the CA of devices' certificates .* ended on 20.*: devices with certificates cannot "
        r"connect",
        line,
    )


def test_a_device_whose_certificate_is_of_another_ca_is_named(
    make_plan: PlanMaker, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificate(tmp_path / "another", HERE, 30)
    make_device_certificate(tmp_path / "another", "roof-7", 30)
    shown = (
        tmp_path / "another" / "devices" / "roof-7.pem",
        tmp_path / "another" / "devices" / "roof-7.key",
    )

    async def test() -> None:
        trusts = ssl.create_default_context(cafile=folder / "ca.pem")
        trusts.load_cert_chain(*shown)
        tls = {**files(folder), "clients": str(folder / "ca.pem")}
        async with serving(
            make_plan(), tls=tls, identities=str(tmp_path / "identities")
        ) as coordinator:
            with pytest.raises((OSError, EOFError, InvalidMessage)):
                await connect(coordinator.host.address, ssl=trusts)
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
    assert (
        "the device's own certificate is not accepted: unable to get local issuer certificate. It "
        "must be valid now, and of the CA in tls.clients"
    ) in caplog.text


def test_tls_to_a_port_without_it_is_named_and_ended_at_once(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_log, "_said", {})

    async def test() -> None:
        async with serving(make_plan()) as coordinator:
            with pytest.raises(ssl.SSLError) as refused:
                await connect(
                    coordinator.host.address.replace("ws", "wss"), ssl=ssl.create_default_context()
                )
            assert refused.value.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "refused" in text)
    assert line.startswith(
        "a connection of 127.0.0.1 was refused: it speaks TLS, and this port has none: it must "
        "connect"
    )


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
            address, connections = (
                coordinator.host.address.replace("wss", "ws"),
                coordinator.host._listener.connections,
            )
            writers = [(await open_stream(address))[1] for _ in range(5)]  # the system accepts them
            while len(connections) < 3:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(connections) == 3
            for writer in writers:
                writer.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_handshake_that_a_standstill_made_overdue_ends_nothing_else(
    make_plan: PlanMaker, folder: Path
) -> None:
    """The process stood still, for a slow disk perhaps: the next sweep finds a connection that is
    due to have checked in, and that has no transport yet."""

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
