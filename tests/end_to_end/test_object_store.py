"""A coordinator whose models and updates are in an object store and whose ledger is in PostgreSQL,
as real processes: its machine is lost, and the object store goes away for a while."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from object_server import BUCKET, ObjectServer, object_server
from postgres_runs import (
    GOAL,
    buffered_run,
    check_updates,
    fleet,
    live_through,
    more,
    serve,
)
from postgres_server import PostgresServer
from processes import Processes, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    name = token_hex(8)
    postgres.make_database(name)
    return postgres.url(name)


def write_run(folder: Path, database: str) -> tuple[Path, Path, str]:
    plan, service, url = buffered_run(folder, database)
    with service.open("a") as file:
        file.write(f'blobs = "s3://{BUCKET}/runs"\n')
    return plan, service, url


def test_a_lost_machine_loses_nothing(run: Processes, database: str, objects: ObjectServer) -> None:
    folder = run.folder
    plan, service, url = write_run(folder, database)
    devices = fleet(url)

    def lose_it() -> None:
        for turn in range(3):
            coordinator = serve(run, f"coordinator-{turn}", plan, service)
            more(devices, GOAL + GOAL // 2)
            coordinator.kill()
            coordinator.wait()
            (folder / "run").rename(folder / f"lost-{turn}")
            (folder / "run").mkdir()
            shutil.copy(folder / f"lost-{turn}" / "stores.toml", folder / "run")
        last = serve(run, "last", plan, service)
        more(devices)
        last.terminate()
        assert last.wait(60) == 0, run.log("last")

    asyncio.run(live_through(devices, lose_it))
    run.command("export-model", plan, "--output", folder / "model.safetensors")
    check_updates(folder / "run", plan, devices.acknowledged)
    kinds = {key.split("/")[2] for key in objects.names()}
    assert kinds == {"models", "owner", "sums", "uploads"}


def test_devices_wait_while_the_object_store_is_away(
    run: Processes, database: str, objects: ObjectServer
) -> None:
    plan, service, url = write_run(run.folder, database)
    devices = fleet(url)

    def take_it_away() -> None:
        coordinator = serve(run, "coordinator", plan, service)
        more(devices, GOAL // 2)
        objects.stop()
        # What is under way when it goes may still be answered; then nothing is promised.
        seen: list[int] = []

        def stands_still() -> bool:
            seen.append(len(devices.acknowledged))
            return len(seen) > 20 and seen[-1] == seen[-20]

        wait_for(stands_still, "nothing to be acknowledged")
        objects.start()
        more(devices, 2 * GOAL)
        coordinator.terminate()
        assert coordinator.wait(60) == 0, run.log("coordinator")

    asyncio.run(live_through(devices, take_it_away))
    check_updates(run.folder / "run", plan, devices.acknowledged)
    assert threading.active_count() < 50
