"""The blobs of a run in plain files: ``uploads/slot-NNNN`` (spool files), ``sums/a`` and ``b``,
``models/``.

Spool files are used again and again: the first write to a fresh 4 MiB file costs ten times as much
CPU as writing it again (page allocation). ``kill -9`` loses nothing that was written, because the
kernel keeps it. With ``power`` files are also fsynced, so that a power cut loses nothing either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import Code, in_words
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.vector import checksum, digest
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fleetlearn_coordinator.storage.arrived import is_arrived
from fleetlearn_coordinator.storage.blobs import PARAMETERS, PART_BYTES, Tensors
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.file_bytes import FileBytes
from fleetlearn_coordinator.storage.served_objects import ServedObjects
from fleetlearn_coordinator.storage.sum_file import read_sum
from fleetlearn_coordinator.storage.synced_names import sync_names

MODELS, UPLOADS, SUMS_FOLDER, SUMS = "models", "uploads", "sums", ("a", "b")
LENT = "lent"
"""A file beside the spool files: they were lent to other processes once."""
WRITTEN_BYTES = 2**24
"""Bytes of a saved sum that are written before the lock is looked at again."""


class FileModels:
    """``StoredModels`` in a data directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model_versions(self) -> list[int]:
        return model_versions(self.folder)

    def model_size(self, version: int) -> int | None:
        try:
            return model_path(self.folder, version).stat().st_size
        except FileNotFoundError:
            return None

    def load_model(self, version: int, sha256: str) -> dict[str, NDArray[Any]]:
        return load_model(model_path(self.folder, version), sha256)

    def open_tensor(self, version: int, name: str = PARAMETERS) -> FileBytes:
        path = model_path(self.folder, version)
        try:
            file = FileBytes(path)
            length = int.from_bytes(file.read(0, 8), "little")
            header = json.loads(file.read(8, length))
        except FileNotFoundError:
            text = f"{path} is missing; put it back from a backup"
            raise StoreError(Code.UNKNOWN_CONTENT, text) from None
        except OSError as error:
            text = f"{path} cannot be opened: {in_words(error)}"
            raise StoreUnavailableError(Code.BUSY, text) from None
        except ValueError as error:
            text = f"{path} is damaged: {error}; put it back from a backup"
            raise StoreError(Code.WRONG_HASH, text) from None
        if name not in header:
            text = f"{path} has no tensor {name}: an earlier version wrote it"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
        # The length of the header, the header, and the tensors one after the other.
        begin, end = header[name]["data_offsets"]
        return file.narrow(8 + length + begin, end - begin)

    def where_model(self, version: int) -> str:
        return str(model_path(self.folder, version))


class FileBlobs(FileModels):
    """``Blobs`` in a data directory."""

    is_slow = False
    served: ServedObjects | None = None

    def __init__(
        self,
        folder: Path,
        *,
        power: bool = False,
        spool_files: int = 64,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """``spool_files``: how many may be in use before there is no room for another. ``check`` is
        called before anything is changed, in any thread: it raises where the run's lock may be
        another coordinator's by now."""
        super().__init__(folder)
        self._power, self._most, self._check = power, spool_files, check
        self._name = token_hex(4)
        """In the names of drafts: of those of a process that was paused when another took over."""
        (folder / MODELS).mkdir(exist_ok=True)
        (folder / UPLOADS).mkdir(exist_ok=True)
        if power:
            sync_names(folder)
        self._spool: list[int] = []
        """The open file descriptor of each spool file."""
        self._free: list[int] = []
        self._checkpoints: set[int] = set()
        """The spool files that have a checkpoint. Few do: no file is looked for."""
        self._sums: list[int] = []
        self._lent_before = (folder / UPLOADS / LENT).exists()
        """Whether an earlier process lent spool files to others, which may still be there."""
        self._distrusted: set[int] = set()
        """Numbers of files that a process without a right to it may write: they are replaced before
        they are used again."""

    def close(self) -> None:
        for descriptor in (*self._spool, *self._sums):
            os.close(descriptor)

    # --- spool files ---

    def has_room(self) -> bool:
        return len(self._spool) - len(self._free) < self._most

    def take_spool_file(self) -> int:
        if not self._free:
            self._add_spool_file()
        number = self._free.pop()
        if number in self._distrusted:
            self._replace_spool_file(number)
        return number

    def reserve_spool_file(self, number: int) -> None:
        if is_arrived(number):  # a file alone, in a copy of a run that has it as an object
            return
        while len(self._spool) <= number:
            self._add_spool_file()
        self._free.remove(number)

    def free_spool_file(self, number: int) -> None:
        if is_arrived(number):
            self._check()
            self._spool_path(number).unlink(missing_ok=True)
            return
        # first: the next upload must not be taken for this one
        self.drop_checkpoint(number)
        self._free.append(number)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        self._check()
        path = checkpoint_path(self.folder, number)
        draft = path.with_suffix(".draft")
        with suppress(OSError):  # such as a full disk: the upload then begins again after a death
            draft.write_bytes(content)
            draft.replace(path)
            self._checkpoints.add(number)

    def checkpoints(self) -> dict[int, bytes]:
        found = {}
        for path in (self.folder / UPLOADS).glob("slot-*.begun"):
            number = path.stem.removeprefix("slot-")
            if number.isdecimal() and path.with_suffix("").exists():
                found[int(number)] = path.read_bytes()
            else:
                path.unlink()
        self._checkpoints.update(found)
        return found

    def drop_checkpoint(self, number: int) -> None:
        if number in self._checkpoints:
            self._check()
            checkpoint_path(self.folder, number).unlink(missing_ok=True)
            self._checkpoints.discard(number)

    # Lent to other processes (lent_spool.py)

    def begin_lending(self) -> None:
        (self.folder / UPLOADS / LENT).touch()

    def mark_spool_file(self, number: int) -> int:
        return os.fstat(self._spool[number]).st_ino

    def has_spool_file(self, number: int, mark: int) -> bool:
        return number < len(self._spool) and self.mark_spool_file(number) == mark

    def claim_spool_file(self, number: int, mark: int) -> bool:
        while len(self._spool) <= number:
            self._add_spool_file()
        if number not in self._free or not self.has_spool_file(number, mark):
            return False
        self._free.remove(number)
        self._distrusted.discard(number)
        return True

    def distrust_spool_file(self, number: int) -> None:
        self._distrusted.add(number)

    def find_checkpoint(self, number: int) -> bytes | None:
        try:
            content = checkpoint_path(self.folder, number).read_bytes()
        except FileNotFoundError:
            return None
        self._checkpoints.add(number)
        return content

    def _replace_spool_file(self, number: int) -> None:
        self._check()
        path = self._spool_path(number)
        os.close(self._spool[number])
        path.unlink(missing_ok=True)
        self._spool[number] = os.open(path, os.O_RDWR | os.O_CREAT)
        self._distrusted.discard(number)
        if self._power:
            sync(self.folder / UPLOADS)

    # As they are written and read

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        self._check()
        with named_errors(self.where_spool_file, number):
            write_all(self._spool[number], content, offset)

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        path = self._spool_path(number)
        with named_errors(self.where_spool_file, number):
            if is_arrived(number):
                with path.open("rb", buffering=0) as file:
                    yield from read_parts(file.fileno(), path, size, begin, part_bytes)
            else:
                yield from read_parts(self._spool[number], path, size, begin, part_bytes)

    def settle_spool_files(self, sizes: Mapping[int, int]) -> None:
        for number in sizes if self._power else ():
            with named_errors(self.where_spool_file, number):
                os.fsync(self._spool[number])

    def _spool_path(self, number: int) -> Path:
        return spool_path(self.folder, number)

    def where_spool_file(self, number: int) -> str:
        return str(self._spool_path(number))

    def _add_spool_file(self) -> None:
        number = len(self._spool)
        if self._lent_before and self._spool_path(number).exists():
            self._distrusted.add(number)
        self._spool.append(os.open(self._spool_path(number), os.O_RDWR | os.O_CREAT))
        if self._power:  # a file survives a power cut only if its name does
            sync(self.folder / UPLOADS)
        self._free.append(number)

    # --- the aggregator's state ---

    def has_aggregator(self) -> bool:
        return (self.folder / SUMS_FOLDER).exists()

    def open_aggregator(self) -> None:
        (self.folder / SUMS_FOLDER).mkdir(exist_ok=True)
        self._sums = [
            os.open(self._sum_path(turn), os.O_RDWR | os.O_CREAT) for turn in range(len(SUMS))
        ]
        if self._power:
            sync(self.folder / SUMS_FOLDER)
            sync(self.folder)

    def save_aggregator(self, turn: int, tensors: Tensors) -> int:
        place = crc32 = 0
        with named_errors(self._sum_path, turn):
            for tensor in tensors.values():
                content = np.ascontiguousarray(tensor).data.cast("B")
                for begin in range(0, len(content), WRITTEN_BYTES):
                    self._check()
                    part = content[begin : begin + WRITTEN_BYTES]
                    write_all(self._sums[turn], part, place + begin)
                place, crc32 = place + len(content), checksum(content, crc32)
            if self._power:
                os.fsync(self._sums[turn])
        return crc32

    def load_aggregator(self, turn: int, like: Tensors, crc32: int) -> dict[str, NDArray[Any]]:
        return read_sum(self._sum_path(turn), like, crc32)

    def where_aggregator(self) -> str:
        return str(self.folder / SUMS_FOLDER)

    def _sum_path(self, turn: int) -> Path:
        return self.folder / SUMS_FOLDER / SUMS[turn]

    # --- models ---

    def save_model(self, version: int, tensors: Tensors) -> None:
        path = model_path(self.folder, version)
        draft = path.with_suffix(f".{self._name}.draft")
        self._check()
        try:
            save_file(dict(tensors), draft)
        except SafetensorError as error:  # what safetensors raises when the disk is full
            raise StoreError(Code.BUSY, f"{draft} cannot be written: {in_words(error)}") from None
        if self._power:
            sync(draft)
        self._check()
        draft.replace(path)
        if self._power:
            sync(path.parent)

    def drop_drafts(self) -> None:
        for pattern in ("*.draft", ".tmp*"):  # safetensors writes a file of a random name first
            for path in (self.folder / MODELS).glob(pattern):
                path.unlink()

    def drop_models(self, versions: Iterable[int]) -> None:
        for version in versions:
            self._check()
            model_path(self.folder, version).unlink(missing_ok=True)


def spool_path(folder: Path, number: int) -> Path:
    """Return the path of a spool file below a data directory."""
    return folder / UPLOADS / f"slot-{number:04d}"


def checkpoint_path(folder: Path, number: int) -> Path:
    """Return the path of a spool file's checkpoint below a data directory."""
    return spool_path(folder, number).with_suffix(".begun")


def model_path(folder: Path, version: int) -> Path:
    """Return the path of a model's file below a data directory."""
    return folder / MODELS / f"v{version:08d}.safetensors"


def model_versions(folder: Path) -> list[int]:
    """Return the versions of the models that have a file below a data directory, in order."""
    return sorted(int(file.stem[1:]) for file in (folder / MODELS).glob("v*.safetensors"))


def load_model(path: Path, sha256: str) -> dict[str, NDArray[Any]]:
    """Return the tensors of a model's file. Raises StoreError: missing, damaged, or not the model
    that was committed."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise StoreError(
            Code.UNKNOWN_CONTENT, f"{path} is missing; put it back from a backup"
        ) from None
    except SafetensorError as error:
        raise StoreError(
            Code.WRONG_HASH, f"{path} is damaged: {error}; put it back from a backup"
        ) from None
    if PARAMETERS not in tensors or digest(tensors[PARAMETERS]) != sha256:
        raise StoreError(
            Code.WRONG_HASH, f"{path} was changed after it was committed; put it back from a backup"
        )
    return tensors


@contextmanager
def named_errors(path_of: Callable[[int], object], number: int) -> Iterator[None]:
    """Let the OSErrors of files that are written and read by their descriptors name the file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path_of(number))
        raise


def write_all(descriptor: int, content: Buffer, offset: int) -> None:
    """Write everything. One call of pwrite may write less: above 2 GiB, or when the disk becomes
    full. Raises OSError."""
    written = os.pwrite(descriptor, content, offset)
    while written < len(content):
        written += os.pwrite(descriptor, memoryview(content)[written:], offset + written)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def read_parts(
    descriptor: int, path: Path, size: int, begin: int, part_bytes: int
) -> Iterator[memoryview]:
    """Yield bytes of a spool file that is open, as ``Blobs.read_spool_file`` does."""
    buffer = np.empty(min(size, part_bytes), np.uint8).data
    for place in range(0, size, len(buffer)):
        part = buffer[: size - place]
        if os.preadv(descriptor, [part], begin + place) != len(part):
            raise StoreError(
                Code.WRONG_LENGTH,
                f"{path} ends before its update's {begin + size} bytes: it is damaged",
            )
        yield part
