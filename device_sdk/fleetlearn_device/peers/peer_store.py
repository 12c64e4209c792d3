"""What a peer keeps on its disk, in the folder peer/ of its state directory.

::

    record.json             step, votes, and which model is own         (record.py)
    own.N                   own: the model, then what stays on the device   (N counts commits)
    difference.NAME.N       the difference of exchange N with a neighbour
    status.json             how the peer is, for its owner

A file of numbers is raw float32 with the CRC-32 of the bytes at its end (4 bytes, little-endian).
The record is written last and names the files that belong to it, so a process that dies leaves the
peer before a commit or after it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
from fleetlearn_protocol.messages import Digest, Identifier
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_folder, sync_names, write_durably

FOLDER = "peer"
RECORD = "record.json"
_CRC = struct.Struct("<I")


class StoredRecord(msgspec.Struct):
    """The contents of record.json."""

    bundle: Digest
    record: PeerRecord
    own: int
    """The number of the file own.N."""
    run: Identifier | None = None
    """The training's name in the address book."""


class PeerStore:
    """The folder peer/. ``size``: elements of the model; ``kept_size``: of what stays beside it.

    ``run``: the training's name. Raises StateError, also where the folder is of another bundle or
    training.
    """

    def __init__(
        self, folder: Path, bundle: str, size: int, kept_size: int, run: str | None = None
    ) -> None:
        self.path, self._run = folder / FOLDER, run
        self._bundle, self._size, self._kept_size = bundle, size, kept_size
        self._own = 0
        self.record = PeerRecord()
        with os_errors_as_state_errors(self.path):
            self.path.mkdir(exist_ok=True)
            sync_names(self.path)
            stored = read_record(self.path)
            if stored is not None:
                if stored.bundle != bundle:
                    raise StateError(
                        f"{self.path} is of the bundle {stored.bundle[:12]}, and "
                        f"{bundle[:12]} was given: choose another state directory, or delete "
                        "that folder to begin again"
                    )
                if stored.run != run:
                    raise StateError(
                        f"{self.path} is of {_named(stored.run)}, and the address book is of "
                        f"{_named(run)}: choose another state directory, or delete that folder to "
                        "begin again. With its old step this peer would end the others' training"
                    )
                self.record, self._own = stored.record, stored.own
            self._clean()

    @property
    def is_new(self) -> bool:
        """Nothing was committed yet."""
        return self._own == 0

    def own(self) -> tuple[Vector, Vector]:
        """Return own, shape (size,), and what stays on the device, shape (kept_size,). Raises
        StateError."""
        whole = self._read(self.path / f"own.{self._own}", self._size + self._kept_size)
        return whole[: self._size], whole[self._size :]

    def difference(self, neighbour: str, number: int) -> Vector:
        """Return a difference, shape (size,). Raises StateError."""
        return self._read(self.path / f"difference.{neighbour}.{number}", self._size)

    def commit(self, record: PeerRecord, own: Vector, kept: Vector) -> None:
        """Replace record and own, both or neither. Raises StateError."""
        with os_errors_as_state_errors(self.path):
            self._write(self.path / f"own.{self._own + 1}", own, kept)
            self._own += 1
            self.save(record)
            self._clean()

    def save_difference(self, neighbour: str, number: int, difference: Vector) -> None:
        """Write a difference; the record that names it comes next. Raises StateError."""
        with os_errors_as_state_errors(self.path):
            self._write(self.path / f"difference.{neighbour}.{number}", difference)

    def save(self, record: PeerRecord) -> None:
        """Replace the record. Raises StateError."""
        self.record = record
        with os_errors_as_state_errors(self.path):
            stored = StoredRecord(self._bundle, record, self._own, self._run)
            write_durably(self.path / RECORD, checked_json(stored))

    def _clean(self) -> None:
        """Remove the files that the record does not name."""
        edges = self.record.edges.items()
        named = {f"difference.{name}.{edge.have}" for name, edge in edges if not edge.applied}
        named.add(f"own.{self._own}")
        for pattern in ("own.*", "difference.*"):
            for path in self.path.glob(pattern):
                if path.name not in named:
                    path.unlink()
        sync_folder(self.path)

    @staticmethod
    def _write(path: Path, *vectors: Vector) -> None:
        contents = [np.ascontiguousarray(vector, "<f4").data.cast("B") for vector in vectors]
        crc = 0
        for content in contents:
            crc = checksum(content, crc)
        write_durably(path, *contents, _CRC.pack(crc))

    @staticmethod
    def _read(path: Path, size: int) -> Vector:
        with os_errors_as_state_errors(path):
            content = path.read_bytes()
        body = memoryview(content)[: -_CRC.size]
        if len(content) != 4 * size + _CRC.size or _CRC.pack(checksum(body)) != content[-4:]:
            raise StateError(
                f"{path} is damaged. Delete the folder {path.parent}: the peer then begins again, "
                "with a neighbour's newest model"
            )
        return np.frombuffer(body, "<f4")


def _named(run: str | None) -> str:
    return "a training without a name" if run is None else f"the training {run}"


def read_record(folder: Path) -> StoredRecord | None:
    """Return the record of a folder peer/, or None where there is none. Raises StateError
    (damaged), OSError."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return read_checked_json(path.read_bytes(), StoredRecord)
    except msgspec.DecodeError as error:
        raise StateError(
            f"{path} is damaged ({error}). Delete the folder {folder}: the peer then begins again, "
            "with a neighbour's newest model"
        ) from None
