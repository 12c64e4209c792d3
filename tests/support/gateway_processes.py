"""For tests: `serve --gateways` with real processes, and devices that take part until its run is
finished."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from peers import SIZE, plan_text, write_test_bundle
from processes import Processes, free_port, service_file
from random_kills import Devices, by_hand


def write_run(
    folder: Path, rounds: int, devices: int, size: int = SIZE, **settings: Any
) -> tuple[Path, str]:
    """Write a plan whose rounds wait for all devices. Returns its file, and the address."""
    port, file = free_port(), folder / "plan.toml"
    bundle = write_test_bundle(folder / "test.bundle", size)
    usual = {
        "round__goal": devices,
        "round__minimum": devices,
        "round__deadline": 120.0,
        "round__grace": 60.0,
        "stop__rounds": rounds,
    }
    file.write_text(plan_text(bundle, folder / "run", **(usual | settings)))
    service_file(file, port)
    return file, f"ws://127.0.0.1:{port}"


def serve(run: Processes, plan: Path, gateways: int) -> Any:
    return run.coordinator(
        plan, "-m", "fleetlearn_coordinator", "serve", plan, "--gateways", str(gateways)
    )


def part_of(supervisor: Any, word: str) -> list[psutil.Process]:
    """Return the processes that a supervisor has started, whose command has this word."""
    try:
        children = psutil.Process(supervisor.pid).children()
    except psutil.NoSuchProcess:
        return []
    return [each for each in children if word in _command_of(each)]


def _command_of(process: psutil.Process) -> list[str]:
    """Return the words of the process's command; none if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def take_part(devices: Devices, supervisor: Any) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for name in devices.names:
            group.create_task(devices.take_part(name))
        while supervisor.poll() is None:
            await asyncio.sleep(0.02)
        devices.over = True


def check_model(folder: Path, file: Path, devices: Devices, rounds: int) -> None:
    """Check that what was acknowledged counts, once, and that the model is made of it."""
    version, model = read_model(folder / "run")
    found = accepted_in(folder / "run")
    assert version == rounds
    assert {*devices.acknowledged} <= {task for task, _, _ in found}, "an update was lost"
    assert len(devices.acknowledged) == len({*devices.acknowledged}), "or acknowledged twice"
    counted = Counter(number for _, number, _ in found)
    assert counted == dict.fromkeys(range(1, rounds + 1), len(devices.names))
    assert by_hand(Plan.load(file), found, rounds).tobytes() == model.tobytes()


def accepted_in(folder: Path) -> list[tuple[str, int, int]]:
    """Return the task, the round and the staleness of each accepted update."""
    query = "SELECT task, round, staleness FROM tasks WHERE state='accepted'"
    storage = find_storage(folder)
    if isinstance(storage, PostgresStorage):
        with closing(PostgresDatabase(storage.run, application="test")) as db:
            return [tuple(row) for row in db.execute(query).fetchall()]
    with sqlite3.connect(folder / DATABASE) as ledger:
        return ledger.execute(query).fetchall()
