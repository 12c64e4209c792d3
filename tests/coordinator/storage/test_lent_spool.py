"""Spool files in the hands of other processes: a process that lost its right to a file cannot write
the update that has its number by now."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.lent_spool import LendableSpool, LentSpool


def read(blobs: FileBlobs, number: int) -> bytes:
    return b"".join(map(bytes, blobs.read_spool_file(number, 4)))


def lend(blobs: FileBlobs, spool: LentSpool) -> int:
    number = blobs.take_spool_file()
    assert spool.open_file(number, blobs.mark_spool_file(number))
    return number


def test_a_lent_file_is_written_elsewhere(tmp_path: Path) -> None:
    blobs, spool = FileBlobs(tmp_path), LentSpool(tmp_path)
    assert isinstance(blobs, LendableSpool)
    blobs.begin_lending()
    number = lend(blobs, spool)
    spool.write(number, 0, b"four")
    assert read(blobs, number) == b"four"
    spool.close()


def test_who_is_distrusted_writes_into_a_file_that_is_nobodys(tmp_path: Path) -> None:
    blobs, lost, other = FileBlobs(tmp_path), LentSpool(tmp_path), LentSpool(tmp_path)
    blobs.begin_lending()
    number = lend(blobs, lost)
    mark = lost.mark_of(number)
    blobs.distrust_spool_file(number)
    blobs.free_spool_file(number)
    assert lend(blobs, other) == number
    other.write(number, 0, b"mine")
    lost.write(number, 0, b"late")
    assert read(blobs, number) == b"mine"
    assert not blobs.claim_spool_file(number, mark)
    blobs.free_spool_file(number)
    assert not blobs.claim_spool_file(number, mark), "it is free, and another file"
    assert blobs.claim_spool_file(number, other.mark_of(number))


def test_a_later_process_trusts_no_file_that_was_lent_before(tmp_path: Path) -> None:
    """Also one without gateways, and also where the earlier process was killed. Updates that count
    stay where they are."""
    before, gateway = FileBlobs(tmp_path), LentSpool(tmp_path)
    before.begin_lending()
    accepted, under_way = lend(before, gateway), lend(before, gateway)
    gateway.write(accepted, 0, b"kept")
    after = FileBlobs(tmp_path)
    after.reserve_spool_file(accepted)
    assert read(after, accepted) == b"kept"
    taken = after.take_spool_file()
    assert taken == under_way
    after.write_spool_file(taken, 0, b"mine")
    gateway.write(under_way, 0, b"late")
    assert read(after, taken) == b"mine"


def test_a_file_is_claimed_by_who_has_it_open(tmp_path: Path) -> None:
    before, gateway = FileBlobs(tmp_path), LentSpool(tmp_path)
    before.begin_lending()
    number = lend(before, gateway)
    after = FileBlobs(tmp_path)
    assert after.claim_spool_file(number, gateway.mark_of(number))
    gateway.write(number, 0, b"more")
    assert read(after, number) == b"more"
    assert not after.claim_spool_file(number, gateway.mark_of(number)), "once"


def test_nothing_is_replaced_where_nothing_was_lent(tmp_path: Path) -> None:
    """The first write to a fresh file costs ten times as much as writing it again."""
    before = FileBlobs(tmp_path)
    mark = before.mark_spool_file(before.take_spool_file())
    after = FileBlobs(tmp_path)
    assert after.mark_spool_file(after.take_spool_file()) == mark
