"""version.json: the format of the state directory as a whole, of what has none of its own (kept
states, tied vectors, updates) above all. It is written once."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.files import write_durably

FILE = "version.json"
DIRECTORY_VERSION = 1
"""What this version writes, and the newest that it can read. Directories without the file, which
fleetlearn 0.1 made, have the same."""

log = logging.getLogger("fleetlearn.device")


class DirectoryVersion(msgspec.Struct, frozen=True):
    """The contents of version.json."""

    version: int


def check_version(folder: Path) -> None:
    """Write the file if there is none. Raises StateError where a newer fleetlearn made the
    directory, OSError."""
    path = folder / FILE
    if path.exists():
        try:
            version = read_checked_json(path.read_bytes(), DirectoryVersion).version
        except msgspec.DecodeError as error:
            log.warning("%s is damaged (%s); it is written again", path, error)
        else:
            if version > DIRECTORY_VERSION:
                raise StateError(
                    f"{folder} is of version {version}, and this fleetlearn knows "
                    f"{DIRECTORY_VERSION}: a newer one made it. Install that one again, or choose "
                    "another state directory"
                )
            return
    write_durably(path, checked_json(DirectoryVersion(DIRECTORY_VERSION)))
