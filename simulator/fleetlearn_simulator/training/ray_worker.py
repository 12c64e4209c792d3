"""What runs on the machines of a Ray cluster. It returns exceptions as values: they are not taken
for its death."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fleetlearn_protocol.vector import digest

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import Backend, Job, PerDevice, RoundInputs
from fleetlearn_simulator.training.kept_rows import KeptRows, RowsInMemory
from fleetlearn_simulator.training.worker_pool import MakeBackend


class Answer(NamedTuple):
    """A value that a worker returns, or an exception."""

    node: str
    value: Any
    error: bytes
    """A pickled exception, if there is no value."""
    trace: str
    """The exception's traceback. Empty: there is no exception."""


class Worker:
    """A worker. ``begin`` makes its back end. ``path``: more folders to import from."""

    def __init__(self, path: list[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        self.backend: Backend | None = None

    def begin(self, make: MakeBackend, inputs: RoundInputs) -> Answer:
        """Return the digest of a first step. It differs between workers that compute different
        bits."""

        def begun() -> str:
            self.backend = make()
            return digest(self.backend.train(inputs, [Job(0, 0, 1)]).updates[0])

        return answer(begun)

    def train(
        self, inputs: RoundInputs, blocks: list[list[Job]], kept: KeptRows[RowsInMemory]
    ) -> list[Answer]:
        backend = self._backend(kept)
        return [answer(partial(backend.train, inputs, jobs)) for jobs in blocks]

    def evaluate(
        self, inputs: RoundInputs, blocks: list[list[Job]], kept: KeptRows[RowsInMemory]
    ) -> list[Answer]:
        backend = self._backend(kept)
        return [answer(partial(backend.evaluate, inputs, jobs)) for jobs in blocks]

    def evaluate_personal(
        self, inputs: RoundInputs, blocks: list[list[Job]], kept: KeptRows[RowsInMemory]
    ) -> list[Answer]:
        backend = self._backend(kept)
        return [answer(partial(backend.evaluate_personal, inputs, jobs)) for jobs in blocks]

    def _backend(self, kept: KeptRows[RowsInMemory]) -> Backend:
        """Return the back end. ``kept``: the rows of its next jobs."""
        assert self.backend is not None
        if isinstance(self.backend, PerDevice):
            self.backend.kept = kept
        return self.backend


def answer(function: Callable[[], Any]) -> Answer:
    """Return what the function returns or raises. SystemExit is raised: by it Ray ends a
    worker."""
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
    """Return the exception, with a note that says where it was raised."""
    try:
        error: Exception = pickle.loads(got.error)
    except Exception:  # it could not be pickled, or its module is not here
        error = SimulatorError(got.trace.strip().rpartition("\n")[2])
    error.add_note(f"Raised by a worker on Ray's node {got.node}:\n{got.trace}")
    return error
