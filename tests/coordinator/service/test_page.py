"""The page for people: what it is told of a run, who may connect from it, and that its port holds
up no round."""

from __future__ import annotations

import asyncio
import importlib
import json
import ssl
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import Fleet, leases
from fleetlearn_coordinator.network.page_listener import DESCRIPTORS
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.service.page import (
    HISTORY,
    PublicRun,
    PublicStatus,
    join_link,
    page_descriptors,
    run_of_page,
)
from fleetlearn_coordinator.service.private_ca import make_certificate
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import PROTOCOL_NAME
from peers import SIZE, PlanMaker, fleet, plan_text, serving, update_of
from processes import free_port
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

ROOT = Path(__file__).parents[3]
EXAMPLE = json.loads(
    (ROOT / "device_sdk" / "web" / "page" / "test" / "status.json").read_text("utf-8")
)
sys.path.append(str(ROOT / "benchmarks"))
device: Any = importlib.import_module("_websocket_device")
sys.path.remove(str(ROOT / "benchmarks"))  # its names are other packages' too: float16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<p>hello")
    (page / "large.wasm").write_bytes(bytes(10_000_000))
    return page


async def fetch(
    address: str, path: str, context: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    host, _, port = address.partition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def until_status(address: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the status until something holds of it."""
    async with asyncio.timeout(20):
        while True:
            code, body = await fetch(address, "/status.json")
            if code == HTTPStatus.OK and holds(found := json.loads(body)):
                return dict(found)
            await asyncio.sleep(0.05)


# What it is told


def test_the_status_has_public_counts_alone(make_plan: PlanMaker, folder: Path) -> None:
    """What the page's own tests read (``status.json`` there) has the same keys."""

    async def test() -> None:
        plan, address = (
            make_plan(round__goal=1, stop__rounds=40),
            f"http://127.0.0.1:{(port := free_port())}",
        )
        page = {"folder": str(folder), "port": port, "title": "T", "about": "A", "task": "digits"}
        async with fleet(plan, page=page) as (coordinator, join):
            peer = await join("a-secret-name")
            for _ in range(3):
                await peer.do_round(update_of(1.0))
            found = await until_status(
                address,
                lambda found: (
                    len(found["history"]) == 3 and (found["round"], found["connected"]) == (4, 1)
                ),
            )
            assert found.keys() == EXAMPLE.keys()
            assert all(row.keys() == EXAMPLE["history"][0].keys() for row in found["history"])
            assert (found["run"], found["state"], found["rounds"], found["goal"]) == (
                "test",
                "running",
                40,
                1,
            )
            assert (found["connected"], found["reports"]) == (1, 0)
            assert found["history"][0] == {"round": 1, "loss": 0.7, "accuracy": 0.5, "devices": 1}
            assert "secret" not in json.dumps(found)
            _, body = await fetch(address, "/page.json")
            assert json.loads(body) == {
                "coordinator": f":{coordinator.host.address.rpartition(':')[2]}",
                "status": "status.json", "title": "T", "about": "A", "task": "digits",
                "invites": False, "pages": {"origins": [], "port": port},
            }  # fmt: skip
            assert (await fetch(address, "/"))[1] == b"<p>hello"

    asyncio.run(test())


def do_rounds(found: Fleet, rounds: int, commands: list[Command]) -> list[Command]:
    for _ in range(rounds):
        (lease,) = leases(commands)
        commands = found.report(lease, update_of(1.0))
    return commands


def test_the_history_is_read_once_and_bounded_and_answers_are_kept_for_a_second(
    make_plan: PlanMaker,
) -> None:
    plan, now = make_plan(round__goal=1), 0.0
    found = Fleet(plan)
    commands = do_rounds(found, HISTORY + 5, found.check_in("a"))
    status = PublicStatus(lambda: PublicRun("test", plan, False), lambda: now)
    first = msgspec.json.decode(status())
    assert [row["round"] for row in first["history"]] == [*range(6, HISTORY + 6)]
    assert first["state"] == "paused", "no process has said that it serves the run"
    do_rounds(found, 2, commands)
    found.store.close()
    assert msgspec.json.decode(status()) == first
    now = 1.0
    second = msgspec.json.decode(status())
    assert [row["round"] for row in second["history"]] == [*range(8, HISTORY + 8)]


def test_a_run_that_is_finished_or_was_never_served(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1, stop__rounds=2)
    status = PublicStatus(lambda: PublicRun("test", plan, False))
    with pytest.raises(StoreError):
        status()
    found = Fleet(plan)
    do_rounds(found, 2, found.check_in("a"))
    found.store.close()
    assert msgspec.json.decode(status())["state"] == "finished"


def test_several_runs_have_a_page_of_one(tmp_path: Path, folder: Path, bundle_path: Path) -> None:
    port = free_port()
    (tmp_path / "a.toml").write_text(plan_text(bundle_path, tmp_path / "a.run"))
    raw = {"port": 0, "runs": "runs", "page": {"folder": "page", "port": port, "run": "a"}}
    service = ServiceSettings.read(raw, tmp_path)

    async def test() -> None:
        address = f"http://127.0.0.1:{port}"
        async with hosting(service):
            assert (await fetch(address, "/status.json"))[0] == 503
            runs = Runs(tmp_path / "runs")
            runs.add("a", tmp_path / "a.toml")
            found = await until_status(address, lambda found: found["state"] == "running")
            assert found["run"] == "a"
            runs.want("a", "paused")
            await until_status(address, lambda found: found["state"] == "paused")
            runs.close()

    asyncio.run(test())
    with pytest.raises(FleetError, match=r"page\.run = b: there is no such run"):
        run_of_page(
            ServiceSettings.read({**raw, "page": {"folder": "page", "run": "b"}}, tmp_path), None
        )


def test_descriptors_are_set_aside_for_it(tmp_path: Path) -> None:
    assert page_descriptors(ServiceSettings()) == 0
    assert (
        page_descriptors(ServiceSettings.read({"page": {"folder": "page"}}, tmp_path))
        == DESCRIPTORS
        == 256
    )


# Links


def test_links_to_join_by(tmp_path: Path) -> None:
    def link(raw: dict[str, Any]) -> str:
        return join_link(ServiceSettings.read({"identities": "ids", **raw}, tmp_path), "to-ken.k/y")

    page: dict[str, Any] = {"folder": "page"}
    tls = {"certificate": "a.pem", "key": "b.pem"}
    assert link({"page": page}) == "http://127.0.0.1:8767/#token=to-ken.k%2Fy"
    assert link({"host": "192.0.2.7", "tls": tls, "page": page}).startswith(
        "https://192.0.2.7:8767/#token="
    )
    assert link({"host": "::1", "page": {**page, "port": 1}}).startswith("http://[::1]:1/#")
    everywhere = {"host": "0.0.0.0", "tls": tls}
    named = {**page, "address": "https://fleet.example"}
    assert link({**everywhere, "page": named}).startswith("https://fleet.example/#token=")
    for raw in ({}, {**everywhere, "page": page}, {"page": {**page, "port": 0}}):
        with pytest.raises(ServiceError):
            link(raw)


# Who may connect from it


async def may_connect(
    coordinator: RunServer, host: str, origin: str, context: ssl.SSLContext | None = None
) -> bool:
    """Return whether a page of this origin may connect to the coordinator under this name."""
    scheme, _, port = coordinator.host.address.replace("://127.0.0.1", "").partition(":")
    connecting = connect(
        f"{scheme}://{host}:{port}",
        host="127.0.0.1",
        port=int(port),
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        origin=Origin(origin),
        ssl=context,
        proxy=None,
    )
    try:
        async with connecting:
            return True
    except InvalidStatus as error:
        return {HTTPStatus.FORBIDDEN: False}[HTTPStatus(error.response.status_code)]


def test_the_page_may_connect_and_no_other(make_plan: PlanMaker, folder: Path) -> None:
    async def test() -> None:
        port = free_port()
        page = {"folder": str(folder), "port": port, "address": "https://fleet.example"}
        async with serving(make_plan(), page=page) as coordinator:
            assert await may_connect(coordinator, "127.0.0.1", f"http://127.0.0.1:{port}")
            assert await may_connect(coordinator, "localhost", f"http://localhost:{port}")
            assert await may_connect(coordinator, "127.0.0.1", "https://fleet.example")
            for host, origin in (
                ("127.0.0.1", f"https://127.0.0.1:{port}"),
                ("127.0.0.1", f"http://127.0.0.1:{port + 1}"),
                ("127.0.0.1", "http://127.0.0.1"),
                ("127.0.0.1", f"http://evil.example:{port}"),
                ("127.0.0.1", f"http://localhost:{port}"),
                ("127.0.0.1", "null"),
                # a name that somebody pointed at this machine
                ("evil.example", f"http://evil.example:{port}"),
            ):
                assert not await may_connect(coordinator, host, origin), origin

    asyncio.run(test())


def test_with_tls_the_page_may_connect_under_every_name(
    make_plan: PlanMaker, folder: Path, tmp_path: Path
) -> None:
    make_certificate(tmp_path, ["127.0.0.1", "fleet.example"], 30)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    tls = {"certificate": str(tmp_path / "certificate.pem"), "key": str(tmp_path / "key.pem")}

    async def test() -> None:
        port = free_port()
        async with serving(
            make_plan(), tls=tls, page={"folder": str(folder), "port": port}
        ) as coordinator:
            assert (await fetch(f"https://127.0.0.1:{port}", "/", context))[1] == b"<p>hello"
            assert await may_connect(
                coordinator, "fleet.example", f"https://fleet.example:{port}", context
            )
            assert not await may_connect(
                coordinator, "fleet.example", f"http://fleet.example:{port}", context
            )

    asyncio.run(test())


# Attacks


def test_rounds_go_on_while_its_port_is_attacked(make_plan: PlanMaker, folder: Path) -> None:
    """Floods of requests and connections, downloads that are read, or are not, and nonsense, beside
    honest devices."""
    names, rounds, opened = ["honest-0", "honest-1"], 5, 0

    async def attack(port: int, kind: int, stop: asyncio.Event) -> None:
        nonlocal opened
        while not stop.is_set():
            opened += 1
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            try:
                if kind == 0:  # as many requests as go
                    writer.write(b"GET /status.json HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
                    await asyncio.wait_for(reader.read(100_000), 1)
                elif kind == 1:  # takes all it can
                    writer.write(b"GET /large.wasm HTTP/1.1\r\nHost: x\r\n\r\n")
                    while not stop.is_set() and await asyncio.wait_for(reader.read(2**20), 1):
                        pass
                elif kind == 2:  # asks, and does not read
                    writer.write(b"GET /large.wasm HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
                    await asyncio.wait_for(stop.wait(), 1)
                elif kind == 3:  # says nothing that can be read
                    writer.write(bytes(range(256)) * 100)
                    await asyncio.wait_for(reader.read(), 1)
            except (OSError, TimeoutError):
                pass
            finally:  # and the last kind connects, and goes
                writer.close()

    async def test() -> None:
        plan = make_plan(
            round__goal=len(names), round__minimum=len(names), round__over_selection=100
        )
        update, log, stop, port = (
            device.make_update(SIZE),
            device.Log(),
            asyncio.Event(),
            free_port(),
        )
        page = {"folder": str(folder), "port": port}
        async with (
            asyncio.timeout(60),
            serving(plan, page=page, limits={"exempt": []}) as coordinator,
        ):
            honest = [
                asyncio.create_task(device.take_part(coordinator.host.address, n, update, log))
                for n in names
            ]

            async def until_round(number: int) -> None:
                while coordinator.engine.version < number:
                    await asyncio.wait(honest, timeout=0.01)
                    for one in honest:
                        assert not one.done(), one.exception() or "it was sent away"

            await until_round(2)
            attacks = [asyncio.create_task(attack(port, number % 5, stop)) for number in range(40)]
            while opened < 2 * len(attacks):
                await asyncio.sleep(0.005)
            last = coordinator.engine.version + rounds
            await until_round(last)
            assert all(log[number].accepted == len(names) for number in range(1, last))
            stop.set()
            await asyncio.gather(*attacks)
            for one in honest:
                one.cancel()
            await asyncio.gather(*honest, return_exceptions=True)

    asyncio.run(test())
