"""Has a process measure the models of a round's sets of devices on held-out data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.service.round_asker import RoundAsker
from fleetlearn_coordinator.service.training_run.measured_contributions import (
    ContributionQuestion,
    MeasuringContributions,
)
from fleetlearn_coordinator.service.worker_process import WorkerProcess


class ContributionAsker(RoundAsker[ContributionQuestion]):
    """Measures what a run's rounds ask for."""

    def __init__(
        self,
        measuring: MeasuringContributions,
        worker: WorkerProcess,
        answered: Callable[[Callable[[], None]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``worker``: of ``fleetlearn_device.measure``. ``answered``: called with what hands an
        answer in."""
        super().__init__(measuring, worker, failed)
        self._measuring, self._answered = measuring, answered

    async def ask(self, question: ContributionQuestion) -> None:
        # The event loop answers devices: what takes long is done in another thread.
        updates = await asyncio.to_thread(question.read)
        sets = await asyncio.to_thread(question.rule.sets, len(question.devices))
        losses = dict[frozenset[int], float]()
        for number, members in enumerate(sets):
            model = await asyncio.to_thread(updates.model_of, members)
            job = {"name": f"model {number} of round {question.round}", "sha256": digest(model)}
            answer = await self._worker.ask(job, [model.astype("<f4", copy=False).tobytes()])
            if "error" in answer.fields:
                why = answer.fields["error"]
                self._answered(partial(self._measuring.failed, question, why))
                return
            losses[members] = answer.fields["loss_sum"] / answer.fields["examples"]
        worth = await asyncio.to_thread(question.rule.worth_of, question.devices, losses)
        self._answered(partial(self._measuring.measured, question, worth, len(losses)))
