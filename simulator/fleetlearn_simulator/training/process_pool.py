"""Training on several processes. Each makes the devices' data itself and keeps a back end of its own.

Which process trains which device changes nothing: every device is trained by itself, and sums are exact. So a process
that dies is replaced, and its work done again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import Backend, Job
from fleetlearn_simulator.training.shared_memory import PLACE, Shared, make_shared
from fleetlearn_simulator.training.trained_devices import LARGE, Outcomes, Pending, Take, from_table, whole

Make = Callable[[], Backend]
Blocks = Callable[[Sequence[Job]], list[list[int]]]
Place = Callable[[tuple[int, ...]], NDArray[np.float32]]
"""An array of that shape in shared memory."""
AHEAD = 2
"""Blocks that a process is given before it has returned any, so that it need not wait for this one."""
PLACES = 4
"""For large updates in the memory that is shared with a process: of those that it was given ahead, and of some that
wait until they are due. Of small ones many more wait."""
SMALL = 256
"""Jobs that surely fit into a pipe, though nobody reads it: one takes 8 KB on some systems."""
ENVIRONMENT = {
    # The processes have the cores; a second thread of numpy's only waits, busily.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # glibc keeps the memory of one update for the next, and does not fetch it anew from the system, page by page.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
}
"""Of the processes."""
DEATHS = 3
"""Processes that may die over one block."""


class Spread:
    """A back end spread over workers. ``blocks`` says which places among the jobs are one worker's, each block
    another's, without regard to how many workers there are; ``shares`` is into how many parts devices are divided that
    are evaluated. How a call is begun is for those that are one."""

    def __init__(self, blocks: Blocks, shares: int) -> None:
        self.blocks, self.shares = blocks, shares

    def train(self, model: Vector, jobs: Sequence[Job]) -> Outcomes:
        return whole(self.begin(model, jobs), len(jobs))

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Take:
        return self._begin("train", model, jobs, self.blocks(jobs)).take

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        size = max(1, -(-len(devices) // self.shares))
        blocks = [list(range(start, min(start + size, len(devices)))) for start in range(0, len(devices), size)]
        found = self._begin("evaluate", model, devices, blocks)
        return [found.value(place) for place in range(len(devices))]

    def _begin(self, method: str, model: Vector, rows: Sequence[Any], blocks: list[list[int]]) -> Pending:
        """Have the method called with the model and each block of ``rows``."""
        raise NotImplementedError


class Parallel(Spread):
    """A back end on several processes of this machine. ``make`` must be picklable: each process calls it once.

    What is asked of it raises what a process raised, and SimulatorError where processes die again and again.
    """

    def __init__(self, make: Make, workers: int, blocks: Blocks) -> None:
        super().__init__(blocks, workers)
        self.waiting: deque[_Block] = deque()
        """Blocks that no process has yet."""
        self.workers = [_Worker(make) for _ in range(workers)]
        self.turns = 0
        """Blocks of large updates that were waited for."""

    def _begin(self, method: str, model: Vector, rows: Sequence[Any], blocks: list[list[int]]) -> Pending:
        pending = Pending(lambda pending, place: self.collect())
        for places in blocks:
            self.waiting.append(_Block(ref(pending), method, model, [rows[place] for place in places], places))
        self.hand_out()
        return pending

    def hand_out(self) -> None:
        """Give waiting blocks to the processes that have least to do."""
        while self.waiting:
            block = self.waiting[0]
            if block.pending() is not None:  # else nobody waits for it any more
                # The last blocks go to whoever is first without any, so that all have something to do until the end.
                ahead = len(self.waiting) >= len(self.workers)
                free = [worker for worker in self.workers if worker.may_take(block) and (ahead or not worker.blocks)]
                if not free:
                    return
                min(free, key=lambda worker: len(worker.blocks)).take(block)
            self.waiting.popleft()

    def collect(self) -> None:
        """Wait until processes return something, and hand out what that makes room for."""
        busy = {worker.pipe.fileno(): worker for worker in self.workers if worker.blocks}
        poll = select.poll()
        for place in busy:
            poll.register(place, select.POLLIN)
        for place, _ in poll.poll():
            if busy[place].blocks[0].place is not None:  # adding it up takes a while
                self.turns += 1
                take_turns(self.turns, len(self.workers))
            self.waiting.extendleft(reversed(busy[place].collect()))
        self.hand_out()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


class _Block:
    """Jobs for one process to do, and where their results belong."""

    def __init__(self, pending: ReferenceType[Pending], kind: str, model: Vector, rows: list[Any], places: list[int]):
        self.pending, self.kind, self.model, self.rows, self.places = pending, kind, model, rows, places
        self.deaths = 0
        self.place: int | None = None
        """Of the process's memory, for the updates."""

    def done(self, results: Any) -> None:
        if (pending := self.pending()) is not None:
            pending.put(self.places, results)


class _Worker:
    """A process, as its parent sees it."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.blocks: deque[_Block] = deque()
        """What it has to do, in order."""
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.memory = make_shared(1 + PLACES)
        """The model, and what was trained from it, where these are large."""
        self.free = deque(range(1, 1 + PLACES) if self.memory else ())
        """Its places that hold nothing."""
        self.process = context.Process(target=_work, args=(self.make, end, self.memory), daemon=True)
        with environment(ENVIRONMENT):
            self.process.start()
        end.close()  # so that the pipe breaks when the process dies
        self.model: Vector | None = None
        """The model that it has."""

    def may_take(self, block: _Block) -> bool:
        # What does not fit into the pipe waits for the process to read it, and that must not wait for its results to be
        # read meanwhile.
        small = block.model is self.model and len(block.rows) <= SMALL
        return len(self.blocks) < (AHEAD if small else 1)

    def take(self, block: _Block) -> None:
        self.blocks.append(block)
        count, size = len(block.rows), len(block.model)
        memory = self.memory if size >= LARGE and block.model.nbytes <= PLACE else None
        model: Vector | int | None = None if block.model is self.model else block.model
        if memory is not None and model is not None:  # it has nothing to do, and so does not use the one before
            memory.array(0, (size,))[:] = block.model
            model = size
        self.model = block.model
        fits = memory is not None and block.kind == "train" and count * block.model.nbytes <= PLACE
        block.place = self.free.popleft() if fits and self.free else None
        # Columns of jobs: pickling them one by one takes ten times as long.
        rows = tuple(zip(*block.rows, strict=True)) if block.kind == "train" else block.rows
        with suppress(OSError):  # it has died, as will be seen when its results are asked for
            self.pipe.send((block.kind, model, rows, block.place))

    def collect(self) -> list[_Block]:
        """Its next results; or of a process that died, the blocks to be done again, by another in its place."""
        try:
            place = self.blocks[0].place
            results = _receive(self.pipe, None if place is None else partial(self._lend, place))
        except (EOFError, OSError):
            self.process.join()
            lost, self.blocks = list(self.blocks), deque()
            lost[0].deaths += 1
            if lost[0].deaths == DEATHS:
                lost[0].done(self._died())
                lost = lost[1:]
            self.pipe.close()
            self._start()
            return lost
        block = self.blocks.popleft()
        if isinstance(results, Exception) and block.place is not None:
            self.free.append(block.place)
        block.done(results)
        return []

    def _lend(self, place: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        assert self.memory is not None
        return self.memory.lend(place, shape, self.free.append)

    def _died(self) -> SimulatorError:
        return SimulatorError(
            f"{DEATHS} processes died over the same devices, the last with exit code {self.process.exitcode} (-9: "
            "killed, as where memory runs out): take fewer workers, or look at the function that makes the data"
        )

    def end(self) -> None:
        self.pipe.close()
        if self.blocks:
            self.process.terminate()
        self.process.join()
        self.process.close()


def take_turns(turn: int, workers: int) -> None:
    """Move this thread to the next core, where there are no more of them than workers. Linux leaves it where it was, so
    that what it does is always at the cost of the same worker, for which the others wait at the end of a round."""
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if 1 < len(allowed) <= workers:
        try:
            with suppress(OSError):  # a core that is gone meanwhile
                os.sched_setaffinity(0, {sorted(allowed)[turn % len(allowed)]})
        finally:  # where it is now, it stays for a while
            os.sched_setaffinity(0, allowed)


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """What the processes that are started meanwhile inherit, where it is not set."""
    new = {name: value for name, value in more.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def _work(make: Make, pipe: Connection, memory: Shared | None) -> None:
    """A process: it does what it is given, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent ends its processes
    backend: Backend | None = None
    model: Vector = np.empty(0, np.float32)
    while True:
        try:
            kind, new, rows, place = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(new, int):
            assert memory is not None
            new = memory.array(0, (new,))
        model = model if new is None else new
        try:
            backend = backend or make()
            if kind == "train":
                results: Any = backend.train(model, list(map(Job._make, zip(*rows, strict=True))))
            else:
                results = backend.evaluate(model, rows)
        except Exception as error:
            error.add_note(f"in another process:\n{traceback.format_exc()}")
            results = error
        try:
            _send(pipe, results, None if memory is None or place is None else partial(memory.array, place))
        except OSError:
            return


def _send(pipe: Connection, results: Any, place: Place | None = None) -> None:
    """``place``: memory for the updates that the other process sees too."""
    if not isinstance(results, Outcomes):
        pipe.send(_portable(results) if isinstance(results, Exception) else results)
        return
    shape, table = results.updates.shape, results.table()
    if place is not None:
        place(shape)[:] = results.updates
    pipe.send((shape, table.shape, [*results.metrics]))
    _write(pipe, table)
    if place is None:
        _write(pipe, results.updates)


def _receive(pipe: Any, place: Place | None = None) -> Any:
    """What ``_send`` sent: the columns of outcomes come as they lay in memory, or still lie there."""
    received = pipe.recv()
    if not isinstance(received, tuple):
        return received
    shape, size, names = received
    table = np.empty(size)
    _read(pipe, table)
    if place is not None:
        return from_table(place(shape), table, names)
    updates = np.empty(shape, np.float32)
    _read(pipe, updates)
    return from_table(updates, table, names)


def _write(pipe: Connection, array: NDArray[Any]) -> None:
    """As it lies in memory: the connection's own ways would copy it, on arrival three times."""
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
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = SimulatorError(f"{type(error).__name__}: {error}")
        told.__notes__ = error.__notes__
        return told
    return error
