"""Peers' state machines in a network that tests control: messages wait until they are delivered,
connections break, processes die between any two of their orders, time passes.

Models are exact fractions, so that sums can be compared without rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction
from random import Random
from typing import Any

from fleetlearn_device.peers.gossip import GossipPeer
from fleetlearn_device.peers.orders import (
    CommitModel,
    Differences,
    OfferModel,
    PeerNote,
    SaveRecord,
    SendToPeer,
    StoreDifference,
    TrainPeer,
    WriteResult,
)
from fleetlearn_device.peers.peer import SynchronousPeer
from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_protocol.peer_messages import PeerFinished, PeerHello, PeerVote

Machine = SynchronousPeer | GossipPeer


class SimulatedPeer:
    """One peer: its disk, and the memory of its process while there is one."""

    def __init__(self, name: str, neighbours: tuple[str, ...], own: Fraction) -> None:
        self.name, self.neighbours = name, neighbours
        self.record, self.own = PeerRecord(), own
        self.differences: dict[str, tuple[int, Fraction]] = {}
        self.result: Fraction | None = None
        self.notes: list[str] = []
        self.machine: Machine | None = None
        self.forget()

    def forget(self) -> None:
        """Lose what is in memory."""
        self.machine = None
        self.orders: deque[Any] = deque()
        self.training: tuple[Fraction, Fraction] | None = None
        """(the model that training began with, what taking a neighbour's added to the sum)."""
        self.trained = Fraction(0)
        self.offered: dict[str, Fraction] = {}
        self.models: dict[str, tuple[int, Fraction]] = {}

    def sum_of(self, differences: Differences) -> Fraction:
        """Return the sum of these differences, which must be on the disk."""
        for neighbour, number in differences:
            assert self.differences[neighbour][0] == number
        return sum((self.differences[name][1] for name, _ in differences), Fraction(0))


class PeerNetwork:
    """All peers, and the messages between them."""

    def __init__(
        self,
        make: Callable[[PeerRecord, str], Machine],
        neighbours: Mapping[str, tuple[str, ...]],
        starts: Mapping[str, Fraction],
    ) -> None:
        self.make = make
        self.now = 0.0
        self.peers = {n: SimulatedPeer(n, neighbours[n], starts[n]) for n in neighbours}
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        """(sender, receiver) -> what is on its way, where the two are connected."""
        self.expected = sum(starts.values(), Fraction(0))
        """The sum of all models, by what was trained and taken."""
        self.trainings = 0

    # What tests do

    def start(self, name: str) -> None:
        peer = self.peers[name]
        peer.forget()
        peer.machine = self.make(peer.record.copy(), name)
        peer.orders.extend(peer.machine.start(self.now))

    def kill(self, name: str) -> None:
        for other in self.peers[name].neighbours:
            self.cut(name, other)
        self.peers[name].forget()

    def cut(self, one: str, other: str) -> None:
        """Break a connection; what was on its way is lost, and both sides notice."""
        if (one, other) not in self.queues:
            return
        del self.queues[one, other], self.queues[other, one]
        for name, neighbour in ((one, other), (other, one)):
            peer = self.peers[name]
            self.run(name)
            peer.models.pop(neighbour, None)
            if peer.machine is not None:
                peer.orders.extend(peer.machine.disconnected(neighbour, self.now))

    def connect(self, one: str, other: str) -> None:
        peers = self.peers[one], self.peers[other]
        if (one, other) in self.queues or any(peer.machine is None for peer in peers):
            return
        for sender, receiver in ((one, other), (other, one)):
            self.run(sender)
            self.queues[sender, receiver] = deque()
        for sender, receiver in ((one, other), (other, one)):
            votes = self.peers[sender].machine.votes_for(receiver)
            hello = PeerHello(1, sender, "0" * 64, "0" * 64, {}, **votes)
            self.queues[sender, receiver].append(hello)

    def deliver(self, sender: str, receiver: str) -> bool:
        """Hand the next message over, if the receiver has no orders left. Returns whether."""
        queue, peer = self.queues.get((sender, receiver)), self.peers[receiver]
        if not queue or peer.orders or peer.machine is None:
            return False
        message, machine, now = queue.popleft(), peer.machine, self.now
        match message:
            case PeerHello():
                orders = machine.connected(sender, message, now)
            case PeerVote(number=number, have=have):
                orders = machine.voted(sender, number, have, now)
            case PeerFinished():
                orders = machine.finished(sender, now)
            case (number, None):
                orders = machine.damaged(sender, number, "it is not finite", now)
            case (number, model):
                peer.models[sender] = (number, model)
                orders = machine.arrived(sender, number, now)
        peer.orders.extend(orders)
        return True

    def train(self, name: str, change: Fraction) -> bool:
        peer = self.peers[name]
        if peer.machine is None or peer.training is None or peer.orders:
            return False
        peer.trained = change
        peer.orders.extend(peer.machine.trained(self.now))
        return True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for peer in self.peers.values():
            if peer.machine is not None and not peer.orders and peer.machine.due() <= self.now:
                peer.orders.extend(peer.machine.tick(self.now))

    def run(self, name: str) -> None:
        """Carry all orders of a peer out."""
        while self.peers[name].orders:
            self.run_one(name)

    def run_one(self, name: str) -> bool:
        """Carry the next order of a peer out. Returns whether there was one."""
        peer = self.peers[name]
        if not peer.orders:
            return False
        match peer.orders.popleft():
            case TrainPeer(differences=differences, take=take):
                mixed = peer.own + peer.sum_of(differences)
                begin = mixed if take is None else peer.models[take][1]
                peer.training = begin, begin - mixed
            case CommitModel(record=record, trained=trained, differences=differences):
                own = peer.own
                if trained:
                    own, taken = peer.training
                    own += peer.trained
                    self.expected += peer.trained + taken
                    self.trainings += 1
                    peer.training = None
                peer.own, peer.record = own + peer.sum_of(differences), record
            case SaveRecord(record=record):
                peer.record = record
            case OfferModel(neighbour=other, number=number):
                peer.offered[other] = peer.own
                if (name, other) in self.queues:
                    self.queues[name, other].append((number, peer.own))
            case StoreDifference(neighbour=other, number=number, weight=weight):
                arrived, model = peer.models.pop(other)
                assert arrived == number
                value = Fraction(weight) * (model - peer.offered[other])
                peer.differences[other] = number, value
            case SendToPeer(neighbour=other, message=message):
                if (name, other) in self.queues:
                    self.queues[name, other].append(message)
            case WriteResult():
                peer.result = peer.own
            case PeerNote(text=text):
                peer.notes.append(text)
        return True

    # What must hold

    def total(self) -> Fraction:
        """Return the sum of all models and of the differences that count and are on their way, by
        what is on the disks alone."""
        total = sum((peer.own for peer in self.peers.values()), Fraction(0))
        for peer in self.peers.values():
            for other in peer.neighbours:
                mine = peer.record.edges.get(other)
                theirs = self.peers[other].record.edges.get(peer.name)
                if mine is None or theirs is None or mine.applied:
                    continue
                if mine.have == theirs.have:
                    number, difference = peer.differences.get(other, (0, Fraction(0)))
                    assert number == mine.have, "a vote without its difference"
                    total += difference
                else:
                    assert mine.counted is not True, "one side counts what the other did not vote"
        return total

    def walk(self, random: Random, events: int, *, deaths: float = 0.05) -> None:
        """Let random events happen, and compare the sum after each. ``deaths``: the share of killed
        processes and broken connections."""
        for _ in range(events):
            name = random.choice(list(self.peers))
            other = random.choice(self.peers[name].neighbours)
            what = random.random()
            if what < deaths / 2:
                self.kill(name)
            elif what < deaths:
                self.cut(name, other)
            elif what < 0.10:
                if self.peers[name].machine is None:
                    self.start(name)
            elif what < 0.20:
                self.connect(name, other)
            elif what < 0.25:
                self.pass_time(random.choice([1.0, 5.0, 11.0]))
            elif what < 0.45:
                self.train(name, Fraction(random.randint(-8, 8), 4))
            elif what < 0.70:
                self.run_one(name)
            else:
                self.deliver(name, other)
            assert self.total() == self.expected, "the sum of all models is not what was trained"

    def settle(self, change: Callable[[], Fraction], limit: int = 20000) -> None:
        """Let everything happen, until all peers have ended."""
        for _ in range(limit):
            for name, peer in self.peers.items():
                self.run(name)
                if peer.machine is None:
                    self.start(name)
            for name, peer in self.peers.items():
                for other in peer.neighbours:
                    self.connect(name, other)
            moved = sum(self.deliver(*pair) for pair in list(self.queues))
            moved += sum(self.train(name, change()) for name in self.peers)
            alive = [n for n, p in self.peers.items() if p.machine and not p.machine.over]
            if not alive and not any(peer.orders for peer in self.peers.values()):
                return
            if not moved and not any(peer.orders for peer in self.peers.values()):
                self.pass_time(5.0)
        stages = {n: p.machine and p.machine.stage for n, p in self.peers.items()}
        raise AssertionError(f"the peers do not end: {stages}")
