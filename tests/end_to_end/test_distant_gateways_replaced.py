"""Gateways on other machines and a pair of engines, all replaced as Kubernetes does it: a new
gateway comes before the old one is told to end, and an engine leaves to the one that stands by. The
engines have folders of their own, which are empty at each start but for stores.toml."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from distant_site import Site, SpreadDevices
from fleetlearn_coordinator.gateways.replacing import START_AGAIN
from fleetlearn_protocol.messages import Task
from nats_server import NatsServer, nats_server
from object_server import BUCKET, ObjectServer, object_server
from peers import Peer
from postgres_server import PostgresServer
from processes import Processes, free_port


@pytest.fixture
def bus() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


class TrainingDevices(SpreadDevices):
    """Devices that take some time to train."""

    async def _report(self, peer: Peer, task: Task) -> None:
        await asyncio.sleep(0.3)
        await super()._report(peer, task)


class ReplacedSite(Site):
    """A site with two engines."""

    def begin(self, ledger: str) -> None:
        self.ledger = ledger
        self.devices = TrainingDevices(self.urls, self.devices.names, size=self.size)
        self.engines: list[Any] = [None, None]
        for number in range(2):
            plan = self.run.folder / f"plan-{number}.toml"
            text = self.plan.read_text()
            plan.write_text(text.replace(f'{self.run.folder / "run"}"', f'{self.folder(number)}"'))
            assert plan.read_text() != text or number == 0
            self.begin_engine(number)
        for number in range(len(self.gateways)):
            self.start_gateway(number)

    def folder(self, number: int) -> Path:
        return self.run.folder / ("run" if number == 0 else f"run-{number}")

    def begin_engine(self, number: int) -> None:
        """Start an engine with what an initContainer writes into its empty folder."""
        folder = self.folder(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        lines = ['run = "test"', f'ledger = "{self.ledger}"', f'blobs = "s3://{BUCKET}/runs"']
        (folder / "stores.toml").write_text("\n".join(lines) + "\n")
        plan = self.run.folder / f"plan-{number}.toml"
        words = ("serve", plan, "--service", self._service, "--standby")
        self.engines[number] = self._command(f"engine-{number}", *words)

    def log(self, number: int) -> str:
        return self.run.log(f"engine-{number}")

    def serves(self, number: int) -> bool:
        return "standing by" not in self.log(number).split("listening on")[-1]

    async def replace_gateway(self, number: int, generation: int) -> None:
        old, file = self.gateways[number], self._gateway_files[number]
        name, port = f"g{number}-{generation}", free_port()
        text = file.read_text().replace(f'name = "g{number}', f'name = "{name}" # ')
        lines = [f"port = {port}", *text.splitlines()[1:-1], f'data_dir = "gateway-{name}"']
        self._gateway_files[number] = self.run.folder / f"{name}.toml"
        self._gateway_files[number].write_text("\n".join(lines) + "\n")
        self.gateways[number] = self._command(
            f"gateway-{name}", "serve-gateway", self._gateway_files[number]
        )
        while "listens on" not in self.run.log(f"gateway-{name}"):
            assert self.gateways[number].poll() is None, self.run.log(f"gateway-{name}")
            await asyncio.sleep(0.05)
        self.urls[number] = f"ws://127.0.0.1:{port}"
        old.terminate()
        assert await asyncio.to_thread(old.wait, 60) == 0

    async def replace_engine(self) -> None:
        number = next(each for each in range(2) if self.log(each).count("listening on") and
                      self.engines[each].poll() is None and self.serves(each))  # fmt: skip
        other = 1 - number
        before = self.log(other).count("listening on")
        self.engines[number].send_signal(signal.SIGUSR1)
        assert await asyncio.to_thread(self.engines[number].wait, 60) == START_AGAIN
        while self.log(other).count("listening on") == before:
            assert self.engines[other].poll() is None, self.log(other)
            await asyncio.sleep(0.05)
        self.begin_engine(number)


@pytest.mark.slow
def test_all_are_replaced_twice(
    run: Processes, bus: NatsServer, objects: ObjectServer, postgres: PostgresServer
) -> None:
    name = token_hex(8)
    postgres.make_database(name)
    site = ReplacedSite(run, bus, objects, (postgres, postgres.url(name)), rounds=70, devices=6)
    site.begin(postgres.url(name))

    async def more() -> None:
        before = len(site.devices.acknowledged)
        while len(site.devices.acknowledged) < before + 6:
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            for device in site.devices.names:
                group.create_task(site.devices.take_part(device))
            for generation in (1, 2):
                await more()
                for number in range(2):
                    await site.replace_gateway(number, generation)
                    await more()
                await site.replace_engine()
            while all(each.poll() is None for each in site.engines):
                await asyncio.sleep(0.05)
            site.devices.over = True

    asyncio.run(test())
    ended = [each.poll() for each in site.engines]
    assert 0 in ended, [site.log(number) for number in range(2)]
    for process in site.engines:
        process.terminate()
        process.wait(30)
    for process in site.gateways:
        process.terminate()
        assert process.wait(30) == 0
    site.check()
    logs = site.log(0) + site.log(1)
    assert "come back later" not in logs.split("ended for the next")[0], "devices heard nothing"
