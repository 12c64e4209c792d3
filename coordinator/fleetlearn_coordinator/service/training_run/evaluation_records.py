"""The evaluations of a run: requests for them, the tiers of devices, and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetlearn_protocol.messages import CheckIn

from fleetlearn_coordinator.aggregation.evaluation_summary import (
    summarise_evaluation,
    summarise_members,
)
from fleetlearn_coordinator.aggregation.round_summary import MEMBERS, deciding
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.store import Store


class EvaluationRecords(ExchangeRecords):
    """What a run knows of its evaluations beside the engine. A device's note is its tier; in a
    family followed by a space and the member that it measures."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(EVALUATION, store.ledger)
        self.plan, self.names = plan, members.all[0].rules.metrics
        self._members = members
        self._requests = store.storage.requests
        self.tiers: dict[str, str] = {}
        """Connected device that can evaluate -> its tier; empty where it states none."""
        self.metrics: dict[str, float] = {}
        """Of the last valid evaluation: those that enough devices measured."""

    def look_for_request(self) -> bool:
        name, plan = self._requests.evaluation(), self.plan
        # A run that has become private since somebody asked does not answer, nor one without a
        # model, nor one in which nobody says which of several models is a device's.
        refused = plan.hides_devices or not plan.algorithm.has_model or plan.clusters is not None
        if name is not None and (refused or name == self.answered):
            self._requests.remove_evaluation()
            name = None
        self.request = name
        return name is not None

    def join(self, check_in: CheckIn) -> None:
        self.tiers[check_in.device] = check_in.tier or ""

    def leave(self, device: str) -> None:
        self.tiers.pop(device, None)

    def note(self, device: str) -> str:
        tier = self.tiers.get(device, "")
        if not self._members.is_family:
            return tier
        return f"{tier} {self._members.of_device(device).name}"

    def summary(self, *, valid: bool) -> dict[str, Any]:
        (measured,), plan = self.answers, self.plan
        if plan.hides_devices:  # it began before the plan was private
            nothing = summarise_evaluation([], [], self.names, plan.round.max_weight, plan.bounds)
            return nothing | {"devices": len(measured)}
        notes = [self.notes[device].partition(" ") for device in measured]
        tiers, members = [tier for tier, _, _ in notes], [member for _, _, member in notes]
        given = self.names, plan.round.max_weight, plan.bounds
        summary = summarise_evaluation([*measured.values()], tiers, *given)
        if self._members.is_family:
            summary[MEMBERS] = summarise_members([*measured.values()], members, *given)
        if valid:
            self.metrics = deciding(summary, plan.evaluation.minimum)
        return summary

    def stop_metrics(self) -> Mapping[str, float] | None:
        return self.metrics if self.plan.stop.measured_by == EVALUATION else None
