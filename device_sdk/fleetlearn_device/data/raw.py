"""What every kind of data becomes first: arrays and columns by name, and the words for a place in
them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import DataError

Raw = Mapping[str, NDArray[Any]]
"""Name -> array or column; the first axis of all of them counts the rows."""


class RawRows(NamedTuple):
    """The data as they are now."""

    arrays: Raw
    where: Callable[[int], str] = lambda row: f"example {row} (the first is 0)"
    """Row -> its place in words, such as ``line 7``."""
    ids: NDArray[np.uint64] | None = None
    """A number that each row keeps for ever, shape (rows,). None: the row's place."""
    of_text: bool = False
    """Whether the numbers were read from text or from a database, which says nothing of the dtype
    that is wanted."""


class RawSource(NamedTuple):
    """Where data come from."""

    name: str
    """What errors call the data: a path, for example."""
    load: Callable[[], RawRows]
    """Return the data as they are now. Raises DataError."""
    version: Callable[[], Hashable] = lambda: None
    """Return something that is different after the data changed; quick. Raises OSError where they
    are gone."""
    order: tuple[str, ...] = ()
    """Names that stand for the bundle's arrays in this order, where nothing else is declared."""


class Choices:
    """The options of a source: what stands behind the ``?`` of its path, or the keywords of
    ``open_data``."""

    def __init__(self, name: str, given: Mapping[str, object]) -> None:
        self.name = name
        self.left = dict(given)
        """Those that no source has taken: declarations of the bundle's arrays."""
        self._known: list[str] = []

    def text(self, key: str, default: str = "") -> str:
        """Take an option. Returns the default where it was not given."""
        self._known.append(key)
        return str(self.left.pop(key, default))

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """Take an option that is a whole number. Raises DataError."""
        text = self.text(key)
        if not text:
            return default
        if not text.isdecimal() or int(text) < least:
            raise DataError(
                f"{self.name}: the option {key} is {text!r}; expected a whole number of at least "
                f"{least}"
            )
        return int(text)

    def names(self, key: str) -> tuple[str, ...]:
        """Take an option that is a list: ``a,b,c``, or a sequence."""
        self._known.append(key)
        return as_names(self.left.pop(key, ()))

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        """Take an option that has one of these values, the first unless given. Raises DataError."""
        value = self.text(key, allowed[0])
        if value not in allowed:
            raise DataError(
                f"{self.name}: the option {key} is {value!r}; expected one of {', '.join(allowed)}"
            )
        return value

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return what is left: the name of an array of the bundle -> the columns it is made of."""
        return {key: as_names(value) for key, value in self.left.items()}

    def known(self) -> str:
        """Return the names of the options that the source has, for an error."""
        return ", ".join(self._known) or "none"


def as_names(value: object) -> tuple[str, ...]:
    """Return a list of names: from ``a,b,c``, from one name or from a sequence of them."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if isinstance(value, Sequence):
        return tuple(str(name) for name in value)
    return (str(value),)


def files_version(*paths: Path) -> Hashable:
    """Return what changes when one of the files is written: sizes and times. Files that are not
    there count as such."""
    found: list[Hashable] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns, status.st_ino))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


def missing(path: Path, expected: str) -> DataError:
    """Return the error for a path that is not there."""
    return DataError(f"{path} does not exist; expected {expected}")


def extra_missing(package: str, extra: str, what: str) -> DataError:
    """Return the error for an optional package that is not installed."""
    return DataError(
        f"{what} needs the package {package}, which is not installed: "
        f"pip install 'fleetlearn-device[{extra}]' or pip install {package}"
    )
