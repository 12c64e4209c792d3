"""The stores in which the tests of storage are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.storage import find_storage
from memory_storage import SCHEME, memory_storage


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place in the store in memory, which is gone after the test."""
    monkeypatch.setitem(find_storage.STORES, SCHEME, memory_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    return Path(f"{SCHEME}://{tmp_path.name}")


@pytest.fixture(params=["files", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place of each store in turn, in which there is no run yet."""
    return tmp_path if request.param == "files" else request.getfixturevalue("memory")
