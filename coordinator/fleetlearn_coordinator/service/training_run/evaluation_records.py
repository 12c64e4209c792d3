"""The evaluations of a run: what is recorded of them, and their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import CheckIn, Evaluation, Reply

from fleetlearn_coordinator.aggregation.evaluation_summary import summarise_evaluation
from fleetlearn_coordinator.aggregation.round_summary import deciding
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds import commands
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeCommand
from fleetlearn_coordinator.storage import ledger
from fleetlearn_coordinator.storage.ledger import LastEvaluation
from fleetlearn_coordinator.storage.requests import Requests


def tier_of(check_in: CheckIn) -> str:
    """Return the tier that a device states. Devices of this version state none."""
    return ""


class EvaluationRecords:
    """What a run knows of its evaluations beside the engine: the tiers of devices, results,
    requests."""

    def __init__(
        self,
        plan: Plan,
        names: Sequence[str],
        requests: Requests,
        last: LastEvaluation | None,
    ) -> None:
        """``names``: of the metrics. ``requests``: the run's. ``last``: what an earlier process
        left."""
        self.plan, self.names, self._requests = plan, names, requests
        self.tiers: dict[str, str] = {}
        """Connected device that can evaluate -> its tier."""
        self._given: dict[str, str] = {}
        """Task of the open evaluation -> its device's tier."""
        self._results: dict[str, Evaluation] = {}
        """Task of the open evaluation -> what its device measured."""
        self._answered = None if last is None else last.request
        """The request that was carried out last."""
        self._request: str | None = None
        self.metrics: dict[str, float] = {}
        """Of the last valid evaluation: those that enough devices measured."""
        for row in () if last is None else last.measurements:
            self._given[row.task] = row.tier
            if row.result is not None:
                self._results[row.task] = row.result

    def look_for_request(self) -> bool:
        """Return whether somebody asked for an evaluation that was not opened yet."""
        name = self._requests.evaluation()
        if name is not None and name == self._answered:
            self._requests.remove_evaluation()
            name = None
        self._request = name
        return name is not None

    def join(self, check_in: CheckIn) -> None:
        """A device that can evaluate checks in."""
        self.tiers[check_in.device] = tier_of(check_in)

    def leave(self, device: str) -> None:
        """A device is not connected any more."""
        self.tiers.pop(device, None)

    def content(self, lease: commands.Ask) -> dict[str, Any]:
        """Return the content of the question: none. The model comes as a vector."""
        return {}

    def answer_row(self, message: Reply) -> ledger.Row:
        """Return the row that makes a measurement durable. ``keep`` follows. Raises ProtocolError
        (bad-message)."""
        return ledger.MeasurementAccepted(message.task, content_of(message))

    def keep(self, message: Reply) -> None:
        """The measurement is durable."""
        self._results[message.task] = content_of(message)

    def row_of(self, command: ExchangeCommand, at: float) -> ledger.Row | None:
        """Return the row that a command writes. ``at``: Unix time."""
        match command:
            case commands.ExchangeOpened(number, version):
                self._given, self._results = {}, {}
                self._answered, self._request = self._request or self._answered, None
                return ledger.EvaluationBegun(number, version, self._answered, at)
            case commands.Ask(device, task, number, again=again):
                if again:
                    return None
                self._given[task] = self.tiers.get(device, "")
                return ledger.MeasurementGiven(task, number, device, self._given[task])
            case commands.Unanswered(_, task, cause):
                return ledger.MeasurementDropped(task, cause)
            case commands.ExchangeClosed():
                return self._close(command, at)

    def _close(self, command: commands.ExchangeClosed, at: float) -> ledger.EvaluationEnded:
        number, _, dropped, valid = command[:4]
        results = [*self._results.values()]
        tiers = [self._given[task] for task in self._results]
        plan = self.plan
        summary = summarise_evaluation(
            results, tiers, self.names, plan.round.max_weight, plan.bounds
        )
        summary["dropped"] = dropped
        if valid:
            self.metrics = deciding(summary, plan.evaluation.minimum)
        return ledger.EvaluationEnded(number, "valid" if valid else "invalid", summary, at)


def saved(last: LastEvaluation) -> SavedExchange:
    """Return what the engine is to know of the evaluation that an earlier process opened last."""
    leases, accepted, dropped = [], [], []
    for row in last.measurements:
        if row.state == "assigned":
            leases.append((row.task, row.device))
        elif row.state == "accepted":
            accepted.append((row.task, row.device))
        else:
            dropped.append((row.task, row.device, row.state))
    return SavedExchange(last.number, last.version, last.is_open, leases, accepted, dropped)
