"""Finds out of what kind data are, by a path's ending or by a ``kind:`` before it, and opens
them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from fleetlearn_protocol.paths import in_home

from fleetlearn_device.data.arrays import open_npy, open_npy_folder, open_npz
from fleetlearn_device.data.buffer_format import MAGIC
from fleetlearn_device.data.buffer_source import open_buffer
from fleetlearn_device.data.csv_file import open_csv
from fleetlearn_device.data.images import ENDINGS, open_images
from fleetlearn_device.data.parquet import open_parquet
from fleetlearn_device.data.raw import Choices, RawSource
from fleetlearn_device.data.sounds import open_sounds
from fleetlearn_device.data.sqlite import open_sqlite
from fleetlearn_device.runtimes.checks import DataError


class SourceKind(NamedTuple):
    """One kind of data."""

    open: Callable[[Path, Choices], RawSource]
    endings: tuple[str, ...] = ()
    """Endings of the files that are of this kind, in small letters."""
    holds: tuple[str, ...] = ()
    """Endings of files; a folder with such files is of this kind."""


SOURCES: dict[str, SourceKind] = {
    "npz": SourceKind(open_npz, (".npz",)),
    "npy": SourceKind(open_npy, (".npy",)),
    "npy-folder": SourceKind(open_npy_folder, holds=(".npy",)),
    "csv": SourceKind(open_csv, (".csv", ".tsv", ".txt")),
    "parquet": SourceKind(open_parquet, (".parquet", ".pq")),
    "sqlite": SourceKind(open_sqlite, (".db", ".sqlite", ".sqlite3")),
    "buffer": SourceKind(open_buffer, (".flb",)),
    "images": SourceKind(open_images, holds=ENDINGS),
    "sounds": SourceKind(open_sounds, holds=(".wav",)),
}
"""By the name that may stand before the path: ``csv:readings.log``. Another kind is a row here."""

BEGINNINGS = {
    b"PK": "npz",
    b"\x93NUMPY": "npy",
    b"SQLite format 3": "sqlite",
    b"PAR1": "parquet",
    MAGIC: "buffer",
}
"""How files begin that say of themselves of what kind they are, whatever their names."""

_KIND = re.compile(r"([a-z][a-z-]+):(.+)", re.DOTALL)
_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)")


def parse(text: str) -> tuple[str | None, str, dict[str, object]]:
    """Take ``[KIND:]PATH[?NAME=VALUE&...]`` apart: kind (None: not said), path, options.

    %26 stands for & in a value, %25 for %.
    """
    kind = None
    if (found := _KIND.fullmatch(text)) and found[1] in SOURCES:
        kind, text = found[1], found[2]
    path, mark, after = text.partition("?")
    # A file may have a question mark in its name.
    if not mark or _exists(text):
        return kind, text, {}
    options: dict[str, object] = {}
    for part in after.split("&"):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise DataError(
                f"{text}: {part!r} stands behind the ?; expected NAME=VALUE, several with & "
                "between, such as ?x=ax,ay,az&y=label"
            )
        options[unquote(name)] = unquote(value)
    return kind, path, options


def is_function(text: str) -> bool:
    """Return whether the text is ``module:function``, and no kind or file."""
    found = _FUNCTION.fullmatch(text)
    return found is not None and found[1] not in SOURCES and not _exists(text)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # no name that a file can have
        return False


def call_function(text: str) -> Any:
    """Return what ``module:function`` returns. The module may be in the current folder.

    Raises DataError where there is no such function.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module is there, and imports another that is not
        raise DataError(
            f"{text}: there is no module {module_name}, neither installed nor in {here}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"{text}: the module {module_name} has no function {name}")
    return function()


def open_source(text: str, kind: str | None = None, **options: object) -> tuple[RawSource, Choices]:
    """Open ``[KIND:]PATH[?NAME=VALUE&...]``: the source, and which arrays of the bundle were
    declared of which columns.

    Raises DataError: a kind that cannot be found out, an option with a wrong value.
    """
    said, path_text, written = parse(text)
    try:
        path = in_home(path_text)
    except ValueError as error:
        raise DataError(str(error)) from None
    choices = Choices(path_text, {**written, **options})
    return SOURCES[kind or said or _kind_of(path)].open(path, choices), choices


def _kind_of(path: Path) -> str:
    if path.is_dir():
        for name, row in SOURCES.items():
            if any(_holds(path, row.holds)):
                return name
    for name, row in SOURCES.items():
        if path.suffix.lower() in row.endings:
            return name
    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(16)
        for start, name in BEGINNINGS.items():
            if begin.startswith(start):
                return name
    if not path.exists():
        raise DataError(
            f"{path} does not exist; expected a file or folder of data: "
            f"{', '.join(f'{name} ({_forms(row)})' for name, row in SOURCES.items())}, or "
            "module:function"
        )
    raise DataError(
        f"{path}: its ending does not say of what kind the data are; say KIND:{path}, where "
        f"KIND is one of {', '.join(SOURCES)}"
    )


def _holds(folder: Path, endings: tuple[str, ...]) -> Any:
    """Yield True for a file of these endings in the folder or in a folder of it."""
    for file in (*folder.glob("*"), *folder.glob("*/*")):
        if file.suffix.lower() in endings:
            yield True


def _forms(row: SourceKind) -> str:
    if row.endings:
        return ", ".join(row.endings)
    return f"a folder with {row.holds[0]}"
