"""For tests with a ledger in PostgreSQL: a run that outlasts a test, its devices, and whether what
they were told was accepted counts once."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import ROUNDS_KEPT
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from peers import BUFFERED, plan_text, write_test_bundle
from processes import Processes, free_port, wait_for
from random_kills import Devices, by_hand

DEVICES, GOAL = 4, 50


def write_run(
    folder: Path, ledger: str, recipe: str = "fedavg", **settings: Any
) -> tuple[Path, Path, str]:
    """Write a plan and its service file. Returns them, and the coordinator's address."""
    port, bundle = free_port(), write_test_bundle(folder / "test.bundle")
    plan, service = folder / "plan.toml", folder / "service.toml"
    usual = {"round__grace": 30.0, "server__optimizer": "adam", "server__lr": 0.05}
    plan.write_text(plan_text(bundle, folder / "run", recipe, **(usual | settings)))
    service.write_text(f'port = {port}\nledger = "{ledger}"\n')
    return plan, service, f"ws://127.0.0.1:{port}"


def buffered_run(folder: Path, ledger: str) -> tuple[Path, Path, str]:
    """An asynchronous run that outlasts a test."""
    settings = BUFFERED | {"round__goal": GOAL, "round__concurrency": DEVICES}
    return write_run(folder, ledger, settings.pop("recipe"), **settings, stop__rounds=ROUNDS_KEPT)


def serve(run: Processes, name: str, plan: Path, service: Path, *options: str) -> Any:
    command = (sys.executable, "-m", "fleetlearn_coordinator", "serve", plan)
    return run.start(name, *command, "--service", service, *options)


def storage_of(folder: Path) -> PostgresStorage:
    found = find_storage(folder)
    assert isinstance(found, PostgresStorage)
    return found


def check_updates(folder: Path, plan: Path, acknowledged: list[str]) -> None:
    """Check that what was acknowledged counts, once, and that the model is made of it."""
    version, model = read_model(folder)
    with closing(PostgresDatabase(storage_of(folder).run, application="test")) as db:
        found = db.execute(
            "SELECT task, round, staleness FROM tasks WHERE state='accepted'"
        ).fetchall()
    print(f"{version} models, {len(acknowledged)} updates acknowledged")
    assert 1 <= version <= ROUNDS_KEPT
    assert {*acknowledged} <= {task for task, _, _ in found}, "an acknowledged update was lost"
    assert len(acknowledged) == len({*acknowledged}), "an update was acknowledged twice"
    counted = Counter(number for _, number, _ in found)
    assert [counted[number] for number in range(1, version + 1)] == [GOAL] * version
    assert by_hand(Plan.load(plan), found, version, 1).tobytes() == model.tobytes()


async def live_through(devices: Devices, what: Callable[[], None]) -> None:
    """Let the devices take part while a thread does something."""
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for name in devices.names:
            group.create_task(devices.take_part(name))
        try:
            await asyncio.to_thread(what)
        finally:
            devices.over = True


def more(devices: Devices, updates: int = GOAL) -> None:
    """Wait until so many more updates are acknowledged."""
    least = len(devices.acknowledged) + updates
    wait_for(lambda: len(devices.acknowledged) >= least, "updates to be acknowledged")


def fleet(url: str) -> Devices:
    return Devices(url, [f"device-{number}" for number in range(DEVICES)])
