"""The set of masked updates that the helper is or was asked for, in a run's ledger."""

from __future__ import annotations

import msgspec

from fleetlearn_coordinator.storage.ledger import Ledger

KEY = "mask_set"
"""Of the metadata: the set as JSON (``SavedMaskSet``)."""


class SavedMaskSet(msgspec.Struct, frozen=True):
    """The set that was asked for, as it is written down. The reports themselves have rows."""

    round: int
    digest: str
    """``MaskSumRequest.digest`` in hexadecimal digits."""
    reports: int


def saved_set(ledger: Ledger) -> SavedMaskSet | None:
    """Return the last set that was written down. None: there is none."""
    found = ledger.get(KEY)
    return None if found is None else msgspec.json.decode(found, type=SavedMaskSet)


def asked_round(ledger: Ledger) -> int | None:
    """Return the open round if its set was written down: the helper may have answered, so that the
    coordinator may have seen the sum of its updates. None: no such round is open."""
    found = saved_set(ledger)
    if found is None or ledger.unfinished(None).round != found.round:
        return None
    return found.round
