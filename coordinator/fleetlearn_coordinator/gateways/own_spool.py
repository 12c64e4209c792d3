"""The spool of a gateway on another machine: files of its own, whose complete updates it puts into
the run's object store."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import Part

from fleetlearn_coordinator.conversation.begun import (
    BegunUpload,
    BegunUploads,
    are_here,
    decode_begun,
)
from fleetlearn_coordinator.gateways.remote_spool import RemoteSpool
from fleetlearn_coordinator.gateways.wire import LentFile
from fleetlearn_coordinator.storage.arrived import is_arrived
from fleetlearn_coordinator.storage.file_blobs import UPLOADS, FileBlobs, spool_path

MOST_SAVED = 32
"""Updates that are kept after they were saved, to be added up here."""
LONGEST = 3600.0
"""Seconds that what is here of an upload whose connection broke is kept."""


class OwnSpool(RemoteSpool):
    """A ``Spool``. No other process writes these files: nothing is lent, and nothing is lost."""

    def __init__(self, folder: Path, uploads: int) -> None:
        """``folder``: this gateway's own, which is made. ``uploads``: how many arrive at a time at
        most. Takes up what an earlier process has of uploads. Raises OSError."""
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._named: dict[int, int] = {}
        """Number under which an update is to be saved -> its spool file."""
        self._saved: deque[int] = deque()
        """Numbers of updates that were saved, some of which are still here."""
        for path in (folder / UPLOADS).glob("slot-*"):
            name = path.name.removeprefix("slot-")
            if name.isdecimal() and is_arrived(int(name)):
                path.unlink()
        # as many as have a place, lost their place, and are begun
        self.files = FileBlobs(folder, spool_files=3 * uploads + 1)
        self._loop = asyncio.get_running_loop()
        self._kept_at: dict[str, float] = {}
        """Task -> when the beginning of its upload was kept."""
        self._begun = BegunUploads(uploads, self.files.free_spool_file)
        for number, content in sorted(self.files.checkpoints().items()):
            begun = decode_begun(content)
            if begun is None or begun.spool_file != number:
                self.files.drop_checkpoint(number)
                continue
            self.files.reserve_spool_file(number)
            if are_here(begun, self.files.read_spool_file):
                self.keep(begun)
            else:
                self.files.free_spool_file(number)

    # The beginnings of uploads

    def keep(self, begun: BegunUpload) -> None:
        """The connection that brought this is gone."""
        self._kept_at[begun.task] = self._loop.time()
        self._begun.keep(begun)

    def take_begun(self, task: str, parts: tuple[Part, ...]) -> BegunUpload | None:
        """Return what is here of an update with these parts, which is the caller's then."""
        self._kept_at.pop(task, None)
        return self._begun.take(task, parts)

    def sweep(self) -> None:
        """Drop beginnings that nobody went on with."""
        oldest = self._loop.time() - LONGEST
        if any(at < oldest for at in self._kept_at.values()):
            self._kept_at = {task: at for task, at in self._kept_at.items() if at >= oldest}
            self._begun.forget(self._kept_at)

    # What the engine process lends others

    def find(self, folder: Path) -> None:
        """The engine process's files are somewhere else."""

    def lend(self, files: Iterable[LentFile]) -> None:
        """Nothing is lent to this gateway."""

    def adopt(self, file: LentFile) -> bool:
        return False

    def held(self) -> tuple[LentFile, ...]:
        return ()

    def lose(self, numbers: Collection[int]) -> None:
        """Nothing is lost."""

    def gave(self, number: int) -> None:
        """An update was saved. Its spool file is free already."""

    # What is added up here

    def name(self, spool_file: int, number: int) -> None:
        """The update in this spool file is to be saved under this number: it may be added up here
        as soon as it is saved."""
        with suppress(OSError):  # the engine process adds it then
            os.link(spool_path(self.folder, spool_file), spool_path(self.folder, number))
            self._named[number] = spool_file

    def saved(self, spool_file: int, number: int) -> None:
        """The update was saved. Its spool file is free."""
        if self._named.pop(number, None) is not None:
            self.files.distrust_spool_file(spool_file)  # the next upload has a file of its own
            self._saved.append(number)
            if len(self._saved) > MOST_SAVED:
                self.added(self._saved.popleft())
        self.files.free_spool_file(spool_file)

    def not_saved(self, number: int) -> None:
        """The update was not saved under this number."""
        if self._named.pop(number, None) is not None:
            self.added(number)

    def added(self, number: int) -> None:
        spool_path(self.folder, number).unlink(missing_ok=True)

    def close(self) -> None:
        self.files.close()

    # As conversations see it

    def has_room(self) -> bool:
        return self.files.has_room()

    def take_spool_file(self) -> int:
        return self.files.take_spool_file()

    def free_spool_file(self, number: int) -> None:
        self.files.free_spool_file(number)

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        self.files.write_spool_file(number, offset, content)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        self.files.write_checkpoint(number, content)
