"""identity.json: the device's name, made once."""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec
from fleetlearn_protocol.messages import Identifier

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.files import write_durably


class Identity(msgspec.Struct, frozen=True):
    """The contents of identity.json."""

    device: Identifier


def read_or_make_name(path: Path, name: str | None) -> str:
    """Return the device's name; make it ``name``, or a random one, where the file does not exist.

    Raises StateError: ``name`` is not the device's name, or cannot be one; the file is damaged.
    """
    if path.exists():
        device = read_name(path)
        if name is not None and name != device:
            raise StateError(
                f"{path} says that this device is {device}, not {name}: leave the name out, or "
                f"give {name} a state directory of its own"
            )
        return device
    device = name if name is not None else str(uuid.uuid4())
    try:
        identity = msgspec.convert({"device": device}, Identity)
    except msgspec.ValidationError:
        raise StateError(
            f"the name {device!r} was given; a device's name has 1 to 64 letters, digits and . _ "
            "-, and begins with a letter or digit"
        ) from None
    write_durably(path, checked_json(identity))
    return device


def read_name(path: Path) -> str:
    """Return the device's name. Raises StateError where the file is damaged, OSError."""
    try:
        return read_checked_json(path.read_bytes(), Identity).device
    except msgspec.DecodeError as error:
        raise StateError(
            f'{path} is damaged ({error}); it should hold {{"device": NAME}}. Write it again with '
            "the name that the coordinator knows, or delete it and the device gets a new name"
        ) from None
