"""How often a task passes over its device's data."""

from __future__ import annotations

from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS


def passes_of(algorithm: str, epochs: int, personal_epochs: int | None) -> int:
    """Return the passes in which a task trains: those that make the update, and those for what is
    the device's own. ``personal_epochs`` None: as many as ``epochs``."""
    return epochs + ((personal_epochs or epochs) if ALGORITHMS[algorithm].personal_passes else 0)
