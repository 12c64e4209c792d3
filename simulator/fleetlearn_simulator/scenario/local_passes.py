"""How often a task passes over its device's data."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS


def passes_of(
    algorithm: str, epochs: int, personal_epochs: int | None, hyper: Mapping[str, float]
) -> int:
    """Return the passes in which a task trains: those that make the update, and those for what is
    the device's own; a pass in which each batch is trained on K times counts as K.
    ``personal_epochs`` None: as many as ``epochs``. hyper: the algorithm's, as far as a plan gives
    them."""
    found = ALGORITHMS[algorithm]
    if found.personal_passes:
        return epochs + (personal_epochs or epochs)
    if isinstance(found.steps, int):
        return epochs * found.steps
    return epochs * int(hyper.get(found.steps, found.hyper[found.steps].default or 1))
