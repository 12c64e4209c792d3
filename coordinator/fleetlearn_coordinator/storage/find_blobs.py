"""Where the blobs of a run in a data directory are: there, or in an object store too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetlearn_coordinator.storage.blobs import StoredModels
from fleetlearn_coordinator.storage.file_blobs import FileBlobs, FileModels


def models_of(folder: Path, objects: str | None) -> StoredModels:
    """Return the models, to be read from outside. ``objects``: URL below which the run's objects
    are; None: its blobs are in the folder alone. Raises StoreError."""
    if objects is None:
        return FileModels(folder)
    from fleetlearn_coordinator.storage.object_blobs import ObjectModels
    from fleetlearn_coordinator.storage.object_store import Objects

    return ObjectModels(folder, Objects(objects))


def complete_copy(folder: Path, objects: str | None) -> None:
    """Let a data directory, which is to be copied, have all of the run's bytes. Raises StoreError
    where a coordinator on another machine has the newest ones; StoreUnavailableError."""
    if objects is not None:
        from fleetlearn_coordinator.storage.object_blobs import fetch_models
        from fleetlearn_coordinator.storage.object_store import Objects

        fetch_models(folder, Objects(objects))


def blobs_of(
    folder: Path,
    objects: str | None,
    *,
    power: bool,
    spool_files: int,
    check: Callable[[], object] = lambda: None,
) -> FileBlobs:
    """Open the blobs, under the run's lock. The parameters of ``models_of`` and ``FileBlobs``.
    Raises StoreError, OSError."""
    if objects is None:
        return FileBlobs(folder, power=power, spool_files=spool_files, check=check)
    from fleetlearn_coordinator.storage.object_blobs import ObjectBlobs
    from fleetlearn_coordinator.storage.object_store import Objects

    return ObjectBlobs(folder, Objects(objects), power=power, spool_files=spool_files, check=check)
