"""Damage in a database's log is found; what a killed process leaves is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.wal_check import check_wal

WRITER = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA journal_mode=WAL")
database.execute("PRAGMA synchronous=OFF")
database.execute("PRAGMA wal_autocheckpoint=40")
database.execute("PRAGMA cache_size=5")
database.execute("CREATE TABLE texts(text TEXT)")
for row in range(int(sys.argv[2])):
    database.execute("INSERT INTO texts VALUES(?)", ("x" * 3000,))
    if row % 7 == 3:
        database.execute("BEGIN")
        database.executemany("INSERT INTO texts VALUES(?)", [("y" * 3000,)] * 12)
        database.execute("ROLLBACK")
os.kill(os.getpid(), signal.SIGKILL)
"""
"""It is killed after so many transactions, among others that were rolled back after they were
written to the log."""


def killed(folder: Path, transactions: int) -> Path:
    path = folder / "a.db"
    done = subprocess.run([sys.executable, "-c", WRITER, path, str(transactions)], check=False)
    assert done.returncode == -signal.SIGKILL
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("killed"), 25).parent


@pytest.mark.parametrize("transactions", [1, 5, 25, 60])
def test_what_a_killed_process_leaves_is_intact(tmp_path: Path, transactions: int) -> None:
    path = killed(tmp_path, transactions)
    check_wal(path)
    path.with_name("a.db-shm").unlink()
    check_wal(path)


@pytest.mark.parametrize("cut", [1, 4000, 5000, 9000])
def test_a_frame_that_was_being_written(template: Path, tmp_path: Path, cut: int) -> None:
    """The index has not heard of the last transaction yet."""
    path = shutil.copytree(template, tmp_path / "copy") / "a.db"
    path.with_name("a.db-shm").unlink()
    wal = path.with_name("a.db-wal")
    os.truncate(wal, wal.stat().st_size - cut)
    check_wal(path)


def flipped(place: float) -> Callable[[bytearray], bytes]:
    def flip(content: bytearray) -> bytes:
        content[int(place * (len(content) - 1))] ^= 1
        return bytes(content)

    return flip


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "nothing is left": lambda content: b"",
    "less than the header is left": lambda content: bytes(content[:20]),
    "the header is left": lambda content: bytes(content[:32]),
    "half is left": lambda content: bytes(content[: len(content) // 2]),
    **{f"a byte at {place} is changed": flipped(place) for place in (0.0, 0.0001, 0.1, 0.3, 0.5)},
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("with_index", [True, False])
def test_damage_is_named(template: Path, tmp_path: Path, how: str, with_index: bool) -> None:
    path = shutil.copytree(template, tmp_path / "copy") / "a.db"
    wal = path.with_name("a.db-wal")
    wal.write_bytes(DAMAGES[how](bytearray(wal.read_bytes())))
    if not with_index:
        path.with_name("a.db-shm").unlink()
    if with_index or "byte" in how:
        with pytest.raises(
            StoreError, match=r"a\.db-wal is damaged or lost: .* Put it back from a backup"
        ):
            check_wal(path)
    else:  # a shorter log is as good as any
        check_wal(path)


def test_a_lost_log_is_named(template: Path, tmp_path: Path) -> None:
    path = shutil.copytree(template, tmp_path / "copy") / "a.db"
    path.with_name("a.db-wal").unlink()
    with pytest.raises(StoreError, match="damaged or lost"):
        check_wal(path)
    path.with_name("a.db-shm").unlink()
    check_wal(path)


def test_no_database_yet(tmp_path: Path) -> None:
    check_wal(tmp_path / "a.db")
