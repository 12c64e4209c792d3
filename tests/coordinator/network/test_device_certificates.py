"""Devices that are known by their certificates, over real sockets: under which name, and until
when."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest
from fleetlearn_coordinator.network.gate import RefusalError, certified_by
from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.plan.service_settings import Tls
from fleetlearn_coordinator.service.private_ca import make_certificate, make_device_certificate
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.messages import PROTOCOL_NAME, Refused
from peers import Peer, PlanMaker, serving, update_of
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage, InvalidStatus
from websockets.typing import Subprotocol

NO_CERTIFICATE = ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A CA, with certificates of the coordinator and of the device ``a``."""
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    make_device_certificate(tmp_path, "a", 30)
    return tmp_path


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Identities]:
    with closing(Identities(tmp_path / "identities")) as found:
        yield found


def service(folder: Path) -> dict[str, Any]:
    files = {
        "certificate": folder / "certificate.pem",
        "key": folder / "key.pem",
        "clients": folder / "ca.pem",
    }
    return {
        "tls": {name: str(file) for name, file in files.items()},
        "identities": str(folder / "identities"),
    }


async def open_with(
    coordinator: RunServer, folder: Path, name: str, **headers: str
) -> ClientConnection:
    """Connect with the certificate ``devices/NAME.pem``, or with none."""
    trusts = ssl.create_default_context(cafile=folder / "ca.pem")
    if name != NO_CERTIFICATE:
        trusts.load_cert_chain(
            folder / "devices" / f"{name}.pem", folder / "devices" / f"{name}.key"
        )
    protocols = [Subprotocol(PROTOCOL_NAME)]
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return await connect(
        coordinator.host.address,
        ssl=trusts,
        additional_headers=given,
        subprotocols=protocols,
        compression=None,
    )


async def refusal(
    coordinator: RunServer, folder: Path, name: str, **headers: str
) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as caught:
        await open_with(coordinator, folder, name, **headers)
    return caught.value.response.status_code, bytes(caught.value.response.body or b"").decode()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_a_device_trains_under_its_certificate_s_name(
    make_plan: PlanMaker, folder: Path, operator: Identities
) -> None:
    async def test() -> None:
        async with serving(make_plan(round__goal=1), **service(folder)) as coordinator:
            connection = await open_with(coordinator, folder, "a")
            peer = Peer("a", connection)
            await peer.check_in()
            await peer.do_round(update_of(1.0))
            assert coordinator.engine.version == 1
            connection.transport.abort()
            (await open_with(coordinator, folder, "a")).transport.abort()

    run(test())
    assert [row.device for row in operator.devices()] == ["a"]
    assert [row.what for row in operator.events()] == ["started", "enrolled", "stopped"], (
        "enrolled once"
    )


def test_nobody_is_somebody_else(make_plan: PlanMaker, folder: Path, operator: Identities) -> None:
    make_device_certificate(folder, "b", 30)
    token = operator.make_token(1, time.time() + 100, [], time.time())
    secret = f"Bearer {token_urlsafe(32)}"

    async def test() -> None:
        async with serving(make_plan(), **service(folder)) as coordinator:
            thief = await open_with(coordinator, folder, "a")
            await thief.send('{"type": "check-in", "protocol": 1, "device": "b", "examples": 1}')
            answer = await Peer("b", thief).receive()
            assert isinstance(answer, Refused)
            assert answer.code is Code.BAD_MESSAGE
            assert "is of a, and b checked in" in answer.text
            status, text = await refusal(coordinator, folder, "a", Fleetlearn_Device="b")
            assert (status, text) == (403, "this certificate is of the device a, not of b\n")
            enrolling = {
                "Authorization": secret,
                "Fleetlearn_Device": "b",
                "Fleetlearn_Enrolment": token,
            }
            by_credential = await open_with(coordinator, folder, NO_CERTIFICATE, **enrolling)
            status, text = await refusal(coordinator, folder, "b")
            assert status == 403
            assert "a device called b is enrolled already, with a credential" in text
            assert not coordinator.host.devices
            for connection in (thief, by_credential):
                connection.transport.abort()

    run(test())


def test_who_shows_nothing_is_told(make_plan: PlanMaker, folder: Path) -> None:
    async def test() -> None:
        async with serving(make_plan(), **service(folder)) as coordinator:
            status, text = await refusal(coordinator, folder, NO_CERTIFICATE)
            assert status == 401
            assert "or with its certificate (--certificate)" in text

    run(test())


@pytest.mark.parametrize("whose", ["of another CA", "the coordinator's own"])
def test_other_certificates_do_not_connect(make_plan: PlanMaker, folder: Path, whose: str) -> None:
    devices = folder / "devices"
    if whose == "of another CA":
        make_device_certificate(folder / "other", "a", 30)
        for kind in ("pem", "key"):
            (folder / "other" / "devices" / f"a.{kind}").replace(devices / f"a.{kind}")
    else:
        for name, kind in (("certificate", "pem"), ("key", "key")):
            (devices / f"a.{kind}").write_bytes((folder / f"{name}.pem").read_bytes())

    async def test() -> None:
        async with serving(make_plan(), **service(folder)) as coordinator:
            # TLS 1.3 says so after the handshake
            with pytest.raises((OSError, EOFError, InvalidMessage)):
                await open_with(coordinator, folder, "a")
            while coordinator.host._listener.connections:
                await asyncio.sleep(0.01)
            assert not coordinator.host.connections

    run(test())


def test_a_revoked_device_is_out_until_it_has_a_new_certificate(
    make_plan: PlanMaker, folder: Path, operator: Identities
) -> None:
    make_device_certificate(folder, "b", 30)

    async def test() -> None:
        async with serving(make_plan(), **service(folder)) as coordinator:
            peer = Peer("a", await open_with(coordinator, folder, "a"))
            await peer.check_in()
            revoked = time.time()
            assert operator.revoke("a", revoked)
            assert await peer.closed() == 1008
            assert not operator.revoke("b", revoked, certified=True), "it has not connected yet"
            for name in ("a", "b"):
                status, text = await refusal(coordinator, folder, name)
                assert status == 403
                assert (
                    text
                    == f"the certificate of {name} was revoked; a new one would let it in again\n"
                )
            while int(time.time()) <= int(revoked):  # certificates have whole seconds
                await asyncio.sleep(0.01)
            make_device_certificate(folder, "a", 30)
            peer = Peer("a", await open_with(coordinator, folder, "a"))
            await peer.check_in()
            peer.connection.transport.abort()

    run(test())


@pytest.mark.parametrize("names", [[], ["a", "b"], ["a b"], [""], ["a" * 65]])
def test_a_certificate_that_names_no_device_is_refused(names: list[str]) -> None:
    begin = {"notBefore": "Nov 22 23:11:25 2026 GMT"}
    assert certified_by(
        {"subject": ((("commonName", "a"),), (("countryName", "CH"),)), **begin}
    ) == ("a", 1795389085.0)
    with pytest.raises(RefusalError, match="expected one, the device's name"):
        certified_by({"subject": tuple((("commonName", name),) for name in names), **begin})


def test_the_ca_is_read_again_and_named_if_it_cannot_be(folder: Path) -> None:
    clients = folder / "devices-ca.pem"
    clients.write_bytes((folder / "ca.pem").read_bytes())
    certificates = Certificates(
        Tls(certificate=folder / "certificate.pem", key=folder / "key.pem", clients=clients)
    )
    before = certificates.context
    certificates.check()
    assert certificates.context is before
    make_certificate(folder / "other", ["127.0.0.1"], 30)
    clients.write_bytes((folder / "other" / "ca.pem").read_bytes() * 2)
    certificates.check()
    assert certificates.context is not before
    clients.write_text("no CA")
    with pytest.raises(
        FleetError, match=r"devices-ca\.pem cannot be used as the CA of devices' certificates"
    ):
        Certificates(
            Tls(certificate=folder / "certificate.pem", key=folder / "key.pem", clients=clients)
        )
