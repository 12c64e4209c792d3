"""Spool files that the coordinator's process lends to other processes of this machine (gateways),
which write arriving updates straight into them.

A lent file has a *mark* beside its number: the file of a number may be replaced by another one, of
another mark, which the process that has the earlier one open cannot reach. So a process that was
stopped for a while, and goes on, can do no harm to the update that has its number by now. (A mark
is the file's inode number, which no other file has while somebody has this one open.)
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.storage.blobs import PART_BYTES
from fleetlearn_coordinator.storage.file_blobs import (
    checkpoint_path,
    named_errors,
    read_parts,
    spool_path,
    write_all,
)
from fleetlearn_coordinator.storage.served_objects import ServedObjects


@runtime_checkable
class LendableSpool(Protocol):
    """Spool files that may be lent: what ``storage/file_blobs.py::FileBlobs`` has beside
    ``Blobs``."""

    folder: Path
    """Below it are the spool files, for ``LentSpool``."""

    def begin_lending(self) -> None:
        """Files are lent from now on. Later processes must know. Raises OSError."""

    def has_room(self) -> bool:
        """Return whether another spool file may be taken."""

    def take_spool_file(self) -> int:
        """Return the number of a free spool file. No process has this file open that was not told
        to leave it alone. Raises OSError."""

    def free_spool_file(self, number: int) -> None:
        """The bytes of the spool file are not needed any more."""

    def mark_spool_file(self, number: int) -> int:
        """Return the mark of the spool file that has this number now."""

    def has_spool_file(self, number: int, mark: int) -> bool:
        """Return whether this very file, free or not, has the number now."""

    def claim_spool_file(self, number: int, mark: int) -> bool:
        """Take this very file, which was lent by an earlier process or to a process that was lost.
        Returns False, and takes nothing, where it is taken or is another one now."""

    def distrust_spool_file(self, number: int) -> None:
        """The file was lent to a process that may still write it: once it is free, it is replaced
        by another one before it is taken again."""

    def find_checkpoint(self, number: int) -> bytes | None:
        """Return the checkpoint that a process to which the file was lent has written, if any. From
        then on it goes with the file. Raises OSError."""

    def drop_checkpoint(self, number: int) -> None:
        """Remove the checkpoint that was found. Raises OSError."""


@runtime_checkable
class ArrivedSpool(LendableSpool, Protocol):
    """What ``storage/object_blobs.py::ObjectBlobs`` has beside ``LendableSpool``."""

    served: ServedObjects

    @property
    def generation(self) -> int:
        """The generation of this coordinator: above those of all before it."""

    @property
    def where_objects(self) -> str:
        """The URL below which the run's objects are."""

    def has_arrived(self, number: int, size: int, *, fetch: bool) -> bool:
        """Return whether a gateway put this object, of ``size`` bytes. ``fetch``: whether its
        bytes are needed here soon. Waits for the store; may be called in any thread. Raises
        StoreUnavailableError, OSError."""

    def take_arrived(self, number: int) -> None:
        """An update is there as an object, which is needed until ``free_spool_file``."""

    def check_owner(self) -> None:
        """Raise StoreError where another coordinator may have the run by now."""

    def fetch_partial_sum(self, number: int, path: Path) -> None:
        """Write to a file what a gateway on another machine has added up, and remove the object.
        May be called in any thread. Raises StoreError, OSError."""

    def drop_orphans(self, live: Container[int], sums: Container[int] = ()) -> None:
        """Remove what arrived and does not count, and partial sums. ``live``: numbers that a
        gateway may be using. ``sums``: those of partial sums that are waited for, also as they
        are asked for or come meanwhile. Waits for the store; may be called in any thread. Raises
        StoreUnavailableError."""


class LentSpool:
    """The spool files that were lent to this process. Those of the ``folder`` of a
    ``LendableSpool``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, tuple[int, int]] = {}
        """Number -> descriptor, mark."""
        self._checkpoints: set[int] = set()
        """The files that have a checkpoint of this process."""

    def open_file(self, number: int, mark: int) -> bool:
        """Open a file that was lent. Returns False where it is another one by now. Raises
        OSError."""
        if number in self._open:
            if self._open[number][1] == mark:
                return True
            self.close_file(number)
        descriptor = os.open(spool_path(self._folder, number), os.O_RDWR)
        if os.fstat(descriptor).st_ino != mark:
            os.close(descriptor)
            return False
        self._open[number] = descriptor, mark
        return True

    def mark_of(self, number: int) -> int:
        """Return the mark of a file that is open."""
        return self._open[number][1]

    def write(self, number: int, offset: int, content: Buffer) -> None:
        """Write at an offset in bytes. Raises OSError."""
        with named_errors(lambda one: spool_path(self._folder, one), number):
            write_all(self._open[number][0], content, offset)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        """Write beside the file what is known of its bytes, as ``Blobs.write_checkpoint`` does."""
        path = checkpoint_path(self._folder, number)
        draft = path.with_suffix(".draft")
        with suppress(OSError):  # such as a full disk: the upload then begins again after a death
            draft.write_bytes(content)
            draft.replace(path)
            self._checkpoints.add(number)

    def drop_checkpoint(self, number: int) -> None:
        """Remove the checkpoint that this process wrote, if it did. Raises OSError."""
        if number in self._checkpoints:
            self._checkpoints.discard(number)
            checkpoint_path(self._folder, number).unlink(missing_ok=True)

    def keep_checkpoint(self, number: int) -> None:
        """The checkpoint is not this process's any more."""
        self._checkpoints.discard(number)

    def close_file(self, number: int) -> None:
        """Write this file no more."""
        descriptor, _ = self._open.pop(number)
        os.close(descriptor)

    def close(self) -> None:
        """Write nothing any more."""
        for number in list(self._open):
            self.close_file(number)


class SpoolFolder:
    """Spool files of another process, which this one reads."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of a ``LendableSpool``."""
        self._folder = folder

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        """As ``Blobs`` has it."""
        path = spool_path(self._folder, number)
        with path.open("rb", buffering=0) as file:
            yield from read_parts(file.fileno(), path, size, begin, part_bytes)
