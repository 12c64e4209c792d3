"""The mean of all models is kept, whatever is lost, reordered or killed: the state machines against
a network that does its worst."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from fleetlearn_device.peers.exchanges import Edge, Exchanges
from fleetlearn_device.peers.gossip import GossipPeer
from fleetlearn_device.peers.machine import PeerRules
from fleetlearn_device.peers.orders import Orders, SaveRecord, SendToPeer
from fleetlearn_device.peers.peer import SynchronousPeer
from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_protocol.peer_messages import PeerVote
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from peer_network import Machine, PeerNetwork

NAMES = ("a", "b", "c", "d")
RINGS = {name: (NAMES[i - 1], NAMES[(i + 1) % 4]) for i, name in enumerate(NAMES)}
MATCHINGS = ({"a": "b", "b": "a", "c": "d", "d": "c"}, {"a": "d", "d": "a", "b": "c", "c": "b"})
STEPS = 6
peers = st.sampled_from(NAMES)
edges = st.sampled_from([(name, other) for name in NAMES for other in RINGS[name]])
changes = st.integers(-8, 8).map(lambda number: Fraction(number, 4))


def ring(name: str, deadline: float = 10.0, take_after: int = 3) -> PeerRules:
    return PeerRules(STEPS, deadline, take_after, lambda step: dict.fromkeys(RINGS[name], 1 / 4))


def in_pairs(name: str) -> PeerRules:
    """Another neighbour in each step."""
    return PeerRules(STEPS, 10.0, 3, lambda step: {MATCHINGS[step % 2][name]: 1 / 2})


def synchronous(record: PeerRecord, name: str) -> Machine:
    return SynchronousPeer(record, ring(name), RINGS[name])


def alternating(record: PeerRecord, name: str) -> Machine:
    return SynchronousPeer(record, in_pairs(name), RINGS[name])


def gossiping(record: PeerRecord, name: str) -> Machine:
    return GossipPeer(record, ring(name), RINGS[name], seed=7)


class WorstNetwork(RuleBasedStateMachine):
    """Anything may happen, in any order. The sum is compared after each event; at the end all that
    can happen happens, and all peers must come to their end."""

    make = staticmethod(synchronous)

    @initialize(starts=st.lists(changes, min_size=4, max_size=4))
    def begin(self, starts: list[Fraction]) -> None:
        self.network = PeerNetwork(self.make, RINGS, dict(zip(NAMES, starts, strict=True)))
        for name in NAMES:
            self.network.start(name)

    @rule(name=peers)
    def one_order(self, name: str) -> None:
        self.network.run_one(name)

    @rule(name=peers)
    def all_orders(self, name: str) -> None:
        self.network.run(name)

    @rule(name=peers, change=changes)
    def train(self, name: str, change: Fraction) -> None:
        self.network.train(name, change)

    @rule(edge=edges)
    def connect(self, edge: tuple[str, str]) -> None:
        self.network.connect(*edge)

    @rule(edge=edges)
    def deliver(self, edge: tuple[str, str]) -> None:
        self.network.deliver(*edge)

    @rule(edge=edges, change=changes)
    def go_on(self, edge: tuple[str, str], change: Fraction) -> None:
        """A little of what usually happens, so that histories get far."""
        for name in edge:
            self.network.run(name)
            self.network.train(name, change)
            self.network.run(name)
        self.network.connect(*edge)
        for pair in (edge, edge[::-1]):
            while self.network.deliver(*pair):
                self.network.run(pair[1])

    @rule(edge=edges)
    def damage(self, edge: tuple[str, str]) -> None:
        """The next model that arrives is not finite."""
        queue = self.network.queues.get(edge)
        for place, message in enumerate(queue or ()):
            if isinstance(message, tuple):
                queue[place] = (message[0], None)
                break

    @rule(edge=edges)
    def cut(self, edge: tuple[str, str]) -> None:
        self.network.cut(*edge)

    @rule(name=peers)
    def kill(self, name: str) -> None:
        self.network.kill(name)

    @rule(name=peers)
    def start(self, name: str) -> None:
        if self.network.peers[name].machine is None:
            self.network.start(name)

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.network.pass_time(seconds)

    @invariant()
    def the_sum_is_kept(self) -> None:
        assert self.network.total() == self.network.expected

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        self.network.settle(lambda: Fraction(1, 4))
        assert self.network.total() == self.network.expected
        # Who ended before a neighbour died may not know what became of the last exchange: it learns
        # that when it is started again with it.
        assert all(peer.result is not None for peer in self.network.peers.values())


class AlternatingNetwork(WorstNetwork):
    make = staticmethod(alternating)


class GossipNetwork(WorstNetwork):
    make = staticmethod(gossiping)


@pytest.mark.parametrize("network", [WorstNetwork, AlternatingNetwork, GossipNetwork])
def test_the_mean_is_kept_whatever_happens(network: type[WorstNetwork]) -> None:
    run_state_machine_as_test(
        network,
        settings=settings(
            max_examples=8,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("network", [WorstNetwork, AlternatingNetwork, GossipNetwork])
def test_the_mean_is_kept_in_long_histories(network: type[WorstNetwork]) -> None:
    run_state_machine_as_test(
        network,
        settings=settings(
            max_examples=100,
            stateful_step_count=120,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def walked(make: Any, seed: int) -> PeerNetwork:
    """Return a network after 300 random events, and after all peers have ended."""
    random = Random(seed)
    starts = {name: Fraction(random.randint(-9, 9)) for name in NAMES}
    network = PeerNetwork(make, RINGS, starts)
    for name in NAMES:
        network.start(name)
    network.walk(random, 300)
    network.settle(lambda: Fraction(1, 4))
    assert network.total() == network.expected
    return network


@pytest.mark.parametrize("make", [synchronous, alternating, gossiping])
def test_random_walks_meet_all_that_can_go_wrong(make: Any) -> None:
    """Else the tests above would show little."""
    missing = {"no neighbour is there"}
    if make is not gossiping:
        missing |= {"goes on without", "counts, as is known only now"}
    for seed in range(60):
        peers = walked(make, seed).peers.values()
        said = "\n".join(note for peer in peers for note in peer.notes)
        missing = {text for text in missing if text not in said}
        if not missing:
            return
    raise AssertionError(f"no walk led to: {missing}")


def never_in_doubt(self: Exchanges, edge: Edge) -> None:
    """A planted mistake: whoever voted *have* counts the exchange at once."""
    if edge.is_doubtful:
        edge.record.counted = True


def never_late(self: Exchanges, edge: Edge) -> None:
    """A planted mistake: an exchange whose vote came late does not count."""
    if edge.is_doubtful and edge.their_have == edge.record.have:
        late = edge.record.have < self.record.step
        edge.record.counted, edge.record.applied = not late, late


def changing_its_vote(self: Exchanges, name: str, number: int, why: str) -> Orders:
    """A planted mistake: at the deadline a peer takes back that it has the model."""
    edge = self.edges[name]
    edge.record.voted, edge.record.applied, edge.record.counted = number, True, False
    return [SaveRecord(self.record.copy()), SendToPeer(name, PeerVote(number, have=False))]


def saying_before_saving(self: Exchanges, name: str, weight: float) -> Orders:
    """A planted mistake: the vote is sent before it is durable."""
    return saved_first(self, name, weight)[::-1]


saved_first = Exchanges.store


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("_settle", never_in_doubt),
        ("_settle", never_late),
        ("skip", changing_its_vote),
        ("store", saying_before_saving),
    ],
)
def test_planted_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, method: str, mistake: Any
) -> None:
    monkeypatch.setattr(Exchanges, method, mistake)
    make = gossiping if method == "_settle" else synchronous
    with pytest.raises(AssertionError):
        deque((walked(make, seed) for seed in range(200)), maxlen=0)
