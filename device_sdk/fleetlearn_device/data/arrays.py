"""Files of NumPy arrays: .npz, .npy and folders of .npy. Large ones stay on the disk, and are read
batch by batch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.npz import SAVEZ, NpzError, read_npz
from numpy.typing import NDArray

from fleetlearn_device.data.raw import Choices, RawRows, RawSource, files_version, missing
from fleetlearn_device.runtimes.checks import DataError

MAPPED_FROM = 64 * 2**20
"""Bytes of a file from which on it is mapped. A smaller one is read: who writes over a mapped file
ends the process that reads it."""
LOCAL_HEADER = 30
"""Bytes of a zip's local header before the file's name."""


def open_npz(path: Path, choices: Choices) -> RawSource:
    """An .npz file. A large one is mapped, unless numpy.savez_compressed wrote it."""

    def load() -> RawRows:
        try:
            large = path.exists() and path.stat().st_size >= MAPPED_FROM
            return RawRows((mapped_npz(path) if large else {}) or read_npz(path))
        except NpzError as error:
            raise DataError(str(error)) from None

    return RawSource(str(path), load, lambda: files_version(path))


def open_npy(path: Path, choices: Choices) -> RawSource:
    """One .npy file, by its name without the ending; for a structured array, by its fields."""

    def load() -> RawRows:
        array = _read_npy(path)
        if array.dtype.names is not None:
            return RawRows({name: array[name] for name in array.dtype.names}, of_text=True)
        return RawRows({path.stem: array})

    return RawSource(str(path), load, lambda: files_version(path))


def open_npy_folder(path: Path, choices: Choices) -> RawSource:
    """A folder of .npy files: each is the array of its name."""

    def files() -> list[Path]:
        return sorted(path.glob("*.npy"))

    def load() -> RawRows:
        found = {file.stem: _read_npy(file) for file in files()}
        if not found:
            raise DataError(f"{path} holds no .npy file; expected one for each array")
        return RawRows(found)

    return RawSource(str(path), load, lambda: (tuple(files()), files_version(*files())))


def mapped_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, mapped from the disk; empty if it is compressed or is no
    zip, which ``read_npz`` reads or says in words."""
    found: dict[str, NDArray[Any]] = {}
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or not entry.filename.endswith(".npy"):
                    return {}
                # The entry in the directory may have another extra field than the local header.
                file.seek(entry.header_offset)
                header = file.read(LOCAL_HEADER)
                name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
                begin = entry.header_offset + LOCAL_HEADER + name + extra
                array = _map(path, file, begin)
                if array is None or begin + entry.file_size < file.tell() + array.nbytes:
                    return {}
                found[entry.filename[:-4]] = array
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        return {}
    return found


def _map(path: Path, file: Any, begin: int) -> NDArray[Any] | None:
    """Return the array whose .npy bytes begin here. None: it holds Python objects."""
    file.seek(begin)
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        return None
    if 0 in shape:
        return np.empty(shape, dtype)
    order: Any = "F" if fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        mode: Any = "r" if path.stat().st_size >= MAPPED_FROM else None
        array: NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    except FileNotFoundError:
        raise missing(path, "an .npy file") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} is not a plain array (.npy), or is damaged: {in_words(error)}. {SAVEZ}"
        ) from None
    return array
