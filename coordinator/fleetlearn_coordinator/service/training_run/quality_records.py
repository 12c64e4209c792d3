"""The looks at devices' data of a run (``[quality]``), and their summaries."""

from __future__ import annotations

from typing import Any

from fleetlearn_protocol.quality_messages import QUALITY

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.quality.look import look_at
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.store import Store


class QualityRecords(ExchangeRecords):
    """What a run knows of its looks beside the engine."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(QUALITY, store.ledger)
        self.plan = plan

    def summary(self, *, valid: bool) -> dict[str, Any]:
        (answers,), rule = self.answers, self.plan.quality
        if rule is None:  # the look began before the plan was another one
            return {}
        return look_at(answers, rule.alarm, rule.classes)
