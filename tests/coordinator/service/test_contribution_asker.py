"""Who has a round's models measured: what takes long is not done where devices are answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.device_models import DeviceModel
from fleetlearn_coordinator.quality.round_worth import WorthRule
from fleetlearn_coordinator.service.contribution_asker import ContributionAsker
from fleetlearn_coordinator.service.training_run.measured_contributions import (
    ContributionQuestion,
)
from fleetlearn_coordinator.service.worker_process import WorkerAnswer
from fleetlearn_protocol.vector import Vector

BEFORE = np.zeros(2, np.float32)


class FiledUpdate:
    """``aggregation.updates.Update`` that says which thread reads it."""

    def __init__(self, value: float, readers: list[int]) -> None:
        self._value, self._readers = value, readers

    def read(self, start: int, stop: int) -> Vector:
        self._readers.append(threading.get_ident())
        return np.full(stop - start, self._value, np.float32)


class Measures:
    """A worker process: the loss of a model is minus its first element."""

    def __init__(self, trouble: str) -> None:
        self._trouble = trouble
        self.asked = 0

    async def ask(self, job: dict[str, Any], content: Sequence[bytes]) -> WorkerAnswer:
        self.asked += 1
        if self._trouble:
            return WorkerAnswer({"error": self._trouble}, b"")
        value = float(np.frombuffer(content[0], "<f4")[0])
        return WorkerAnswer({"loss_sum": -value * 10, "examples": 10}, b"")


class Heard:
    """``MeasuringContributions``, as the asker knows it."""

    def __init__(self, question: ContributionQuestion) -> None:
        self.question: ContributionQuestion | None = question
        self.changed: Callable[[], None] = lambda: None
        self.worth: dict[str, dict[str, float]] = {}
        self.models = 0
        self.why = ""

    def measured(self, question: ContributionQuestion, worth: Any, models: int) -> None:
        self.worth, self.models = worth, models

    def failed(self, question: ContributionQuestion, why: str) -> None:
        self.why = why


async def heard(readers: list[int], trouble: str = "") -> tuple[Heard, Measures]:
    """Ask about two devices, whose updates are 1 and 3, and wait for what is handed in."""
    own: Any = [DeviceModel(BEFORE, FiledUpdate(value, readers), (), BEFORE) for value in (1, 3)]  # type: ignore[arg-type]
    question = ContributionQuestion(4, ["a", "b"], BEFORE, own, np.ones(2), WorthRule(16, 5))
    measuring, worker = Heard(question), Measures(trouble)
    failed, over = list[Exception](), asyncio.Event()

    def answered(hand_in: Callable[[], None]) -> None:
        hand_in()
        over.set()

    def fail(error: Exception) -> None:
        failed.append(error)
        over.set()

    asker = ContributionAsker(measuring, worker, answered, fail)  # type: ignore[arg-type]
    asker.look()
    async with asyncio.timeout(60):
        await over.wait()
    assert not failed
    return measuring, worker


def test_the_event_loop_does_not_read_spool_files() -> None:
    readers: list[int] = []
    measuring, worker = asyncio.run(heard(readers))
    assert len(readers) == 2
    assert threading.get_ident() not in readers
    assert worker.asked == measuring.models == 4
    # Alone they add 1 and 3; after the other one -1 and 1, as the mean of both is 2.
    shapley = {device: row["shapley"] for device, row in measuring.worth.items()}
    assert shapley == pytest.approx({"a": 0.0, "b": 2.0})
    assert measuring.worth["b"]["left_out"] == pytest.approx(1.0)


def test_a_process_that_cannot_measure_is_not_asked_again() -> None:
    measuring, worker = asyncio.run(heard([], "the file is gone"))
    assert worker.asked == 1
    assert measuring.why == "the file is gone"
    assert not measuring.worth
