"""One peer's side of training without a coordinator, without I/O, clock and randomness: events in,
orders out.

A peer's owner (``node.PeerNode``, or a test) tells it what happened, and carries out the orders
with which it answers, in order, before the next event. Times are seconds on any clock that never
goes back. What an exchange of models is, and why it keeps the mean of all models: exchanges.py.

**Synchronous training** (``SynchronousPeer``). In step k a peer trains, commits its model y, sends
it to its neighbours under the number k, and waits for their models and votes until ``deadline``
seconds are over. Then it mixes what counts, and goes on with step k + 1. A neighbour that was away
when a step ended is not waited for until it is back.

A step's number says when, not how often: a peer that is behind its neighbours, since it is slow or
was away, gives the model that it trained next the number that they are at. Its own model goes on
until it is more than ``take_after`` steps behind; then it begins with the newest model of a
neighbour. That is the one event in which the mean of all models is not kept.

A peer without any neighbour waits, and does not train on alone.
"""

from __future__ import annotations

from fleetlearn_protocol.peer_messages import PeerHello

from fleetlearn_device.peers.exchanges import Edge
from fleetlearn_device.peers.machine import (
    Catching,
    Collecting,
    Lingering,
    Lonely,
    PeerMachine,
)
from fleetlearn_device.peers.orders import CommitModel, Orders, PeerNote


class SynchronousPeer(PeerMachine):
    """A peer that takes its steps together with its neighbours."""

    def start(self, now: float) -> Orders:
        """Begin, or go on where an earlier process was."""
        if self._was_finished():
            return self._finish(now)
        if self.record.step == 0:
            return self._train_or_finish(now)
        self.stage = Collecting(now + self.rules.deadline)
        return self._advance(now)

    def connected(self, name: str, hello: PeerHello, now: float) -> Orders:
        """A neighbour with the same bundle, matrix and settings said hello."""
        orders = self._told_late(name, self.exchanges.connected(name, hello))
        if isinstance(self.stage, Collecting):
            orders += self._offer(name)
        return orders + self._advance(now)

    def disconnected(self, name: str, now: float) -> Orders:
        """The connection to a neighbour is gone."""
        self.exchanges.disconnected(name)
        return self._advance(now)

    def finished(self, name: str, now: float) -> Orders:
        """A neighbour has done all of its steps."""
        self.exchanges.edges[name].record.finished = True
        orders = Orders()
        if isinstance(self.stage, Collecting) and self._weight(name):
            orders += self.exchanges.skip(name, self.record.step, "you are finished")
        return orders + self._advance(now)

    def arrived(self, name: str, number: int, now: float) -> Orders:
        """A neighbour's model for step ``number`` is here, complete and checked."""
        if not self.exchanges.arrived(name, number):
            return []
        orders = Orders()
        if isinstance(self.stage, Lingering):
            orders += self.exchanges.skip(name, number, "this peer is finished")
        elif isinstance(self.stage, Collecting):
            orders += self._take_in(name)
        return orders + self._advance(now)

    def damaged(self, name: str, number: int, why: str, now: float) -> Orders:
        """A neighbour's model for step ``number`` cannot be used."""
        self.exchanges.edges[name].heard = max(self.exchanges.edges[name].heard, number)
        text = f"the model of {name} for step {number} is left out: {why}"
        orders = [PeerNote(text, warning=True), *self.exchanges.skip(name, number, why)]
        return orders + self._advance(now)

    def voted(self, name: str, number: int, have: bool, now: float) -> Orders:
        """A neighbour's vote on step ``number`` is here."""
        orders = self._told_late(name, self.exchanges.voted(name, number, have=have))
        if isinstance(self.stage, Collecting):
            orders += self._offer(name)
        return orders + self._advance(now)

    def trained(self, now: float) -> Orders:
        """The training that ``TrainPeer`` asked for is done."""
        record = self.record
        record.step = self._next_number()
        record.trainings += 1
        self.stage = Collecting(now + self.rules.deadline)
        differences = self.exchanges.commit()
        orders: Orders = [CommitModel(record.copy(), True, differences)]
        for name in self.rules.weights(record.step):
            orders += self._offer(name)
        return orders + self._advance(now)

    def tick(self, now: float) -> Orders:
        """Time has passed."""
        return self._advance(now)

    # Steps

    def _told_late(self, name: str, counts: bool) -> Orders:
        """Say it where an exchange counts that this peer went on without."""
        number = self.exchanges.edges[name].record.have
        if not counts or (number == self.record.step and isinstance(self.stage, Collecting)):
            return []
        return [PeerNote(f"step {number}'s exchange with {name} counts, as is known only now")]

    def _weight(self, name: str) -> float:
        return self.rules.weights(self.record.step).get(name, 0.0)

    def _next_number(self) -> int:
        """Return the number of the next step: the one that the neighbours are at, if that is
        greater than the next of this peer."""
        numbers = [self.record.step + 1]
        for edge in self.exchanges.edges.values():
            if edge.connected and not edge.record.finished:
                numbers += [edge.heard, edge.their_voted + 1]
        return min(max(numbers), self.rules.steps)

    def _offer(self, name: str) -> Orders:
        """Send own to a neighbour for this step, or skip the exchange where that cannot be."""
        step, edge = self.record.step, self.exchanges.edges[name]
        if not self._weight(name):
            return []
        if edge.record.voted < step and (why := self._why_skipped(edge)):
            return self.exchanges.skip(name, step, why)
        is_open = edge.record.voted < step or edge.record.have == step
        is_free = edge.is_free or edge.record.have == step
        # A neighbour that has the model already needs none; but after a restart this peer must
        # know again what it offered.
        is_needed = edge.their_voted < step or edge.offered != step
        is_due = edge.connected and edge.sent != step
        if not (is_open and is_free and is_needed and is_due):
            return []
        return [*self.exchanges.offer(name, step), *self._take_in(name)]

    def _why_skipped(self, edge: Edge) -> str:
        """Return why this step has no exchange on an edge. Empty: it has one, or may have."""
        step = self.record.step
        if edge.record.finished:
            return "you are finished"
        if not edge.connected:
            return "you were away" if edge.away else ""
        if edge.is_pending:
            return "the difference of the last exchange is not added yet"
        is_skipped = edge.their_voted >= step and edge.their_have < step
        if is_skipped or max(edge.heard, edge.their_voted) > step:
            return "you are beyond this step"
        return ""

    def _take_in(self, name: str) -> Orders:
        """Store the model that arrived, if it is of this step; skip the exchange if the neighbour
        is beyond it."""
        edge, step = self.exchanges.edges[name], self.record.step
        if edge.heard > step:
            return self._offer(name)
        return self.exchanges.store(name, self._weight(name))

    def _advance(self, now: float) -> Orders:
        """Go on, if what the peer waits for is there or the time is over."""
        match self.stage:
            case Collecting(until):
                return self._collect(now, late=now >= until)
            case Lonely() if not self.exchanges.is_alone() or self.exchanges.pending():
                return self._begin_step(now)
            case Lonely():
                return self._wait_alone(now)
            case Catching(until):
                return self._catch_up(now, late=now >= until)
            case Lingering():
                return self._linger(now)
        return []

    def _collect(self, now: float, *, late: bool) -> Orders:
        step, orders = self.record.step, Orders()
        edges = {name: self.exchanges.edges[name] for name in self.rules.weights(step)}
        waiting = [name for name, edge in edges.items() if not edge.is_decided(step)]
        if waiting and not late:
            return []
        for name in waiting:
            edges[name].away = not edges[name].connected
            orders += self.exchanges.skip(name, step, "your model did not come in time")
        missed = [name for name, edge in edges.items() if edge.record.have < step]
        if waiting:
            orders.append(PeerNote(f"step {step} goes on without {', '.join(missed or waiting)}"))
        if self.exchanges.is_alone() and not self.exchanges.pending() and step < self.rules.steps:
            return orders + self._wait_alone(now)
        return orders + self._begin_step(now)

    def _begin_step(self, now: float) -> Orders:
        """Train on, from a neighbour's model if this peer's own is too old."""
        if self.record.step < self.rules.steps and self._is_far_behind():
            self.stage = Catching(now + self.rules.deadline)
            return self._catch_up(now, late=False)
        return self._train_or_finish(now)

    def _newest(self) -> int:
        """Return the newest step that a connected neighbour is at."""
        edges = self.exchanges.edges.values()
        here = [edge for edge in edges if edge.connected and not edge.record.finished]
        return max((max(edge.heard, edge.their_voted) for edge in here), default=0)

    def _is_far_behind(self) -> bool:
        return self._newest() > self.record.step + self.rules.take_after

    def _catch_up(self, now: float, *, late: bool) -> Orders:
        edges, least = self.exchanges.edges, self.record.step + self.rules.take_after
        here = {name: edge.arrived for name, edge in edges.items() if edge.arrived > least}
        if here:
            name = max(here, key=lambda name: here[name])
            text = (
                f"this peer is {here[name] - self.record.step} steps behind: it goes on with the "
                f"model of {name}"
            )
            return [PeerNote(text), *self._train(name)]
        if late or not self._is_far_behind():
            return self._train_or_finish(now)
        return []
