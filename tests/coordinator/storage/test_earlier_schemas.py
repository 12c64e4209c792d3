"""A data directory that an earlier version's coordinator left, killed in its third round, goes on
with this one's: with the same bits as if this one had made it."""

from __future__ import annotations

import asyncio
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import earlier_run
import earlier_schemas
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SCHEMA_VERSION
from peers import fleet, write_test_bundle


async def go_on(folder: Path) -> None:
    """Let the third device report in the round that was open."""
    async with fleet(earlier_run.plan_of(folder)) as (server, join):
        peer = await join("c")
        await earlier_run.report(peer, earlier_run.ROUNDS)
        await asyncio.wait_for(asyncio.shield(server.done), 30)


async def whole_run(folder: Path) -> None:
    """The same run by this version alone, without a death."""
    write_test_bundle(folder / "test.bundle", earlier_run.SIZE)
    async with fleet(earlier_run.plan_of(folder)) as (server, join):
        peers = [await join(name) for name in earlier_run.DEVICES]
        for round in range(1, earlier_run.ROUNDS + 1):
            for peer in peers:
                await earlier_run.report(peer, round)
        await asyncio.wait_for(asyncio.shield(server.done), 30)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Version -> the model that this version of fleetlearn makes."""
    folder = tmp_path_factory.mktemp("whole")
    asyncio.run(whole_run(folder))
    return {version: read_model(folder / "run", version)[1].tobytes() for version in range(4)}


def unpack(schema: int, folder: Path) -> Path:
    with tarfile.open(earlier_schemas.archive(schema)) as packed:
        packed.extractall(folder, filter="data")
    return folder / "run"


def version_of(data: Path) -> int:
    with closing(sqlite3.connect(data / DATABASE)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_each_version_of_the_tables_has_a_data_directory() -> None:
    known = [*range(1, SCHEMA_VERSION)]
    assert [*earlier_schemas.LAST_COMMITS] == known, "add the last commit of the version before"
    assert all(earlier_schemas.archive(schema).is_file() for schema in known)


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION))
def test_it_goes_on_to_the_same_models(
    tmp_path: Path, models: dict[int, bytes], schema: int
) -> None:
    data = unpack(schema, tmp_path)
    before: Any = read_status(data)  # a command that looks changes nothing
    assert (before.version, before.finished, len(before.rounds)) == (2, None, 2)
    assert version_of(data) == schema
    asyncio.run(go_on(tmp_path))
    assert version_of(data) == SCHEMA_VERSION
    after = read_status(data)
    assert (after.version, [row.summary["reports"] for row in after.rounds]) == (3, [3, 3, 3])
    assert after.finished is not None
    kept = find_storage(data).models.model_versions()
    assert kept[-1] == 3
    assert {version: read_model(data, version)[1].tobytes() for version in kept} == {
        version: models[version] for version in kept
    }
    with find_storage(data).read_ledger() as ledger:
        assert [made.version for made in ledger.known_models()] == [0, 1, 2, 3]


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION))
def test_it_is_backed_up_before_it_is_brought_up_to_date(tmp_path: Path, schema: int) -> None:
    """So the version that made it can read the backup."""
    data = unpack(schema, tmp_path)
    copied = find_storage(data).copy_to(tmp_path / "copy")
    assert (copied.version, copied.round, copied.updates) == (2, 3, 2)
    assert version_of(tmp_path / "copy") == schema
    assert read_model(tmp_path / "copy")[1].tobytes() == read_model(data)[1].tobytes()
