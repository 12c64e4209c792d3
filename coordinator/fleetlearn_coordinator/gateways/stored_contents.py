"""What devices fetch, as a gateway on another machine has it: copies of the run's objects, which it
fetches as they are published."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from hashlib import file_digest
from pathlib import Path

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.manifest_file import read_manifest

from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.served_objects import ServedObjects

PAUSES = 0.05, 1.0
"""Seconds between looks whether an object is there: at first, and at most. The engine process says
what it publishes, and writes it meanwhile."""
PATIENCE = 30.0
"""Seconds until people are told that an object does not come."""


class StoredContents:
    """Copies of objects, in a folder of this gateway's own, named by their SHA-256."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. What an earlier process left is used where it is whole: after a loss of
        power it may not be. Raises OSError."""
        self.folder = folder / "served"
        self._bundles = folder / "bundles"
        for each in (self.folder, self._bundles):
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o700)
            for left in each.iterdir():
                if not (_is_bundle if left.is_dir() else _is_whole)(left, left.name):
                    _remove(left)
        self.served: ServedObjects

    def has(self, sha256: str) -> bool:
        """Return whether a content is here."""
        return (self.folder / sha256).exists()

    async def fetch(
        self, sha256: str, is_over: Callable[[], bool], path: Path | None = None
    ) -> bool:
        """Have a content here, in the folder or at ``path``; wait until there is such an object.
        Returns False where ``is_over`` says meanwhile that it is not needed any more. Raises
        StoreError (somebody changed it), OSError (the disk is full)."""
        path = self.folder / sha256 if path is None else path
        loop = asyncio.get_running_loop()
        began, said, pause = loop.time(), False, PAUSES[0]
        while not path.exists():
            if is_over():
                return False
            try:
                await asyncio.to_thread(self.served.fetch, sha256, path)
            except StoreUnavailableError as error:
                say_seldom("a content is fetched again and again", error.text)
            except StoreError as error:
                if error.code is not Code.UNKNOWN_CONTENT:
                    raise
                if not said and loop.time() - began > PATIENCE:
                    said = True
                    logger.warning("waiting for the engine process to publish it: %s", error.text)
            else:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        return True

    async def fetch_bundle(self, sha256: str, is_over: Callable[[], bool]) -> Path | None:
        """Have a bundle here. Returns its folder; None: it is not needed any more. Raises as
        ``fetch``."""
        target = self._bundles / sha256
        if target.exists():
            return target
        draft = self._bundles / f"{sha256}.draft"
        draft.mkdir(exist_ok=True)
        if not await self.fetch(sha256, is_over, draft / MANIFEST):
            return None
        manifest = read_manifest((draft / MANIFEST).read_bytes())
        for file, entry in manifest.files.items():
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            if not await self.fetch(entry.sha256, is_over, draft / file):
                return None
        draft.replace(target)
        return target

    def keep(self, contents: Iterable[str], bundles: Iterable[str]) -> None:
        """Drop what is neither one of these contents nor a bundle."""
        wanted = {*contents, *bundles}
        for folder in (self.folder, self._bundles):
            for each in folder.iterdir():
                if each.name not in wanted:
                    _remove(each)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _is_whole(path: Path, sha256: str) -> bool:
    """Return whether a file has these bytes."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def _is_bundle(folder: Path, sha256: str) -> bool:
    """Return whether a folder has a whole bundle."""
    if not _is_whole(folder / MANIFEST, sha256):
        return False
    files = read_manifest((folder / MANIFEST).read_bytes()).files
    return all(_is_whole(folder / file, entry.sha256) for file, entry in files.items())
