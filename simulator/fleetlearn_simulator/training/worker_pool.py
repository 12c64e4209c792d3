"""What the two worker pools share: work that waits for a worker, and work that is done again when
its worker dies.

Which worker trains which device changes nothing: every device is trained by itself, and sums are
exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from weakref import ref

from fleetlearn_protocol.messages import Evaluation

from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.trained_devices import (
    PendingResults,
    ResultReader,
    TrainedDevices,
    read_all,
)

MakeBackend = Callable[[], Backend]
"""Makes a back end in a worker. It must be picklable."""
DivideJobs = Callable[[Sequence[Job]], list[list[int]]]
"""Divides jobs into blocks, as lists of their indices. A block is trained by one worker. The blocks
must not depend on the number of workers."""
MAX_QUEUED = 2
"""Pieces of work that a worker is given before it returns the first, so that it does not wait for
the next one."""
MAX_DEATHS = 3
"""When this many workers died while they did the same piece of work, it is not tried again."""


class WorkItem:
    """A piece of work for one worker."""

    def __init__(self, pending: PendingResults, indices: Sequence[int]) -> None:
        """``indices``: of the jobs, in ``pending``."""
        self.pending, self.indices = ref(pending), indices
        self.deaths = 0
        """Workers that died while they did this."""

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for the results."""
        return self.pending() is not None

    def put(self, indices: Iterable[int], values: Any) -> None:
        """Hand over results, as ``PendingResults.put`` does."""
        if (pending := self.pending()) is not None:
            pending.put(indices, values)

    def fail(self, error: Exception) -> None:
        """Raise the error for whoever reads the results."""
        self.put(self.indices, error)


AnyWork = TypeVar("AnyWork", bound=WorkItem)
AnyWorker = TypeVar("AnyWorker")


class WorkerPool(Generic[AnyWork, AnyWorker]):
    """A back end that is spread over workers. ``divide`` divides the jobs that are trained. Those
    of evaluations are divided into at most ``shares`` parts."""

    def __init__(self, divide: DivideJobs, shares: int) -> None:
        self.divide, self.shares = divide, shares
        self.waiting: deque[AnyWork] = deque()
        """Work that no worker has yet."""

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        return read_all(self.begin(inputs, jobs), len(jobs))

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        return self._begin("train", inputs, jobs, self.divide(jobs)).read

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        return self._evaluate("evaluate", inputs, jobs)

    def evaluate_personal(
        self, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        return self._evaluate("evaluate_personal", inputs, jobs)

    def _evaluate(
        self, method: str, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        size = max(1, -(-len(jobs) // self.shares))
        blocks = [
            list(range(start, min(start + size, len(jobs)))) for start in range(0, len(jobs), size)
        ]
        pending = self._begin(method, inputs, jobs, blocks)
        return [pending.value(index) for index in range(len(jobs))]

    def assign_waiting(self) -> None:
        """Give waiting work to workers, until all workers have enough."""
        while self.waiting:
            if self.waiting[0].wanted:
                worker = self._worker_for(self.waiting[0])
                if worker is None:
                    return
                self._give(worker, self.waiting[0])
            self.waiting.popleft()

    def redo(self, lost: Sequence[AnyWork], error: Exception) -> None:
        """Put the work of a worker that died back, before all other work. The worker was doing the
        first piece: that fails with the error if too many workers died over it."""
        for work in lost[:1]:
            work.deaths += 1
            if work.deaths == MAX_DEATHS:
                work.fail(error)
                lost = lost[1:]
        self.waiting.extendleft(reversed(lost))

    def _begin(
        self, method: str, inputs: RoundInputs, jobs: Sequence[Job], blocks: list[list[int]]
    ) -> PendingResults:
        """Have a worker call the back end's method with the round's inputs and each block of
        jobs."""
        raise NotImplementedError

    def _worker_for(self, work: AnyWork) -> AnyWorker | None:
        """Return the worker that has the least to do, or None if all have enough."""
        raise NotImplementedError

    def _give(self, worker: AnyWorker, work: AnyWork) -> None:
        raise NotImplementedError
