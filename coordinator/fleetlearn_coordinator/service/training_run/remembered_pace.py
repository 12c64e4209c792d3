"""When devices come back that were sent away: what the next process is to know of it."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, Row
from fleetlearn_coordinator.storage.stored_json import decode

PACE = "pace"
"""The key in the run's metadata."""


def pace_rows(pace: Pace | None, now: float, wall: float) -> list[Row]:
    """Return what is to be written, now and then. It is no loss if the last of them are missing:
    their times are then given to others, too. ``now``: the engine's time. ``wall``: Unix time."""
    if pace is None:
        return []
    state = {"time": wall, **pace.bookings.state(now)}
    return [Metadata(PACE, msgspec.json.encode(state).decode())]


def restore_pace(pace: Pace | None, ledger: Ledger, now: float, wall: float) -> None:
    """Go on with what an earlier process wrote."""
    saved = ledger.get(PACE)
    if saved is not None and pace is not None:
        state = decode(saved, dict[str, Any], "what the database says of pace")
        pace.bookings.restore(state, now - max(0.0, wall - state["time"]))
