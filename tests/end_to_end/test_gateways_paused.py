"""`serve --gateways`, whose processes are paused (SIGSTOP) and wake up again: the model is one
process's, and nobody is left alone meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest
from fleetlearn_coordinator.gateways.engine_link import ENGINE_SILENT
from fleetlearn_protocol.messages import PROTOCOL_NAME, CheckIn, ComeBack
from gateway_processes import check_model, part_of, serve, take_part, write_run
from peers import Peer
from processes import Processes
from random_kills import Devices
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol


async def what_a_newcomer_hears(url: str) -> str:
    """Return why a device that connects now is told to come back."""
    async with connect(url, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None) as to:
        peer = Peer("newcomer", to)
        await peer.send(CheckIn(1, "newcomer", 10))
        return (await peer.expect(ComeBack)).reason


@pytest.mark.slow
def test_an_engine_process_is_paused_for_long(run: Processes, tmp_path: Path) -> None:
    """Devices stay, newcomers are sent away at once, and what was acknowledged before counts."""
    rounds = 40
    file, url = write_run(tmp_path, rounds, 4)
    supervisor = serve(run, file, 2)
    devices = Devices(url, [f"device-{number}" for number in range(4)])

    async def pause() -> None:
        while len(devices.acknowledged) < 40:
            await asyncio.sleep(0.01)
        (engine,) = part_of(supervisor, "--engine")
        engine.send_signal(signal.SIGSTOP)
        while run.log("coordinator").count("has said nothing for") < 2:  # of both gateways
            await asyncio.sleep(0.1)
        began = time.monotonic()
        assert await what_a_newcomer_hears(url) == "busy"
        assert time.monotonic() - began < ENGINE_SILENT / 2
        engine.send_signal(signal.SIGCONT)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(take_part(devices, supervisor))
            group.create_task(pause())

    asyncio.run(both())
    assert supervisor.returncode == 0, run.log("coordinator")
    check_model(tmp_path, file, devices, rounds)
    log = run.log("coordinator")
    assert "speaks again" in log
    assert "is gone" not in log.split("speaks again")[0], "no gateway was given up"
    assert log.count("is there, with 4 devices") + log.count("is there, with") == 2, log


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_processes_are_paused_and_killed(run: Processes, tmp_path: Path, seed: int) -> None:
    rounds, luck = 80, random.Random(seed)
    file, url = write_run(tmp_path, rounds, 6)
    devices = Devices(url, [f"device-{number}" for number in range(6)])
    supervisor = serve(run, file, 2)

    async def disturb() -> None:
        for _ in range(8):
            devices.alive.clear()
            while not devices.alive.is_set() and supervisor.poll() is None:
                await asyncio.sleep(0.01)
            victims = part_of(supervisor, luck.choice(["gateway", "--engine"]))
            if not victims:
                continue
            victim = luck.choice(victims)
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(luck.uniform(0.1, 1.5))
            victim.send_signal(luck.choice([signal.SIGCONT, signal.SIGKILL]))

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(take_part(devices, supervisor))
            group.create_task(disturb())

    asyncio.run(both())
    assert supervisor.returncode == 0, run.log("coordinator")
    check_model(tmp_path, file, devices, rounds)
