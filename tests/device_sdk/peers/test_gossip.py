"""Pairwise gossip, step by step."""

from __future__ import annotations

from fractions import Fraction

from fleetlearn_device.peers.gossip import GossipPeer
from fleetlearn_device.peers.machine import PeerRules
from fleetlearn_device.peers.record import PeerRecord
from peer_network import PeerNetwork

NAMES = "abcd"


def network(steps: int = 4, names: str = "ab") -> PeerNetwork:
    def make(record: PeerRecord, name: str) -> GossipPeer:
        rules = PeerRules(steps, 10.0, 3, lambda step: {})
        return GossipPeer(record, rules, tuple(sorted({*names} - {name})), seed=1)

    neighbours = {name: tuple(sorted({*names} - {name})) for name in names}
    made = PeerNetwork(make, neighbours, {name: Fraction(0) for name in names})
    for name in names:
        made.start(name)
    for name in names:
        for other in neighbours[name]:
            made.connect(name, other)
    return made


def talk(made: PeerNetwork) -> None:
    moved = True
    while moved:
        for name in made.peers:
            made.run(name)
        moved = sum(made.deliver(*pair) for pair in list(made.queues)) > 0


def test_two_peers_average_while_both_train_on() -> None:
    made = network()
    talk(made)
    made.train("a", Fraction(4))
    talk(made)
    a, b = made.peers["a"], made.peers["b"]
    # a offered 4; b answered with 0 while its first training runs: the differences are -2 and +2
    assert (a.differences["b"], b.differences["a"]) == ((1, Fraction(-2)), (1, Fraction(2)))
    assert a.training is not None
    made.train("b", Fraction(10))
    made.run("b")
    assert b.own == 12
    made.train("a", Fraction(1))
    made.run("a")
    assert a.own == 3
    assert made.total() == made.expected == 15


def test_a_slow_peer_slows_nobody_down() -> None:
    made = network(names="abc")
    talk(made)
    for _ in range(3):
        for name in "ab":
            made.train(name, Fraction(1))
        talk(made)
    assert {name: peer.record.trainings for name, peer in made.peers.items()} == {
        "a": 3,
        "b": 3,
        "c": 0,
    }


def test_all_neighbours_are_asked_in_turns_that_the_seed_draws() -> None:
    made = network(steps=40, names=NAMES)
    talk(made)
    for _ in range(39):
        for name in NAMES:
            made.train(name, Fraction(1))
        talk(made)
    for peer in made.peers.values():
        assert all(edge.have > 3 for edge in peer.record.edges.values())
    assert made.total() == made.expected
    values = [peer.own for peer in made.peers.values()]
    assert max(values) - min(values) < 2


def test_an_offer_that_nobody_answers_is_given_up() -> None:
    made = network()
    talk(made)
    made.queues["a", "b"].clear()
    made.train("a", Fraction(4))
    made.run("a")
    made.queues["a", "b"].clear()  # the offer is lost
    made.pass_time(10.0)
    talk(made)
    assert made.peers["a"].record.edges["b"].voted == 1
    assert made.peers["a"].record.edges["b"].have == 0
    made.train("b", Fraction(2))
    talk(made)
    assert made.peers["a"].record.edges["b"].have == 2
    assert made.total() == made.expected


def test_what_was_offered_before_a_death_is_skipped() -> None:
    made = network()
    talk(made)
    made.train("a", Fraction(4))
    made.run("a")
    made.deliver("a", "b")
    made.run("b")  # b voted that it has a's model
    made.kill("a")
    made.start("a")
    made.connect("a", "b")
    talk(made)
    assert made.peers["b"].machine.record.edges["a"].counted is False
    assert made.total() == made.expected == 4
