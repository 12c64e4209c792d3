"""Training in several processes of this machine. Each has its own back end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.extensions import allowed_modules
from fleetlearn_protocol.messages import StepSchedule
from fleetlearn_protocol.user_errors import keep_own_traceback
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.interrupts import follow_parent
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs, jobs_from_columns
from fleetlearn_simulator.training.kept_rows import RowReader
from fleetlearn_simulator.training.shared_memory import (
    ARRAY_BYTES,
    SharedArrays,
    make_shared_arrays,
)
from fleetlearn_simulator.training.trained_devices import (
    LARGE_UPDATE,
    PendingResults,
    TrainedDevices,
    from_table,
)
from fleetlearn_simulator.training.worker_pool import (
    MAX_DEATHS,
    MAX_QUEUED,
    DivideJobs,
    MakeBackend,
    WorkerPool,
    WorkItem,
)

NewArray = Callable[[], NDArray[np.float32]]
"""Returns an array in shared memory, of ``ARRAY_ELEMENTS``."""
ARRAY_ELEMENTS = ARRAY_BYTES // 4
UPDATE_ARRAYS = 4
"""Arrays for large updates in the memory that is shared with a process: for the work that it was
given, and for some results that wait until they are read."""
MAX_JOBS_IN_PIPE = 256
"""Jobs that surely fit into a pipe before anybody reads it. A pipe takes 8 KB on some systems."""
WORKER_ENVIRONMENT = {
    # Each core has a process: a second thread of numpy's would only wait, and use a core for that.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # glibc then keeps the memory of one update for the next, instead of asking the system for it
    # page by page.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
}


class ProcessPool(WorkerPool["_Block", "_Worker"]):
    """A back end on several processes of this machine. Each process calls ``make`` once, and makes
    the devices' data itself.

    Its methods raise what a process raised, and SimulatorError if processes die again and again.
    """

    def __init__(self, make: MakeBackend, workers: int, divide: DivideJobs) -> None:
        super().__init__(divide, workers)
        self.workers = [_Worker(make) for _ in range(workers)]
        self.large_blocks = 0
        """Blocks of large updates that were received."""

    def _begin(
        self, method: str, inputs: RoundInputs, jobs: Sequence[Job], blocks: list[list[int]]
    ) -> PendingResults:
        pending = PendingResults(lambda pending, index: self.collect())
        for indices in blocks:
            self.waiting.append(
                _Block(pending, method, inputs, [jobs[index] for index in indices], indices)
            )
        self.assign_waiting()
        return pending

    def _worker_for(self, work: _Block) -> _Worker | None:
        # The last blocks go to the workers that are first without any, so that all are busy until
        # the end.
        ahead = len(self.waiting) >= len(self.workers)
        free = [
            worker
            for worker in self.workers
            if worker.may_take(work) and (ahead or not worker.blocks)
        ]
        return min(free, key=lambda worker: len(worker.blocks), default=None)

    def _give(self, worker: _Worker, work: _Block) -> None:
        worker.give(work)

    def collect(self) -> None:
        """Wait until processes return something, and give them more work."""
        busy = {worker.pipe.fileno(): worker for worker in self.workers if worker.blocks}
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            worker = busy[descriptor]
            if worker.blocks[0].array is not None:  # to add it up takes a while
                self.large_blocks += 1
                take_turns(self.large_blocks, len(self.workers))
            try:
                worker.receive()
            except (EOFError, OSError):
                self.redo(*worker.restart())
        self.assign_waiting()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


class _Block(WorkItem):
    """Jobs for one process."""

    def __init__(
        self,
        pending: PendingResults,
        method: str,
        inputs: RoundInputs,
        jobs: list[Job],
        indices: list[int],
    ) -> None:
        super().__init__(pending, indices)
        self.method, self.inputs, self.jobs = method, inputs, jobs
        self.array: int | None = None
        """The array of the process's shared memory that the updates, and other vectors that fit in,
        are written to."""


class _Worker:
    """A process, as its parent sees it."""

    def __init__(self, make: MakeBackend) -> None:
        self.make = make
        self.blocks: deque[_Block] = deque()
        """What it has to do, in order."""
        self._start()

    def _start(self) -> None:
        # A forked process would lack ONNX Runtime's threads, and could inherit their locks.
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.memory = make_shared_arrays(1 + UPDATE_ARRAYS)
        """Array 0 is the model with the round's other vectors, and the others are updates, if these
        are large."""
        self.free = deque(range(1, 1 + UPDATE_ARRAYS) if self.memory else ())
        """The arrays that nobody uses."""
        self.process = context.Process(
            target=_work, args=(self.make, end, self.memory), daemon=True
        )
        with environment(WORKER_ENVIRONMENT), without_main_module():
            self.process.start()
        end.close()  # then the pipe breaks when the process dies
        self.inputs: RoundInputs | None = None
        """What the process has."""

    def may_take(self, block: _Block) -> bool:
        # What does not fit into the pipe is sent only when the process is idle. Else both could
        # wait for each other: this process until the worker reads, and the worker until its results
        # are read.
        small = block.inputs is self.inputs and len(block.jobs) <= MAX_JOBS_IN_PIPE
        return len(self.blocks) < (MAX_QUEUED if small else 1)

    def give(self, block: _Block) -> None:
        self.blocks.append(block)
        count, model = len(block.jobs), block.inputs.model
        memory = self.memory if model.size >= LARGE_UPDATE and model.nbytes <= ARRAY_BYTES else None
        inputs: _SentInputs | None = None
        # the process is idle, and does not use what it had before
        if block.inputs is not self.inputs:
            inputs = _share(block.inputs, memory)
        self.inputs = block.inputs
        fits = (
            memory is not None and block.method == "train" and count * model.nbytes <= ARRAY_BYTES
        )
        block.array = self.free.popleft() if fits and self.free else None
        # Columns of jobs: to pickle them one by one takes ten times as long.
        columns = tuple(zip(*block.jobs, strict=True))
        # the process has died: that is noticed when its results are received
        with suppress(OSError):
            self.pipe.send((block.method, inputs, columns, block.array))

    def receive(self) -> None:
        """Wait for its next results. Raises EOFError or OSError if the process has died."""
        array = self.blocks[0].array
        results = _receive(self.pipe, None if array is None else partial(self._lend, array))
        block = self.blocks.popleft()
        if isinstance(results, Exception) and block.array is not None:
            self.free.append(block.array)
        block.put(block.indices, results)

    def restart(self) -> tuple[list[_Block], SimulatorError]:
        """Start another process in place of one that has died. Returns the blocks that it had, and
        the error if they are not to be done again."""
        self.process.join()
        error = SimulatorError(
            f"{MAX_DEATHS} processes died over the same devices, the last with exit code "
            f"{self.process.exitcode} (-9: killed, for example because memory ran out): take fewer "
            "workers, or look at the function that makes the data"
        )
        lost, self.blocks = list(self.blocks), deque()
        self.pipe.close()
        self._start()
        return lost, error

    def _lend(self, array: int) -> NDArray[np.float32]:
        assert self.memory is not None
        return self.memory.lend(array, (ARRAY_ELEMENTS,), self.free.append)

    def end(self) -> None:
        self.pipe.close()
        if self.blocks:
            # Its results are of no use, and a block may take minutes.
            self.process.terminate()
        self.process.join()
        self.process.close()


def take_turns(turn: int, workers: int) -> None:
    """Move this thread to the next core, if there are not more cores than workers. Linux leaves a
    thread where it was: its work would always slow down the same worker, for which the others wait
    at the end of a round."""
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if 1 < len(allowed) <= workers:
        try:
            with suppress(OSError):  # the core is gone
                os.sched_setaffinity(0, {sorted(allowed)[turn % len(allowed)]})
        finally:  # the thread stays where it is for a while
            os.sched_setaffinity(0, allowed)


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the processes that are started inside the
    context."""
    new = {name: value for name, value in more.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the user's script from the processes that are started inside the context.

    multiprocessing would run the script again in each of them. They need nothing from it, and a
    script that calls ``simulate`` without ``if __name__ == "__main__":`` would begin a simulation
    in each.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(make: MakeBackend, pipe: Connection, memory: SharedArrays | None) -> None:
    """What a process runs: it does the blocks that it receives until the pipe is closed."""
    # Ctrl-C reaches all processes; the parent ends its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()  # a killed parent ends none, and a block may take long
    backend: Backend | None = None
    inputs = RoundInputs(np.empty(0, np.float32))
    while True:
        try:
            method, sent, columns, array = pipe.recv()
        except (EOFError, OSError):
            return
        inputs = inputs if sent is None else _shared(sent, memory)
        try:
            backend = backend or make()
            results: Any = getattr(backend, method)(inputs, jobs_from_columns(*columns))
        except Exception as error:
            keep_own_traceback(error, allowed_modules())
            error.add_note(f"in another process:\n{traceback.format_exc()}")
            results = error
        try:
            shared = (
                None
                if memory is None or array is None
                else partial(memory.array, array, (ARRAY_ELEMENTS,))
            )
            _send(pipe, results, shared)
        except OSError:
            return


class _SentInputs(NamedTuple):
    """``RoundInputs`` as they are sent."""

    vectors: list[Vector] | int
    """The model and the other vectors; or how many elements each has, if they are in the shared
    memory."""
    names: list[str]
    """The other vectors' names."""
    hyper: Mapping[str, float] | None
    models: RowReader | None
    """Where peers' own models are."""
    schedule: StepSchedule | None


def _share(inputs: RoundInputs, memory: SharedArrays | None) -> _SentInputs:
    """Write the vectors to the shared memory, if there is any and they fit in. Returns what is to
    be sent."""
    vectors, size = [inputs.model, *inputs.vectors.values()], inputs.model.size
    if memory is None or len(vectors) * size > ARRAY_ELEMENTS:
        return _SentInputs(vectors, [*inputs.vectors], *inputs[2:])
    shared = memory.array(0, (len(vectors), size))
    for row, vector in zip(shared, vectors, strict=True):
        row[:] = vector
    return _SentInputs(size, [*inputs.vectors], *inputs[2:])


def _shared(sent: _SentInputs, memory: SharedArrays | None) -> RoundInputs:
    """Undo ``_share``."""
    vectors = sent.vectors
    if isinstance(vectors, int):
        assert memory is not None
        vectors = list(memory.array(0, (1 + len(sent.names), vectors)))
    named = dict(zip(sent.names, vectors[1:], strict=True))
    return RoundInputs(vectors[0], named, *sent[2:])


def _send(pipe: Connection, results: Any, new_array: NewArray | None = None) -> None:
    """Send results. ``new_array`` makes the array for their vectors in shared memory, as far as
    they fit in; None: all go through the pipe."""
    if not isinstance(results, TrainedDevices):
        pipe.send(_portable(results) if isinstance(results, Exception) else results)
        return
    table, vectors, rest = (
        results.table(),
        [results.updates, *results.vectors.values()],
        list[NDArray[np.float32]](),
    )
    left = np.empty(0, np.float32) if new_array is None else new_array()
    for vector in vectors:  # before anything is sent, so that a reader finds the whole vector
        if vector.size <= left.size:
            left[: vector.size] = vector.ravel()
            left = left[vector.size :]
        else:
            rest.append(vector)
    pipe.send(
        (table.shape, [*results.metrics], [*results.vectors], [vector.shape for vector in vectors])
    )
    _write(pipe, table)
    for vector in rest:
        _write(pipe, vector)


def _receive(pipe: Any, new_array: NewArray | None = None) -> Any:
    """Receive what ``_send`` sent. ``new_array`` returns the array of their vectors in shared
    memory."""
    received = pipe.recv()
    if not isinstance(received, tuple):
        return received
    size, metrics, names, shapes = received
    table = np.empty(size)
    _read(pipe, table)
    left, vectors = (
        np.empty(0, np.float32) if new_array is None else new_array(),
        list[NDArray[np.float32]](),
    )
    for shape in shapes:
        count = prod(shape)
        if count <= left.size:
            vectors.append(left[:count].reshape(shape))
            left = left[count:]
        else:
            vectors.append(np.empty(shape, np.float32))
            _read(pipe, vectors[-1])
    return from_table(vectors[0], table, metrics, dict(zip(names, vectors[1:], strict=True)))


def _write(pipe: Connection, array: NDArray[Any]) -> None:
    """Write the array's bytes. The connection's own methods would copy them, three times on
    arrival."""
    left = array.ravel().view(np.uint8).data
    while left:
        left = left[os.write(pipe.fileno(), left) :]


def _read(pipe: Connection, array: NDArray[Any]) -> None:
    left = array.ravel().view(np.uint8).data
    while left:
        count = os.readv(pipe.fileno(), [left])
        if not count:
            raise EOFError
        left = left[count:]


def _portable(error: Exception) -> Exception:
    try:
        # An exception whose __init__ takes more than its args is pickled, and cannot be read again.
        pickle.loads(pickle.dumps(error))
    except Exception:
        portable = SimulatorError(f"{type(error).__name__}: {error}")
        portable.__notes__ = error.__notes__
        return portable
    return error
