"""Gateways on other machines, with real processes: the model is one process's, whatever is
killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from distant_site import Site
from fleetlearn_coordinator.service.training_run import pre_sums
from nats_server import NatsServer, nats_server
from object_server import ObjectServer, killed_object_server
from postgres_server import PostgresServer
from processes import Processes

KILLS = 12


@pytest.fixture
def bus() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    with killed_object_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


async def take_part(site: Site, kills: list[str], luck: random.Random) -> None:
    """Let the devices take part until the run is finished, and kill these parts meanwhile, one
    after another."""
    devices = site.devices

    async def kill_some() -> None:
        for part in kills:
            before = len(devices.acknowledged)
            while len(devices.acknowledged) == before and site.engine.poll() is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(luck.uniform(0, 0.4))
            if site.engine.poll() is None:
                await asyncio.to_thread(site.kill, part, luck)
                killed[part] += 1

    killed: Counter[str] = Counter()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for name in devices.names:
            group.create_task(devices.take_part(name))
        await kill_some()
        while site.engine.poll() is None:
            await asyncio.sleep(0.02)
        devices.over = True
    assert site.engine.returncode == 0, site.run.log("engine")
    print(dict(killed))


@pytest.mark.slow
def test_a_run_of_twenty_devices(run: Processes, bus: NatsServer, objects: ObjectServer) -> None:
    site = Site(run, bus, objects, None, rounds=3, devices=20)
    site.start()
    asyncio.run(take_part(site, [], random.Random(0)))
    site.end()
    site.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ledger", ["sqlite", "postgresql"])
def test_parts_are_killed(
    run: Processes,
    bus: NatsServer,
    objects: ObjectServer,
    ledger: str,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    luck = random.Random(seed)
    parts = ["engine", "gateway", "bus", "store", "paused bus", "paused gateway"]
    postgres: tuple[PostgresServer, str] | None = None
    if ledger == "postgresql":
        server: Any = request.getfixturevalue("postgres")
        name = token_hex(8)
        server.make_database(name)
        postgres = server, server.url(name)
        parts.append("postgres")
    site = Site(run, bus, objects, postgres, rounds=60, devices=6)
    site.start()
    kills = [luck.choice(parts) for _ in range(KILLS)]
    asyncio.run(take_part(site, kills, luck))
    site.end()
    site.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_parts_are_killed_while_gateways_add_up_updates(
    run: Processes, bus: NatsServer, objects: ObjectServer, seed: int
) -> None:
    """The model is so large, and its rounds have so many updates, that gateways add them up."""
    luck = random.Random(seed)
    size = 2**18
    assert 4 * size >= pre_sums.SMALLEST
    site = Site(run, bus, objects, None, rounds=10, devices=16, size=size)
    site.start()
    parts = ["engine", "gateway", "gateway", "bus", "store", "paused gateway"]
    kills = [luck.choice(parts) for _ in range(KILLS)]
    asyncio.run(take_part(site, kills, luck))
    site.end()
    site.check()
