"""The exchanges of one peer with each of its neighbours, without I/O: who has whose model, and what
counts.

**One exchange.** Two neighbours i and j exchange models under a number n, which both use once. Each
sends its model y, and each votes once: *have*, when it has the other's model, or *skip*. A vote is
durable before it is sent, and never changes. The exchange counts if both voted *have*. Before a
peer votes *have* it writes down the difference

    d_ij = w (y_j - y_i),    and its neighbour    d_ji = w (y_i - y_j),

and when it knows that the exchange counts it adds its difference to its model, once.

**The mean is kept**, whatever is lost, and whoever dies when. Both votes are written down, so
whether an exchange counts is a fact, and both sides learn the same fact: from the other's vote, or
on the next connection from the hello, which has the newest vote of each kind. IEEE arithmetic
rounds w (y_j - y_i) and w (y_i - y_j) to numbers that differ in their sign alone (subtraction and
multiplication round symmetrically), so d_ij + d_ji = 0 exactly. Hence the exchanges that count add
0 to the sum of all models, and those that do not count add nothing. With the differences that are
on their way (of exchanges that count, which one side has added and the other does not know of yet)

    sum_i x_i + sum of the differences that count and are not added yet  =  sum_i y_i,

up to the rounding of each sum x_i + d_ij. Nobody has to wait for a neighbour's vote: a peer that
waited long enough goes on *in doubt* and adds the difference later, if it counts. It begins no
other exchange on this edge before it knows, so there is one difference for each neighbour at most.

In one step of synchronous training without losses this is x_i = y_i + sum_j W_ij (y_j - y_i) =
sum_j W_ij y_j, as in ``mixing.mix``; where edges do not count it is ``mixing.without``, edge by
edge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from fleetlearn_protocol.peer_messages import PeerHello, PeerVote

from fleetlearn_device.peers.orders import (
    Differences,
    OfferModel,
    Orders,
    SaveRecord,
    SendToPeer,
    StoreDifference,
)
from fleetlearn_device.peers.record import EdgeRecord, PeerRecord


@dataclass(slots=True)
class Edge:
    """A neighbour: what is durable, and what this process knows of it."""

    record: EdgeRecord
    connected: bool = False
    away: bool = False
    """It was not there when a step ended: later steps do not wait for it until it is back."""
    offered: int = 0
    """The number under which own was offered last; it is kept as it was offered. 0: none is."""
    sent: int = 0
    """The number under which own was offered last on this connection."""
    until: float = inf
    """When the offer is given up."""
    arrived: int = 0
    """The number of the neighbour's model that has arrived and is in memory. 0: none is."""
    heard: int = 0
    """The newest number that the neighbour offered its model under, on this connection."""
    their_have: int = 0
    their_voted: int = 0
    in_training: bool = False
    """Its difference is in what is being trained now."""

    @property
    def is_doubtful(self) -> bool:
        """This peer voted *have* and does not know the neighbour's vote."""
        return self.record.have > 0 and self.record.counted is None

    @property
    def is_pending(self) -> bool:
        """A difference that counts is not in the peer's model yet."""
        return self.record.counted is True and not self.record.applied

    @property
    def is_free(self) -> bool:
        """Another exchange may begin."""
        return self.record.applied

    def is_decided(self, number: int) -> bool:
        """Return whether it is known if this exchange counts."""
        voted = self.record.voted >= number
        return voted and (self.record.have < number or not self.is_doubtful)


class Exchanges:
    """All edges of a peer. ``record`` is copied; it may be of an earlier process."""

    def __init__(self, record: PeerRecord, neighbours: Iterable[str]) -> None:
        self.record = record.copy()
        self.edges: dict[str, Edge] = {}
        for name in neighbours:
            edge = self.record.edges.setdefault(name, EdgeRecord())
            self.edges[name] = Edge(edge)

    # What happens

    def connected(self, name: str, hello: PeerHello) -> bool:
        """The neighbour is connected, and said hello. Returns as ``voted`` does."""
        edge = self.edges[name]
        edge.connected, edge.away = True, False
        edge.arrived = edge.sent = 0
        edge.heard = hello.step
        edge.record.finished = hello.finished
        return self._learn(name, have=hello.have, voted=hello.voted)

    def disconnected(self, name: str) -> None:
        """The connection is gone. A model that arrived and was not stored comes again."""
        edge = self.edges[name]
        edge.connected = False
        edge.arrived = edge.heard = 0

    def arrived(self, name: str, number: int) -> bool:
        """The neighbour's model for an exchange is complete, checked and in memory. Returns whether
        it is of use."""
        edge = self.edges[name]
        edge.heard = max(edge.heard, number)
        if number <= edge.record.voted:
            return False
        edge.arrived = number
        return True

    def voted(self, name: str, number: int, *, have: bool) -> bool:
        """The neighbour's vote came. Returns whether an exchange that was in doubt counts now."""
        return self._learn(name, have=number if have else 0, voted=number)

    def _learn(self, name: str, *, have: int, voted: int) -> bool:
        edge = self.edges[name]
        edge.their_have = max(edge.their_have, have)
        edge.their_voted = max(edge.their_voted, voted)
        was_doubtful = edge.is_doubtful
        self._settle(edge)
        return was_doubtful and edge.is_pending

    def _settle(self, edge: Edge) -> None:
        """Find out whether the newest exchange counts, from the neighbour's votes."""
        record = edge.record
        if not edge.is_doubtful:
            return
        if edge.their_have == record.have:
            record.counted = True
        elif edge.their_voted >= record.have:
            # The neighbour skipped it, or is beyond it and never took part.
            record.counted, record.applied = False, True

    # What the peer does

    def offer(self, name: str, number: int) -> Orders:
        """Send own for this exchange."""
        edge = self.edges[name]
        edge.offered = edge.sent = number
        return [OfferModel(name, number)]

    def store(self, name: str, weight: float) -> Orders:
        """Store the neighbour's model and vote *have*, if both models of one exchange are here."""
        edge = self.edges[name]
        number = edge.offered
        if edge.arrived != number or number <= edge.record.voted or not edge.is_free:
            return []
        record = edge.record
        record.voted = record.have = number
        record.counted, record.applied = None, False
        edge.arrived = 0
        self._settle(edge)
        return [
            StoreDifference(name, number, weight),
            SaveRecord(self.record.copy()),
            SendToPeer(name, PeerVote(number, have=True)),
        ]

    def skip(self, name: str, number: int, why: str) -> Orders:
        """Vote *skip*, unless this peer voted on the exchange already."""
        edge = self.edges[name]
        if edge.record.voted >= number:
            return []
        edge.record.voted = number
        if edge.arrived <= number:
            edge.arrived = 0
        if edge.offered <= number:
            edge.offered = 0
        return [
            SaveRecord(self.record.copy()),
            SendToPeer(name, PeerVote(number, have=False, text=why)),
        ]

    # The peer's model

    def pending(self) -> Differences:
        """Return the differences that count and are not in own yet, nor in what is being
        trained."""
        return tuple(
            (name, edge.record.have)
            for name, edge in self.edges.items()
            if edge.is_pending and not edge.in_training
        )

    def begin_training(self) -> Differences:
        """Return the differences that the training begins with."""
        for edge in self.edges.values():
            edge.in_training = False
        differences = self.pending()
        for name, _ in differences:
            self.edges[name].in_training = True
        return differences

    def commit(self) -> Differences:
        """Note that all differences that count are in own with the next commit. Returns those that
        were not in what was trained."""
        differences = self.pending()
        for edge in self.edges.values():
            if edge.is_pending:
                edge.record.applied = True
            edge.in_training = False
        return differences

    def is_alone(self) -> bool:
        """Return whether no neighbour that still trains is connected."""
        return not any(edge.connected and not edge.record.finished for edge in self.edges.values())

    def all_finished(self) -> bool:
        """Return whether every neighbour has done all of its steps."""
        return all(edge.record.finished for edge in self.edges.values())
