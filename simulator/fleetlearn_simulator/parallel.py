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
Blocks = Callable[[Sequence[Job]], list[list[int]]]
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
    """A back end spread over processes. ``make`` must be picklable: each process calls it once. ``blocks`` says which
    places among the jobs are one process's, each block another's, without regard to how many processes there are.
    """

    def __init__(self, make: Make, workers: int, blocks: Blocks) -> None:
        self.workers, self.blocks = workers, blocks
        self.pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(make,)
        )

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        """In blocks, so that no process waits long for another."""
        parts = self.blocks(jobs)
        waiting: list[Future[list[Result]]] = [
            self.pool.submit(_train, model, [jobs[place] for place in places]) for places in parts
        ]
        found = {
            place: result
            for places, part in zip(parts, waiting, strict=True)
            for place, result in zip(places, part.result(), strict=True)
        }
        return [found[place] for place in range(len(jobs))]

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        size = max(1, -(-len(devices) // self.workers))
        parts = [devices[start : start + size] for start in range(0, len(devices), size)]
        waiting = [self.pool.submit(_evaluate, model, part) for part in parts]
        return [found for part in waiting for found in part.result()]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
