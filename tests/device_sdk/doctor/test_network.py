"""What doctor says of the way to the coordinator, on real sockets, each with a fault that was
planted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_device.doctor import network
from fleetlearn_device.doctor.finding import Finding
from fleetlearn_device.doctor.network import check_network
from fleetlearn_device.driver.address import checked_address
from fleetlearn_device.storage.credential import Credential
from processes import free_port
from silent_server import silent_server

SECRET = Credential("s" * 43)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("wss", "socks", "https", "all", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is valid for 30 days, and its CA."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, ["127.0.0.1"], 30)
    return folder


def found_at(
    scheme: str, tls: Path | None = None, *, ca: Path | None = None, **options: Any
) -> tuple[dict[str, Finding], str | None]:
    """What is found of a server with these options, and its header Date."""
    credential = options.pop("credential", None)

    async def test() -> tuple[dict[str, Finding], str | None]:
        async with silent_server(tls, **options) as port:
            address = checked_address(f"{scheme}://127.0.0.1:{port}", ca=ca)
            found = await check_network(address, "sensor-7", credential)
            return {each.what: each for each in found.findings}, found.date

    found, date = asyncio.run(test())
    for each in found.values():
        assert each.do or each.state == "good"
    return found, date


def test_a_way_that_is_open(tls: Path) -> None:
    found, date = found_at("wss", tls, ca=tls / "ca.pem", credential=SECRET)
    assert {name: each.state for name, each in found.items()} == {
        "name": "good", "network": "good", "tls": "good", "coordinator": "good",
    }  # fmt: skip
    assert " GMT to " in found["tls"].found
    assert date is not None
    assert date.endswith("GMT")


def test_a_credential_that_is_refused(tls: Path) -> None:
    def refuse(connection: Any, request: Any) -> Any:
        assert request.headers["Authorization"] == f"Bearer {SECRET.secret}"
        return connection.respond(401, "this credential is not known here")

    found, date = found_at("wss", tls, ca=tls / "ca.pem", credential=SECRET, process_request=refuse)
    assert found["coordinator"].state == "bad"
    assert "this credential is not known here" in found["coordinator"].found
    assert found["tls"].state == "good"
    assert date is not None


def test_without_a_credential_the_token_is_kept_for_later() -> None:
    def refuse(connection: Any, request: Any) -> Any:
        assert "Fleetlearn-Enrolment" not in request.headers
        return connection.respond(401, "a credential is needed")

    found, _ = found_at("ws", process_request=refuse)
    assert found["coordinator"].state == "unknown"
    assert "--token" in found["coordinator"].do


def test_nobody_listens() -> None:
    address = checked_address(f"ws://127.0.0.1:{free_port()}")
    found = asyncio.run(check_network(address, "", None)).findings
    assert [(each.what, each.state) for each in found] == [("name", "good"), ("network", "bad")]


def test_a_name_that_leads_nowhere() -> None:
    address = checked_address("wss://no-such-host.invalid")
    (found,) = asyncio.run(check_network(address, "", None)).findings
    assert (found.what, found.state) == ("name", "bad")
    assert "no-such-host.invalid" in found.found


def test_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "ftp://127.0.0.1:3")
    address = checked_address("wss://fleet.example.invalid")
    (found,) = asyncio.run(check_network(address, "", None)).findings
    assert (found.what, found.state) == ("proxy", "bad")
    assert "https_proxy names a proxy that cannot be used" in found.found


def test_a_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    address = checked_address("wss://fleet.example.invalid")
    found = asyncio.run(check_network(address, "", None)).findings
    assert [(each.what, each.state) for each in found] == [
        ("proxy", "good"), ("network", "good"), ("coordinator", "bad"),
    ]  # fmt: skip
    assert "the proxy refused the connection" in found[-1].found


@pytest.mark.parametrize(
    ("scheme", "has_tls", "has_ca", "text"),
    [
        ("wss", True, False, "no CA that this device trusts signed it"),
        ("wss", False, True, "speaks no TLS at this address"),
        ("ws", True, False, "use wss://"),
    ],
)
def test_tls_that_fails(scheme: str, has_tls: bool, has_ca: bool, text: str, tls: Path) -> None:
    found, _ = found_at(scheme, tls if has_tls else None, ca=tls / "ca.pem" if has_ca else None)
    assert found["tls"].state == "bad"
    assert text in found["tls"].found
    assert "coordinator" not in found


def test_a_certificate_of_another_time_shows_its_dates_and_the_other_clock(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], -0.5)  # type: ignore[arg-type]
    found, date = found_at("wss", tmp_path, ca=tmp_path / "ca.pem")
    assert found["tls"].state == "bad"
    assert "it has expired, or the clock of this device is wrong" in found["tls"].found
    assert " (from " in found["tls"].found
    assert "timedatectl" in found["tls"].do
    assert date is not None, "so that the clock can be compared"


def test_a_certificate_that_ends_soon(tls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 20 * 86400
    monkeypatch.setattr(network.time, "time", lambda: later)
    found, _ = found_at("wss", tls, ca=tls / "ca.pem")
    assert found["tls"].state == "warning"
    assert "10 days are left" in found["tls"].found or "9 days are left" in found["tls"].found
