"""The error of a data directory that cannot be used."""

from __future__ import annotations

from fleetlearn_protocol.errors import FleetError


class StoreError(FleetError):
    """The data directory cannot be used."""
