"""Which own algorithms a run goes by, and whether they are others than when it was served last."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from fleetlearn_protocol.computations.function_settings import NEXT_STATE, FunctionSums
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.origins import origin

from fleetlearn_coordinator.plan.own_algorithms import ASKED_AT_ONCE, OwnName
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata
from fleetlearn_coordinator.storage.stored_json import decode

OWN = "own_algorithms"
"""The key of the own algorithms, by the keys that name them, in the run's metadata."""
OURS = "no own algorithm"
WHAT = "what the database says of own algorithms"


def own_names(plan: Plan, manifests: Iterable[Manifest]) -> list[OwnName]:
    """Return what a plan and its bundles name of other packages."""
    return plan.own_names() + [
        OwnName(
            NEXT_STATE, each.coordinator, "the bundle's coordinator", each.coordinator_parameters
        )
        for each in (manifest.computation for manifest in manifests)
        if isinstance(each, FunctionSums)
    ]


def combine_by_own_code(plan: Plan, manifests: Iterable[Manifest]) -> bool:
    """Return whether an own algorithm has a part in what becomes of updates."""
    return any(each.point not in ASKED_AT_ONCE for each in own_names(plan, manifests))


def own_origins(plan: Plan, manifests: Iterable[Manifest]) -> dict[str, str]:
    """Return where the plan's own algorithms come from: the key that names one -> its name, the
    version of its package and the beginning of its source's SHA-256. ``manifests``: of the plan's
    bundles. Raises ExtensionError."""
    return {
        each.key: str(origin(each.point, each.name, each.key))
        for each in own_names(plan, manifests)
    }


def look_at_origins(now: dict[str, str], ledger: Ledger) -> tuple[list[str], list[Metadata]]:
    """Return what has changed since the run was served last, and the rows that remember these
    algorithms. ``now``: of ``own_origins``.

    Nothing has changed where the run is new, or where an earlier version served it, which
    remembered none."""
    stored = ledger.get(OWN)
    row = Metadata(OWN, msgspec.json.encode(now).decode())
    if stored is None:
        return [], [row]
    before = decode(stored, dict[str, str], WHAT)
    changes = [
        f"{key} was {before.get(key, OURS)} and is {now.get(key, OURS)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    return changes, [row] if changes else []
