"""The data directory: what it keeps, what it refuses, and that its disk use is bounded."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.service.status import read_model, read_status, read_tasks
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.store import DATABASE, MODELS_KEPT, SLOTS_HELD, Store, StoreError
from fleetlearn_protocol import Code
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector, checksum

SIZE = 1000
BUNDLE = "b" * 64


def report_of(task: str, update: Vector, examples: int) -> Report:
    return Report(task, 1, (FLOAT32.part("update", update),), examples, 1, 1.0, True, 0.5)


def spool(kept: Store, task: str, update: Vector, weight: int, total: exact_mean.Sum) -> None:
    """What the server does with an update that has come in whole."""
    slot = kept.take_slot()
    kept.write_slot(slot, 0, update.tobytes())
    kept.accept(report_of(task, update, weight), weight, slot)
    exact_mean.add(total, update, weight)
    kept.fold(total)


def updates(count: int) -> list[Vector]:
    return [np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) for seed in range(count)]


@pytest.mark.parametrize("durable", ["process", "power"])
@pytest.mark.parametrize("count", [1, SLOTS_HELD - 1, SLOTS_HELD, 2 * SLOTS_HELD + 5])
def test_an_open_round_is_found_again(tmp_path: Path, count: int, durable: str) -> None:
    kept, total = Store(tmp_path, BUNDLE, durable=durable), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    for number, update in enumerate(updates(count)):
        kept.assign(f"t1-{number}", 1, f"d{number}")
        spool(kept, f"t1-{number}", update, number + 1, total)
    kept.assign("t1-x", 1, "x")
    kept.assign("t1-y", 1, "y")
    kept.end("t1-y", "lost")
    kept.close()
    opened = Store(tmp_path, BUNDLE).recover(SIZE)
    assert opened is not None
    assert opened.number == 1
    assert opened.leases == [("t1-x", "x")]
    assert opened.dropped == [("t1-y", "y", "lost")]
    assert len(opened.reports) == count
    np.testing.assert_array_equal(exact_mean.mean(opened.total), exact_mean.mean(total))
    assert (opened.total.weight, opened.total.count) == (total.weight, count)


def test_an_open_round_of_the_version_before_goes_on(tmp_path: Path) -> None:
    """Its accepted reports describe one update each, without parts."""
    kept, total = Store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    kept.assign("t1-1", 1, "a")
    (update,) = updates(1)
    spool(kept, "t1-1", update, 3, total)
    kept.close()
    before = {
        "type": "report", "task": "t1-1", "round": 1, "crc32": checksum(update), "size": update.nbytes, "examples": 3,
        "steps": 1, "epochs": 1.0, "complete": True, "loss": 0.5, "metrics": {}, "seconds": 0.0,
        "encoding": "float32", "evaluation": None,
    }  # fmt: skip
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        database.execute("UPDATE tasks SET report=?", (json.dumps(before).encode(),))
    opened = Store(tmp_path, BUNDLE).recover(SIZE)
    assert opened is not None
    assert opened.reports == [("t1-1", "a", report_of("t1-1", update, 3))]
    np.testing.assert_array_equal(exact_mean.mean(opened.total), exact_mean.mean(total))


def test_the_disk_holds_a_bounded_number_of_updates(tmp_path: Path) -> None:
    kept, total = Store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    for number, update in enumerate(updates(10) * 20):
        kept.assign(f"t1-{number}", 1, f"d{number}")
        spool(kept, f"t1-{number}", update, 1, total)
    assert len(list((tmp_path / "uploads").iterdir())) <= SLOTS_HELD


def test_a_damaged_update_is_named(tmp_path: Path) -> None:
    kept, total = Store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    kept.assign("t1-1", 1, "a")
    spool(kept, "t1-1", updates(1)[0], 1, total)
    kept.close()
    path = next((tmp_path / "uploads").iterdir())
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    again = Store(tmp_path, BUNDLE)
    with pytest.raises(StoreError, match=r"slot-0000: the update of t1-1 is damaged"):
        again.recover(SIZE)
    again.close()
    path.write_bytes(bytes(size - 1))
    with pytest.raises(StoreError, match=rf"slot-0000 ends before its update's {size} bytes"):
        Store(tmp_path, BUNDLE).recover(SIZE)


def test_models_are_kept_and_the_old_ones_go(tmp_path: Path) -> None:
    kept = Store(tmp_path, BUNDLE)
    assert kept.model() is None
    vectors = updates(8)
    for version, vector in enumerate(vectors):
        kept.save_model(version, version, vector, {"m": vector * 2}, 0.0)
        kept.drop_old_models(version)
    version, vector, state = kept.model() or (None, None, {})
    assert version == 7
    np.testing.assert_array_equal(vector, vectors[7])
    np.testing.assert_array_equal(state["m"], vectors[7] * 2)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [
        f"v{version:08d}.safetensors" for version in (0, *range(8 - MODELS_KEPT, 8))
    ]
    (tmp_path / "models" / "v00000007.safetensors").write_bytes(
        (tmp_path / "models" / "v00000006.safetensors").read_bytes()
    )
    with pytest.raises(StoreError, match="was changed after it was committed"):
        kept.model()


def test_the_tasks_of_old_rounds_go_and_their_summaries_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROUNDS_KEPT", 2)
    kept = Store(tmp_path, BUNDLE)
    for number in range(1, 5):
        kept.open_round(number, 0.0)
        kept.assign(f"t{number}-1", number, "a")
        kept.close_round(number, "committed", {"reports": number}, 1.0)
    assert [len(read_tasks(tmp_path, number)[1]) for number in range(1, 5)] == [0, 0, 1, 1]
    assert [row.summary["reports"] for row in read_status(tmp_path).rounds] == [1, 2, 3, 4]


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    kept = Store(tmp_path, BUNDLE)

    def fail_within() -> None:
        with kept.transaction():
            kept.put("a", 1)
            with kept.transaction():
                kept.put("b", 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert kept.get("a") is None
    assert kept.get("b") is None


def test_a_run_has_a_name_of_its_own_that_stays(tmp_path: Path) -> None:
    first, other = Store(tmp_path / "first", BUNDLE), Store(tmp_path / "other", BUNDLE)
    assert first.run != other.run
    name = first.run
    first.close()
    assert Store(tmp_path / "first", BUNDLE).run == name


def test_two_coordinators_cannot_share_a_directory(tmp_path: Path) -> None:
    first = Store(tmp_path, BUNDLE)
    with pytest.raises(StoreError, match="in use by another coordinator") as caught:
        Store(tmp_path, BUNDLE)
    assert caught.value.code is Code.BUSY
    first.close()
    Store(tmp_path, BUNDLE).close()


def test_another_bundle_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, BUNDLE).close()
    with pytest.raises(StoreError, match="holds the run of another bundle"):
        Store(tmp_path, "c" * 64)


def test_a_newer_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SCHEMA_VERSION", 2)
    Store(tmp_path, BUNDLE).close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 2; this fleetlearn reads version 1"):
        Store(tmp_path, BUNDLE)


def test_power_safety_syncs_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    safe, total = Store(tmp_path / "safe", BUNDLE, durable="power"), exact_mean.init(SIZE)
    safe.open_round(1, 0.0)
    safe.assign("t1-1", 1, "a")
    spool(safe, "t1-1", updates(1)[0], 1, total)
    paths = ("sums", "", "uploads", "uploads/slot-0000")  # a new file's folder too, or its name may be gone
    assert synced == [(tmp_path / "safe" / path).stat().st_ino for path in paths]
    fast = Store(tmp_path / "fast", BUNDLE)
    fast.open_round(1, 0.0)
    fast.assign("t1-1", 1, "a")
    spool(fast, "t1-1", updates(1)[0], 1, total)
    assert len(synced) == len(paths)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can grow beyond it: a write across that border is a short one, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_chunk_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    kept = Store(tmp_path, BUNDLE)
    slot = kept.take_slot()
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        kept.write_slot(slot, 0, bytes(4000))


def test_half_a_sum_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """The disk becomes full while the sum is written: what was accepted is still there."""
    kept, total = Store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    for number, update in enumerate(updates(SLOTS_HELD)):
        kept.assign(f"t1-{number}", 1, f"d{number}")
        if number < SLOTS_HELD - 1:
            spool(kept, f"t1-{number}", update, 1, total)
            continue
        slot = kept.take_slot()
        kept.write_slot(slot, 0, update.tobytes())
        kept.accept(report_of(f"t1-{number}", update, 1), 1, slot)
        exact_mean.add(total, update, 1)
    with pytest.raises(OSError, match="File too large"), largest_file(16 * SIZE + 12):
        kept.fold(total)
    kept.close()
    opened = Store(tmp_path, BUNDLE).recover(SIZE)
    assert opened is not None
    np.testing.assert_array_equal(exact_mean.mean(opened.total), exact_mean.mean(total))


def test_a_sum_that_is_cut_short_is_named(tmp_path: Path) -> None:
    kept, total = Store(tmp_path, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    for number, update in enumerate(updates(SLOTS_HELD)):
        kept.assign(f"t1-{number}", 1, f"d{number}")
        spool(kept, f"t1-{number}", update, 1, total)
    turn = kept.get("sum")
    kept.close()
    path = tmp_path / "sums" / store.SUMS[turn]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(StoreError, match="is shorter than the sum of a round"):
        Store(tmp_path, BUNDLE).recover(SIZE)


def folded(folder: Path) -> tuple[exact_mean.Sum, Path]:
    """A data directory whose open round has its sum on disk and in no slot; the sum, and its file."""
    kept, total = Store(folder, BUNDLE), exact_mean.init(SIZE)
    kept.open_round(1, 0.0)
    for number, update in enumerate(updates(SLOTS_HELD)):
        kept.assign(f"t1-{number}", 1, f"d{number}")
        spool(kept, f"t1-{number}", update, 2, total)
    turn = kept.get("sum")
    kept.close()
    return total, folder / "sums" / store.SUMS[turn]


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 7 * SIZE, 8 * SIZE + 3, 16 * SIZE, 16 * SIZE + 8])
def test_a_flipped_bit_in_a_sum_is_named(tmp_path: Path, place: int) -> None:
    """In the high sum, the low one, the weight and the count."""
    _, path = folded(tmp_path)
    flip(path, place)
    again = Store(tmp_path, BUNDLE)
    with pytest.raises(StoreError, match=r"sums/\w was changed after it was written.*Put .* back .* Or remove .*/sums"):
        again.recover(SIZE)
    again.close()
    flip(path, place)
    again = Store(tmp_path, BUNDLE)
    assert again.recover(SIZE) is not None
    again.close()


def test_a_damaged_report_or_an_old_sum_s_count_is_named(tmp_path: Path) -> None:
    _, path = folded(tmp_path)
    flip(path, 16 * SIZE + 8, 5)  # 0 updates
    kept = Store(tmp_path, BUNDLE)
    kept.put("sum_crc32", None)
    with pytest.raises(StoreError, match=r"sums/\w: the saved sum says 0 updates .* damaged"):
        kept.recover(SIZE)
    kept._db.execute("UPDATE tasks SET report=? WHERE task='t1-3'", (b'{"task": "\xff"',))
    flip(path, 16 * SIZE + 8, 5)
    with pytest.raises(StoreError, match=r"coordinator\.sqlite3: the report of t1-3 is damaged"):
        kept.recover(SIZE)
    kept.close_round(1, "committed", {}, 1.0)
    kept._db.execute("UPDATE rounds SET summary='{\"a'")
    text = r"coordinator\.sqlite3: the summary of round 1 is damaged"
    with pytest.raises(StoreError, match=text):
        kept.last_committed()
    with pytest.raises(StoreError, match=text):
        read_status(tmp_path)
    kept.close()


def test_a_sum_that_the_version_before_wrote_has_no_checksum(tmp_path: Path) -> None:
    total, _ = folded(tmp_path)
    old = Store(tmp_path, BUNDLE)
    old.put("sum_crc32", None)
    old.close()
    again = Store(tmp_path, BUNDLE)
    opened = again.recover(SIZE)
    assert opened is not None
    np.testing.assert_array_equal(exact_mean.mean(opened.total), exact_mean.mean(total))
    again.close()


def lose_database(folder: Path) -> None:
    for path in folder.glob(f"{store.DATABASE}*"):
        path.unlink()


def test_a_lost_or_an_empty_database_beside_models_is_refused(tmp_path: Path) -> None:
    kept = Store(tmp_path, BUNDLE)
    for version in range(3):
        kept.save_model(version, version, np.zeros(SIZE, np.float32), {}, 0.0)
    kept.close()
    lose_database(tmp_path)
    text = r"has models up to version 2, but coordinator\.sqlite3 there is lost or empty\. Put it back from a backup"
    for _ in range(2):  # the first leaves a database without tables
        with pytest.raises(StoreError, match=text):
            Store(tmp_path, BUNDLE)
    lose_database(tmp_path)
    (tmp_path / store.DATABASE).touch()
    with pytest.raises(StoreError, match=text):
        Store(tmp_path, BUNDLE)
    empty = Store(tmp_path / "other", BUNDLE)
    empty.close()
    lose_database(tmp_path)
    (tmp_path / "other" / store.DATABASE).rename(tmp_path / store.DATABASE)  # one with tables, and no model in them
    with pytest.raises(StoreError, match=text):
        Store(tmp_path, BUNDLE)
    assert sorted(path.name for path in (tmp_path / "models").iterdir())[0] == "v00000000.safetensors"


def test_a_first_start_that_was_killed_begins_again(tmp_path: Path) -> None:
    """Version 0 was written, and not recorded."""
    kept = Store(tmp_path, BUNDLE)

    def killed() -> None:
        with kept.transaction():
            kept.save_model(0, 0, np.zeros(SIZE, np.float32), {}, 0.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        killed()
    kept.close()
    again = Store(tmp_path, BUNDLE)
    assert again.model() is None
    again.close()


def test_a_refused_data_directory_is_not_locked(tmp_path: Path) -> None:
    Store(tmp_path, BUNDLE).close()
    with pytest.raises(StoreError, match="another bundle"):
        Store(tmp_path, "c" * 64)
    Store(tmp_path, BUNDLE).close()


def test_any_flipped_bit_of_a_model_s_file_is_named(tmp_path: Path) -> None:
    """In its header, the vector or the server optimizer's state; also where a model is read from outside."""
    kept, vector = Store(tmp_path, BUNDLE), updates(1)[0][:20]
    kept.save_model(1, 1, vector, {"m": vector * 2, "v": vector * 3}, 0.0)
    path = kept.model_path(1)
    size, named = path.stat().st_size, 0
    header = size - 3 * vector.nbytes
    for place in range(size):
        flip(path, place, place % 8)
        with suppress(StoreError):
            found = kept.model()
            assert found is not None
            assert found[1].tobytes() == vector.tobytes()
            assert place < header, "a blank, or a word that says nothing"
            named -= 1
        named += 1
        with suppress(StoreError):
            assert read_model(tmp_path)[1].tobytes() == vector.tobytes()
        flip(path, place, place % 8)
    assert kept.model() is not None
    assert named > 3 * vector.nbytes
    path.unlink()
    with pytest.raises(StoreError, match=r"v00000001\.safetensors is missing"):
        kept.model()
    kept.close()


def test_a_full_database_is_named_as_such(tmp_path: Path) -> None:
    """SQLite ends the transaction by itself; what comes out is the cause, not that there is nothing to roll back."""
    kept = Store(tmp_path, BUNDLE)
    pages = kept._db.execute("PRAGMA page_count").fetchone()[0]
    kept._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"), kept.transaction():
        kept.put("a", "x" * 100_000)
    kept.put("b", 1)
    assert kept.get("a") is None


def test_a_model_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    kept, vector = Store(tmp_path, BUNDLE), np.zeros(SIZE, np.float32)
    with largest_file(1000), pytest.raises(StoreError, match=r"v00000001.draft cannot be written"):
        kept.save_model(1, 1, vector, {}, 0.0)
    kept.save_model(1, 1, vector, {}, 0.0)
    path = kept.model_path(1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StoreError, match=r"v00000001.safetensors is damaged"):
        kept.model()
