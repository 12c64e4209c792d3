"""The data directory: what it keeps, what it refuses, and that its disk use is bounded."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.service.status import read_model, read_status
from fleetlearn_coordinator.storage import file_blobs, sqlite_ledger
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_blobs import model_path
from fleetlearn_coordinator.storage.ledger import (
    Metadata,
    ModelMade,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    SavedTask,
    TaskEnded,
    TaskGiven,
    Unfinished,
)
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_coordinator.storage.store import SPOOL_FILES_HELD, Store, open_store
from fleetlearn_protocol import Code
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector, check_finite, checksum, digest
from full_disk import largest_file

SIZE = 33_000
"""Elements of an update: two parts of a spool file."""
BUNDLE = "b" * 64


def spool(kept: Store, task: str, update: Vector, weight: int) -> None:
    """Do what the server does with an update that has arrived completely."""
    spool_file = kept.blobs.take_spool_file()
    kept.blobs.write_spool_file(spool_file, 0, update.tobytes())
    report = Report(task, 1, (FLOAT32.part("update", update),), weight, 1, 1.0, True, 0.5)
    kept.record_report(ReportAccepted(report, weight, spool_file))


def add(kept: Store, task: str, update: Vector, weight: int, total: exact_mean.Sum) -> None:
    """The same, and what the run then does with it."""
    spool(kept, task, update, weight)
    exact_mean.add(total, (update,), weight, check_finite(update))
    if kept.must_save_aggregator:
        kept.end_save(kept.begin_save(exact_mean.to_tensors(total))())


def recover(kept: Store) -> tuple[Unfinished, exact_mean.Sum]:
    """Do what a start does with the round that an earlier process left open."""
    with kept.repair_advice():
        opened, total = kept.ledger.unfinished(None), exact_mean.init(SIZE)
        tensors = kept.load_aggregator({})
        if tensors is not None:
            total = exact_mean.from_tensors(tensors)
        for row in opened.reports:
            if row.spool_file is not None:
                update = np.frombuffer(kept.take_back_update(row), "<f4")
                exact_mean.add(total, (update,), row.weight, check_finite(update))
    return opened, total


def database(kept: Store) -> sqlite3.Connection:
    assert isinstance(kept.ledger, SqliteLedger)
    return kept.ledger._db


def save_model(kept: Store, version: int, vector: Vector, state: dict[str, Vector]) -> None:
    kept.write(kept.write_model(ModelMade(version, digest(vector), version, 0.0), vector, state))


def updates(count: int) -> list[Vector]:
    return [
        np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) for seed in range(count)
    ]


@pytest.mark.parametrize("durable", ["process", "power"])
@pytest.mark.parametrize(
    "count", [1, SPOOL_FILES_HELD - 1, SPOOL_FILES_HELD, 2 * SPOOL_FILES_HELD + 5]
)
def test_an_open_round_is_found_again(place: Path, count: int, durable: str) -> None:
    kept, total = open_store(place, BUNDLE, durable=durable), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    for number, update in enumerate(updates(count)):
        kept.write([TaskGiven(f"t1-{number}", 1, f"d{number}", 0)])
        add(kept, f"t1-{number}", update, number + 1, total)
    kept.write([TaskGiven("t1-x", 1, "x", 0)])
    kept.write([TaskGiven("t1-y", 1, "y", 0)])
    kept.write([TaskEnded("t1-y", "lost")])
    kept.close()
    with closing(open_store(place, BUNDLE)) as again:
        opened, found = recover(again)
    assert opened.round == 1
    assert opened.leases == [SavedTask("t1-x", "x", 0)]
    assert opened.dropped == [("t1-y", "y", "lost")]
    assert len(opened.reports) == count
    np.testing.assert_array_equal(exact_mean.mean(found), exact_mean.mean(total))
    assert (found.weight, found.count) == (total.weight, count)


def test_the_disk_holds_a_bounded_number_of_updates(tmp_path: Path) -> None:
    kept, total = open_store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    for number, update in enumerate(updates(10) * 20):
        kept.write([TaskGiven(f"t1-{number}", 1, f"d{number}", 0)])
        add(kept, f"t1-{number}", update, 1, total)
    assert len(list((tmp_path / "uploads").iterdir())) <= SPOOL_FILES_HELD


def test_a_damaged_update_is_named(tmp_path: Path) -> None:
    kept, total = open_store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    kept.write([TaskGiven("t1-1", 1, "a", 0)])
    add(kept, "t1-1", updates(1)[0], 1, total)
    kept.close()
    path = next((tmp_path / "uploads").iterdir())
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    again = open_store(tmp_path, BUNDLE)
    with pytest.raises(StoreError, match=r"slot-0000: the update of t1-1 is damaged"):
        recover(again)
    again.close()
    path.write_bytes(bytes(size - 1))
    with pytest.raises(StoreError, match=rf"slot-0000 ends before its update's {size} bytes"):
        recover(open_store(tmp_path, BUNDLE))


def test_models_are_kept_with_their_state_until_they_are_dropped(place: Path) -> None:
    kept = open_store(place, BUNDLE)
    assert kept.load_model() is None
    vectors = updates(8)
    for version, vector in enumerate(vectors):
        save_model(kept, version, vector, {"m": vector * 2})
    kept.write(
        kept.write_model(ModelMade(8, digest(vectors[0]), 8, 0.0), vectors[0], {}, [1, 2, 3, 4, 9])
    )
    assert kept.blobs.model_versions() == [0, 5, 6, 7, 8]
    known = kept.ledger.known_models()
    assert [made.version for made in known] == [*range(9)]
    vector, state = kept.load_version(known[6])
    np.testing.assert_array_equal((vector, state["m"]), (vectors[6], vectors[6] * 2))
    kept.close()


def test_a_changed_model_is_not_used(tmp_path: Path) -> None:
    kept = open_store(tmp_path, BUNDLE)
    vectors = updates(8)
    for version, vector in enumerate(vectors):
        save_model(kept, version, vector, {"m": vector * 2})
    version, vector, state = kept.load_model() or (None, None, {})
    assert version == 7
    np.testing.assert_array_equal(vector, vectors[7])
    np.testing.assert_array_equal(state["m"], vectors[7] * 2)
    (tmp_path / "models" / "v00000007.safetensors").write_bytes(
        (tmp_path / "models" / "v00000006.safetensors").read_bytes()
    )
    with pytest.raises(StoreError, match="was changed after it was committed"):
        kept.load_model()


def test_a_run_has_a_name_of_its_own_that_stays(place: Path) -> None:
    first, other = open_store(place / "first", BUNDLE), open_store(place / "other", BUNDLE)
    assert first.run != other.run
    name = first.run
    first.close()
    assert open_store(place / "first", BUNDLE).run == name


def test_two_coordinators_cannot_share_a_directory(place: Path) -> None:
    first = open_store(place, BUNDLE)
    with pytest.raises(StoreError, match="in use by another coordinator") as caught:
        open_store(place, BUNDLE)
    assert caught.value.code is Code.BUSY
    first.close()
    open_store(place, BUNDLE).close()


def test_another_bundle_is_refused(place: Path) -> None:
    open_store(place, BUNDLE).close()
    with pytest.raises(StoreError, match="holds the run of another bundle"):
        open_store(place, "c" * 64)


def test_power_safety_syncs_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Any] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    safe, total = open_store(tmp_path / "safe", BUNDLE, durable="power"), exact_mean.init(SIZE)
    safe.write([RoundOpened(1, 0.0)])
    safe.write([TaskGiven("t1-1", 1, "a", 0)])
    add(safe, "t1-1", updates(1)[0], 1, total)
    # a new file's folder too, or its name may be gone
    safe_folder = tmp_path / "safe"
    device = safe_folder.stat().st_dev
    above = [each for each in (safe_folder, *safe_folder.parents) if each.stat().st_dev == device]
    paths = ("sums", "", "uploads", "uploads/slot-0000")
    files = [*above, *(safe_folder / path for path in paths)]
    assert synced == [file.stat().st_ino for file in files]
    fast = open_store(tmp_path / "fast", BUNDLE)
    fast.write([RoundOpened(1, 0.0)])
    fast.write([TaskGiven("t1-1", 1, "a", 0)])
    add(fast, "t1-1", updates(1)[0], 1, total)
    assert len(synced) == len(files)


def test_what_is_written_is_told_to_who_measures(place: Path) -> None:
    """Rows, updates, sums and models, each as often as it was written."""
    kept, total = open_store(place, BUNDLE), exact_mean.init(SIZE)
    told: list[str] = []
    kept.timed = lambda what, seconds: told.append(what) if seconds >= 0 else None
    kept.write([RoundOpened(1, 0.0)])
    tasks = [f"t1-{number}" for number in range(SPOOL_FILES_HELD)]
    kept.write([TaskGiven(task, 1, task, 0) for task in tasks])
    for task in tasks:
        add(kept, task, updates(1)[0], 1, total)
    assert told == ["rows", "rows", *["update", "rows"] * SPOOL_FILES_HELD, "sum", "rows"]
    told.clear()
    kept.write(kept.write_model(ModelMade(1, "0" * 64, 1, 0.0), updates(1)[0], {}))
    assert told == ["model", "rows"]
    kept.close()


def test_half_a_sum_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """The disk becomes full while the sum is written: what was accepted is still there."""
    kept, total = open_store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    for number, update in enumerate(updates(SPOOL_FILES_HELD)):
        kept.write([TaskGiven(f"t1-{number}", 1, f"d{number}", 0)])
        if number < SPOOL_FILES_HELD - 1:
            add(kept, f"t1-{number}", update, 1, total)
            continue
        spool(kept, f"t1-{number}", update, 1)
        exact_mean.add(total, (update,), 1, check_finite(update))
    with pytest.raises(OSError, match="File too large"), largest_file(8 * SIZE + 12):
        kept.end_save(kept.begin_save(exact_mean.to_tensors(total))())
    kept.close()
    _, found = recover(open_store(tmp_path, BUNDLE))
    np.testing.assert_array_equal(exact_mean.mean(found), exact_mean.mean(total))


def test_a_sum_that_is_cut_short_is_named(tmp_path: Path) -> None:
    kept, total = open_store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    for number, update in enumerate(updates(SPOOL_FILES_HELD)):
        kept.write([TaskGiven(f"t1-{number}", 1, f"d{number}", 0)])
        add(kept, f"t1-{number}", update, 1, total)
    turn = kept.ledger.get("sum")
    kept.close()
    path = tmp_path / "sums" / file_blobs.SUMS[turn]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(StoreError, match="is shorter than the sum of a round"):
        recover(open_store(tmp_path, BUNDLE))


COUNT = 16
"""Where a sum's file has the number of its updates: after the model's size and the weight."""


def folded(folder: Path) -> tuple[exact_mean.Sum, Path]:
    """A data directory whose open round has its sum on disk and in no spool file; the sum, and its
    file."""
    kept, total = open_store(folder, BUNDLE), exact_mean.init(SIZE)
    kept.write([RoundOpened(1, 0.0)])
    for number, update in enumerate(updates(SPOOL_FILES_HELD)):
        kept.write([TaskGiven(f"t1-{number}", 1, f"d{number}", 0)])
        add(kept, f"t1-{number}", update, 2, total)
    turn = kept.ledger.get("sum")
    kept.close()
    return total, folder / "sums" / file_blobs.SUMS[turn]


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 8, COUNT, 24, 7 * SIZE, 8 * SIZE + 23])
def test_a_flipped_bit_in_a_sum_is_named(tmp_path: Path, place: int) -> None:
    """The bit is in the size, in the weight, in the count, or in a bin."""
    _, path = folded(tmp_path)
    flip(path, place)
    again = open_store(tmp_path, BUNDLE)
    with pytest.raises(
        StoreError,
        match=r"sums/\w was changed after it was written.*Put .* back .* Or remove .*/sums",
    ):
        recover(again)
    again.close()
    flip(path, place)
    again = open_store(tmp_path, BUNDLE)
    recover(again)
    again.close()


def test_a_damaged_report_or_an_old_sum_s_count_is_named(tmp_path: Path) -> None:
    _, path = folded(tmp_path)
    flip(path, COUNT, 5)  # 0 updates
    kept = open_store(tmp_path, BUNDLE)
    kept.write([Metadata("sum_crc32", checksum(path.read_bytes()))])
    with pytest.raises(StoreError, match=r"sums: the saved sum says 0 updates .* damaged"):
        recover(kept)
    database(kept).execute("UPDATE tasks SET report=? WHERE task='t1-3'", (b'{"task": "\xff"',))
    flip(path, COUNT, 5)
    with pytest.raises(StoreError, match=r"coordinator\.sqlite3: the report of t1-3 is damaged"):
        recover(kept)
    kept.write([RoundClosed(1, "committed", {}, 1.0)])
    database(kept).execute("UPDATE rounds SET summary='{\"a'")
    text = r"coordinator\.sqlite3: the summary of round 1 is damaged"
    with pytest.raises(StoreError, match=text):
        kept.ledger.last_committed()
    with pytest.raises(StoreError, match=text):
        read_status(tmp_path)
    kept.close()


def test_a_sum_that_an_earlier_version_wrote_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folded(tmp_path)
    old = open_store(tmp_path, BUNDLE)
    old.write([Metadata("sum_layout", None)])
    old.close()
    again = open_store(tmp_path, BUNDLE)
    text = r"/sums: an earlier version of fleetlearn saved the sum\. Put .* Or remove .*/sums"
    with pytest.raises(StoreError, match=text):
        recover(again)
    again.close()


def lose_database(folder: Path) -> None:
    for path in folder.glob(f"{sqlite_ledger.DATABASE}*"):
        path.unlink()


def test_a_lost_or_an_empty_database_beside_models_is_refused(tmp_path: Path) -> None:
    kept = open_store(tmp_path, BUNDLE)
    for version in range(3):
        save_model(kept, version, np.zeros(SIZE, np.float32), {})
    kept.close()
    lose_database(tmp_path)
    text = (
        r"has models up to version 2, but coordinator\.sqlite3 there is lost or empty\. Put it "
        r"back from a backup"
    )
    for _ in range(2):  # the first leaves a database without tables
        with pytest.raises(StoreError, match=text):
            open_store(tmp_path, BUNDLE)
    lose_database(tmp_path)
    (tmp_path / sqlite_ledger.DATABASE).touch()
    with pytest.raises(StoreError, match=text):
        open_store(tmp_path, BUNDLE)
    empty = open_store(tmp_path / "other", BUNDLE)
    empty.close()
    lose_database(tmp_path)
    # One with tables, and no model in them:
    (tmp_path / "other" / sqlite_ledger.DATABASE).rename(tmp_path / sqlite_ledger.DATABASE)
    with pytest.raises(StoreError, match=text):
        open_store(tmp_path, BUNDLE)
    assert (
        sorted(path.name for path in (tmp_path / "models").iterdir())[0] == "v00000000.safetensors"
    )


def test_a_first_start_that_was_killed_begins_again(place: Path) -> None:
    """Version 0 was written, and not recorded."""
    kept = open_store(place, BUNDLE)

    kept.write_model(ModelMade(0, "0" * 64, 0, 0.0), np.zeros(SIZE, np.float32), {})
    kept.close()
    again = open_store(place, BUNDLE)
    assert again.load_model() is None
    again.close()


def test_a_refused_data_directory_is_not_locked(place: Path) -> None:
    open_store(place, BUNDLE).close()
    with pytest.raises(StoreError, match="another bundle"):
        open_store(place, "c" * 64)
    open_store(place, BUNDLE).close()


def test_any_flipped_bit_of_a_model_s_file_is_named(tmp_path: Path) -> None:
    """In its header, the vector or the server optimizer's state; also where a model is read from
    outside."""
    kept, vector = open_store(tmp_path, BUNDLE), updates(1)[0][:20].copy()
    save_model(kept, 1, vector, {"m": vector * 2, "v": vector * 3})
    path = model_path(tmp_path, 1)
    size, named = path.stat().st_size, 0
    header = size - 3 * vector.nbytes
    for place in range(size):
        flip(path, place, place % 8)
        with suppress(StoreError):
            found = kept.load_model()
            assert found is not None
            assert found[1].tobytes() == vector.tobytes()
            assert place < header, "a blank, or a word that says nothing"
            named -= 1
        named += 1
        with suppress(StoreError):
            assert read_model(tmp_path)[1].tobytes() == vector.tobytes()
        flip(path, place, place % 8)
    assert kept.load_model() is not None
    assert named > 3 * vector.nbytes
    path.unlink()
    with pytest.raises(StoreError, match=r"v00000001\.safetensors is missing"):
        kept.load_model()
    kept.close()


def test_half_written_models_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """safetensors writes a file of a random name beside the draft, and renames it."""
    open_store(tmp_path, BUNDLE).close()
    for name in (".tmpA1b2C3", "v00000001.draft"):
        (tmp_path / "models" / name).write_bytes(b"half")
    open_store(tmp_path, BUNDLE).close()
    assert not [*(tmp_path / "models").iterdir()]
