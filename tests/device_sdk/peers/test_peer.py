"""A synchronous peer, step by step, against results worked out by hand."""

from __future__ import annotations

from fractions import Fraction

from fleetlearn_device.peers.machine import Lonely, PeerEnded, PeerRules
from fleetlearn_device.peers.peer import SynchronousPeer
from fleetlearn_device.peers.record import PeerRecord
from peer_network import PeerNetwork

DEADLINE = 10.0


def network(weights: dict[str, dict[str, float]], steps: int = 2) -> PeerNetwork:
    """Return peers that begin with 0, all started and connected."""

    def make(record: PeerRecord, name: str) -> SynchronousPeer:
        rules = PeerRules(steps, DEADLINE, 3, lambda step: weights[name])
        return SynchronousPeer(record, rules, tuple(weights[name]))

    neighbours = {name: tuple(row) for name, row in weights.items()}
    made = PeerNetwork(make, neighbours, dict.fromkeys(weights, Fraction(0)))
    for name in weights:
        made.start(name)
    connect(made)
    return made


def connect(made: PeerNetwork) -> None:
    for name, peer in made.peers.items():
        for other in peer.neighbours:
            made.connect(name, other)


def talk(made: PeerNetwork) -> None:
    """Deliver until nothing is on its way."""
    moved = True
    while moved:
        for name in made.peers:
            made.run(name)
        moved = sum(made.deliver(*pair) for pair in list(made.queues)) > 0


def step(made: PeerNetwork, **changes: int) -> None:
    talk(made)
    for name, change in changes.items():
        assert made.train(name, Fraction(change))
    talk(made)


def begins(made: PeerNetwork) -> dict[str, Fraction]:
    """Return what each peer that trains now began with."""
    return {name: peer.training[0] for name, peer in made.peers.items() if peer.training}


TRIANGLE = {name: dict.fromkeys({*"abc"} - {name}, 0.25) for name in "abc"}
PAIR = {"a": {"b": 0.5}, "b": {"a": 0.5}}


def test_a_step_is_adapt_then_combine() -> None:
    made = network(TRIANGLE)
    step(made, a=4, b=8, c=-4)
    # W y by hand: the own weight is 1/2
    assert begins(made) == {"a": Fraction(3), "b": Fraction(4), "c": Fraction(1)}


def test_a_neighbour_that_does_not_come_is_left_out_on_both_sides() -> None:
    made = network(TRIANGLE)
    step(made, a=4, b=8)
    assert not begins(made).keys() & {"a", "b"}
    made.pass_time(DEADLINE)
    talk(made)
    # without c, its weight is the own one's: 3/4 own + 1/4 of the other's
    assert begins(made) == {"a": Fraction(5), "b": Fraction(7), "c": Fraction(0)}
    step(made, c=-4)
    assert made.peers["c"].machine is not None
    # c heard that the others are beyond its step: its model counts for theirs
    assert made.peers["c"].record.step == 2
    assert "step 1 goes on without c" in made.peers["a"].notes


def test_who_is_away_is_waited_for_once() -> None:
    made = network(TRIANGLE, steps=3)
    made.kill("c")
    step(made, a=4, b=8)
    made.pass_time(DEADLINE)
    step(made, a=0, b=0)
    assert {name: peer.record.step for name, peer in made.peers.items()} == {"a": 2, "b": 2, "c": 0}
    assert begins(made) == {"a": Fraction(11, 2), "b": Fraction(13, 2)}


def test_who_is_killed_after_its_vote_goes_on_where_it_was() -> None:
    made = network(PAIR)
    step(made, a=4, b=8)
    made.kill("a")
    made.start("a")
    talk(made)
    # a does not know b's vote from its disk, or it does: it waits for what it needs
    connect(made)
    talk(made)
    assert begins(made) == {"a": Fraction(6), "b": Fraction(6)}


def test_who_is_killed_before_its_vote_exchanges_again_at_once() -> None:
    """The neighbour has its model, and it does not have the neighbour's: nobody waits for the
    deadline."""
    made = network(PAIR)
    talk(made)
    made.train("a", Fraction(4))
    made.train("b", Fraction(8))
    for name in "ab":
        made.run(name)
    made.deliver("a", "b")
    made.run("b")
    assert made.peers["b"].record.edges["a"].have == 1
    made.kill("a")
    made.start("a")
    connect(made)
    talk(made)
    assert begins(made) == {"a": Fraction(6), "b": Fraction(6)}


def test_a_vote_that_got_lost_counts_later() -> None:
    made = network(PAIR)
    talk(made)
    made.train("a", Fraction(4))
    made.train("b", Fraction(8))
    for name in "ab":
        made.run(name)
    while made.deliver("a", "b"):
        made.run("b")
    made.deliver("b", "a")  # b's model; its vote stays on the way
    made.run("a")
    assert made.deliver("a", "b")
    made.run("b")
    assert begins(made) == {"b": Fraction(6)}
    made.cut("a", "b")
    made.pass_time(DEADLINE)
    made.run("a")
    assert isinstance(made.peers["a"].machine.stage, Lonely)
    connect(made)
    talk(made)
    assert begins(made) == {"a": Fraction(6), "b": Fraction(6)}
    assert made.total() == made.expected == 12


def test_who_was_away_for_long_takes_a_neighbours_model() -> None:
    made = network(TRIANGLE, steps=12)
    step(made, a=4, b=8, c=-4)
    made.kill("c")
    for _ in range(6):
        step(made, a=0, b=0)
        made.pass_time(DEADLINE)
    made.start("c")
    connect(made)
    step(made, a=0, b=0)
    (note,) = [note for note in made.peers["c"].notes if "steps behind" in note]
    assert note.startswith("this peer is 7 steps behind: it goes on with the model of ")
    assert begins(made)["c"] in {made.peers["a"].own, made.peers["b"].own}


def test_who_was_away_for_a_little_keeps_its_own_model() -> None:
    made = network(TRIANGLE, steps=12)
    step(made, a=4, b=8, c=-4)
    made.kill("c")
    step(made, a=0, b=0)
    made.pass_time(DEADLINE)
    talk(made)
    made.start("c")
    connect(made)
    step(made, a=0, b=0)
    assert begins(made)["c"] == 1
    step(made, c=0)
    assert made.peers["c"].record.step == made.peers["a"].record.step == 3
    assert made.total() == made.expected == 8


def test_a_peer_without_neighbours_waits() -> None:
    made = network(PAIR)
    made.kill("b")
    step(made, a=4)
    for _ in range(3):
        made.pass_time(DEADLINE)
        made.run("a")
    assert made.peers["a"].record.trainings == 1
    assert made.peers["a"].notes == [
        "step 1 goes on without b",
        "step 1 is done, and no neighbour is there: waiting for one",
    ]


def test_the_end() -> None:
    made = network(PAIR)
    step(made, a=4, b=8)
    step(made, a=2, b=0)
    assert [peer.result for peer in made.peers.values()] == [7, 7]
    assert all(isinstance(peer.machine.stage, PeerEnded) for peer in made.peers.values())
    # More steps: they go on.
    for name in "ab":
        made.kill(name)
    made.make = lambda record, name: SynchronousPeer(
        record, PeerRules(3, DEADLINE, 3, lambda step: PAIR[name]), tuple(PAIR[name])
    )
    for name in "ab":
        made.start(name)
    connect(made)
    step(made, a=2, b=4)
    assert [peer.result for peer in made.peers.values()] == [10, 10]


def test_a_damaged_model_is_left_out_on_both_sides() -> None:
    made = network(PAIR)
    talk(made)
    made.train("a", Fraction(4))
    made.train("b", Fraction(8))
    made.run("a")
    made.queues["a", "b"][-1] = (1, None)
    talk(made)
    assert begins(made) == {"a": Fraction(4), "b": Fraction(8)}
    assert made.peers["b"].notes == ["the model of a for step 1 is left out: it is not finite"]


def test_the_last_one_does_not_wait_for_those_that_have_finished() -> None:
    made = network(PAIR)
    step(made, a=4, b=8)
    talk(made)
    made.train("a", Fraction(0))
    talk(made)
    made.pass_time(DEADLINE)
    talk(made)
    assert made.peers["a"].result == 6
    step(made, b=1)
    assert made.peers["b"].result == 7
