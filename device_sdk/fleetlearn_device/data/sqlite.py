"""The result of a query to an SQLite database, which is opened read-only."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.data.raw import Choices, RawRows, RawSource, files_version, missing
from fleetlearn_device.runtimes.checks import DataError

BUSY = 10.0
"""Seconds to wait for a program that writes."""


def open_sqlite(path: Path, choices: Choices) -> RawSource:
    """The rows that a query gives, by the names of its columns.

    Options: query (needed); nulls (refuse, or missing: NaN in a column of numbers, else an empty
    text).
    """
    query = choices.text("query")
    missing_too = choices.one_of("nulls", ("refuse", "missing")) == "missing"
    if not query:
        raise DataError(
            f"{path}: an SQLite database was given without a query; say ?query=SELECT ax, ay, "
            "label FROM motion, with %26 for & and %25 for %"
        )
    # In WAL mode the rows are in a second file first.
    wal = path.with_name(path.name + "-wal")
    return RawSource(
        str(path),
        lambda: read_query(path, query, nulls=missing_too),
        lambda: files_version(path, wal),
    )


def read_query(path: Path, query: str, *, nulls: bool = False) -> RawRows:
    """Return the columns of the query's result: float64, int64 or text.

    nulls: whether NULL is a missing value. Raises DataError: no such file, SQL that fails, no row,
    bytes or an unwanted NULL in a row.
    """
    import sqlite3  # here: a device that reads no database does without it

    if not path.exists():
        raise missing(path, "an SQLite database")
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", timeout=BUSY, uri=True)
        ) as database:
            cursor = database.execute(query)
            if cursor.description is None:
                raise DataError(f"{path}: the query {query!r} gives no rows; expected a SELECT")
            names = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path}: the query {query!r} failed: {error}") from None
    if not rows:
        raise DataError(f"{path}: the query {query!r} gave no row; expected at least one")
    columns = zip(*rows, strict=True)
    arrays = {
        name: _column(_without_nulls(values) if nulls else values, name, path)
        for name, values in zip(names, columns, strict=True)
    }
    return RawRows(arrays, lambda row: f"row {row + 1} of the query", of_text=True)


def _column(values: tuple[Any, ...], name: str, path: Path) -> NDArray[Any]:
    for row, value in enumerate(values):
        if value is None or isinstance(value, bytes):
            raise DataError(
                f"{path}, row {row + 1} of the query, {name}: "
                f"{'NULL' if value is None else 'bytes'}; expected a number or text. Leave such "
                f"rows out: WHERE {name} IS NOT NULL"
            )
    return np.array(values)


def _without_nulls(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a column with what stands for a missing value in the place of NULL."""
    is_text = any(isinstance(value, str) for value in values)
    absent: Any = "" if is_text else float("nan")
    return tuple(absent if value is None else value for value in values)
