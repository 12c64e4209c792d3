"""credential.json: the device's credential, 256 random bits that it makes for itself and shows its
coordinator alone. Beside it, whether a coordinator has ever let the device in.

``next`` is the credential that the device changes to: both are valid until the coordinator has
heard of the new one.
"""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_urlsafe
from tempfile import mkstemp
from typing import Annotated

import msgspec

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

FILE = "credential.json"
LET_IN = "let-in"
"""An empty file, there from the first handshake on that a coordinator accepted, with a credential
or without."""


Secret = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{43,128}$")]


class Credential(msgspec.Struct, frozen=True):
    """The contents of credential.json."""

    secret: Secret
    next: Secret | None = None


def read_credential(folder: Path) -> Credential | None:
    """Return the credential in a state directory, or None where there is none. Raises StateError
    (damaged)."""
    path = folder / FILE
    try:
        with os_errors_as_state_errors(path):
            return read_checked_json(path.read_bytes(), Credential) if path.exists() else None
    except msgspec.DecodeError as error:
        raise StateError(
            f"{path} is damaged ({error}): delete it, and enrol the device again with a token"
        ) from None


def make_credential(folder: Path) -> None:
    """Make a credential if there is none. Raises StateError."""
    if read_credential(folder) is None:
        _write(folder, Credential(token_urlsafe(32)))


def begin_change(folder: Path) -> None:
    """Make the credential that the device changes to at its next connection. Raises StateError
    where it has none."""
    found = read_credential(folder)
    if found is None:
        raise StateError(f"{folder} has no credential: the device is not enrolled")
    _write(folder, Credential(found.secret, found.next or token_urlsafe(32)))


def end_change(folder: Path) -> None:
    """The coordinator has heard of the credential that the device changes to: it is the device's
    from now on."""
    found = read_credential(folder)
    if found is not None and found.next is not None:
        _write(folder, Credential(found.next))


def was_let_in(folder: Path) -> bool:
    """Return whether a coordinator has ever accepted a handshake of this device."""
    return (folder / LET_IN).exists()


def note_let_in(folder: Path) -> None:
    """Keep that a coordinator has accepted a handshake of this device. Raises StateError."""
    with os_errors_as_state_errors(folder):
        (folder / LET_IN).touch()


def _write(folder: Path, credential: Credential) -> None:
    with os_errors_as_state_errors(folder):
        # Readable by its owner alone from its first byte on, and under a name that no other
        # process uses: the command ``rotate`` may write at the same moment as the device.
        descriptor, draft = mkstemp(prefix=f"{FILE}.", dir=folder)
        os.close(descriptor)
        write_durably(folder / FILE, checked_json(credential), into=Path(draft))
