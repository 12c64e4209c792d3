"""SQLite's errors name the file and say what to do."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.database import Tables, connect, open_shared
from fleetlearn_coordinator.storage.errors import (
    DuplicateRowError,
    StoreError,
    StoreUnavailableError,
)


def test_an_error_names_the_database_and_what_to_do(tmp_path: Path) -> None:
    database = connect(tmp_path / "a.db")
    database.execute("CREATE TABLE numbers(number INTEGER PRIMARY KEY)")
    database.executemany("INSERT INTO numbers VALUES(?)", [(1,), (2,)])
    assert database.execute("SELECT * FROM numbers").fetchall() == [(1,), (2,)]
    assert [*database.execute("SELECT * FROM numbers")] == [(1,), (2,)]
    with pytest.raises(DuplicateRowError):  # no fault of the file
        database.execute("INSERT INTO numbers VALUES(?)", (1,))
    with pytest.raises(StoreUnavailableError, match=r"a\.db: no such table: letters \[busy\]$"):
        database.execute("SELECT * FROM letters")
    database.execute("PRAGMA query_only=1")
    with pytest.raises(
        StoreUnavailableError, match=r"a\.db: attempt to write a readonly database; its file system"
    ):
        database.executemany("INSERT INTO numbers VALUES(?)", [(3,)])
    database.close()


def test_a_damaged_page_is_found_while_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    database = connect(path)
    database.execute("CREATE TABLE texts(text TEXT)")
    database.executemany("INSERT INTO texts VALUES(?)", [("x" * 1000,)] * 20)
    database.close()
    content = bytearray(path.read_bytes())
    content[3 * 4096 : 3 * 4096 + 100] = bytes(100)
    path.write_bytes(content)
    database = connect(path, read_only=True)
    with pytest.raises(
        StoreUnavailableError, match="malformed; it is damaged: put it back from a backup"
    ):
        [*database.execute("SELECT * FROM texts")]
    with pytest.raises(
        StoreUnavailableError, match="malformed; it is damaged: put it back from a backup"
    ):
        database.execute("SELECT * FROM texts").fetchall()
    database.close()


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(
        StoreUnavailableError, match=r"a\.db: unable to open database file; check its folder"
    ):
        connect(tmp_path / "missing" / "a.db")


TABLES = Tables(
    1,
    ("CREATE TABLE numbers(number INTEGER)",),
    ("CREATE TABLE IF NOT EXISTS letters(letter TEXT)",),
)


def open_it(path: Path) -> closing[object]:
    return closing(open_shared(path, TABLES, timeout=1.0, mode=0o600))


def no_links(source: Path, target: Path) -> None:
    raise OSError("Operation not permitted")


def made_meanwhile(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
    raise FileExistsError


@pytest.mark.parametrize("link", [None, no_links, made_meanwhile])
def test_a_shared_database_is_made_with_its_tables_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: object
) -> None:
    if link is not None:
        monkeypatch.setattr(os, "link", link)
    path = tmp_path / "folder" / "a.db"
    with open_it(path):
        pass
    assert [*path.parent.iterdir()] == [path]
    assert link is made_meanwhile or stat.S_IMODE(path.stat().st_mode) == 0o600
    with closing(connect(path)) as found:
        assert found.execute("SELECT name FROM sqlite_schema").fetchall() == [
            ("numbers",),
            ("letters",),
        ]
        found.execute("INSERT INTO numbers VALUES(1)")
    with open_it(path), closing(connect(path)) as found:
        assert found.execute("SELECT * FROM numbers").fetchall() == [(1,)]


def test_a_shared_database_that_became_empty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    with pytest.raises(
        StoreError, match=r"a\.db is empty: its content is lost\. Put the file back from a backup"
    ):
        open_it(path)
    path.unlink()
    with open_it(path):
        pass
