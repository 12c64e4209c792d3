"""Which store a run is in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.find_storage import STORES, begin_elsewhere, find_storage
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.stored_elsewhere import (
    FILE,
    StoredElsewhere,
    read_stores,
    write_stores,
)
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


URL = "postgresql://fleet@127.0.0.1:1/fleet"
"""Nobody listens there."""


def test_a_folder_says_where_its_ledger_is(tmp_path: Path) -> None:
    assert read_stores(tmp_path) is None
    place = StoredElsewhere('a "run"', URL)
    write_stores(tmp_path / "run", place)
    assert read_stores(tmp_path / "run") == place
    found = find_storage(tmp_path / "run")
    assert isinstance(found, PostgresStorage)
    assert (found.run.url, found.run.schema) == (URL, 'fleetlearn_a "run"')
    for url in ("oracle://u:secret@host", "secret"):
        write_stores(tmp_path / "other", StoredElsewhere("r", url))
        with pytest.raises(StoreError, match="has to begin with postgresql:// or") as caught:
            find_storage(tmp_path / "other")
        assert "secret" not in caught.value.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ledger =", "stores.toml, which says where the run is stored, cannot be used"),
        (
            'ledger = "postgresql://h/d"',
            "it has to have run, and ledger or blobs or both, as strings, and no more",
        ),
        ('ledger = "postgresql://h/d"\nrun = 3', "see run"),
        ('ledger = "postgresql://h/d"\nrun = "r"\nblob = "x"', "see blob"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StoreError, match=said):
        find_storage(tmp_path)


def test_a_run_stays_where_it_began(tmp_path: Path) -> None:
    begin_elsewhere(tmp_path / "new", StoredElsewhere("r"))
    assert not (tmp_path / "new").exists(), "nothing is said, and nothing made"
    (tmp_path / DATABASE).touch()
    with pytest.raises(StoreError, match="the run's ledger is in this folder"):
        begin_elsewhere(tmp_path, StoredElsewhere("r", URL))
    write_stores(tmp_path / "there", StoredElsewhere("r", URL))
    begin_elsewhere(tmp_path / "there", StoredElsewhere("another name", URL))
    begin_elsewhere(tmp_path / "there", StoredElsewhere("r"))
    assert read_stores(tmp_path / "there") == StoredElsewhere("r", URL)
    with pytest.raises(StoreError, match=r"is in postgresql://fleet@127\.0\.0\.1:1/fleet .* moved"):
        begin_elsewhere(tmp_path / "there", StoredElsewhere("r", "postgresql://elsewhere/fleet"))
    for place in (tmp_path / "new", tmp_path / "there"):
        with pytest.raises(StoreError, match="this address has a password") as caught:
            begin_elsewhere(place, StoredElsewhere("r", "postgresql://fleet:secret@host/fleet"))
        assert "secret" not in caught.value.text
    assert not (tmp_path / "new").exists()


def test_what_has_begun_keeps_its_blobs_too(tmp_path: Path, object_stores: None) -> None:
    both = StoredElsewhere("r", blobs="s3://bucket/fleet")
    begin_elsewhere(tmp_path / "run", both)
    assert read_stores(tmp_path / "run") == both
    found = find_storage(tmp_path / "run")
    begin_elsewhere(tmp_path / "run", both)
    with pytest.raises(StoreError, match=r"blobs is in s3://bucket/fleet .* file says blobs = "):
        begin_elsewhere(tmp_path / "run", StoredElsewhere("r", blobs="s3://other"))
    with pytest.raises(StoreError, match="ledger is in this folder, and the service file says"):
        begin_elsewhere(tmp_path / "run", StoredElsewhere("r", URL))
    blobs = found.open_blobs(power=False, spool_files=4)
    blobs.save_model(0, {"parameters": np.zeros(2, np.float32)})
    blobs.close()
    with pytest.raises(StoreError, match="has a run called r already"):
        begin_elsewhere(tmp_path / "another", both)
