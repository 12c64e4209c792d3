"""What devices fetch of a run, as files that gateways open: each is named by its SHA-256."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.network.transfers.contents import Older


class PublishedFiles:
    """A folder with the newest vectors and the older ones that tasks began from. A file is there
    whole or not at all, and never changes; who has it open keeps it, also when it is removed."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, or empties it: after a loss of power a file of an earlier process may
        not be whole, and who has a file open keeps it. Raises OSError."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        self.newest: tuple[str, ...] = ()
        self.older: tuple[str, ...] = ()

    def publish(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> None:
        """Have these vectors, and no others. Raises OSError."""
        self.name(newest, older)
        self.write(newest, older)

    def name(self, newest: Iterable[str], older: Iterable[str]) -> None:
        """These vectors, and no others, are here once ``write`` has returned."""
        self.newest, self.older = tuple(newest), tuple(older)

    def write(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> None:
        """Write these vectors, and remove others. In any thread, one call at a time. Raises
        OSError."""
        for sha256, content in newest.items():
            if not self._has(sha256):
                self._write(sha256, [content])
        for sha256, where in older.items():
            self.write_older(sha256, where)
        for file in self.folder.iterdir():
            if file.name not in newest and file.name not in older:
                file.unlink(missing_ok=True)

    def _has(self, sha256: str) -> bool:
        return (self.folder / sha256).exists()

    def write_older(self, sha256: str, where: Older) -> None:
        """Write an older vector. It is mostly here: it was the newest one before. In any thread,
        one call at a time. Raises OSError."""
        if not self._has(sha256):
            self._write(sha256, where.parts())

    def _write(self, sha256: str, parts: Iterable[Buffer]) -> None:
        draft = self.folder / f"{sha256}.draft"
        with draft.open("wb") as file:
            for part in parts:
                file.write(part)
        draft.replace(self.folder / sha256)
