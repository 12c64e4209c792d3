"""What a device says of itself at a check-in, for the coordinator's selection."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Network: TypeAlias = Literal["metered", "unmetered"]


class Statement(NamedTuple):
    """What is so at this moment. None: not known."""

    memory: int | None = None
    """Bytes of RAM."""
    tags: tuple[str, ...] = ()
    tier: str | None = None
    charging: bool | None = None
    """Whether it is charging, or has mains power."""
    network: Network | None = None
    models: tuple[str, ...] = ()
    """SHA-256 of the models that it still has."""
    challenge: str | None = None
    """Random, for this connection, where the device trusts keys."""


NOTHING_STATED = Statement()
