"""Which gateways and engine processes understand each other: during an update, those of two
releases are connected.

``WIRE`` is the version of what wire.py says. What a release changes there is of one of two kinds:

- A field is added at the end of a message, with a default. Whoever does not know the field skips
  it, and whoever does not get it has the default. ``WIRE`` stays.
- Anything else, such as a new kind of message, raises ``WIRE``, once for a release. A new kind is
  entered in ``SINCE``, and said only on a bus whose *agreed version* is as high. ``OLDEST`` is
  raised when a release cannot speak the older version any more.

The agreed version is the lower of both sides' ``WIRE``. There is none where one side's is below the
other side's ``OLDEST``: then the engine process refuses the gateway.
tests/coordinator/gateways/test_wire_version.py has the shape of each version, and holds wire.py to
it.
"""

from __future__ import annotations

WIRE = 1
"""The version that this release speaks."""
OLDEST = 1
"""The oldest version that it can speak."""
SINCE: dict[str, int] = {}
"""Kind of message -> the version in which it came, where that is above 1."""


def agreed_wire(wire: int, oldest: int) -> int | None:
    """Return the version that is spoken with a peer of this release, from the peer's ``WIRE`` and
    ``OLDEST``; None: there is none."""
    agreed = min(WIRE, wire)
    return agreed if agreed >= max(OLDEST, oldest) else None


def why_refused(gateway: str, software: str, wire: int, oldest: int) -> str:
    """Return why a gateway is refused, and what to do. ``gateway``: names it for people;
    ``software``: this process's release."""
    theirs, own = _range(oldest, wire), _range(OLDEST, WIRE)
    if oldest > WIRE:
        what = "the gateway is newer: start the engine process with the gateway's release"
    else:
        what = "the gateway is older: start it with the engine process's release"
    return (
        f"{gateway} cannot work with this engine process ({software}): the gateway speaks "
        f"{theirs} of the bus between them, the engine process {own}; {what}. Devices stay "
        "connected meanwhile"
    )


def _range(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
