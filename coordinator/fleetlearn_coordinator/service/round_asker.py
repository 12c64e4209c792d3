"""Asks a worker process what a run's closed round waits for, one question at a time: what two
refiners (``training_run/refining.py``) have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fleetlearn_coordinator.service.worker_process import WorkerProcess

Question = TypeVar("Question")


class WithQuestion(Protocol[Question]):
    """What has the question."""

    question: Question | None
    """What is to be asked now. None: nothing."""
    changed: Callable[[], None]
    """Called when ``question`` is another one."""


class RoundAsker(ABC, Generic[Question]):
    """Asks what ``waiting`` has to ask, as long as that is to be asked."""

    def __init__(
        self,
        waiting: WithQuestion[Question],
        worker: WorkerProcess,
        failed: Callable[[Exception], None],
    ) -> None:
        """``failed``: called with an error that is no answer. In a running event loop."""
        self._waiting, self._worker, self._failed = waiting, worker, failed
        self._asked: Question | None = None
        """What is under way, or is to be asked again after a pause."""
        self._asking: asyncio.Task[None] | None = None
        self._is_over = False
        waiting.changed = self.look

    @abstractmethod
    async def ask(self, question: Question) -> None:
        """Ask, and hand the answer in. What is raised ends the run."""

    def look(self) -> None:
        """Ask what is to be asked now, unless it is being asked. Harmless when repeated."""
        if self._is_over or self._waiting.question is self._asked:
            return
        self._stop_asking()
        self._asked = self._waiting.question
        if self._asked is not None:
            self._asking = asyncio.get_running_loop().create_task(self._ask(self._asked))

    async def _ask(self, question: Question) -> None:
        try:
            await self.ask(question)
        except Exception as error:
            self._failed(error)

    def _stop_asking(self) -> None:
        # Within ``_ask`` the answer has been handed in, and it returns by itself.
        if self._asking is not None and self._asking is not asyncio.current_task():
            self._asking.cancel()
        self._asking = None

    def end(self) -> None:
        """Ask nothing more. An answer that is under way is not heard."""
        self._is_over = True
        self._stop_asking()

    async def close(self) -> None:
        """End the process, too."""
        self.end()
        await self._worker.close()
