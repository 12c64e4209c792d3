"""CSV files: columns by the names in the first line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_device.data.raw import Choices, RawRows, RawSource, files_version, missing
from fleetlearn_device.runtimes.checks import DataError

TOGETHER = 20_000
"""Rows that are converted together: their text takes ten times the room of their numbers."""
DELIMITERS = ",;\t|"


def open_csv(path: Path, choices: Choices) -> RawSource:
    """A CSV file. Its first line names the columns, unless all of that line are numbers: then they
    are 0, 1, 2 and so on.

    Options: delimiter (the one of , ; tab | that the first line has most of).
    """
    delimiter = choices.text("delimiter")
    if len(delimiter) > 1:
        delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
    if len(delimiter) > 1:
        raise DataError(f"{path}: the option delimiter is {delimiter!r}; expected one character")
    return RawSource(str(path), lambda: read_csv(path, delimiter), lambda: files_version(path))


def read_csv(path: Path, delimiter: str = "") -> RawRows:
    """Return a CSV file's columns: float64, or text where a cell is no number.

    Raises DataError: no such file, no row, a line with another number of cells than the first.
    """
    try:
        # One byte of another encoding, in a remark for example, should not stop the training.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            return _read(file, path, delimiter)
    except FileNotFoundError:
        raise missing(path, "a CSV file") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {in_words(error)}") from None


def _read(file: TextIO, path: Path, delimiter: str) -> RawRows:
    first = file.readline()
    delimiter = delimiter or max(DELIMITERS, key=first.count)
    cells = next(csv.reader([first], delimiter=delimiter), [])
    named = not all(map(_is_number, cells))
    names = [cell.strip() for cell in cells] if named else [str(i) for i in range(len(cells))]
    if not cells or len(set(names)) < len(names):
        raise DataError(
            f"{path}: the first line is {first.strip()[:60]!r}; expected the columns' names, each "
            "once"
        )
    text: set[str] = set()
    while True:
        file.seek(0)
        if named:
            file.readline()
        lines: list[int] = []
        found = _columns(file, path, delimiter, names, text, lines, 1 + named)
        if isinstance(found, set):
            text |= found  # read once more: the rows before were taken for numbers
            continue
        if not lines:
            raise DataError(f"{path} has no row of data; expected at least one")
        return RawRows(found, partial(_line, np.array(lines, np.int64)), of_text=True)


def _columns(
    file: TextIO,
    path: Path,
    delimiter: str,
    names: list[str],
    text: set[str],
    lines: list[int],
    line: int,
) -> dict[str, NDArray[Any]] | set[str]:
    """Return the columns, or the names of those that turned out to hold text."""
    blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    reader = csv.reader(file, delimiter=delimiter)
    rows = _numbered(reader, path, len(names), line, lines)
    surprises: set[str] = set()
    while block := list(islice(rows, TOGETHER)):
        for name, column in zip(names, zip(*block, strict=True), strict=True):
            if name not in text:
                try:
                    blocks[name].append(np.array(column, np.float64))
                    continue
                except ValueError:
                    surprises.add(name)
            blocks[name].append(np.array(column))
    if surprises:
        return surprises
    return {name: np.concatenate(parts) for name, parts in blocks.items() if parts}


def _numbered(
    reader: Any, path: Path, cells: int, line: int, lines: list[int]
) -> Iterator[list[str]]:
    """Yield the rows, and note in ``lines`` on which line of the file each begins. Empty lines are
    left out."""
    before = 0
    for row in reader:
        begin, before = line + before, reader.line_num
        if not row:
            continue
        if len(row) != cells:
            raise DataError(
                f"{path}, line {begin}: {len(row)} cells; the first line has {cells}. Text with "
                "the delimiter in it stands in quotation marks"
            )
        lines.append(begin)
        yield row


def _line(numbers: NDArray[np.int64], row: int) -> str:
    return f"line {numbers[row]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
