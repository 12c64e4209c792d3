"""What is known of SCAFFOLD's c or FedDyn's h (``aggregation/tied_sum.py``), in the ledger."""

from __future__ import annotations

import msgspec

from fleetlearn_coordinator.aggregation.tied_sum import EMPTY_SUM, TiedSum
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata
from fleetlearn_coordinator.storage.stored_json import decode

TIED_SUM = "tied_sum"
"""The key of its state in the run's metadata."""


def row_of(state: TiedSum) -> Metadata:
    """Return what is written with the model."""
    return Metadata(TIED_SUM, msgspec.json.encode(state).decode())


def load_tied_sum(ledger: Ledger) -> TiedSum:
    """Return the state at the newest model. An earlier version wrote none."""
    saved = ledger.get(TIED_SUM)
    if saved is None:
        return EMPTY_SUM
    return decode(saved, TiedSum, "what the database says of tied vectors")
