"""Writing files so that they survive a crash, and holding room for them on the disk."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from fleetlearn_protocol.frames import Buffer


class WrittenBytes:
    """What this process has written to files of state directories, for owners who count what wears
    a memory card out."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, *contents: Buffer) -> None:
        """These bytes were written to a file."""
        self.count += sum(memoryview(content).nbytes for content in contents)


WRITTEN = WrittenBytes()


def write_durably(path: Path, *contents: Buffer, into: Path | None = None) -> None:
    """Write a file beside its place, sync it, and rename it. ``into``: the file to write over,
    where it exists."""
    aside = into if into is not None and into.exists() else path.with_name(f"{path.name}.tmp")
    with aside.open("r+b" if aside is into else "wb") as file:
        for content in contents:
            file.write(content)
        WRITTEN.add(*contents)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    # The name must not be durable before the bytes: a power cut would leave an empty file.
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if sys.platform != "win32":  # where a directory cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Make the names of a folder that may be new durable: its own, those of the folders above it on
    its file system, and those in it."""
    folder = folder.absolute()
    device = folder.stat().st_dev
    for each in (folder, *folder.parents):
        if each.stat().st_dev != device:
            break
        with suppress(PermissionError):  # it was not made by this process
            sync_folder(each)


def allocate(path: Path, size: int) -> None:
    """Make a file of this size whose bytes have their place on the disk."""
    with path.open("wb") as file:
        if sys.platform == "linux" and size:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
        # Zeros that are written take room everywhere, unless the file system compresses.
        block = bytes(2**20)
        for start in range(0, size, len(block)):
            WRITTEN.count += file.write(block[: size - start])
