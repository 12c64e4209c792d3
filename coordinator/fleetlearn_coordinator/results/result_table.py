"""A table of results: as rows, as a frame of pandas or Polars, or in a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from fleetlearn_coordinator.results.errors import ResultsError

ResultRow: TypeAlias = dict[str, Any]
"""Column -> number or text. None: not measured."""


class ResultTable(NamedTuple):
    """Rows that may lack columns."""

    rows: Sequence[ResultRow]

    @property
    def columns(self) -> list[str]:
        """Return the names of all rows' columns, in the order in which they first come."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def polars(self) -> Any:
        """Return a ``polars.DataFrame``. Raises ResultsError where Polars is not installed."""
        frames = tool("polars")
        # Of all rows: a metric's first value may be a whole number and a later one not.
        return frames.DataFrame(self._by_column(), infer_schema_length=None, strict=False)

    def pandas(self) -> Any:
        """Return a ``pandas.DataFrame``. Raises ResultsError where pandas is not installed."""
        return tool("pandas").DataFrame(self._by_column())

    def write(self, file: Path) -> None:
        """Write the table, whole or not at all, in the format of the name's end: ``.parquet``,
        ``.csv`` or ``.jsonl``. Raises ResultsError for another end, OSError."""
        write = FORMATS.get(file.suffix)
        if write is None:
            raise ResultsError(
                f"{file} ends with none of {', '.join(FORMATS)}: the end says which format to write"
            )
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            write(self, temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def _by_column(self) -> dict[str, list[Any]]:
        return {name: [row.get(name) for row in self.rows] for name in self.columns}


def _write_parquet(table: ResultTable, file: Path) -> None:
    table.polars().write_parquet(file)


def _write_csv(table: ResultTable, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, table.columns, restval="")
        writer.writeheader()
        writer.writerows(table.rows)


def _write_jsonl(table: ResultTable, file: Path) -> None:
    file.write_bytes(msgspec.json.Encoder().encode_lines(table.rows))


FORMATS: dict[str, Callable[[ResultTable, Path], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def tool(module: str) -> Any:
    """Import a tool of the extra ``results``. Raises ResultsError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ResultsError(
            f"this needs {module.partition('.')[0]}, which cannot be imported here ({error}): "
            "pip install 'fleetlearn[results]'",
        ) from None
