"""Asynchronous pairwise gossip: after each training a peer averages with one neighbour, whatever
that neighbour does just then.

A peer offers the model that it trained to one free neighbour and waits for the answer. The
neighbour, which may be in the middle of a training, answers at once with its own model as it was
last committed, and adds its half of the difference when its training is done. So nobody waits for
another's training, and a slow peer slows nobody down.

Stephen Boyd et al., "Randomized gossip algorithms", IEEE Transactions on Information Theory 52(6),
2006, in which a random pair averages at each time; here each peer trains between two averagings.
Which neighbour is next is drawn from ``seed`` and the number of trainings, evenly among the free
ones. A neighbour adds its half to a model that has moved on meanwhile; that both halves are of one
difference is enough to keep the mean (exchanges.py).
"""

from __future__ import annotations

from math import inf

from fleetlearn_protocol.peer_messages import PeerHello

from fleetlearn_device.peers.exchanges import Edge
from fleetlearn_device.peers.machine import Collecting, Lonely, PeerMachine, PeerRules
from fleetlearn_device.peers.orders import CommitModel, Orders, PeerNote
from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_device.training.shuffling import permutation

HALF = 0.5
"""What each of two peers takes of the other's model."""


class GossipPeer(PeerMachine):
    """A peer that averages with one neighbour at a time, and waits for none."""

    def __init__(
        self, record: PeerRecord, rules: PeerRules, neighbours: tuple[str, ...], seed: int
    ) -> None:
        super().__init__(record, rules, neighbours)
        self.seed = seed

    def due(self) -> float:
        """Return when ``tick`` is to be called."""
        edges = self.exchanges.edges.values()
        return min(super().due(), *(edge.until for edge in edges))

    def start(self, now: float) -> Orders:
        """Begin, or go on where an earlier process was."""
        return self._finish(now) if self._was_finished() else self._train_or_finish(now)

    def connected(self, name: str, hello: PeerHello, now: float) -> Orders:
        """A neighbour with the same bundle, matrix and settings said hello."""
        orders = Orders()
        self.exchanges.connected(name, hello)
        edge = self.exchanges.edges[name]
        if edge.their_have > edge.record.voted:
            # What this peer offered under that number is gone with an earlier process.
            orders += self.exchanges.skip(name, edge.their_have, "this peer was started again")
        if isinstance(self.stage, Lonely):
            orders += self._invite(now)
        return orders + self._advance(now)

    def disconnected(self, name: str, now: float) -> Orders:
        """The connection to a neighbour is gone."""
        self.exchanges.disconnected(name)
        return [*self._give_up(name), *self._advance(now)]

    def finished(self, name: str, now: float) -> Orders:
        """A neighbour has done all of its steps."""
        self.exchanges.edges[name].record.finished = True
        return self._advance(now)

    def arrived(self, name: str, number: int, now: float) -> Orders:
        """A neighbour's model for exchange ``number`` is here, complete and checked."""
        if not self.exchanges.arrived(name, number):
            return []
        return [*self._answer(name, now), *self._advance(now)]

    def damaged(self, name: str, number: int, why: str, now: float) -> Orders:
        """A neighbour's model for exchange ``number`` cannot be used."""
        self.exchanges.edges[name].until = inf
        orders = [PeerNote(f"the model of {name} is left out: {why}", warning=True)]
        return [*orders, *self.exchanges.skip(name, number, why), *self._advance(now)]

    def voted(self, name: str, number: int, have: bool, now: float) -> Orders:
        """A neighbour's vote on exchange ``number`` is here."""
        orders = Orders()
        self.exchanges.voted(name, number, have=have)
        edge = self.exchanges.edges[name]
        if not have and edge.offered == number:
            edge.until = inf
            orders += self.exchanges.skip(name, number, "you skipped it")
        return orders + self._advance(now)

    def trained(self, now: float) -> Orders:
        """The training that ``TrainPeer`` asked for is done."""
        record = self.record
        record.step += 1
        record.trainings += 1
        differences = self.exchanges.commit()
        orders: Orders = [CommitModel(record.copy(), True, differences)]
        if record.step < self.rules.steps and self.exchanges.is_alone():
            return orders + self._wait_alone(now)
        return [*orders, *self._invite(now), *self._advance(now)]

    def tick(self, now: float) -> Orders:
        """Time has passed."""
        orders = Orders()
        for name, edge in self.exchanges.edges.items():
            if edge.until <= now:
                orders += self._give_up(name)
        return orders + self._advance(now)

    # Exchanges

    def _invite(self, now: float) -> Orders:
        """Offer own to one of the free neighbours, and wait for it."""
        edges = self.exchanges.edges
        free = [name for name, edge in edges.items() if self._may_invite(edge)]
        self.stage = Collecting(now + self.rules.deadline)
        if not free:
            return []
        name = free[permutation(len(free), self.seed, self.record.trainings)[0]]
        edge = edges[name]
        return self._offer(name, max(edge.record.voted, edge.their_voted, edge.heard) + 1, now)

    @staticmethod
    def _is_open(edge: Edge) -> bool:
        """Return whether an exchange that this peer takes part in is not over."""
        return edge.offered > edge.record.voted or (edge.is_doubtful and edge.connected)

    def _may_invite(self, edge: Edge) -> bool:
        is_free = edge.is_free and not self._is_open(edge)
        return edge.connected and is_free and not edge.record.finished

    def _offer(self, name: str, number: int, now: float) -> Orders:
        self.exchanges.edges[name].until = now + self.rules.deadline
        return self.exchanges.offer(name, number)

    def _answer(self, name: str, now: float) -> Orders:
        """Take part in the exchange that a neighbour began, or go on with this peer's own."""
        edge, orders = self.exchanges.edges[name], Orders()
        number = edge.arrived
        if self.record.finished:
            return self.exchanges.skip(name, number, "this peer is finished")
        if not edge.is_free:
            text = "the difference of the last exchange is not added yet"
            return self.exchanges.skip(name, number, text)
        if number < edge.offered:
            edge.arrived = 0  # both began one at once, and the newer one goes on
            return []
        if edge.offered != number:
            orders += self._offer(name, number, now)
        edge.until = inf
        return orders + self.exchanges.store(name, HALF)

    def _give_up(self, name: str) -> Orders:
        """End an offer to which no model came."""
        edge = self.exchanges.edges[name]
        edge.until = inf
        if edge.offered <= edge.record.voted:
            return []
        return self.exchanges.skip(name, edge.offered, "your model did not come in time")

    def _advance(self, now: float) -> Orders:
        match self.stage:
            case Lonely():
                return self._wait_alone(now)
            case Collecting(until):
                edges = self.exchanges.edges.values()
                if now < until and any(self._is_open(edge) for edge in edges):
                    return []
                return self._train_or_finish(now)
        return self._linger(now)
