"""What runs on a Ray cluster's machines. An exception comes back as a value, and so is not taken for a death."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import Backend, Job
from fleetlearn_simulator.training.process_pool import Make


class Answer(NamedTuple):
    """What a worker returns."""

    node: str
    value: Any
    error: bytes
    """A pickled exception in place of a value."""
    trace: str
    """Where it was raised; empty: nothing was."""


class Worker:
    """What runs on the cluster: a back end of its own, made by ``begin``. ``path``: more places to import from."""

    def __init__(self, path: list[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        self.backend: Backend | None = None

    def begin(self, make: Make, model: Vector) -> Answer:
        """The digest of a first step, in which workers that will not make the same bits differ."""

        def begun() -> str:
            self.backend = make()
            return digest(self.backend.train(model, [Job(0, 0, 1)]).updates[0])

        return answer(begun)

    def train(self, model: Vector, blocks: list[list[Job]]) -> list[Answer]:
        backend = self.backend
        assert backend is not None
        return [answer(partial(backend.train, model, jobs)) for jobs in blocks]

    def evaluate(self, model: Vector, blocks: list[list[int]]) -> list[Answer]:
        backend = self.backend
        assert backend is not None
        return [answer(partial(backend.evaluate, model, devices)) for devices in blocks]


def answer(function: Callable[[], Any]) -> Answer:
    """What it returns or raises. Not SystemExit, by which Ray ends a worker."""
    import ray

    node = ray.util.get_node_ip_address()
    try:
        return Answer(node, function(), b"", "")
    except Exception as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        return Answer(node, None, pickled, traceback.format_exc())


def error_of(got: Answer) -> Exception:
    """What was raised, with a note of where."""
    try:
        error: Exception = pickle.loads(got.error)
    except Exception:  # it could not be pickled, or is of a module that is not here
        error = SimulatorError(got.trace.strip().rpartition("\n")[2])
    error.add_note(f"Raised by a worker on Ray's node {got.node}:\n{got.trace}")
    return error
