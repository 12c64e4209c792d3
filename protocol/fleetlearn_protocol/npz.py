"""Reading the arrays of an .npz file, and saying in words what a file is that is none."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import in_words

ZIP, NPY = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"
"""How an .npz file, which is a zip, and an .npy file begin."""
SAVEZ = "numpy.savez(path, x=..., y=...) writes one"


TABLE = (
    "A table with a line of names and the label in its last column becomes one by: "
    "t = numpy.loadtxt('mine.csv', delimiter=',', skiprows=1); "
    "numpy.savez('mine.npz', x=t[:, :-1], y=t[:, -1].astype(int)), "
    "with the names of the bundle's arrays in place of x and y"
)
"""How a CSV file is converted."""


class NpzError(ValueError):
    """A file whose arrays cannot be read. The text names the file, what it is, and what was
    expected."""


def read_npz(
    path: str | os.PathLike[str], choose: Callable[[list[str]], Iterable[str]] | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by name. ``choose``: takes all names, returns those to
    read. Default: all.

    Raises NpzError: no such file, not an .npz, arrays of Python objects in it, a damaged file.
    """
    path = Path(path)
    try:
        # Read through a file of our own: np.load leaves the file open when the content is damaged.
        with path.open("rb") as file:
            begin = file.read(64)
            if begin[:4] not in ZIP:
                convert = f". {TABLE}" if _is_text(begin) else ""
                raise NpzError(
                    f"{path} {_described(begin)}; expected an .npz file of plain arrays: "
                    f"{SAVEZ}{convert}"
                )
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            names = list(archive.files)
            return {
                name: _read(archive, name) for name in (names if choose is None else choose(names))
            }
    except FileNotFoundError:
        raise NpzError(f"{path} does not exist; expected an .npz file") from None
    except NpzError as error:
        raise NpzError(
            str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        ) from None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise NpzError(
            f"{path} is not an .npz file of plain arrays, or is damaged: {in_words(error)}"
        ) from None


def _read(archive: Any, name: str) -> NDArray[Any]:
    """Return an array of the archive. Raises NpzError."""
    try:
        array = archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise NpzError(
            f"the array {name} holds Python objects; expected plain arrays: numbers alone, such as "
            f"numpy.asarray({name}, numpy.float32)"
        ) from None
    if not isinstance(array, np.ndarray):  # numpy gives other files of a zip as bytes
        raise NpzError(
            f"it is a zip with other files than arrays in it, such as {name}: a file of PyTorch or "
            f"of a spreadsheet, for example; expected an .npz file: {SAVEZ}"
        )
    return array


def _described(begin: bytes) -> str:
    """Return what a file is that begins so, and is no zip."""
    if not begin:
        return "is empty"
    if begin.startswith(NPY):
        return "is a single array (.npy)"
    return "is a text file, such as CSV" if _is_text(begin) else "is a binary file of another kind"


def _is_text(begin: bytes) -> bool:
    # The last character may be cut in the middle.
    text = begin.decode("utf-8", "ignore")
    whole = begin and len(text.encode()) > len(begin) - 4
    return bool(whole) and all(letter.isprintable() or letter in "\t\r\n" for letter in text)
