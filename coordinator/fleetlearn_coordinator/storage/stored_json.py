"""JSON from a store, with an error that names what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

T = TypeVar("T")


def decode(content: str | bytes, kind: type[T], what: str) -> T:
    """Decode stored JSON. Raises StoreError if it is damaged; ``what`` names it for people."""
    found: T = read_json(partial(msgspec.json.decode, type=kind), content, what)
    return found


def read_json(read: Callable[[Any], T], content: str | bytes, what: str) -> T:
    """Return what ``read`` makes of stored JSON. Raises StoreError if it is damaged; ``what`` names
    it for people."""
    try:
        return read(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(Code.WRONG_HASH, f"{what} is damaged: {error}") from None
