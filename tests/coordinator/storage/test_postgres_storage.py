"""PostgreSQL as a run's ledger: its lock and who may write, names, addresses, errors. What it does
as a store is tested with the other stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex

import numpy as np
import pytest
from fleetlearn_coordinator.storage import postgres_ledger, postgres_lock, postgres_storage
from fleetlearn_coordinator.storage.blobs import PARAMETERS
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.find_storage import begin_elsewhere, find_storage
from fleetlearn_coordinator.storage.ledger import DeviceActivity, Metadata, RoundOpened, TaskGiven
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase, find_run
from fleetlearn_coordinator.storage.postgres_ledger import PostgresLedger
from fleetlearn_coordinator.storage.postgres_lock import PostgresLock
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from fleetlearn_coordinator.storage.sql_tables import SCHEMA_VERSION
from fleetlearn_coordinator.storage.stored_elsewhere import (
    StoredElsewhere,
    read_stores,
    write_stores,
)
from fleetlearn_protocol import Code
from postgres_server import PASSWORD, USER, PostgresServer


def storage_of(folder: Path) -> PostgresStorage:
    found = find_storage(folder)
    assert isinstance(found, PostgresStorage)
    return found


@contextmanager
def begun(folder: Path) -> Iterator[tuple[PostgresStorage, PostgresLedger]]:
    storage = storage_of(folder)
    with storage.lock(), closing(storage.open_ledger(power=False, any_thread=True)) as ledger:
        if ledger.is_new:
            ledger.create({"run": "r"})
        yield storage, ledger


@contextmanager
def paused(storage: PostgresStorage) -> Iterator[None]:
    """Let the process of this storage give no more signs of life, as one that is paused, and let
    the server end the session that has its lock."""
    lock = storage._held()
    lock._end.set()
    lock._thread.join()
    with closing(PostgresDatabase(storage.run, application="test")) as db:
        ended = db.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' "
            "AND granted AND database = (SELECT oid FROM pg_database WHERE datname = "
            "current_database()) AND classid::bigint = ?",
            ((storage.run.lock_key % 2**64) >> 32,),
        ).fetchall()
    assert ended == [(True,)]
    yield


def test_a_run_goes_on_where_its_folder_says(in_postgres: Path) -> None:
    with begun(in_postgres) as (storage, ledger):
        ledger.write([Metadata("a", 1.5), Metadata("b", "text"), RoundOpened(1, 2.0)])
        assert storage.is_locked()
        assert ledger.is_slow
    with begun(in_postgres) as (_, ledger):
        assert [ledger.get(key) for key in ("a", "b", "c", "run")] == [1.5, "text", None, "r"]
        assert ledger.unfinished(None).round == 1


def test_runs_of_one_database_do_not_meet(in_postgres: Path, postgres: PostgresServer) -> None:
    other = in_postgres.with_name("other")
    write_stores(other, StoredElsewhere(f'{"é" * 40}-"{token_hex(8)}', postgres.url()))
    with begun(in_postgres) as (_, first), begun(other) as (storage, second):
        assert len(storage.run.schema.encode()) <= 63
        first.write([Metadata("a", 1)])
        assert second.get("a") is None
        first.write([RoundOpened(1, 0.0)])
        second.write([RoundOpened(1, 0.0)])


def test_what_a_device_says_may_have_a_nul(in_postgres: Path) -> None:
    with begun(in_postgres) as (storage, ledger):
        ledger.write([DeviceActivity("d", 1.0, error="a\0b")])
        with storage.read_ledger() as reader:
            assert reader.device_activity()[0].error == "a\N{REPLACEMENT CHARACTER}b"


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a run over waits that long for one that is still there."""
    monkeypatch.setattr(postgres_storage, "LEASE", 0.0)


@pytest.mark.usefixtures("short_lease")
def test_who_was_paused_while_another_took_over_writes_nothing(in_postgres: Path) -> None:
    """Neither rows nor bytes; also where it does not know yet that its session was ended."""
    with (
        begun(in_postgres) as (storage, ledger),
        closing(storage.open_blobs(power=False, spool_files=2)) as blobs,
    ):
        blobs.open_aggregator()
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"before")
        ledger.write([Metadata("who", "first")])
        with paused(storage):
            storage._held()._sent -= postgres_lock.LEASE  # what a pause does to its clock
            with begun(in_postgres) as (_, other):
                assert other.get("who") == "first"
                other.write([Metadata("who", "second")])
                vector = {PARAMETERS: np.zeros(3, np.float32)}
                for change in (
                    lambda: ledger.write([Metadata("who", "first again")]),
                    lambda: blobs.write_spool_file(number, 0, b"after!"),
                    lambda: blobs.save_aggregator(0, vector),
                    lambda: blobs.save_model(1, vector),
                    lambda: blobs.drop_models([1]),
                ):
                    with pytest.raises(StoreUnavailableError, match="the lock of the run is lost"):
                        change()
                assert other.get("who") == "second"
        assert [bytes(part) for part in blobs.read_spool_file(number, 6)] == [b"before"]
        assert not (in_postgres / "models" / "v00000001.safetensors").exists()


@pytest.mark.usefixtures("short_lease")
def test_a_batch_is_refused_by_the_database_itself(in_postgres: Path) -> None:
    """The process was paused after it had looked at its lock, and within its transaction."""
    with begun(in_postgres) as (storage, ledger), paused(storage):
        lock = storage._held()
        unlucky = PostgresLock.check
        lock.check = lambda: None  # type: ignore[method-assign]
        with begun(in_postgres) as (_, other):
            with pytest.raises(StoreUnavailableError):  # its session was ended
                ledger.write([Metadata("who", "first")])
            late = PostgresLedger(lock)
            with (
                closing(late),
                pytest.raises(StoreUnavailableError, match="another coordinator took it over"),
            ):
                late.write([Metadata("who", "first")])
            assert other.get("who") is None
        lock.check = unlucky.__get__(lock)  # type: ignore[method-assign]


def test_a_lock_that_is_lost_is_noticed(in_postgres: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_lock, "PULSE", 0.01)
    with begun(in_postgres) as (storage, ledger):
        lock = storage._held()
        with closing(PostgresDatabase(storage.run, application="test")) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE "
                "application_name = 'fleetlearn lock'"
            )
        lock._thread.join(30)
        assert not lock._thread.is_alive()
        with pytest.raises(StoreUnavailableError, match="another coordinator may have it"):
            ledger.write([Metadata("a", 1)])


@pytest.mark.usefixtures("short_lease")
def test_the_server_ends_the_session_of_who_gives_no_sign_of_life(
    in_postgres: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_lock, "SILENCE", 3.0)
    monkeypatch.setattr(postgres_lock, "PATIENCE", 30.0)
    with begun(in_postgres) as (storage, _):
        lock = storage._held()
        lock._end.set()
        lock._thread.join()
        with begun(in_postgres) as (_, other):
            other.write([Metadata("who", "second")])


def test_a_newer_version_s_tables_are_refused(in_postgres: Path) -> None:
    with begun(in_postgres) as (storage, ledger):
        ledger._db.execute("UPDATE owner SET tables = 100")
    expected = rf"version 100; this fleetlearn reads version {SCHEMA_VERSION}\."
    with pytest.raises(StoreError, match=expected), begun(in_postgres):
        pass
    assert not storage.is_locked()


def test_the_first_version_s_tables_are_brought_up_to_date(in_postgres: Path) -> None:
    with begun(in_postgres) as (_, ledger):
        ledger.write([RoundOpened(1, 2.0), TaskGiven("r1-1-1", 1, "a", 0)])
        ledger._db.execute("ALTER TABLE tasks DROP COLUMN region")
        ledger._db.execute("ALTER TABLE rounds DROP COLUMN goal")
        ledger._db.execute(f"UPDATE owner SET tables = {postgres_ledger.FIRST_VERSION}")
    with begun(in_postgres) as (_, ledger):
        ledger.write([TaskGiven("r1-1-2", 1, "b", 0, region="eu")])
        found = ledger._db.execute("SELECT device, region FROM tasks ORDER BY task").fetchall()
        assert found == [("a", None), ("b", "eu")]


def test_tables_are_brought_up_to_date(in_postgres: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(in_postgres) as (_, ledger):
        ledger.write([RoundOpened(1, 2.0)])
    newer = SCHEMA_VERSION + 1
    monkeypatch.setattr(postgres_ledger, "SCHEMA_VERSION", newer)
    added = "ALTER TABLE rounds ADD COLUMN region TEXT"
    monkeypatch.setitem(postgres_ledger.MIGRATIONS, newer - 1, (added,))
    for _ in range(2):
        with begun(in_postgres) as (_, ledger):
            found = ledger._db.execute("SELECT number, region FROM rounds").fetchall()
            assert found == [(1, None)]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:secret@host/db", r"postgresql://\.\.\.@host/db: this address has a pass"),
        ("postgresql://u@host/db?password=secret", r"@host/db: this address has a password"),
        ("postgresql://u@host/db?sslpassword=secret", r"@host/db: this address has a password"),
        ("postgresql://u@[host/db", "no address of a database"),
        ("postgresql://u:secret@ho\N{FULLWIDTH SOLIDUS}st/db", "no address of a database"),
    ],
)
def test_addresses_with_a_password_are_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as caught:
        find_run(url, "r")
    assert "secret" not in caught.value.text


def test_errors_name_the_server_and_say_what_to_do(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"127.0.0.1:{postgres.port}"
    wrong = "not the secret"
    cases = {
        f"postgresql://{USER}@127.0.0.1:1/db": "refused.*check that the server runs",
        f"postgresql://{USER}@{host}/fleet": "password authentication failed.*PGPASSFILE",
        f"{postgres.url('nothing')}": 'database "nothing" does not exist.*createdb',
        f"postgresql://{USER}@{host}/fleet?nonsense=1": "invalid.*nonsense",
    }
    monkeypatch.setenv("PGPASSWORD", wrong)
    for url, said in cases.items():
        write_stores(tmp_path, StoredElsewhere("r", url))
        with pytest.raises(StoreUnavailableError, match=said) as caught:
            find_storage(tmp_path).is_locked()
        assert caught.value.code is Code.BUSY
        assert url in caught.value.text
        assert wrong not in caught.value.text
        assert "\n" not in caught.value.text
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    write_stores(tmp_path, StoredElsewhere("r", f"postgresql://{USER}@{host}/fleet"))
    assert not find_storage(tmp_path).is_locked()


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_that(
    in_postgres: Path, postgres: PostgresServer
) -> None:
    """The server's own time-out ends nothing while its process is stopped."""
    run = storage_of(in_postgres).run
    with closing(PostgresDatabase(run, application="test", answer=1.0)) as db:
        with pytest.raises(StoreUnavailableError, match="statement timeout"):
            db.execute("SELECT pg_sleep(60)").fetchone()
        db.set("statement_timeout", "0")
        with pytest.raises(StoreUnavailableError, match="timeout: no answer within 3 s"):
            db.execute("SELECT pg_sleep(60)").fetchone()


def test_an_ended_process_leaves_the_lock_at_once(in_postgres: Path) -> None:
    with begun(in_postgres) as (storage, _):
        lock = storage._held()
        lock._end.set()
        lock._thread.join()
        lock.db.close()  # what the kernel does with a dead process's sockets
        taken = threading.Event()

        def take() -> None:
            with storage_of(in_postgres).lock():
                taken.set()

        before = in_postgres / "lock-1"
        before.unlink()
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(30)
        assert taken.is_set()


def test_a_run_begins_in_the_database_that_the_service_names(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    name = tmp_path.name
    begin_elsewhere(tmp_path / "run", StoredElsewhere(name, postgres.url()))
    assert read_stores(tmp_path / "run") == StoredElsewhere(name, postgres.url())
    begin_elsewhere(tmp_path / "before-it-began", StoredElsewhere(name, postgres.url()))
    with begun(tmp_path / "run"):
        pass
    with pytest.raises(StoreError, match=f"has a run called {name} already"):
        begin_elsewhere(tmp_path / "other", StoredElsewhere(name, postgres.url()))
    assert not (tmp_path / "other").exists()
