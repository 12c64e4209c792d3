"""A vertical run without I/O: meeting, training, going back, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.service.vertical.engine import KeptRun, TellParty, VerticalEngine
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.alignment import (
    MOST_ROWS,
    hash_rows,
    hashes_as_bytes,
    read_membership,
)
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    PartyActivations,
    PartyDone,
    PartyJoin,
    PartyRows,
    PartyState,
    PartyStops,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step
from vertical_world import BUNDLES, CUTS, KEY, LR, TARGETS, World, terms, two_parties


def in_one_place(steps: int) -> list[float]:
    """Train the same model on the joined rows, in float32, without parties."""
    bank, shop = two_parties()
    common = np.intersect1d(bank.hashes, shop.hashes)
    a, b = np.searchsorted(bank.hashes, common), np.searchsorted(shop.hashes, common)
    x, y = np.concatenate([bank.x[a], shop.x[b]], 1), bank.y[a]
    w, bias = np.zeros(4, np.float32), np.float32(0)
    for step in range(steps):
        rows = rows_of_step(step, len(common), 4, 5)
        error = x[rows] @ w + bias - y[rows]
        w, bias = w - LR * 2 * (x[rows] * error[:, None]).mean(0), bias - LR * 2 * error.mean()
    return [*w.tolist(), float(bias)]


def test_parties_train_what_one_place_would() -> None:
    world = World(two_parties())
    world.go()
    assert world.kept.finished
    assert world.kept.rows == 11
    assert {party.ended for party in world.parties.values()} == {"finished"}
    assert np.allclose(world.trained(), in_one_place(12), atol=1e-6)
    assert world.losses[11] < world.losses[0]


@pytest.mark.parametrize("victim", ["bank", "shop", "coordinator"])
def test_a_death_between_any_two_messages_gives_the_same_bits(victim: str) -> None:
    calm = World(two_parties())
    calm.go()
    # Each second moment, the odd ones for two of them: what is before and after is the same.
    for moment in range(victim != "coordinator", calm.steps, 2):
        world = World(two_parties())
        world.losses = dict(calm.losses)
        world.go({moment: victim})
        assert world.kept.finished, moment
        assert world.trained() == calm.trained(), moment


def test_many_deaths_give_the_same_bits() -> None:
    calm = World(two_parties())
    calm.go()
    random = np.random.default_rng(0)
    names = ["bank", "shop", "coordinator"]
    deaths = {int(at): names[int(random.integers(3))] for at in random.integers(0, 150, 25)}
    world = World(two_parties())
    world.go(deaths)
    assert world.kept.finished
    assert world.trained() == calm.trained()
    assert world.steps > calm.steps


def test_all_go_back_to_the_newest_checkpoint_that_all_have() -> None:
    world = World(two_parties(), steps=30)
    world.go(most=120)
    assert world.engine.phase == "training"
    step, kept = world.engine.step, max(world.tops)
    assert step > kept > 3
    assert world.engine.kept.checkpoints == (kept - 3, kept)
    world.kill("shop")
    while world.engine.attempt == 1:
        world.go(most=world.steps + 1)
    assert world.engine.step in (kept, kept - 3)


def test_a_party_that_means_other_rows_is_found_before_anything_is_trained_on_them() -> None:
    parties = two_parties()
    parties[1].shift = 1
    world = World(parties)
    world.go()
    assert "the parties do not mean the same rows: bank " in world.failed
    assert world.losses == {}
    assert all("do not mean the same rows" in party.ended for party in parties)


def test_parties_with_other_keys_have_no_rows_in_common() -> None:
    parties = two_parties()
    parties[1].hashes = np.sort(hash_rows(["a", "b", "c"], b"q" * 32))
    world = World(parties)
    world.go()
    assert "no row is common to all (bank 13, shop 3 rows)" in world.failed
    assert "the same key" in world.failed


def test_a_party_whose_rows_have_changed_ends_a_run_that_was_begun() -> None:
    world = World(two_parties(), steps=30)
    world.go(most=120)
    shop = world.parties["shop"]
    shop.hashes, shop.x, shop.kept_rows = shop.hashes[1:], shop.x[1:], None
    world.kill("shop")
    world.go()
    assert "the common rows are others than those that were trained on" in world.failed


def test_a_party_that_lost_what_it_kept_takes_everybody_back_to_the_beginning() -> None:
    calm = World(two_parties(), steps=30)
    calm.go()
    world = World(two_parties(), steps=30)
    world.go(most=120)
    shop = world.parties["shop"]
    shop.kept_rows, shop.kept = None, {0: shop.kept[0]}
    world.kill("shop")
    world.go()
    assert world.kept.finished
    assert world.trained() == calm.trained()


# What single events lead to


def engine(**more: Any) -> VerticalEngine:
    return VerticalEngine(terms(), CUTS, TARGETS, "bank", KeptRun(**more))


def join(party: str) -> PartyJoin:
    return PartyJoin(1, party, BUNDLES[party])


def test_the_first_party_waits_for_the_other() -> None:
    assert engine().joined("bank", join("bank")) == [TellParty("bank", VerticalPause("for shop"))]


def test_terms_give_each_party_its_part_and_labels_to_the_one_that_has_them() -> None:
    one = engine()
    one.joined("bank", join("bank"))
    told: Any = one.joined("shop", join("shop"))
    assert [(each.party, each.message.part, each.message.targets) for each in told] == [
        ("bank", 1, TARGETS),
        ("shop", 2, ()),
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (join("shop"), "nobody called shop with that token"),
        (msgspec.structs.replace(join("bank"), version=2), "version 2 of this conversation"),
        (msgspec.structs.replace(join("bank"), bundle="c" * 64), "All parts of a model are of one"),
    ],
)
def test_who_does_not_belong_is_refused(message: PartyJoin, said: str) -> None:
    one = engine()
    (told,) = one.joined("bank", message)
    assert isinstance(told, TellParty)
    assert isinstance(told.message, VerticalRefusal)
    assert said in told.message.text
    assert one.seats == {}


def test_a_party_that_comes_after_the_end_is_told_so() -> None:
    told = engine(finished=True).joined("bank", join("bank"))
    assert told == [TellParty("bank", VerticalFinished())]


def test_a_party_that_stops_says_why_and_is_waited_for() -> None:
    one = engine()
    one.joined("bank", join("bank"))
    one.joined("shop", join("shop"))
    assert one.said("shop", PartyStops("the disk is full"), b"") == []
    assert one.why == "shop stopped: the disk is full"
    assert one.left("shop") == [TellParty("bank", VerticalPause("for shop"))]
    assert one.left("shop") == []


def test_what_a_party_says_as_it_stops_is_told_in_as_much_as_a_message_can_say() -> None:
    one = engine()
    one.phase, one.why = "failed", "x" * 1100
    (told,) = one.joined("bank", join("bank"))
    assert isinstance(told, TellParty)
    assert isinstance(told.message, VerticalRefusal)
    assert len(told.message.text) == 1000


def test_what_comes_out_of_its_turn_breaks_the_protocol() -> None:
    world = World(two_parties())
    world.go(most=20)
    assert world.engine.phase == "training"
    with pytest.raises(ProtocolError, match="done came at step"):
        world.engine.said("bank", PartyDone(world.engine.attempt), b"")
    with pytest.raises(ProtocolError, match="join came twice"):
        world.engine.said("bank", join("bank"), b"")
    # Of an attempt that was given up: not an error.
    assert world.engine.said("bank", PartyDone(7), b"") == []
    assert world.engine.said("bank", PartyState(3, None, (0,)), b"") == []
    part = ArrayPart("activations_bank", "float32", 0, 0)
    assert world.engine.said("bank", PartyActivations(7, 0, "a" * 64, (part,)), b"") == []
    attempt = world.engine.attempt
    nameless = PartyActivations(attempt, world.engine.step, None, (part,))
    with pytest.raises(ProtocolError, match="bank does not say which rows it means"):
        world.engine.said("bank", nameless, b"")
    with pytest.raises(ProtocolError, match="activations of step 9 came at step"):
        world.engine.said("bank", PartyActivations(attempt, 9, "a" * 64, (part,)), b"")


def test_what_follows_a_message_is_bounded_by_what_can_be() -> None:
    part = ArrayPart("activations_bank", "float32", 0, 0)
    messages = {
        PartyRows(0, 0): 32 * MOST_ROWS,
        # of 4 rows: one activation of float32, and a label of at most 8 bytes
        PartyActivations(1, 0, "a" * 64, (part,)): 4 * 4 + 8 * 4,
        PartyDone(1): 0,
    }
    assert {each: engine().most_bytes(each) for each in messages} == messages


def test_labels_of_the_coordinators_own_take_part_in_the_alignment() -> None:
    bank, shop = two_parties()
    own = np.sort(hash_rows([f"row {number}" for number in range(5)], KEY))
    one = VerticalEngine(terms(), CUTS, TARGETS, None, KeptRun(), own)
    told: Any = []
    for party in (bank, shop):
        told = one.joined(party.name, join(party.name))
    assert [each.message.targets for each in told] == [(), ()]
    for party in (bank, shop):
        one.said(party.name, PartyState(len(party.hashes), None, (0,)), b"")
    rows = PartyRows(32 * len(bank.hashes), 0)
    assert one.said("bank", rows, hashes_as_bytes(bank.hashes)) == []
    kept: Any = one.said("shop", rows, hashes_as_bytes(shop.hashes))[0]
    # Rows 0 and 1 are not the shop's.
    assert kept.rows == 3
    assert read_membership(kept.own, 5).sum() == 3


def test_hashes_that_are_not_as_many_as_the_party_said_are_refused() -> None:
    one = engine()
    for name in ("bank", "shop"):
        one.joined(name, join(name))
    for name in ("bank", "shop"):
        one.said(name, PartyState(3, None, (0,)), b"")
    two = hashes_as_bytes(np.sort(hash_rows(["a", "b"], KEY)))
    with pytest.raises(ProtocolError, match="2 hashes of rows were sent"):
        one.said("bank", PartyRows(64, 0), two)


def test_a_top_that_died_takes_everybody_back() -> None:
    world = World(two_parties(), steps=30)
    world.go(most=120)
    checkpoints = tuple(one for one in sorted(world.tops) if one)
    world.carry_out(world.engine.top_lost(checkpoints))
    world.go()
    assert world.kept.finished
    assert world.engine.attempt == 2
