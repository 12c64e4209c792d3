"""A gateway's spool: files that the engine process lends it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.gateways.wire import LentFile
from fleetlearn_coordinator.storage.lent_spool import LentSpool


class RemoteSpool:
    """A ``Spool`` of files that belong to the engine process. A file is lent until its update is
    saved (``gave``)."""

    def __init__(self) -> None:
        self._files: LentSpool | None = None
        self._free: list[int] = []
        self._used: set[int] = set()
        self._lost: set[int] = set()
        """Of ``_used``: files that are others' now."""

    def find(self, folder: Path) -> None:
        """The spool files are in this folder."""
        if self._files is None:
            self._files = LentSpool(folder)

    def lend(self, files: Iterable[LentFile]) -> None:
        """The engine process lends these files. Raises OSError."""
        for file in files:
            if self._open(file):
                self._free.append(file.number)

    def adopt(self, file: LentFile) -> bool:
        """The engine process lends this file with the bytes of a begun upload. Returns whether it
        can be used. Raises OSError."""
        found = self._open(file)
        if found:
            self._used.add(file.number)
        return found

    def _open(self, file: LentFile) -> bool:
        assert self._files is not None
        return self._files.open_file(file.number, file.mark)

    def held(self) -> tuple[LentFile, ...]:
        """Return the files that are lent."""
        if self._files is None:
            return ()
        numbers = [*self._free, *self._used]
        return tuple(LentFile(number, self._files.mark_of(number)) for number in numbers)

    def file(self, number: int) -> LentFile:
        """Return a file that is lent, as it is named on the bus."""
        assert self._files is not None
        return LentFile(number, self._files.mark_of(number))

    def lose(self, numbers: Collection[int]) -> None:
        """These files are others' now. Those in use must not be written any more: their uploads are
        to be dropped."""
        self._free = [number for number in self._free if number not in numbers]
        self._lost |= self._used & {*numbers}

    def gave(self, number: int) -> None:
        """The file is the engine process's again, with its bytes and its checkpoint."""
        assert self._files is not None
        self._files.keep_checkpoint(number)
        self._used.discard(number)
        self._lost.discard(number)

    def added(self, number: int) -> None:
        """The update that was saved from this file is in a partial sum. In any thread."""

    def close(self) -> None:
        """Write nothing any more."""
        if self._files is not None:
            self._files.close()

    # As conversations see it

    def has_room(self) -> bool:
        return bool(self._free)

    def take_spool_file(self) -> int:
        number = self._free.pop()
        self._used.add(number)
        return number

    def free_spool_file(self, number: int) -> None:
        self._used.discard(number)
        if number in self._lost:
            self._lost.discard(number)
            return
        assert self._files is not None
        # first: the next upload must not be taken for this one
        self._files.drop_checkpoint(number)
        self._free.append(number)

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        if number not in self._lost:  # its upload ends
            assert self._files is not None
            self._files.write(number, offset, content)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        if number not in self._lost:
            assert self._files is not None
            self._files.write_checkpoint(number, content)
