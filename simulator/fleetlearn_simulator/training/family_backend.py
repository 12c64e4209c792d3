"""The back end of a family: each member's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetlearn_protocol.messages import Evaluation

from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.trained_devices import NO_DEVICES, ResultReader, TrainedDevices


class FamilyBackend:
    """Trains devices with their member's back end. All jobs of a call are of one member."""

    def __init__(
        self,
        backends: Sequence[Backend],
        numbers: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """``backends``: of the members, in the plan's order. ``numbers``: devices -> the number of
        each one's member."""
        self._backends, self._numbers = backends, numbers

    def _of(self, jobs: Sequence[Job]) -> Backend:
        (number,) = self._numbers([jobs[0].device])
        return self._backends[number]

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        return self._of(jobs).train(inputs, jobs) if jobs else NO_DEVICES

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        return self._of(jobs).begin(inputs, jobs)

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        return self._of(jobs).evaluate(inputs, jobs) if jobs else []

    def evaluate_personal(
        self, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        return self._of(jobs).evaluate_personal(inputs, jobs) if jobs else []

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
