"""The metrics of canaries: which devices have one, and what both kinds of devices do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleetlearn_coordinator.rounds.commands import FAILED, REJECTED
from fleetlearn_coordinator.service.monitoring.catalogue import Sample
from fleetlearn_coordinator.service.views.records import ArmView, CanaryView


def canary_samples(canaries: Iterable[CanaryView]) -> Iterator[tuple[str, Sample]]:
    """Yield the name and series of each metric. A canary that has taken the old run's place has
    none any more."""
    for canary in canaries:
        if canary.phase == "finished":
            continue
        run, is_back = (canary.name,), canary.phase == "back"
        yield "fleetlearn_canary_devices_ratio", Sample(run, 0.0 if is_back else canary.share)
        yield "fleetlearn_canary_went_back", Sample(run, float(is_back))
        for arm, found in (("canary", canary.canary), ("control", canary.control)):
            for outcome, tasks in _outcomes(found).items():
                labels = (canary.name, arm, outcome)
                yield "fleetlearn_canary_tasks", Sample(labels, float(tasks))
            if found.seconds is not None:
                yield "fleetlearn_canary_training_seconds", Sample((*run, arm), found.seconds)


def _outcomes(arm: ArmView) -> Mapping[str, int]:
    """Return how many tasks of a step came to what."""
    failed = sum(count for cause, count in arm.causes.items() if cause.startswith(FAILED))
    refused = sum(count for cause, count in arm.causes.items() if cause.startswith(REJECTED))
    return {
        "given": arm.given,
        "done": arm.done,
        "failed": failed,
        "refused": refused,
        "lost": sum(arm.causes.values()) - failed - refused,
        "interrupted": arm.interrupted,
    }
