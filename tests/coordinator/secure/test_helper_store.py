"""The helper's file: its key, its devices, its used seeds."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_coordinator.secure.helper_book import OnRecord, seed_name
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.storage.errors import DuplicateRowError, StoreError
from helper_fleet import BUNDLE, SIZE, fleet, ordinary, seeds_of, terms_of

ONE, TWO, THREE = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
HELPER = X25519PrivateKey.generate().public_key().public_bytes_raw()
REQUEST = ordinary(terms_of(HELPER), fleet(["a", "b", "c"]))


@pytest.fixture
def store(tmp_path: Path) -> HelperStore:
    make_helper_store(tmp_path / "helper.sqlite", 1.0)
    return HelperStore(tmp_path / "helper.sqlite")


def test_the_key_is_the_owner_s_alone_and_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "helper.sqlite"
    make_helper_store(path, 1.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with closing(HelperStore(path)) as store:
        key = store.private_key().private_bytes_raw()
    with pytest.raises(StoreError, match="there already"):
        make_helper_store(path, 2.0)
    with closing(HelperStore(path)) as store:
        assert store.private_key().private_bytes_raw() == key


def test_a_file_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """A new file would know of no used seed."""
    with pytest.raises(StoreError, match=r"never made again.*helper init"):
        HelperStore(tmp_path / "helper.sqlite")
    assert not [*tmp_path.iterdir()]


def test_a_file_without_its_key_is_refused(tmp_path: Path, store: HelperStore) -> None:
    store.close()
    with closing(sqlite3.connect(tmp_path / "helper.sqlite")) as opened:
        opened.execute("DELETE FROM helper")
        opened.commit()
    with (
        closing(HelperStore(tmp_path / "helper.sqlite")) as emptied,
        pytest.raises(StoreError, match="no key"),
    ):
        emptied.private_key()


def test_what_is_on_record(store: HelperStore) -> None:
    seeds = seeds_of(REQUEST)
    assert store.on_record(REQUEST, seeds) == OnRecord(None, False, set(), set())
    with store.transaction():
        store.record(REQUEST, seeds, 5.0)
    names = {seed_name(seed) for seed in seeds}
    known = store.on_record(REQUEST, seeds)
    assert known == OnRecord((BUNDLE, SIZE), True, names, {"a", "b", "c"})
    other = ordinary(terms_of(HELPER), fleet(["a", "b", "d"]), round=2)
    found = store.on_record(other, [*seeds_of(other)[:2], seeds[2]])
    assert found == OnRecord((BUNDLE, SIZE), False, {seed_name(seeds[2])}, set())
    assert store.counts() == (0, 1, 1, 3, 5.0)


def test_the_file_itself_takes_no_seed_twice(store: HelperStore) -> None:
    """Also where whoever asked the file before did not look."""
    with store.transaction():
        store.record(REQUEST, seeds_of(REQUEST), 5.0)
    other = ordinary(terms_of(HELPER), fleet(["d", "e"]), round=2)
    with pytest.raises(DuplicateRowError), store.transaction():
        store.record(other, [THREE, seeds_of(REQUEST)[0]], 6.0)
    assert store.counts().seeds == 3, "all or nothing"


def test_what_is_remembered_says_nothing_of_a_seed(tmp_path: Path, store: HelperStore) -> None:
    seeds = seeds_of(REQUEST)
    with store.transaction():
        store.record(REQUEST, seeds, 5.0)
    store.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert seed_name(seeds[0]) in content
    assert not any(seed in content for seed in seeds)
    assert not any(report.sealed in content for report in REQUEST.reports)


# Devices


def test_devices_are_enrolled_all_or_none(store: HelperStore) -> None:
    assert store.enrol([("a", ONE), ("b", TWO)], 1.0) == 2
    assert store.enrol([("a", ONE), ("c", THREE)], 2.0) == 1, "the same roster with one more"
    with pytest.raises(StoreError, match="d was given the key of b"):
        store.enrol([("e", bytes(32)), ("d", TWO)], 3.0)
    with pytest.raises(StoreError, match=r"a is enrolled with another key.*helper revoke"):
        store.enrol([("a", bytes(32))], 3.0)
    assert store.keys(["a", "b", "c", "d", "e"]) == {"a": ONE, "b": TWO, "c": THREE}


def test_a_revoked_device_is_out_until_it_is_enrolled_again(store: HelperStore) -> None:
    store.enrol([("a", ONE)], 1.0)
    assert store.revoke("a", 2.0)
    assert not store.revoke("a", 3.0)
    assert not store.revoke("nobody", 3.0)
    assert store.keys(["a"]) == {}
    assert store.counts().devices == 0
    with pytest.raises(StoreError, match="key of a"):
        store.enrol([("b", ONE)], 4.0)
    assert store.enrol([("a", TWO)], 5.0) == 1
    assert [tuple(row) for row in store.devices()] == [("a", TWO, 5.0, None)]
