"""The state directory: what a device keeps on disk, so that a process that dies loses at most the
training it was in.

::

    lock                        held while a process uses the directory
    version.json                the directory's format                     (directory_version.py)
    identity.json               the device's name                              (identity.py)
    credential.json             its credential, if it is enrolled              (credential.py)
    device_key.json             its own key, if it needs one                   (device_key.py)
    trusted.json                the public keys that it trusts, if any         (trusted_keys.py)
    bundles/ models/ partial/   what was downloaded                            (content_cache.py)
    training.json               which task is in training                      (training_starts.py)
    checkpoint                  how far that training is                   (training_checkpoint.py)
    pending/                    the update that nobody acknowledged yet        (outbox.py)
    kept/                       kept state and personal model, for each bundle (kept_states.py)
    tied/                       the tied vectors of the last tasks             (tied_vectors.py)
    updates.json                how many updates it made in each run           (update_counts.py)
    predict/                    the shared model in use, if one is kept            (model_in_use.py)
    status.json                 how the device is, for its owner               (status.py)
    peer/                       what it keeps as a peer                  (peers/peer_store.py)
    peer.pem                    its key and certificate as a peer       (peers/certificate.py)

Every file is written beside its place and renamed, and has a checksum; damage is found when the
file is read, and said by the file's name. The update, what is kept with it, the checkpoint, the
identity, the credential, all keys and the counts of updates are synced as well.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.manifest_file import read_manifest
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.paths import in_home

from fleetlearn_device.storage.content_cache import ContentCache, bundles_by_use
from fleetlearn_device.storage.directory_version import check_version
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_names
from fleetlearn_device.storage.identity import read_name, read_or_make_name
from fleetlearn_device.storage.kept_states import KeptStates
from fleetlearn_device.storage.outbox import Outbox, read_report
from fleetlearn_device.storage.status import DeviceStatus, read_status
from fleetlearn_device.storage.tied_vectors import TiedSet, TiedVectors, sets_in
from fleetlearn_device.storage.training_checkpoint import CHECKPOINT, TrainingCheckpoint
from fleetlearn_device.storage.training_starts import TrainingStarts
from fleetlearn_device.storage.trusted_keys import read_trusted_keys
from fleetlearn_device.storage.unmasked import read_unmasked
from fleetlearn_device.storage.update_counts import UpdateCounts

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl


def state_folder(path: str | os.PathLike[str]) -> Path:
    """Return a state directory's path, without ``~``. Raises StateError where no home folder is
    known."""
    try:
        return in_home(path)
    except ValueError as error:
        raise StateError(str(error)) from None


LOCK_TRIES = 3
"""How often a device tries to lock its directory: ``info``, which asks whether it is locked, holds
the lock for a moment."""


class StateDirectory:
    """An open state directory, locked against other processes until ``close``.

    ``name`` becomes the device's name if it has none yet, and must be its name otherwise. Raises
    StateError.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = state_folder(path)
        with os_errors_as_state_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
        try:
            with os_errors_as_state_errors(self.path):
                check_version(self.path)
                self.device = read_or_make_name(self.path / "identity.json", name)
                self.contents = ContentCache(self.path)
                self.training_starts = TrainingStarts(self.path / "training.json")
                self.checkpoint = TrainingCheckpoint(self.path / CHECKPOINT)
                self.kept_states = KeptStates(self.path / "kept")
                self.tied_vectors = TiedVectors(self.path / "tied")
                self.update_counts = UpdateCounts(self.path / "updates.json")
                self.outbox = Outbox(self.path / "pending", self.kept_states, self.tied_vectors)
                sync_names(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.close()


def device_in(folder: Path, name: str | None) -> str:
    """Return the name of the device whose state directory this is, and which may be running; make
    the directory where there is none. ``name``: as for StateDirectory. Raises StateError."""
    with os_errors_as_state_errors(folder):
        if (folder / "identity.json").exists():
            return read_or_make_name(folder / "identity.json", name)
        directory = StateDirectory(folder, name)
        directory.close()
        return directory.device


class Summary(NamedTuple):
    """What a state directory holds, for people."""

    device: str | None
    bundles: list[tuple[str, str]]
    """(SHA-256 of the manifest, the bundle's name), the last used first."""
    pending: Report | None
    """Of the update that waits, which may be unmasked (``unmasked``)."""
    kept_states: list[tuple[str, int]]
    """(name of the file, bytes) of each kept state and personal model; the bundle itself may be
    gone."""
    tied_sets: list[TiedSet]
    trusted: tuple[str, ...]
    """Public keys."""
    running: bool
    """A process uses the directory."""
    status: DeviceStatus | None
    """How the device is, or was when its process ended. None: it never ran, or not with this
    version."""
    checkpoint: bool
    """There is a checkpoint of the last training."""
    unmasked: bool = False
    """The update that waits is not masked yet, and on this disk alone."""


def describe(path: str | os.PathLike[str]) -> Summary:
    """Return what a state directory holds; it may be in use. Raises StateError."""
    directory = state_folder(path)
    with os_errors_as_state_errors(directory):  # such as of another user's
        found = (directory / "bundles").is_dir()
    if not found:
        raise StateError(
            f"{directory} is not a state directory: fleetlearn-device run makes one at its first "
            "start"
        )
    with os_errors_as_state_errors(directory):
        identity = directory / "identity.json"
        device = read_name(identity) if identity.exists() else None
        bundles = []
        for folder in bundles_by_use(directory):
            try:
                bundles.append((folder.name, read_manifest((folder / MANIFEST).read_bytes()).name))
            except (FleetError, FileNotFoundError):
                bundles.append((folder.name, "(incomplete)"))
        kept_states = [
            (path.name, path.stat().st_size) for path in sorted(directory.glob("kept/*"))
        ]
        tied_sets = sets_in(directory / "tied")
        trusted = read_trusted_keys(directory)
        pending, running = read_report(directory / "pending"), is_running(directory)
        waits = read_unmasked(directory / "pending") if pending is None else None
        if waits is not None:
            pending = waits.report
        return Summary(
            device,
            bundles,
            pending,
            kept_states,
            tied_sets,
            trusted,
            running,
            read_status(directory),
            (directory / CHECKPOINT).exists(),
            waits is not None,
        )


def is_running(directory: Path) -> bool:
    """Return whether a process uses a state directory. Raises OSError."""
    try:
        with (directory / "lock").open("rb") as file:
            return not _try_lock(file, shared=True)
    except FileNotFoundError:
        return False


def _lock(directory: Path) -> BinaryIO:
    """Return the lock file, locked until it is closed or the process ends, however that happens."""
    # "a" makes the file and never empties one that another process has locked.
    file = (directory / "lock").open("ab")
    try:
        for _ in range(LOCK_TRIES):
            if _try_lock(file):
                return file
            time.sleep(0.05)
    except OSError:
        file.close()
        raise
    file.close()
    raise StateError(
        f"the state directory {directory} is in use by another process: each device needs one of "
        "its own"
    )


def _try_lock(file: BinaryIO, shared: bool = False) -> bool:
    """Lock the file, unless another process has. Returns whether it is locked."""
    try:
        if sys.platform == "win32":  # pragma: no cover
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        # Systems differ in which of these says that another process holds the lock.
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK):
            raise
        return False
    return True
