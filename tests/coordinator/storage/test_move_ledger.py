"""A run's ledger goes from SQLite to PostgreSQL in the middle of a round, and the run goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.storage import move_ledger as moving
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.move_ledger import MOVED, move_ledger
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol.messages import Accepted, Held
from peers import fleet, plan_text, update_of, write_test_bundle
from postgres_server import PostgresServer
from typer.testing import CliRunner


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    name = token_hex(8)
    postgres.make_database(name)
    return postgres.url(name)


def plan_in(folder: Path) -> Plan:
    folder.mkdir(exist_ok=True)
    file = folder / "plan.toml"
    bundle = folder / "test.bundle"
    if not bundle.exists():
        write_test_bundle(bundle)
    settings = {"round__goal": 2, "round__grace": 60.0, "stop__rounds": 2}
    file.write_text(plan_text(bundle, folder / "run", **settings))
    return Plan.load(file)


async def first_part(plan: Plan) -> Any:
    """One round, and one of the two updates of the next. Returns the task that is left."""
    async with fleet(plan) as (_, join):
        a, b = await join("a"), await join("b")
        for value, device in ((1.0, a), (2.0, b)):
            task = await device.task()
            assert isinstance(await device.upload(task, update_of(value)), Accepted)
        assert isinstance(await a.upload(await a.task(), update_of(3.0)), Accepted)
        return await b.task()


async def second_part(plan: Plan, task: Any, **service: Any) -> None:
    async with fleet(plan, **service) as (server, join):
        b = await join("b", held=Held(task.task, task.round))
        assert isinstance(await b.upload(task, update_of(4.0)), Accepted)
        assert await server.done == "2 rounds done"


def rows_of(folder: Path) -> list[Any]:
    with closing(sqlite3.connect(folder)) as db:
        return [
            db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            for table in ("meta", "models", "rounds", "tasks", "devices", "activity", "tied")
        ]


def test_the_run_goes_on_in_the_middle_of_a_round(tmp_path: Path, url: str) -> None:
    plan, undisturbed = plan_in(tmp_path / "a"), plan_in(tmp_path / "b")
    task = asyncio.run(first_part(plan))
    held_out: HeldOutResults = find_storage(plan.data_dir).held_out
    held_out.write(1, {"loss": 0.5})
    find_storage(plan.data_dir).requests.ask_for_evaluation()
    service = tmp_path / "service.toml"
    service.write_text(f'ledger = "{url}"\n')
    words = ["move-ledger", str(plan.file), "--service", str(service)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "the ledger of test is in postgresql://" in done.output
    storage = find_storage(plan.data_dir)
    assert isinstance(storage, PostgresStorage)
    assert storage.held_out.read(1) == {"loss": 0.5}
    assert storage.requests.evaluation() is not None
    storage.requests.remove_evaluation()
    copy = tmp_path / "copy"
    storage.copy_to(copy)
    before, after = rows_of(plan.data_dir / MOVED), rows_of(copy / DATABASE)
    assert len(before[3]) == 4
    assert before[1:] == after[1:], "each row is there"
    assert {*before[0]} - {*after[0]} == {row for row in before[0] if row[0] == "live"}
    asyncio.run(second_part(plan, task, ledger=url))
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert "is in a database already" in again.output

    asyncio.run(second_part(undisturbed, asyncio.run(first_part(undisturbed))))
    (version, model), (other, expected) = (
        read_model(each.data_dir) for each in (plan, undisturbed)
    )
    assert version == other == 2
    assert model.tobytes() == expected.tobytes()


def test_a_death_in_between_loses_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is where it was, until the data directory says otherwise; the next try says what is
    in its way."""
    plan = plan_in(tmp_path / "a")
    task = asyncio.run(first_part(plan))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(moving, "write_stores", die)
        with pytest.raises(KeyboardInterrupt):
            move_ledger(plan.data_dir, plan.name, url)
    with pytest.raises(StoreError, match='DROP SCHEMA "fleetlearn_test" CASCADE'):
        move_ledger(plan.data_dir, plan.name, url)
    asyncio.run(second_part(plan, task))
    assert read_model(plan.data_dir)[0] == 2


def test_what_cannot_be_moved_says_why(tmp_path: Path, url: str) -> None:
    plan = plan_in(tmp_path / "a")
    with pytest.raises(StoreError, match="has no run yet"):
        move_ledger(plan.data_dir, plan.name, url)
    service = tmp_path / "service.toml"
    service.write_text("port = 1\n")
    done = CliRunner().invoke(app, ["move-ledger", str(plan.file), "--service", str(service)])
    assert done.exit_code == 2
    assert "has no ledger" in done.output

    async def while_served() -> None:
        async with fleet(plan):
            with pytest.raises(StoreError, match="in use"):
                move_ledger(plan.data_dir, plan.name, url)

    asyncio.run(while_served())
