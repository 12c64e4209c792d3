"""Several runs behind gateways, with real processes: each run's model is the one that its
acknowledged updates make, whoever is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from gateway_processes import check_model, part_of, write_run
from processes import Processes, free_port, status_of
from random_kills import Devices

NAMES = ("one", "two")
KILLS = 6


def version(data: Path) -> int:
    found = status_of(data)
    return 0 if found is None else found.version


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_processes_of_two_runs_are_killed(run: Processes, tmp_path: Path, seed: int) -> None:
    rounds, count, luck = 30, 6, random.Random(seed)
    port, service = free_port(), tmp_path / "service.toml"
    service.write_text(f'port = {port}\nruns = "runs"\ngateways = 2\n')
    plans = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        plans[name], _ = write_run(tmp_path / name, rounds, count)
        run.command("run", "add", service, name, plans[name])
    supervisor = run.start(
        "coordinator", sys.executable, "-m", "fleetlearn_coordinator", "serve", service
    )
    devices = Devices(f"ws://127.0.0.1:{port}", [f"device-{number}" for number in range(count)])

    async def disturb() -> None:
        for number in range(KILLS):
            devices.alive.clear()
            while not devices.alive.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(luck.uniform(0, 0.5))
            if number == KILLS // 2:
                supervisor.send_signal(signal.SIGUSR1)
                continue
            victims = part_of(supervisor, luck.choice(["gateway", "--engine"]))
            if victims:
                luck.choice(victims).send_signal(signal.SIGKILL)
        while not all(version(tmp_path / name / "run") == rounds for name in NAMES):
            assert supervisor.poll() is None, run.log("coordinator")
            await asyncio.sleep(0.2)
        supervisor.send_signal(signal.SIGTERM)
        while supervisor.poll() is None:
            await asyncio.sleep(0.02)
        devices.over = True

    async def test() -> None:
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for name in devices.names:
                group.create_task(devices.take_part(name))
            group.create_task(disturb())

    asyncio.run(test())
    assert supervisor.returncode == 0, run.log("coordinator")
    acknowledged, known = devices.acknowledged, 0
    for name in NAMES:
        with sqlite3.connect(tmp_path / name / "run" / DATABASE) as ledger:
            (prefix,) = ledger.execute("SELECT substr(task, 1, 8) FROM tasks LIMIT 1").fetchone()
        devices.acknowledged = [task for task in acknowledged if task.startswith(prefix)]
        known += len(devices.acknowledged)
        check_model(tmp_path / name, plans[name], devices, rounds)
    assert known == len(acknowledged) > 0
