"""Training on several processes. Each makes the devices' data itself and keeps a back end of its own.

Which process trains which device changes nothing: every device is trained by itself, and sums are exact.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.training import Backend, Job, Result

Make = Callable[[], Backend]
_backend: Backend | None = None


def _begin(make: Make) -> None:
    global _backend
    _backend = make()


def _train(model: Vector, jobs: Sequence[Job]) -> list[Result]:
    assert _backend is not None
    return _backend.train(model, jobs)


def _evaluate(model: Vector, devices: Sequence[int]) -> list[Evaluation]:
    assert _backend is not None
    return _backend.evaluate(model, devices)


class Parallel:
    """A back end spread over processes. ``make`` must be picklable: each process calls it once."""

    def __init__(self, make: Make, workers: int, block: int) -> None:
        self.workers, self.block = workers, block
        self.pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(make,)
        )

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        """In blocks, so that no process waits long for another."""
        size = max(1, min(self.block, -(-len(jobs) // self.workers)))
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        waiting: list[Future[list[Result]]] = [self.pool.submit(_train, model, part) for part in parts]
        return [result for part in waiting for result in part.result()]

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        size = max(1, -(-len(devices) // self.workers))
        parts = [devices[start : start + size] for start in range(0, len(devices), size)]
        waiting = [self.pool.submit(_evaluate, model, part) for part in parts]
        return [found for part in waiting for found in part.result()]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
