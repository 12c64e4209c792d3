"""The looks at devices' data of a run (``[quality]``), and their summaries."""

from __future__ import annotations

from typing import Any

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import Reply
from fleetlearn_protocol.quality_messages import QUALITY

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.quality.look import look_at
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.ledger import Row
from fleetlearn_coordinator.storage.store import Store


class QualityRecords(ExchangeRecords):
    """What a run knows of its looks beside the engine."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(QUALITY, store.ledger)
        self.plan = plan

    def answer_row(self, device: str, message: Reply) -> Row:
        why_not = content_of(message).contradiction
        if why_not is not None:
            text = f"the answer to {message.task} does not fit together: {why_not}"
            raise ProtocolError(Code.BAD_MESSAGE, text)
        return super().answer_row(device, message)

    def summary(self, *, valid: bool) -> dict[str, Any]:
        (answers,), rule = self.answers, self.plan.quality
        if rule is None:  # the look began before the plan was another one
            return {}
        return look_at(answers, rule.alarm, rule.classes)
