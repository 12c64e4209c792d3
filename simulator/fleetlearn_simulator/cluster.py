"""Training on a Ray cluster: the blocks of ``parallel``, handed to workers on any of its machines.

A worker that dies costs time and nothing else: what it had in hand is done again by another, and a new one is begun in
its place. An exception in a worker is not a death: it is carried back as a value and raised here, once.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.parallel import Blocks, Make, environment
from fleetlearn_simulator.training import Backend, Job, Result

PARTS = 4
"""Into how many parts a round is divided for each worker, so that none waits long for another."""
MOST_BYTES = 32 * 2**20
"""Updates that one part brings back, unless a single block has more."""
STORE_BYTES = 512 * 2**20
"""Ray's object store on this machine, where we start it; what does not fit in, Ray puts on the disk."""
DEATHS = 3
"""So many, of the workers that had the same part in hand, or that began one in place of the other, are no accident."""
PATIENCE = 600.0
"""Seconds that a first worker, or the first after the last has died, may take to begin."""
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For a cluster of our own: no report to Ray's makers; and not to be seen from other machines, which is what the second
is for on the two systems in its name, and does on all."""
logger = logging.getLogger("fleetlearn.simulator")


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
            return digest(self.backend.train(model, [Job(0, 0, 1)])[0].update)

        return answer(begun)

    def train(self, model: Vector, blocks: list[list[Job]]) -> Answer:
        backend = self.backend
        assert backend is not None
        return answer(lambda: [backend.train(model, jobs) for jobs in blocks])

    def evaluate(self, model: Vector, devices: list[int]) -> Answer:
        backend = self.backend
        assert backend is not None
        return answer(lambda: backend.evaluate(model, devices))


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


class Task(NamedTuple):
    """What a worker has in hand."""

    actor: Any
    call: object = None
    """Of whom: an earlier call may have been ended by an error. None: it begins."""
    part: int = 0
    deaths: int = 0
    """Of those that it is in the place of, one after the other, while they began."""


class OnRay:
    """A back end spread over a Ray cluster. ``make`` must be picklable: each worker calls it once. ``blocks``: as
    ``parallel.Parallel`` has it. ``model`` is one to try the workers with: float32 (P,). ``workers``: how many, of one
    CPU each; None: the cluster's CPUs. ``address``: of a cluster that runs; None: what RAY_ADDRESS says, or else one on
    this machine that ``close`` ends. Where the program has called ``ray.init`` itself, that is the one.

    Raises SimulatorError where there is no Ray or no cluster at the address, and where workers cannot begin, differ in
    what they make, or keep dying; and whatever is raised in a worker.
    """

    def __init__(
        self, make: Make, blocks: Blocks, model: Vector, workers: int | None = None, address: str | None = None
    ) -> None:
        self.ray, self.ours = connect(address, workers)
        self.make, self.blocks, self.model = make, blocks, self.ray.put(model)
        self.free: list[Any] = []
        self.busy: dict[Any, Task] = {}
        self.first: tuple[str, str] | None = None
        """The node of the first worker that began, and the digest of its first step."""
        try:
            self.workers = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
            self.hire = self.ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Worker).remote
            for _ in range(self.workers):
                self._begin(0)
            while not self.free:
                self._next()
        except BaseException:
            self.close()
            raise

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        blocks = self.blocks(jobs)
        # Each block is trained by itself, whatever else is in its part: the parts may depend on the number of workers.
        count = min(len(blocks), max(PARTS * self.workers, -(-len(jobs) * model.nbytes // MOST_BYTES)))
        parts = [blocks[first::count] for first in range(count)]
        given = [[[jobs[place] for place in block] for block in part] for part in parts]
        found = self._all("train", model, given, _owned)
        results: dict[int, Result] = {}
        for part, answers in zip(parts, found, strict=True):
            for block, rows in zip(part, answers, strict=True):
                results.update(zip(block, rows, strict=True))
        return [results[place] for place in range(len(jobs))]

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Callable[[int], Result]:
        return self.train(model, jobs).__getitem__

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        size = max(1, -(-len(devices) // (PARTS * self.workers)))
        parts = [list(devices[start : start + size]) for start in range(0, len(devices), size)]
        return [row for part in self._all("evaluate", model, parts, list) for row in part]

    def close(self) -> None:
        """End the workers, and the cluster if it is ours."""
        for actor in [*self.free, *(task.actor for task in self.busy.values())]:
            self.ray.kill(actor)
        self.free, self.busy = [], {}
        if self.ours:
            self.ray.shutdown()
            self.ours = False

    def _all(self, method: str, model: Vector, parts: Sequence[Any], take: Callable[[Any], Any]) -> list[Any]:
        """What the workers' method makes of the model and each of the parts, in order; taken at once as it comes."""
        call, shared = object(), self.ray.put(model)
        waiting = list(range(len(parts)))[::-1]
        found: dict[int, Any] = {}
        deaths: Counter[int] = Counter()
        while len(found) < len(parts):
            while waiting and self.free:
                task = Task(self.free.pop(), call, waiting.pop())
                self.busy[getattr(task.actor, method).remote(shared, parts[task.part])] = task
            task, got = self._next()
            if task.call is not call:
                continue
            if isinstance(got, Answer):
                found[task.part] = take(_value(got))
                continue
            waiting.append(task.part)
            deaths[task.part] += 1
            if deaths[task.part] == DEATHS:
                raise SimulatorError(
                    f"{DEATHS} workers died with the same devices in hand, so that a fourth would too: the data or the "
                    f"training of one of them ends its process, as too little memory does. Ray says: {got}"
                )
        return [found[part] for part in range(len(parts))]

    def _begin(self, deaths: int) -> None:
        actor = self.hire(sys.path)
        self.busy[actor.begin.remote(self.make, self.model)] = Task(actor, deaths=deaths)

    def _next(self) -> tuple[Task, Answer | str]:
        """Wait for a worker: what it had in hand and its answer, or how it died."""
        begun = any(task.call for task in self.busy.values())
        ready, _ = self.ray.wait(list(self.busy), timeout=None if begun else PATIENCE)
        if not ready:
            raise SimulatorError(
                f"none of {len(self.busy)} workers, of one CPU each, has begun in {PATIENCE:g} s. Ray's cluster has "
                f"{self.ray.cluster_resources().get('CPU', 0):g} CPUs, of which "
                f"{self.ray.available_resources().get('CPU', 0):g} are free: end what holds them, or add machines"
            )
        task = self.busy.pop(ready[0])
        try:
            got: Answer = self.ray.get(ready[0])
        except self.ray.exceptions.RayTaskError as error:
            # Not in the worker's own code, whose errors are answers: before it, in what it was given.
            raise SimulatorError(f"a worker of Ray's could not take up its work: {error}") from None
        except self.ray.exceptions.RayError as error:
            said = _short(str(error))
            logger.warning("a worker died, and what it had in hand is done again. Ray says: %s", said)
            self.ray.kill(task.actor)  # or it could come back, where it was only out of reach
            self._bury(task, said)
            return task, said
        if task.call is None:
            self._check(got)
        self.free.append(task.actor)
        return task, got

    def _bury(self, task: Task, said: str) -> None:
        deaths = task.deaths + 1 if task.call is None else 0
        if deaths == DEATHS:
            raise SimulatorError(
                f"{DEATHS} workers, one in place of the other, died while they began. Ray says: {said}"
            )
        self._begin(deaths)

    def _check(self, got: Answer) -> None:
        """A worker that has begun makes the same bits as the others do."""
        if got.trace and isinstance(error := _error(got), FleetError | OSError):
            text = f"a worker on Ray's node {got.node} could not begin: {getattr(error, 'text', error)}"
            if got.node != self.ray.util.get_node_ip_address():
                text += (
                    ". The bundle, the arrays and the data's module must be at the same paths on all nodes, as in a "
                    "shared folder"
                )
            raise SimulatorError(text) from error
        made = _value(got)
        self.first = self.first or (got.node, made)
        if made != self.first[1]:
            raise SimulatorError(
                f"two workers, on Ray's nodes {self.first[0]} and {got.node}, make different bits of the same step: a "
                "run would not be the same twice. They need the same bundle and data at the same paths, the same "
                "versions of fleetlearn, onnxruntime and numpy, and processors of the same kind"
            )


def connect(address: str | None, workers: int | None) -> tuple[ModuleType, bool]:
    """Ray, connected; and whether it is for us to disconnect. Raises SimulatorError."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    own = {
        "num_cpus": workers or os.cpu_count(),
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    with environment(LOCAL if address == "local" else {}):
        try:
            import ray
            from ray import init  # which a folder of that name does not have
        except ImportError as error:
            raise SimulatorError(f"training on Ray needs the extra: pip install 'fleetlearn[ray]' ({error})") from None
        if ray.is_initialized():
            return ray, False
        try:
            _knock(address)
            init(address, log_to_driver=False, logging_level=logging.ERROR, **(own if address == "local" else {}))
        except Exception as error:
            raise SimulatorError(
                f"Ray at {address!r} is out of reach, {type(error).__name__}: {error}. Expected the address of a "
                'cluster that this machine is a node of, as HOST:6379 or "auto"; or "local", for one of its own'
            ) from error
    return ray, True


def _knock(address: str) -> None:
    """Nobody listens there: say so at once, which takes Ray minutes. Raises OSError."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), 10.0).close()


def _short(text: str) -> str:
    """Of what Ray says of a death, what tells people something."""
    lines = [line.strip() for line in text.partition(" Some common causes")[0].splitlines()]
    return " ".join(line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:")))


def _error(got: Answer) -> Exception:
    """What was raised, with a note of where."""
    try:
        error: Exception = pickle.loads(got.error)
    except Exception:  # it could not be pickled, or is of a module that is not here
        error = SimulatorError(got.trace.strip().rpartition("\n")[2])
    error.add_note(f"Raised by a worker on Ray's node {got.node}:\n{got.trace}")
    return error


def _value(got: Answer) -> Any:
    """What was returned; raises what was raised."""
    if got.trace:
        raise _error(got)
    return got.value


def _owned(blocks: list[list[Result]]) -> list[list[Result]]:
    """With updates of our own: arrays from Ray's store are read-only, and keep their place in it."""
    return [[row._replace(update=row.update.copy()) for row in rows] for rows in blocks]
