"""The stores in which the tests of storage are tried."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_coordinator.storage.stored_elsewhere import StoredElsewhere, write_stores
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
    write_stores(folder, StoredElsewhere(token_hex(8), postgres.url()))
    return folder


@pytest.fixture
def object_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore's stores in memory in the place of those that URLs name."""
    kinds = pytest.importorskip("obstore.store")
    stores: dict[str, Any] = {}
    monkeypatch.setattr(
        kinds, "from_url", lambda url, **options: stores.setdefault(url, kinds.MemoryStore())
    )


@pytest.fixture
def in_objects(tmp_path: Path, object_stores: None) -> Path:
    """A data directory whose blobs are in an object store."""
    folder = tmp_path / "in-objects"
    write_stores(folder, StoredElsewhere(token_hex(8), blobs="s3://bucket/fleet"))
    return folder


PLACES = {"memory": "memory", "objects": "in_objects", "postgres": "in_postgres"}


@pytest.fixture(
    params=["files", "memory", "objects", pytest.param("postgres", marks=pytest.mark.slow)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place of each store in turn, in which there is no run yet."""
    if request.param == "files":
        return tmp_path
    found: Path = request.getfixturevalue(PLACES[request.param])
    return found
