"""Models and bundles by HTTP: a coordinator with its port of caches or an object store, and a
device, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from awaited import awaited
from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.network import driver
from fleetlearn_coordinator.network.transfers import contents
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_device import Device
from fleetlearn_device.driver.timing import Timing
from gateways import gateway_fleet
from line_bundle import line_data, write_line_bundle
from processes import free_port

PATIENCE = 60.0
HERE = ["127.0.0.1"]


@pytest.fixture(autouse=True)
def _small_contents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LEAST_ELSEWHERE", 1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each content that is sent by the WebSocket."""
    found: list[int] = []
    frames = contents.FramedContent.frames

    def counted(
        self: contents.FramedContent, offset: int, end: int | None = None
    ) -> Iterator[bytes]:
        found.append(self.size - offset)
        return frames(self, offset, end)

    monkeypatch.setattr(contents.FramedContent, "frames", counted)
    return found


def plan_in(folder: Path) -> Plan:
    write_line_bundle(folder / "line.bundle")
    plan = folder / "plan.toml"
    plan.write_text(
        'name = "lines"\nbundle = "line.bundle"\ndata_dir = "run"\n[round]\ngoal = 1\nminimum = 1\n'
        "[local]\nepochs = 1\nbatch_size = 4\nlr = 0.1\n[stop]\nrounds = 2\n"
    )
    return Plan.load(plan)


@asynccontextmanager
async def served(
    folder: Path, service: dict[str, Any], gateways: int
) -> AsyncIterator[tuple[RunServer, str]]:
    """Serve the run, behind gateways if there are any. Yields also where devices connect."""
    if gateways:
        async with gateway_fleet(plan_in(folder), gateways, **service) as fleet:
            yield fleet.server, fleet.gateways[0].address
        return
    async with running(plan_in(folder), ServiceSettings.read({"port": 0} | service)) as server:
        yield server, server.host.address


async def trained(
    folder: Path, service: dict[str, Any], gateways: int = 0, **options: Any
) -> RunServer:
    """Let one device train two rounds. Returns the run's server."""
    async with served(folder, service, gateways) as (server, url):
        timing, state = Timing(base=0.01), folder / "device"
        device = Device(url, line_data(8), state, until_finished=True, timing=timing, **options)
        serving = asyncio.create_task(device.serve())
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({server.done})
            assert server.done.result()
            await server.stop("")
            await serving
        return server


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    own = [each for each in caplog.records if each.name.startswith("fleetlearn")]
    return [record.getMessage() for record in own if text in record.getMessage()]


@awaited
async def test_all_comes_from_the_port_of_caches(tmp_path: Path, sent: list[int]) -> None:
    port = free_port()
    served = {"address": f"http://127.0.0.1:{port}", "port": port}
    server = await trained(tmp_path, {"contents": served}, download_from=HERE)
    assert not sent
    assert server.run.engine.version == 2


@awaited
async def test_a_cache_that_is_down_costs_one_line(
    tmp_path: Path, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served = {"address": f"http://127.0.0.1:{free_port()}/fleet", "port": 0}
    server = await trained(tmp_path, {"contents": served}, download_from=HERE)
    assert server.run.engine.version == 2
    assert len(sent) == 5
    (line,) = lines(caplog, "and not by HTTP")
    assert "refused the connection" in line


@awaited
async def test_wrong_bytes_are_fetched_again_by_the_websocket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        contents.FramedContent,
        "read",
        lambda self, begin, size: b"?" * min(size, self.size - begin),
    )
    port = free_port()
    service = {"contents": {"address": f"http://127.0.0.1:{port}", "port": port}}
    server = await trained(tmp_path, service, download_from=HERE)
    assert server.run.engine.version == 2
    assert len(lines(caplog, "arrived with another SHA-256")) == 1


@awaited
async def test_a_host_that_the_owner_does_not_allow_is_not_asked(
    tmp_path: Path, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    service = {"contents": {"address": f"http://127.0.0.1:{port}", "port": port}}
    server = await trained(tmp_path, service, download_from=["cdn.example.org"])
    assert server.run.engine.version == 2
    assert len(sent) == 5
    (line,) = lines(caplog, "and not by HTTP")
    assert "its owner does not allow 127.0.0.1" in line


@awaited
async def test_a_device_that_knows_no_http_is_sent_all(tmp_path: Path, sent: list[int]) -> None:
    port = free_port()
    service = {"contents": {"address": f"http://127.0.0.1:{port}", "port": port}}
    await trained(tmp_path, service)
    assert len(sent) == 5


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("moto")
    from object_server import BUCKET, object_server

    with object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/fleet"


@pytest.mark.slow
@pytest.mark.parametrize("gateways", [0, 1])
@awaited
async def test_all_comes_from_the_object_store(
    gateways: int, tmp_path: Path, bucket: str, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = {"blobs": bucket, "contents": {"address": "store"}}
    server = await trained(tmp_path, service, gateways, download_from=HERE)
    assert server.run.engine.version == 2
    assert not sent, "a device waits for what is on its way to the store"
    assert not lines(caplog, "and not by HTTP")
    assert not lines(caplog, "X-Amz-Signature"), "whoever has the URL can read the content"
