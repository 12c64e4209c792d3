"""Has the worker process distil what a run waits for, and asks again after pauses where it could
not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import Distilling, DistilQuestion
from fleetlearn_coordinator.service.worker_process import WorkerAnswer, WorkerProcess

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds between two questions: each pause is twice the one before, up to the longest."""


class DistilAsker:
    """Asks a run's questions, one at a time."""

    def __init__(
        self,
        distilling: Distilling,
        worker: WorkerProcess,
        log: RunLog,
        answered: Callable[[DistilQuestion, WorkerAnswer], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``answered``, ``failed``: called with what the process answered, or with an error that is
        no answer. In a running event loop."""
        self._distilling, self._worker, self._log = distilling, worker, log
        self._answered, self._failed = answered, failed
        self._loop = asyncio.get_running_loop()
        self._asked: DistilQuestion | None = None
        """What is under way, or is to be asked again after a pause."""
        self._asking: asyncio.Task[None] | None = None
        self._is_over = False
        distilling.changed = self.look

    def look(self) -> None:
        """Ask what is to be asked now, unless it is being asked. Harmless when repeated."""
        if self._is_over or self._distilling.question is self._asked:
            return
        self._stop_asking()
        self._asked = self._distilling.question
        if self._asked is not None:
            self._asking = self._loop.create_task(self._ask(self._asked))

    def _stop_asking(self) -> None:
        # Within ``_ask`` the answer has been handed in, and it returns by itself.
        if self._asking is not None and self._asking is not asyncio.current_task():
            self._asking.cancel()
        self._asking = None

    async def _ask(self, question: DistilQuestion) -> None:
        pause, text = FIRST_PAUSE, "the process that distils died (%d); it is started again"
        try:
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
        except Exception as error:
            self._failed(error)

    def end(self) -> None:
        """Ask nothing more. An answer that is under way is not heard."""
        self._is_over = True
        self._stop_asking()

    async def close(self) -> None:
        """End the process, too."""
        self.end()
        await self._worker.close()
