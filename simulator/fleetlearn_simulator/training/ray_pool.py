"""Training on a Ray cluster: the workers may be on any of its machines.

A worker that dies costs time and nothing else. Its work is done again, and another worker is
started in its place.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.backend import Job, RoundInputs
from fleetlearn_simulator.training.kept_rows import (
    NO_ROW,
    NOTHING_KEPT,
    KeptRows,
    RowReader,
    RowsInMemory,
)
from fleetlearn_simulator.training.process_pool import environment
from fleetlearn_simulator.training.ray_worker import Answer, Worker, error_of
from fleetlearn_simulator.training.trained_devices import PendingResults, TrainedDevices
from fleetlearn_simulator.training.worker_pool import (
    MAX_DEATHS,
    MAX_QUEUED,
    DivideJobs,
    MakeBackend,
    WorkerPool,
    WorkItem,
)

PARTS_PER_WORKER = 4
"""Parts of a round for each worker. With several, no worker waits long for another."""
MAX_PART_BYTES = 32 * 2**20
"""Bytes of updates that one part returns. A part of a single block may return more."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Size of Ray's object store on this machine, if we start the cluster. Ray puts on the disk what
does not fit in."""
START_TIMEOUT = 600.0
"""Seconds in which a worker must have started, while no other worker is at work."""
OWN_CLUSTER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Hides the cluster from other machines, on all systems and not only on the two in its name.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Some versions warn that this will be the default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment variables for a cluster that we start."""
logger = logging.getLogger("fleetlearn.simulator")


class _Part(WorkItem):
    """Blocks for one worker."""

    def __init__(
        self,
        pending: PendingResults,
        method: str,
        inputs: Any,
        blocks: list[list[Job]],
        indices: list[list[int]],
    ) -> None:
        """``inputs``: their reference in Ray's store. ``indices``: of each block's jobs."""
        super().__init__(pending, [*chain.from_iterable(indices)])
        self.method, self.inputs, self.blocks, self.block_indices = method, inputs, blocks, indices

    def done(self, answers: Sequence[Answer]) -> None:
        for indices, got in zip(self.block_indices, answers, strict=True):
            # Arrays from Ray's store are read-only, and occupy it as long as they exist.
            value = got.value.copy() if isinstance(got.value, TrainedDevices) else got.value
            self.put(indices, error_of(got) if got.trace else value)


class _WorkerHandle:
    """A worker, as this process sees it."""

    def __init__(self, actor: Any, failed_starts: int) -> None:
        """``failed_starts``: workers that died one after the other while they started, before this
        one in their place."""
        self.actor, self.failed_starts = actor, failed_starts
        self.started = False
        self.tasks: dict[Any, _Part | None] = {}
        """Ray's tasks that it has to do, in order. None: to start."""


class RayPool(WorkerPool[_Part, _WorkerHandle]):
    """A back end on the workers of a Ray cluster. Each worker calls ``make`` once.

    Args:
        make: Makes the back end.
        divide: Divides jobs into blocks.
        model: A model that each new worker does one step with: float32 (P,).
        workers: How many, of one CPU each. Default: the CPUs of the cluster.
        address: Of a cluster that runs. Default: the address in RAY_ADDRESS, or else a new cluster
            on this machine that ``close`` ends. If the program has called ``ray.init`` itself, that
            cluster is used.
        kept: Where the rows of jobs are, if jobs have any. They are sent with their jobs: the run's
            folder is on this machine.

    Raises SimulatorError if Ray is not installed, if no cluster is at the address, and if workers
    do not start, differ in the bits of their results, or keep dying. Raises what a worker raised.
    """

    def __init__(
        self,
        make: MakeBackend,
        divide: DivideJobs,
        model: Vector,
        workers: int | None = None,
        address: str | None = None,
        kept: KeptRows[RowReader] = NOTHING_KEPT,
    ) -> None:
        self.ray, self.owns_cluster = connect(address, workers)
        self.make, self.inputs, self.kept = make, RoundInputs(model), kept
        self.stored = self.trial = self.ray.put(self.inputs)
        """References in Ray's store: a round's inputs, and those that new workers do a step
        with."""
        self.first: tuple[str, str] | None = None
        """The node of the first worker that started, and the digest of its first step."""
        self.handles: list[_WorkerHandle] = []
        self.busy: dict[Any, _WorkerHandle] = {}
        """Ray's task -> the worker that does it."""
        try:
            self.workers = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
            super().__init__(divide, PARTS_PER_WORKER * self.workers)
            self.actor = self.ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(
                Worker
            ).remote
            for _ in range(self.workers):
                self._start_worker(0)
            while not any(handle.started for handle in self.handles):
                self.collect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, and the cluster if we started it."""
        for handle in self.handles:
            self.ray.kill(handle.actor)
        self.handles, self.busy = [], {}
        if self.owns_cluster:
            self.ray.shutdown()
            self.owns_cluster = False

    def _begin(
        self, method: str, inputs: RoundInputs, jobs: Sequence[Job], blocks: list[list[int]]
    ) -> PendingResults:
        pending = PendingResults(lambda pending, index: self.collect())
        if inputs is not self.inputs:
            self.inputs, self.stored = inputs, self.ray.put(inputs)
        # Each block is done by itself, whatever else is in its part. So the parts may depend on the
        # number of workers.
        large = -(-len(jobs) * inputs.model.nbytes // MAX_PART_BYTES)
        count = min(len(blocks), max(PARTS_PER_WORKER * self.workers, large))
        for first in range(count):
            indices = blocks[first::count]
            given = [[jobs[index] for index in block] for block in indices]
            self.waiting.append(_Part(pending, method, self.stored, given, indices))
        self.assign_waiting()
        return pending

    def _worker_for(self, work: _Part) -> _WorkerHandle | None:
        free = [
            handle for handle in self.handles if handle.started and len(handle.tasks) < MAX_QUEUED
        ]
        return min(free, key=lambda handle: len(handle.tasks), default=None)

    def _give(self, worker: _WorkerHandle, work: _Part) -> None:
        jobs = [job for block in work.blocks for job in block]
        states, tied = self.kept
        kept_rows = KeptRows(
            _copies(states, (job.kept for job in jobs)), _copies(tied, (job.tied for job in jobs))
        )
        self._add_task(
            worker,
            getattr(worker.actor, work.method).remote(work.inputs, work.blocks, kept_rows),
            work,
        )

    def collect(self) -> None:
        """Wait until a worker returns something, and give it more work."""
        at_work = any(handle.started and handle.tasks for handle in self.handles)
        ready, _ = self.ray.wait(list(self.busy), timeout=None if at_work else START_TIMEOUT)
        if not ready:
            raise SimulatorError(
                f"none of {len(self.handles)} workers, of one CPU each, has started in "
                f"{START_TIMEOUT:g} s. Ray's cluster has "
                f"{self.ray.cluster_resources().get('CPU', 0):g} CPUs; "
                f"{self.ray.available_resources().get('CPU', 0):g} are free: end what holds them, "
                "or add machines"
            )
        task = ready[0]
        handle = self.busy.pop(task)
        try:
            got = self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            # The worker's own code returns its errors. This one was raised before it ran, by what
            # it was given.
            raise SimulatorError(f"a worker of Ray's could not receive its work: {error}") from None
        except self.ray.exceptions.RayError as error:
            self._died(handle, _short(str(error)))
        else:
            part = handle.tasks.pop(task)
            if part is None:
                self._check(got)
                handle.started = True
            else:
                part.done(got)
        self.assign_waiting()

    def _start_worker(self, failed_starts: int) -> None:
        handle = _WorkerHandle(self.actor(sys.path), failed_starts)
        self.handles.append(handle)
        self._add_task(handle, handle.actor.begin.remote(self.make, self.trial), None)

    def _add_task(self, handle: _WorkerHandle, task: Any, part: _Part | None) -> None:
        handle.tasks[task] = part
        self.busy[task] = handle

    def _died(self, handle: _WorkerHandle, reason: str) -> None:
        """Start another worker in its place, and have its work done again."""
        logger.warning("a worker died, and its work is done again. Ray says: %s", reason)
        self.ray.kill(handle.actor)  # it could come back, if it was only unreachable
        self.handles.remove(handle)
        for task in handle.tasks:
            self.busy.pop(task, None)
        failed_starts = 0 if handle.started else handle.failed_starts + 1
        if failed_starts == MAX_DEATHS:
            raise SimulatorError(
                f"{MAX_DEATHS} workers, one in place of the other, died while they started. Ray "
                f"says: {reason}"
            )
        error = SimulatorError(
            f"{MAX_DEATHS} workers died over the same devices. The data or the training of one of "
            "these devices ends its process, for example because memory runs out: take fewer "
            f"workers, or look at the function that makes the data. Ray says: {reason}"
        )
        self.redo([part for part in handle.tasks.values() if part is not None], error)
        self._start_worker(failed_starts)

    def _check(self, got: Answer) -> None:
        """Raise unless the worker has started and its first step has the same bits as the other
        workers'."""
        if got.trace:
            error = error_of(got)
            if not isinstance(error, FleetError | OSError):
                raise error
            text = (
                f"a worker on Ray's node {got.node} could not start: "
                f"{getattr(error, 'text', error)}"
            )
            if len(self.ray.nodes()) > 1:
                text += (
                    ". The bundle, the arrays and the data's module must be at the same paths on "
                    "all nodes, for example in a shared folder"
                )
            raise SimulatorError(text) from error
        self.first = self.first or (got.node, got.value)
        if got.value != self.first[1]:
            raise SimulatorError(
                f"two workers, on Ray's nodes {self.first[0]} and {got.node}, compute the same "
                "step with different bits: a run would not be reproducible. The nodes need the "
                "same bundle and data at the same paths, the same versions of fleetlearn, "
                "onnxruntime and numpy, and processors of the same kind"
            )


def _copies(reader: RowReader | None, rows: Iterable[int]) -> RowsInMemory | None:
    """Return copies of rows. None: there are no rows."""
    return (
        None
        if reader is None
        else RowsInMemory({row: reader.read(row) for row in {*rows} - {NO_ROW}})
    )


def connect(address: str | None, workers: int | None) -> tuple[ModuleType, bool]:
    """Connect to Ray. Returns its module, and whether we have to disconnect. Raises
    SimulatorError."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    own = {
        "num_cpus": workers or os.cpu_count(),
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    with environment(OWN_CLUSTER_ENVIRONMENT if address == "local" else {}):
        try:
            import ray
            from ray import init  # fails for a mere folder with the name ray
        except ImportError as error:
            raise SimulatorError(
                f'training on Ray needs the extra: pip install "fleetlearn[ray]" ({error})'
            ) from None
        if ray.is_initialized():
            return ray, False
        try:
            _check_listening(address)
            init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(own if address == "local" else {}),
            )
        except Exception as error:
            raise SimulatorError(
                f"Ray at {address!r} cannot be reached, {type(error).__name__}: {error}. Expected "
                'the address of a cluster that this machine is a node of, as HOST:6379 or "auto"; '
                'or "local", for a cluster of its own'
            ) from error
    return ray, True


def _check_listening(address: str) -> None:
    """Raise OSError at once if nobody listens at the address. Ray takes minutes to say so."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), 10.0).close()


def _short(text: str) -> str:
    """Return what helps people in Ray's message about a death."""
    lines = [line.strip() for line in text.partition(" Some common causes")[0].splitlines()]
    return " ".join(
        line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:"))
    )
