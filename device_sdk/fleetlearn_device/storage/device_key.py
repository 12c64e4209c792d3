"""device_key.json: the device's own key, 32 random bytes (Ed25519), by which the helper of secure
aggregation knows its masked updates. Nobody else is shown the file.

The file is made when the key is first needed: by ``fleetlearn-device public-key``, or for the first
task with secure aggregation.
"""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_hex
from tempfile import mkstemp

import msgspec
from fleetlearn_protocol.messages import Bytes32

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_folder, write_durably

FILE = "device_key.json"


class DeviceKey(msgspec.Struct, frozen=True):
    """The contents of device_key.json."""

    private: Bytes32


def read_device_key(folder: Path) -> bytes | None:
    """Return the private key in a state directory, 32 bytes, or None where there is none. Raises
    StateError (damaged)."""
    path = folder / FILE
    try:
        with os_errors_as_state_errors(path):
            return bytes.fromhex(read_checked_json(path.read_bytes(), DeviceKey).private)
    except StateError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except msgspec.DecodeError as error:
        raise StateError(
            f"{path} is damaged ({error}): delete it, and `fleetlearn-device public-key` makes a "
            "new key. The operator of the helper must be told the new one, and revoke the old one"
        ) from None


def device_key(folder: Path) -> bytes:
    """Return the device's private key, 32 bytes; make it where there is none. Raises StateError.

    The command ``public-key`` may make it at the same moment as the device that serves: both return
    the same key.
    """
    found = read_device_key(folder)
    if found is None:
        _make(folder)
        found = read_device_key(folder)
    if found is None:
        raise StateError(f"{folder / FILE} was deleted while the device used it: start again")
    return found


def _make(folder: Path) -> None:
    """Make the file, unless another process has made one."""
    with os_errors_as_state_errors(folder):
        # Readable by its owner alone from its first byte on.
        descriptor, name = mkstemp(prefix=f"{FILE}.", dir=folder)
        os.close(descriptor)
        draft = Path(name)
        try:
            write_durably(draft, checked_json(DeviceKey(token_hex(32))), into=draft)
            try:
                os.link(draft, folder / FILE)  # which replaces no file
            except FileExistsError:
                return
            except OSError:  # a file system without hard links, as on a camera's card
                draft.replace(folder / FILE)
            sync_folder(folder)
        finally:
            draft.unlink(missing_ok=True)
