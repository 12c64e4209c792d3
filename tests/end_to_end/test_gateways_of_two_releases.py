"""Gateways and an engine process of two releases, as real processes: one side is of an earlier
commit, the first one whose bus has a version."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.wire_version import OLDEST
from gateway_processes import check_model, write_run
from processes import ROOT
from random_kills import Devices

EARLIER = "ed981c36"
ROOMS = "protocol", "device_sdk", "coordinator"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OLDEST > 1, reason="version 1 of the bus is not spoken any more"),
]


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which Python imports the earlier commit's packages."""
    words = ["git", "-C", str(ROOT), "archive", EARLIER, *ROOMS]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        pytest.skip("this is no clone with the earlier commit")
    folder = tmp_path / "earlier"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    path = os.pathsep.join(str(folder / room) for room in ROOMS)
    environment = {**os.environ, "PYTHONPATH": path}
    where = [sys.executable, "-c", "from fleetlearn_coordinator.gateways import wire as w; "
             "print(w.__file__)"]  # fmt: skip
    found = subprocess.run(where, capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.startswith(str(folder)), "the earlier commit's packages are imported"
    return environment


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Start a process of the coordinator, in an environment, with a log of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, environment: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleetlearn_coordinator", *words],
                stdin=subprocess.PIPE,  # as long as it is open, the supervisor lives
                stdout=log,
                stderr=log,
                env=environment,
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("engine", ["now", "earlier"])
def test_they_work_together(
    tmp_path: Path, earlier: dict[str, str], started: Any, engine: str
) -> None:
    rounds, count = 8, 6
    file, url = write_run(tmp_path, rounds, count)
    service = file.with_name("service.toml")
    port = url.rpartition(":")[2]
    environments = {"now": dict(os.environ), "earlier": earlier}
    common = ["--gateways", "2", "--service", str(service)]
    serving = started("engine", environments[engine], "serve", str(file), "--engine", *common)
    place = ["--socket", str(tmp_path / "run" / SOCKET), "--port", port]
    for number, release in enumerate(environments):
        words = ["gateway", "--number", str(number), *common, *place]
        started(f"gateway-{number}", environments[release], *words)
    devices = Devices(url, [f"device-{number}" for number in range(count)])

    def log() -> str:
        return (tmp_path / "engine.log").read_text()

    async def test() -> None:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            while not all(f"gateway {number} (" in log() for number in range(2)):
                await asyncio.sleep(0.05)  # the whole run takes less than one of them to start
            for name in devices.names:
                group.create_task(devices.take_part(name))
            while serving.poll() is None:
                await asyncio.sleep(0.05)
            devices.over = True

    asyncio.run(test())
    assert serving.returncode == 0, log()
    check_model(tmp_path, file, devices, rounds)
