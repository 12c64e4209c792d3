"""The rounds that a plan's own stop rule goes by. Nothing is kept for it: the summaries of rounds
are in the ledger."""

from __future__ import annotations

from typing import Any

from fleetlearn_coordinator.aggregation.round_summary import deciding
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.own_stop_rule import OwnStopRule
from fleetlearn_coordinator.storage.store import Store


def restore_stop_rule(
    plan: Plan, store: Store, newest: int, rolled_back: int
) -> OwnStopRule | None:
    """Return the plan's own stop rule with the rounds since the last roll back; None: the plan has
    none. Raises PlanError and StoreError (damaged).

    ``newest``: the newest version. ``rolled_back``: the version that the last roll back made; 0:
    there was none."""
    rule = plan.own_stop_rule()
    if rule is not None:
        for version, summary in store.ledger.committed_rounds(newest - rolled_back):
            if version > rolled_back:
                note_round(rule, plan, version, summary)
    return rule


def note_round(rule: OwnStopRule, plan: Plan, version: int, summary: dict[str, Any]) -> None:
    """A round was committed that made this version."""
    rule.add(version, summary, deciding(summary, plan.round.minimum))
