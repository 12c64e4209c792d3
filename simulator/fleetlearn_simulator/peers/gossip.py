"""Asynchronous gossip: a peer that has trained averages with one neighbour, and trains again.

Nobody waits for anybody. A peer trains from the model that it had when it began, adds what it
learned to the model that it has by then, which meetings may have changed meanwhile, and then both
peers of a pair take their mean (Lian et al., arXiv 1710.06952, algorithm 1). The neighbour is drawn
among those that are online. Without one the peer goes on alone.

What a training gives is fixed when it begins. So trainings that go on at the same time are computed
together, when the first of their results is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from fleetlearn_device.peers.mixing import average

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.peers.peer_fleet import PeerFleet, PeerStep, PeerTotals
from fleetlearn_simulator.peers.synchronous import DIVERGED
from fleetlearn_simulator.population.availability import next_online, online
from fleetlearn_simulator.population.failures import CAUSES, TaskFates

BEGINS, ENDS = 0, 1


class Gossip:
    """Peers that meet in pairs."""

    def __init__(self, fleet: PeerFleet) -> None:
        count = len(fleet.ids)
        self.fleet, self.scenario = fleet, fleet.scenario
        self.changes = np.zeros_like(fleet.models)
        """What each peer's training changes, once it is computed."""
        self.turns = np.zeros(count, np.int64)
        """Trainings that each peer has begun."""
        self.waiting = np.zeros(count, bool)
        """Peers whose training goes on and is not computed yet."""
        self.diverged = np.zeros(count, bool)
        self.queue = [(0.0, peer, BEGINS) for peer in range(count)]
        self.there = online(self.scenario, fleet.ids, 0.0)
        """Which peers are online, as far as peers know: this is looked up again after a fiftieth of
        a turn, since to ask for each meeting would take most of the time."""
        self.vanished = np.zeros(count, bool)
        """Peers whose training failed, until they begin again."""
        self.look_again = max(1, count // 50)
        self._fates = lru_cache(maxsize=64)(self._draw)
        self.totals = PeerTotals()

    def steps(self) -> Iterator[PeerStep]:
        """Yield after as many trainings as there are peers. Raises SimulatorError if nobody is
        online any more."""
        count, ended = len(self.fleet.ids), 0
        while self.queue:
            time, peer, what = heapq.heappop(self.queue)
            if what == BEGINS:
                self._begin(time, peer)
                continue
            if ended % self.look_again == 0:
                self.there = online(self.scenario, self.fleet.ids, time)
            self._end(time, peer)
            ended += 1
            if ended % count == 0:
                yield self.totals.close(time, int(self.there.sum()))
                self.totals = PeerTotals()
        raise SimulatorError(f"after {ended} trainings no peer is online, and none will be again")

    def _fate(self, peer: int) -> tuple[float, str, int]:
        """Return the seconds of a peer's training, why it fails, if it does, and its steps."""
        found = self._fates(int(self.turns[peer]))
        return float(found.seconds[peer]), CAUSES[found.cause[peer]], int(found.steps[peer])

    def _draw(self, turn: int) -> TaskFates:
        """Draw the fates of a turn of all peers: they do not depend on when a peer begins it."""
        ids = self.fleet.ids
        return self.fleet.fates(ids, turn, None, np.ones(len(ids), np.int64))

    def _begin(self, time: float, peer: int) -> None:
        if not self.there[peer]:
            back = float(next_online(self.scenario, np.array([peer]), time)[0])
            if back > time:
                if np.isfinite(back):
                    heapq.heappush(self.queue, (back, peer, BEGINS))
                return
            self.there[peer] = True
        self.vanished[peer] = False
        seconds, cause, _ = self._fate(peer)
        self.fleet.keep(np.array([peer]))
        self.waiting[peer] = not cause and self.fleet.has_data[peer]
        heapq.heappush(self.queue, (time + seconds, peer, ENDS))

    def _end(self, time: float, peer: int) -> None:
        fleet, totals = self.fleet, self.totals
        seconds, cause, steps = self._fate(peer)
        if self.waiting[peer]:
            self._train()
        if not cause and self.diverged[peer]:
            cause = DIVERGED
        self.turns[peer] += 1
        if cause:
            totals.wasted += seconds
            totals.causes[cause] += 1
            fleet.note([{"time": time, "event": "gone", "peer": peer, "cause": cause}])
            self.diverged[peer] = False
            self.vanished[peer] = True
            heapq.heappush(self.queue, (time + fleet.section.deadline, peer, BEGINS))
            return
        fleet.models[peer] += self.changes[peer]
        self.changes[peer] = 0.0
        totals.useful += seconds
        totals.mixed += 1
        totals.partial += int(fleet.has_data[peer] and steps < fleet.steps[peer])
        other = self._partner(peer)
        if other is not None:
            both = average(fleet.models[peer], fleet.models[other])
            fleet.models[peer] = fleet.models[other] = both
            totals.sent += 2
        fleet.note([{"time": time, "event": "met", "peer": peer, "with": other}])
        heapq.heappush(self.queue, (time, peer, BEGINS))

    def _partner(self, peer: int) -> int | None:
        """Return the neighbour that a peer meets. None: it is offline itself, or all of them
        are."""
        matrix = self.fleet.matrices[0]
        neighbours = matrix.neighbours[matrix.starts[peer] : matrix.starts[peer + 1]]
        neighbours = neighbours[self.there[neighbours] & ~self.vanished[neighbours]]
        if not self.there[peer] or not len(neighbours):
            return None
        luck = keyed_random.uniform(self.scenario.seed, "partner", peer, int(self.turns[peer]))
        return int(neighbours[int(luck * len(neighbours))])

    def _train(self) -> None:
        """Compute all trainings that go on."""
        ids = np.flatnonzero(self.waiting)
        steps = np.array([self._fate(peer)[2] for peer in ids.tolist()])
        changes, results = self.fleet.train(ids, self.turns[ids], steps)
        self.changes[ids], self.diverged[ids] = changes, results.diverged
        self.totals.train(results, ~results.diverged)
        self.waiting[ids] = False


def gossip_steps(fleet: PeerFleet) -> Iterator[PeerStep]:
    """Let the peers of a fleet train and meet."""
    return Gossip(fleet).steps()
