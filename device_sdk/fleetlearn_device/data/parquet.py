"""Parquet files, by Polars: one wheel without other dependencies for all Pythons, where pyarrow's
would be larger than all of the device's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetlearn_protocol.errors import in_words

from fleetlearn_device.data.frames import columns_of
from fleetlearn_device.data.raw import (
    Choices,
    RawRows,
    RawSource,
    extra_missing,
    files_version,
    missing,
)
from fleetlearn_device.runtimes.checks import DataError


def open_parquet(path: Path, choices: Choices) -> RawSource:
    """A Parquet file, by its columns. Options: columns (those to read; all unless given)."""
    wanted = choices.names("columns")
    return RawSource(str(path), lambda: read_parquet(path, wanted), lambda: files_version(path))


def read_parquet(path: Path, columns: Sequence[str] = ()) -> RawRows:
    """Return columns of a Parquet file; all if none are named. Raises DataError."""
    if not path.exists():
        raise missing(path, "a Parquet file")
    try:
        import polars
    except ImportError:
        raise extra_missing("polars", "parquet", f"{path}, a Parquet file,") from None
    try:
        frame = polars.read_parquet(path, columns=list(columns) or None)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {in_words(error)}") from None
    return columns_of(frame, str(path))
