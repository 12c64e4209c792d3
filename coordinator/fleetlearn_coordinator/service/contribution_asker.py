"""Has a process measure the models of a round's sets of devices on held-out data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.service.training_run.measured_contributions import (
    ContributionQuestion,
    MeasuringContributions,
)
from fleetlearn_coordinator.service.worker_process import WorkerProcess


class ContributionAsker:
    """Measures what a run's rounds ask for, one at a time."""

    def __init__(
        self,
        measuring: MeasuringContributions,
        worker: WorkerProcess,
        answered: Callable[[Callable[[], None]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``worker``: of ``fleetlearn_device.measure``. ``answered``: called with what hands an
        answer in. ``failed``: called with an error that is no answer. In a running event loop."""
        self._measuring, self._worker = measuring, worker
        self._answered, self._failed = answered, failed
        self._asked: ContributionQuestion | None = None
        self._asking: asyncio.Task[None] | None = None
        self._is_over = False
        measuring.changed = self.look

    def look(self) -> None:
        """Measure what is to be measured now, unless that is under way. Harmless when repeated."""
        if self._is_over or self._measuring.question is self._asked:
            return
        self._stop_asking()
        self._asked = self._measuring.question
        if self._asked is not None:
            self._asking = asyncio.get_running_loop().create_task(self._ask(self._asked))

    def _stop_asking(self) -> None:
        # Within ``_ask`` the answer has been handed in, and it returns by itself.
        if self._asking is not None and self._asking is not asyncio.current_task():
            self._asking.cancel()
        self._asking = None

    async def _ask(self, question: ContributionQuestion) -> None:
        try:
            losses = dict[frozenset[int], float]()
            for number, members in enumerate(question.sets):
                model = await asyncio.to_thread(question.model_of, members)
                name = f"model {number} of round {question.round}"
                job = {"name": name, "sha256": digest(model)}
                answer = await self._worker.ask(job, [model.astype("<f4", copy=False).tobytes()])
                if "error" in answer.fields:
                    why = answer.fields["error"]
                    self._answered(partial(self._measuring.failed, question, why))
                    return
                losses[members] = answer.fields["loss_sum"] / answer.fields["examples"]
            self._answered(partial(self._measuring.measured, question, losses))
        except Exception as error:
            self._failed(error)

    def end(self) -> None:
        """Measure nothing more. What is under way is not heard."""
        self._is_over = True
        self._stop_asking()

    async def close(self) -> None:
        """End the process, too."""
        self.end()
        await self._worker.close()
