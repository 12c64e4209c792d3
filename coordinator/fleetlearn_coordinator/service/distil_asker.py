"""Has the worker process distil what a run waits for, and asks again after pauses where it could
not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from fleetlearn_coordinator.service.round_asker import RoundAsker
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import Distilling, DistilQuestion
from fleetlearn_coordinator.service.worker_process import WorkerAnswer, WorkerProcess

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds between two questions: each pause is twice the one before, up to the longest."""


class DistilAsker(RoundAsker[DistilQuestion]):
    """Has a run's rounds distilled."""

    def __init__(
        self,
        distilling: Distilling,
        worker: WorkerProcess,
        log: RunLog,
        answered: Callable[[DistilQuestion, WorkerAnswer], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``answered``: called with what the process answered."""
        super().__init__(distilling, worker, failed)
        self._distilling, self._log, self._answered = distilling, log, answered

    async def ask(self, question: DistilQuestion) -> None:
        pause, text = FIRST_PAUSE, "the process that distils died (%d); it is started again"
        while True:
            answer = await self._worker.ask(
                msgspec.to_builtins(question.job),
                question.content,
                lambda death: self._log.warning(text, death),
            )
            self._answered(question, answer)
            if self._distilling.question is not question:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
