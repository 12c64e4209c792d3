"""Which store a run is in."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.find_storage import STORES, find_storage
from plans import SMALL


def test_a_folder_is_a_store_of_files(tmp_path: Path) -> None:
    for place in (tmp_path / "a:b", str(tmp_path / "run"), "run", "a.b/c"):
        found = find_storage(place)
        assert isinstance(found, FileStorage)
        assert found.where == str(place)
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_a_url_names_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StoreError,
        match="there is no store called postgresql; a run's data can be in: folders alone",
    ):
        find_storage("postgresql://host/runs")
    made = FileStorage("made")
    monkeypatch.setitem(
        STORES, "made", lambda url: made if url == "made://up" else FileStorage("?")
    )
    assert find_storage("made://up") is made
    plan = Plan.parse(f'data_dir = "made://up"\n{SMALL}', Path("/plans"))
    assert find_storage(plan.data_dir) is made
    with pytest.raises(StoreError, match="can be in: made://"):
        find_storage("postgresql://host/runs")
