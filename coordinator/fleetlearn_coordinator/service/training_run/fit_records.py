"""The exchanges in which the devices of a clustered run measure its models, and which model each
device then trains."""

from __future__ import annotations

from typing import Any, cast

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import FIT, FitAnswer, FitQuestion, content_of, fields_of
from fleetlearn_protocol.messages import CheckIn, Reply

from fleetlearn_coordinator.aggregation.clusters import best_of, summarise_fit
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import Ask
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.ledger import Row
from fleetlearn_coordinator.storage.store import Store


class FitRecords(ExchangeRecords):
    """What a run knows of its fits beside the engine."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(FIT, store.ledger)
        self.names = [member.name for member in members.all]

    def content(self, lease: Ask) -> dict[str, Any]:
        return fields_of(FitQuestion(tuple(self.names)))

    def answer_row(self, device: str, message: Reply) -> Row:
        answer = cast("FitAnswer", content_of(message))
        if len(answer.losses) != len(self.names):
            text = f"{len(answer.losses)} losses came for {len(self.names)} models"
            raise ProtocolError(Code.BAD_MESSAGE, text)
        return super().answer_row(device, message)

    def summary(self, *, valid: bool) -> dict[str, Any]:
        return summarise_fit(self.names, [answer.losses for answer in self.answers[-1].values()])


class BestFit:
    """Gives each device the member whose model had the least loss on its data, by the last fit
    (``MemberPolicy``). Only devices that answered in a round's fit are given its tasks."""

    def __init__(self, records: FitRecords) -> None:
        self._records = records

    def join(self, check_in: CheckIn) -> None: ...

    def leave(self, device: str) -> None: ...

    def member_of(self, device: str) -> str:
        names, answers = self._records.names, self._records.answers
        answer = answers[-1].get(device) if answers else None
        return names[0] if answer is None else names[best_of(answer.losses)]

    def why_not(self, check_in: CheckIn) -> str:
        if FIT in check_in.exchanges:
            return ""
        return (
            "this run has several models, each device must say which one fits its data, and the "
            "device does not know how. Update its fleetlearn"
        )
