"""The versions of a run's model: what is kept and why, and what was measured of each."""

from __future__ import annotations

from collections.abc import Collection

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.settings import MEASURED_ON
from fleetlearn_coordinator.service.status import read_status
from fleetlearn_coordinator.service.training_run.kept_models import (
    best_versions,
    measured,
    metrics_of,
    why_kept,
)
from fleetlearn_coordinator.service.views.records import Version
from fleetlearn_coordinator.storage.find_storage import find_storage


def model_views(plan: Plan, *, gone: bool = False, most: int | None = None) -> list[Version]:
    """Return the versions of a run's model that are kept, the oldest first; ``gone``: the others,
    too. ``most``: the newest of them, this many. Raises StoreError."""
    storage = find_storage(plan.data_dir)
    with storage.read_ledger() as ledger:
        known = ledger.known_models()
        newest = known[-1].version if known else 0
        there = {version for version in storage.models.model_versions() if version <= newest}
        known = [row for row in known if gone or row.version in there][-(most or 0) :]
        made = ledger.measured_in_rounds(row.version - 1 for row in known)
    numbers = [row.version for row in known]
    metrics = {source: metrics_of(plan, numbers, source) for source in MEASURED_ON}
    best = best_versions(plan.models, measured(plan, there) if plan.models.best is not None else {})
    met_by = read_status(plan.data_dir).met_by
    found = []
    for row in known:
        number = row.version
        is_there = number in there
        found.append(
            Version(
                number,
                row.sha256,
                row.at,
                row.round or None,
                row.restores,
                made[number - 1]["change"] if number - 1 in made else None,
                _why_kept(plan, number, newest, best, met_by) if is_there else None,
                storage.models.model_size(number) if is_there else None,
                {source: rows[number] for source, rows in metrics.items() if number in rows},
            )
        )
    return found


def _why_kept(
    plan: Plan, version: int, newest: int, best: Collection[int], met_by: int | None
) -> str:
    return (
        "target" if version == met_by else why_kept(plan.models, version, newest, best) or "needed"
    )
