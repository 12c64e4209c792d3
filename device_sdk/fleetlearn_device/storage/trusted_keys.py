"""trusted.json: the public keys that the device trusts, where it was given any. Without the file it
does any task.

The file is written when the device is first given keys, before it connects with them. From then on
it decides: a start without the keys does not forget them, and neither does one with a token or an
option from before they were changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from fleetlearn_protocol.messages import MAX_KEYS, Bytes32
from msgspec import Meta

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

FILE = "trusted.json"

log = logging.getLogger("fleetlearn.device")


class TrustedKeys(msgspec.Struct, frozen=True):
    """The contents of trusted.json."""

    keys: Annotated[tuple[Bytes32, ...], Meta(min_length=1, max_length=MAX_KEYS)]


def checked_keys(given: Sequence[str]) -> tuple[str, ...]:
    """Return the keys, each once. Raises ValueError where one is none."""
    keys = tuple(dict.fromkeys(given))
    try:
        return msgspec.convert({"keys": keys}, TrustedKeys).keys if keys else ()
    except msgspec.ValidationError:
        raise ValueError(
            f"the keys {', '.join(map(repr, keys))} were given to be trusted; expected at most "
            f"{MAX_KEYS}, each of 64 hexadecimal digits, as `fleetlearn-coordinator signing-key` "
            "prints them"
        ) from None


def read_trusted_keys(folder: Path) -> tuple[str, ...]:
    """Return the keys in a state directory, none where it has no file. Raises StateError
    (damaged)."""
    path = folder / FILE
    try:
        with os_errors_as_state_errors(path):
            return read_checked_json(path.read_bytes(), TrustedKeys).keys if path.exists() else ()
    except msgspec.DecodeError as error:
        raise StateError(
            f"{path} is damaged ({error}): `fleetlearn-device trust` writes it again, with the "
            "keys that it is given"
        ) from None


def write_trusted_keys(folder: Path, keys: Sequence[str]) -> None:
    """Trust these keys from now on, and no others. Raises StateError."""
    with os_errors_as_state_errors(folder):
        write_durably(folder / FILE, checked_json(TrustedKeys(tuple(keys))))


def trust_first(folder: Path, given: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that the device trusts: those in its state directory, or those given if it
    has none yet, which are then there. Raises StateError."""
    keys = read_trusted_keys(folder)
    if not keys and given:
        write_trusted_keys(folder, given)
        return tuple(given)
    for key in given:
        if key not in keys:
            text = (
                "this device trusts %s, and goes on so: %s was given, and only `fleetlearn-device "
                "trust` changes keys"
            )
            log.warning(text, ", ".join(keys), key)
    return keys
