"""Lists of devices and their own public keys: those that a helper's operator lets in, and those
that a device or a coordinator lets be neighbours."""

from __future__ import annotations

import re
from pathlib import Path

from fleetlearn_protocol.errors import Code, FleetError, in_words

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = r"[0-9a-f]{64}"


class RosterError(FleetError):
    """A roster that cannot be used. ``text`` names the file, the line, and what is expected."""


def read_roster(path: Path) -> list[tuple[str, bytes]]:
    """Return the devices of a file: names, and public Ed25519 keys of 32 bytes.

    A line is a name, a space, and 64 hexadecimal digits; lines that begin with # are comments.
    Raises RosterError.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        text = f"{path}: the roster cannot be read: {in_words(error)}"
        raise RosterError(Code.BAD_MESSAGE, text) from None
    found: dict[str, bytes] = {}
    holders: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not re.fullmatch(KEY, words[1]):
            _refuse(
                path,
                number,
                f'"{line.strip()}" was given; a name and 64 of 0-9 and a-f are expected: roof-8 '
                "d75a980182b1...",
            )
        name, key = words[0], bytes.fromhex(words[1])
        if name in found:
            _refuse(path, number, f"{name} is named twice")
        if key in holders:
            _refuse(path, number, f"{name} has the key of {holders[key]}. A key is one device's")
        found[name], holders[key] = key, name
    if not found:
        raise RosterError(Code.BAD_MESSAGE, f"{path} names no device")
    return [*found.items()]


def _refuse(path: Path, number: int, text: str) -> None:
    raise RosterError(Code.BAD_MESSAGE, f"{path}, line {number}: {text}")
