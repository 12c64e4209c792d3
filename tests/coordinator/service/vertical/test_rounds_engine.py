"""A split run without I/O: SplitFed and turns, deaths between any two messages, devices that do not
come back, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.service.vertical.engine import StopRun, TellParty
from fleetlearn_coordinator.service.vertical.rounds_engine import (
    BeginDevice,
    CloseRound,
    EndServing,
    RoundsEngine,
)
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    PartyActivations,
    PartyDone,
    PartyJoin,
    PartyState,
    PartyStops,
    SplitBottom,
    SplitTerms,
    VerticalFinished,
    VerticalPause,
    VerticalRefusal,
    decode_to_party,
    encode_to_party,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step
from rounds_world import BUNDLE, LR, NAMES, RoundsWorld, rounds_engine, three_devices

MODES = pytest.mark.parametrize("turns", [False, True], ids=["splitfed", "turns"])


def local_steps(w: Any, b: Any, device: Any, seed: int, first: int, steps: int) -> Any:
    """Do a device's steps of the whole model, without a cut."""
    for step in range(first, first + steps):
        rows = rows_of_step(step, len(device.x), 4, seed)
        error = device.x[rows] @ w + b - device.y[rows]
        w = w - LR * 2 * (device.x[rows] * error[:, None]).mean(0)
        b = b - LR * 2 * error.mean()
    return w, b


def in_one_place(*, turns: bool, rounds: int = 4, steps: int = 3) -> list[float]:
    """Train the whole model: on one device's rows after the other, or by Federated Averaging."""
    w, b = np.zeros(2), 0.0
    engine = rounds_engine()
    for number in range(rounds):
        made = []
        for device in three_devices():
            given = (w, b)
            weight = steps * min(4, len(device.x))
            made.append((weight, *local_steps(*given, device, engine.seed_of(device.name),
                                              number * steps, steps)))  # fmt: skip
            if turns:
                w, b = made[-1][1:]
        if not turns:
            total = sum(weight for weight, *_ in made)
            w = sum(weight * each for weight, each, _ in made) / total
            b = sum(weight * each for weight, _, each in made) / total
    return [*w.tolist(), float(b)]


@MODES
def test_devices_train_what_one_place_would(turns: bool) -> None:
    world = RoundsWorld(turns=turns)
    world.go()
    assert world.finished
    assert {one.ended for one in world.devices.values()} == {"finished"}
    assert np.allclose(world.trained(), in_one_place(turns=turns), atol=1e-6)
    assert max(world.kept) == (12 if turns else 4)


def test_one_step_in_a_round_is_the_step_of_one_place_on_the_joined_batches() -> None:
    """SplitFed's averaged gradients, weighted by rows, are the gradient of all rows together."""
    world = RoundsWorld(rounds=5, round_steps=1)
    world.go()
    w, b = np.zeros(2), 0.0
    devices, engine = three_devices(), rounds_engine()
    for step in range(5):
        chosen = [
            (one, rows_of_step(step, len(one.x), 4, engine.seed_of(one.name))) for one in devices
        ]
        x = np.concatenate([one.x[rows] for one, rows in chosen])
        y = np.concatenate([one.y[rows] for one, rows in chosen])
        assert len(x) == 4 + 4 + 3
        error = x @ w + b - y
        w, b = w - LR * 2 * (x * error[:, None]).mean(0), b - LR * 2 * error.mean()
    assert np.allclose(world.trained(), [*w, b], atol=1e-6)


def test_a_round_of_an_epoch_has_as_many_steps_as_the_device_has_batches() -> None:
    world = RoundsWorld(round_steps=None, rounds=2)
    world.go()
    assert world.weights == [{"a": 8, "b": 4, "c": 3}] * 2


@MODES
@pytest.mark.parametrize("victim", ["a", "b", "c", "top", "coordinator"])
def test_a_death_between_any_two_messages_gives_the_same_bits(turns: bool, victim: str) -> None:
    short = {"turns": turns, "rounds": 2, "round_steps": 2}
    calm = RoundsWorld(**short)
    calm.go()
    # Each third moment, others for others.
    for moment in range("abc".find(victim) + 1, calm.handled - 3, 3):
        world = RoundsWorld(**short)
        world.go({moment: victim})
        assert world.finished, moment
        assert world.trained() == calm.trained(), moment


@MODES
def test_many_deaths_give_the_same_bits(turns: bool) -> None:
    calm = RoundsWorld(turns=turns)
    calm.go()
    random = np.random.default_rng(0)
    names = [*NAMES, "top", "coordinator"]
    deaths = {int(at): names[int(random.integers(5))] for at in random.integers(0, 120, 30)}
    world = RoundsWorld(turns=turns)
    world.go(deaths)
    assert world.finished
    assert world.trained() == calm.trained()
    assert world.handled > calm.handled


def test_a_round_goes_on_without_a_device_that_is_gone() -> None:
    world = RoundsWorld()
    world.go(most=30)
    world.away = {"b"}
    world.kill("b")
    world.go()
    # The others have ended their part, and wait for it.
    assert world.engine.step < 4
    assert world.wait()
    world.go()
    assert world.finished
    assert [sorted(round_) for round_ in world.weights[-1:]] == [["a", "c"]]
    # Nobody waited for it a second time.
    assert world.engine.given_up == {"b"}


def test_a_device_that_was_given_up_counts_again_when_it_is_back() -> None:
    world = RoundsWorld(rounds=30)
    world.away = {"b"}
    world.kill("b")
    world.go()
    assert world.wait()
    world.go(most=world.handled + 40)
    assert world.engine.step > 0
    world.away = set()
    world.connect("b")
    world.go()
    assert world.finished
    assert sorted(world.weights[0]) == ["a", "c"]
    assert sorted(world.weights[-1]) == ["a", "b", "c"]


def test_a_turn_goes_to_the_next_device_from_where_the_last_one_ended() -> None:
    world = RoundsWorld(turns=True, rounds=2)
    world.away = {"b"}
    world.kill("b")
    world.go()
    assert world.engine.step == 1
    assert world.wait()
    world.go()
    assert world.finished
    assert world.skipped == ["b", "b"]
    assert world.kept[2].bottom is world.kept[1].bottom
    seeds, (a, _, c) = rounds_engine(), three_devices()
    w, b = np.zeros(2), 0.0
    for number in range(2):
        for one in (a, c):
            w, b = local_steps(w, b, one, seeds.seed_of(one.name), 3 * number, 3)
    assert np.allclose(world.trained(), [*w, b], atol=1e-6)


def test_a_device_that_says_nothing_is_dropped_like_one_that_is_gone() -> None:
    world = RoundsWorld()
    world.go(most=20)
    world.up["b"].clear()
    world.down["b"].clear()
    world.go()
    assert world.engine.step < 4
    assert world.wait()
    assert world.dropped == ["b"]
    world.go()
    assert world.finished


def test_nothing_is_given_up_where_nobody_could_go_on() -> None:
    one = rounds_engine(least=2)
    assert one.waits_for is None
    told = begun(one, "a")
    assert told
    assert one.waits_for is None, "no part of a round is there"
    turns = rounds_engine(turns=True)
    begun(turns, "a")
    assert turns.waits_for is None, "nobody else is there to take the turn"
    begun(turns, "b")
    assert turns.waits_for is not None


def test_fewer_devices_than_a_round_needs_do_not_end_it() -> None:
    world = RoundsWorld(least=2)
    world.away = {"b", "c"}
    for name in world.away:
        world.kill(name)
    world.go()
    assert not world.wait()
    assert world.engine.step == 0


def waited_for(engine: RoundsEngine, device: str, times: int) -> int:
    """Let a device come and go this often. Returns how often what the run waits for changed: each
    time, the others wait from the beginning again."""
    found = [engine.waits_for]
    for _ in range(times):
        for event in (
            lambda: engine.left(device),
            lambda: engine.joined(device, join(device)),
            lambda: engine.said(device, PartyState(9, None, ()), b""),
        ):
            event()
            found.append(engine.waits_for)
    return sum(before != after for before, after in pairwise(found))


def with_a_device_that_ended(world: RoundsWorld) -> RoundsEngine:
    """Go on until the first device has ended its part, and the others have not."""
    world.go(most=4)
    while "a" not in world.engine.ended:
        world.go(most=world.handled + 1)
    assert world.engine.due == ["b", "c"]
    return world.engine


@pytest.mark.parametrize("device", ["a", "b"], ids=["that ended its part", "that is waited for"])
def test_a_device_that_comes_and_goes_does_not_keep_a_round_open_for_ever(device: str) -> None:
    """Each time, all others waited again for as long as a device may be gone."""
    engine = with_a_device_that_ended(RoundsWorld())
    assert waited_for(engine, device, 50) <= 8
    engine.waited()
    assert engine.step == 1


def test_a_turn_is_not_kept_by_coming_and_going() -> None:
    engine = rounds_engine(turns=True)
    for name in NAMES:
        begun(engine, name)
    assert waited_for(engine, "a", 50) <= 8
    engine.waited()
    assert engine.due == ["b"]


def test_a_device_gets_on_with_its_part_after_a_few_deaths() -> None:
    world = RoundsWorld()
    engine = with_a_device_that_ended(world)
    world.kill("b")
    before = engine.waits_for
    world.go(most=world.handled + 6)
    assert engine.waits_for != before


# What single events lead to


def join(device: str, **more: Any) -> PartyJoin:
    return PartyJoin(more.get("version", 1), device, more.get("bundle", BUNDLE))


def begun(engine: RoundsEngine, device: str) -> list[Any]:
    engine.joined(device, join(device))
    return engine.said(device, PartyState(9, None, ()), b"")


def test_each_device_has_a_part_and_a_seed_of_its_own() -> None:
    engine = rounds_engine()
    told: list[Any] = [engine.joined(name, join(name))[0] for name in NAMES]
    assert all(isinstance(one.message, SplitTerms) for one in told)
    assert [one.message.part for one in told] == [1, 2, 3]
    assert len({one.message.seed for one in told}) == 3


@MODES
def test_who_begins_and_who_waits(turns: bool) -> None:
    engine = rounds_engine(turns=turns)
    assert begun(engine, "a") == [BeginDevice("a", 1, 0, 0, 3)]
    second = begun(engine, "b")
    expected: Any = BeginDevice("b", 2, 0, 0, 3)
    if turns:
        expected = TellParty("b", VerticalPause("it is the turn of a"))
    assert second == [expected]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (join("b"), "nobody called b with that token"),
        (join("a", version=2), "version 2 of this conversation"),
        (join("a", bundle="c" * 64), "All parts of a model are of one"),
    ],
)
def test_who_does_not_belong_is_refused(message: PartyJoin, said: str) -> None:
    engine = rounds_engine()
    (told,) = engine.joined("a", message)
    assert isinstance(told, TellParty)
    assert isinstance(told.message, VerticalRefusal)
    assert said in told.message.text
    assert engine.seats == {}


def test_after_the_end_devices_are_told_so_for_a_while() -> None:
    engine = rounds_engine(phase="finished", step=4)
    assert engine.joined("a", join("a")) == [TellParty("a", VerticalFinished())]
    assert engine.waits_for is not None
    assert engine.waited() == [EndServing()]


def test_what_comes_out_of_its_turn_breaks_the_protocol() -> None:
    engine = rounds_engine()
    begun(engine, "a")
    part = ArrayPart("activations_device", "float32", 0, 0)
    with pytest.raises(ProtocolError, match="activations of step 2 came at step 0"):
        engine.said("a", PartyActivations(1, 2, None, (part,)), b"")
    with pytest.raises(ProtocolError, match="bottom came after step 0; 3 ends the round"):
        engine.said("a", SplitBottom(1, 8, 0), bytes(8))
    with pytest.raises(ProtocolError, match="done has no place in a split run"):
        engine.said("a", PartyDone(1), b"")
    # Of an attempt that was given up: not an error.
    assert engine.said("a", SplitBottom(7, 8, 0), bytes(8)) == []
    assert engine.said("a", PartyActivations(7, 2, None, (part,)), b"") == []
    assert engine.copy_done("a", 7, np.zeros((4, 1), np.float32), 0.5) == []


def test_state_is_said_once_on_a_connection() -> None:
    """Each one began the device's part again, with all of the bottom to send, and kept its turn."""
    engine = rounds_engine(turns=True)
    begun(engine, "a")
    with pytest.raises(ProtocolError, match="state was said twice"):
        engine.said("a", PartyState(9, None, ()), b"")


def test_a_device_with_more_rows_than_the_steps_that_can_be_named_is_refused() -> None:
    """Its first step was beyond what a message can say, and the run ended."""
    engine = rounds_engine(rounds=1000, round_steps=None, step=900)
    engine.joined("a", join("a"))
    with pytest.raises(ProtocolError, match="4194304 steps in each of 1000 rounds"):
        engine.said("a", PartyState(2**24, None, ()), b"")


def test_texts_for_devices_are_never_longer_than_a_message_can_say() -> None:
    """The names of many devices, or a long error, ended the run."""
    names = tuple(f"hospital-{number:02}-{'x' * 100}" for number in range(32))
    engine = rounds_engine(names=names)
    for name in names[:2]:
        begun(engine, name)
    engine.ended.add(names[0])
    told = [*engine.added(names[1]), *engine.copy_failed(names[1], "y" * 2000)]
    assert len(told) == 2
    for one in told:
        assert isinstance(one, TellParty)
        assert len(decode_to_party(encode_to_party(one.message)).text) == 1000  # type: ignore[union-attr]


def test_devices_that_cannot_go_on_end_and_the_last_one_ends_the_run() -> None:
    engine = rounds_engine()
    for name in NAMES:
        begun(engine, name)
    (told,) = engine.copy_failed("a", "the loss is inf")
    assert isinstance(told, TellParty)
    assert isinstance(told.message, VerticalRefusal)
    assert (engine.phase, engine.why) == ("training", "a cannot go on: the loss is inf")
    assert engine.said("b", PartyStops("the disk is full"), b"") == []
    assert engine.left("b") == []
    assert (engine.phase, engine.why) == ("training", "b stopped: the disk is full")
    # One that was restarted may go on.
    begun(engine, "a")
    engine.copy_failed("c", "the loss is inf")
    assert engine.phase == "training"
    engine.said("a", PartyStops("the disk is full"), b"")
    assert engine.left("a") == [StopRun("a stopped: the disk is full")]
    assert engine.phase == "failed"
    (refused,) = engine.joined("c", join("c"))
    assert isinstance(refused, TellParty)
    assert isinstance(refused.message, VerticalRefusal)


def test_checkpoints_are_as_far_apart_as_the_plan_says() -> None:
    world = RoundsWorld(rounds=5, checkpoint_every=2)
    world.go()
    assert sorted(world.kept) == [0, 2, 4, 5]
    engine = rounds_engine(checkpoint_every=2)
    assert [one for one in engine._close() if isinstance(one, CloseRound)] == [CloseRound(1, False)]


def test_what_follows_a_message_is_bounded_by_what_can_be() -> None:
    part = ArrayPart("activations_device", "float32", 0, 0)
    messages = {
        SplitBottom(1, 0, 0): 4 * 2,
        # of 4 rows: one activation of float32, and a label of at most 8 bytes
        PartyActivations(1, 0, None, (part,)): 4 * 4 + 8 * 4,
        PartyDone(1): 0,
    }
    assert {each: rounds_engine().most_bytes(each) for each in messages} == messages
