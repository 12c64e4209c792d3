"""Which of the plan's values are others than when the run was served last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata
from fleetlearn_coordinator.storage.stored_json import decode

PLAN = "plan"
"""The key of the plan's values in the run's metadata."""
WHAT = "what the database says of the plan"
FREE = "local.hyper."
"""The table whose keys are not the same in each plan."""


def look_at_plan(plan: Plan, ledger: Ledger) -> tuple[list[str], Metadata]:
    """Return what has changed, such as ``stop.rounds was 40 and is 60``, and the row that remembers
    the plan. Nothing has changed where the run is new, or where an earlier version served it, which
    remembered no plan."""
    values = msgspec.json.decode(msgspec.json.encode(plan, enc_hook=str))
    del values["file"]  # where the plan was read from
    before = ledger.get(PLAN)
    changes = [] if before is None else [*_changes(decode(before, dict[str, Any], WHAT), values)]
    return changes, Metadata(PLAN, msgspec.json.encode(values).decode())


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in after:
        if key not in before and prefix != FREE:  # a key of a newer version
            continue
        was, now = before.get(key), after[key]
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _changes(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key} was {_shown(was)} and is {_shown(now)}"
    if prefix == FREE:
        yield from (
            f"{prefix}{key} was {_shown(before[key])} and is left out"
            for key in before
            if key not in after
        )


def _shown(value: object) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
