"""Training on a Ray cluster: the blocks of ``parallel``, handed to workers on any of its machines.

A worker that dies costs time and nothing else: what it had in hand is done again, and a new one is begun in its place.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import ReferenceType, ref

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.process_pool import Blocks, Make, Spread, environment
from fleetlearn_simulator.training.ray_worker import Answer, Worker, error_of
from fleetlearn_simulator.training.trained_devices import Outcomes, Pending

PARTS = 4
"""Into how many parts a round is divided for each worker, so that none waits long for another."""
AHEAD = 2
"""Parts that a worker is given before it has returned any, so that it need not wait for this process."""
MOST_BYTES = 32 * 2**20
"""Updates that one part brings back, unless a single block has more."""
STORE_BYTES = 512 * 2**20
"""Ray's object store on this machine, where we start it; what does not fit in, Ray puts on the disk."""
DEATHS = 3
"""So many, of the workers that had the same part in hand, or that began one in place of the other, are no accident."""
PATIENCE = 600.0
"""Seconds that a first worker, or the first after the last has died, may take to begin."""
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Not to be seen from other machines: this is for the two systems in its name, and does it on all.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Some versions warn that this will be the default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""The environment of a cluster of our own."""
logger = logging.getLogger("fleetlearn.simulator")


class Part:
    """Blocks for one worker to do, and where their results belong."""

    def __init__(
        self, pending: ReferenceType[Pending], method: str, model: Any, blocks: list[list[Any]], places: list[list[int]]
    ) -> None:
        """``model``: where it is in Ray's store."""
        self.pending, self.method, self.model, self.blocks, self.places = pending, method, model, blocks, places
        self.deaths = 0

    def done(self, answers: Sequence[Answer]) -> None:
        if (pending := self.pending()) is not None:
            for places, got in zip(self.places, answers, strict=True):
                # Arrays from Ray's store are read-only, and keep their place in it.
                value = got.value.copy() if isinstance(got.value, Outcomes) else got.value
                pending.put(places, error_of(got) if got.trace else value)

    def fail(self, error: Exception) -> None:
        if (pending := self.pending()) is not None:
            for places in self.places:
                pending.put(places, error)


class Hand:
    """A worker, as it is seen from here."""

    def __init__(self, actor: Any, deaths: int) -> None:
        """``deaths``: of those that it is in the place of, one after the other, while they began."""
        self.actor, self.deaths = actor, deaths
        self.begun = False
        self.tasks: dict[Any, Part | None] = {}
        """What it has to do, in order; None: to begin."""


class OnRay(Spread):
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
        self.make, self.model = make, model
        self.stored = self.trial = self.ray.put(model)
        """Where the model is in Ray's store; and the one to try workers with."""
        self.first: tuple[str, str] | None = None
        """The node of the first worker that began, and the digest of its first step."""
        self.waiting: deque[Part] = deque()
        """What no worker has yet."""
        self.hands: list[Hand] = []
        self.busy: dict[Any, Hand] = {}
        """Whose task it is."""
        try:
            self.workers = workers or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
            super().__init__(blocks, PARTS * self.workers)
            self.hire = self.ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Worker).remote
            for _ in range(self.workers):
                self._hire(0)
            while not any(hand.begun for hand in self.hands):
                self.collect()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, and the cluster if it is ours."""
        for hand in self.hands:
            self.ray.kill(hand.actor)
        self.hands, self.busy = [], {}
        if self.ours:
            self.ray.shutdown()
            self.ours = False

    def _begin(self, method: str, model: Vector, rows: Sequence[Any], blocks: list[list[int]]) -> Pending:
        pending = Pending(lambda pending, place: self.collect())
        if model is not self.model:
            self.model, self.stored = model, self.ray.put(model)
        # Each block is done by itself, whatever else is in its part: the parts may depend on the number of workers.
        count = min(len(blocks), max(PARTS * self.workers, -(-len(rows) * model.nbytes // MOST_BYTES)))
        for first in range(count):
            places = blocks[first::count]
            given = [[rows[place] for place in block] for block in places]
            self.waiting.append(Part(ref(pending), method, self.stored, given, places))
        self.hand_out()
        return pending

    def hand_out(self) -> None:
        """Give what waits to the workers that have least to do."""
        while self.waiting:
            free = [hand for hand in self.hands if hand.begun and len(hand.tasks) < AHEAD]
            if not free:
                return
            part = self.waiting.popleft()
            if part.pending() is not None:  # else nobody waits for it any more
                hand = min(free, key=lambda hand: len(hand.tasks))
                self._give(hand, getattr(hand.actor, part.method).remote(part.model, part.blocks), part)

    def collect(self) -> None:
        """Wait until a worker returns something, and hand out what that makes room for."""
        at_work = any(hand.begun and hand.tasks for hand in self.hands)
        ready, _ = self.ray.wait(list(self.busy), timeout=None if at_work else PATIENCE)
        if not ready:
            raise SimulatorError(
                f"none of {len(self.hands)} workers, of one CPU each, has begun in {PATIENCE:g} s. Ray's cluster has "
                f"{self.ray.cluster_resources().get('CPU', 0):g} CPUs, of which "
                f"{self.ray.available_resources().get('CPU', 0):g} are free: end what holds them, or add machines"
            )
        task = ready[0]
        hand = self.busy.pop(task)
        try:
            got = self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            # Not in the worker's own code, whose errors are answers: before it, in what it was given.
            raise SimulatorError(f"a worker of Ray's could not take up its work: {error}") from None
        except self.ray.exceptions.RayError as error:
            self._died(hand, _short(str(error)))
        else:
            part = hand.tasks.pop(task)
            if part is None:
                self._check(got)
                hand.begun = True
            else:
                part.done(got)
        self.hand_out()

    def _hire(self, deaths: int) -> None:
        hand = Hand(self.hire(sys.path), deaths)
        self.hands.append(hand)
        self._give(hand, hand.actor.begin.remote(self.make, self.trial), None)

    def _give(self, hand: Hand, task: Any, part: Part | None) -> None:
        hand.tasks[task] = part
        self.busy[task] = hand

    def _died(self, hand: Hand, said: str) -> None:
        """Another in its place; and what it had to do is to be done again."""
        logger.warning("a worker died, and what it had in hand is done again. Ray says: %s", said)
        self.ray.kill(hand.actor)  # or it could come back, where it was only out of reach
        self.hands.remove(hand)
        for task in hand.tasks:
            self.busy.pop(task, None)
        first, *later = hand.tasks.values()
        deaths = hand.deaths + 1 if first is None else 0
        if deaths == DEATHS:
            raise SimulatorError(
                f"{DEATHS} workers, one in place of the other, died while they began. Ray says: {said}"
            )
        lost = [part for part in later if part is not None]
        if first is not None:
            first.deaths += 1
            if first.deaths == DEATHS:
                first.fail(
                    SimulatorError(
                        f"{DEATHS} workers died with the same devices in hand, so that a fourth would too: the data or "
                        "the training of one of them ends its process, as too little memory does. Take fewer workers, "
                        f"or look at the function that makes the data. Ray says: {said}"
                    )
                )
            else:
                lost = [first, *lost]
        self.waiting.extendleft(reversed(lost))
        self._hire(deaths)

    def _check(self, got: Answer) -> None:
        """A worker that has begun makes the same bits as the others do."""
        if got.trace:
            error = error_of(got)
            if not isinstance(error, FleetError | OSError):
                raise error
            text = f"a worker on Ray's node {got.node} could not begin: {getattr(error, 'text', error)}"
            if len(self.ray.nodes()) > 1:
                text += (
                    ". The bundle, the arrays and the data's module must be at the same paths on all nodes, as in a "
                    "shared folder"
                )
            raise SimulatorError(text) from error
        self.first = self.first or (got.node, got.value)
        if got.value != self.first[1]:
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
