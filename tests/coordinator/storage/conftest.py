"""The stores in which the tests of storage are tried."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import pytest
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_coordinator.storage.ledger_place import LedgerPlace, write_ledger_place
from memory_storage import SCHEME, memory_storage
from postgres_server import PostgresServer


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place in the store in memory, which is gone after the test."""
    monkeypatch.setitem(find_storage.STORES, SCHEME, memory_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    return Path(f"{SCHEME}://{tmp_path.name}")


@pytest.fixture
def in_postgres(tmp_path: Path, postgres: PostgresServer) -> Path:
    """A data directory whose ledger is in PostgreSQL."""
    folder = tmp_path / "in-postgres"
    write_ledger_place(folder, LedgerPlace(postgres.url(), token_hex(8)))
    return folder


@pytest.fixture(params=["files", "memory", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place of each store in turn, in which there is no run yet."""
    if request.param == "files":
        return tmp_path
    found: Path = request.getfixturevalue("memory" if request.param == "memory" else "in_postgres")
    return found
