"""A device's sessions of pairwise masks: what it says once, and each thing that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.secure.pairwise_session import (
    sealed_for,
    shares_question,
    unmasking_question,
)
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.summed_models import FILE
from fleetlearn_device.training.pairwise_sessions import LostSessionError, UntrustedError
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS,
    SHARES,
    UNMASKING,
    PairwiseQuestion,
)
from pairwise_fleet import PairwiseFleet

replace = msgspec.structs.replace


@pytest.fixture
def fleet(tmp_path: Path) -> PairwiseFleet:
    return PairwiseFleet(tmp_path)


def up_to(fleet: PairwiseFleet, phase: int) -> PairwiseFleet:
    steps = [fleet.tell_keys, fleet.tell_shares, fleet.train, fleet.tell_unmasking]
    for step in steps[:phase]:
        step()
    return fleet


def test_the_sum_is_exact_where_devices_are_lost_at_each_step(fleet: PairwiseFleet) -> None:
    fleet.tell_keys()
    fleet.tell_shares("d0", "d1", "d2", "d3", "d4")
    fleet.train("d0", "d1", "d2", "d3")
    fleet.tell_unmasking("d0", "d1", "d2", "d3")
    found, plain, masks = fleet.sum()
    assert (found == plain).all()
    assert masks.liars == frozenset()


def test_the_same_question_has_the_same_answer(fleet: PairwiseFleet) -> None:
    """The coordinator was restarted, or the device was lost for a while: another task, one text."""
    up_to(fleet, 4)
    for phase, told, asked in (
        (KEYS, fleet.keys, PairwiseQuestion(1)),
        (SHARES, fleet.shares, shares_question(fleet.circle, "d0")),
        (
            UNMASKING,
            fleet.unmasking,
            unmasking_question(fleet.circle, fleet.shares, fleet.sent, "d0"),
        ),
    ):
        assert fleet.ask("d0", phase, asked, turn=2) == told["d0"]


def asked_of(fleet: PairwiseFleet, phase: int) -> PairwiseQuestion:
    if phase == SHARES:
        return shares_question(fleet.circle, "d0")
    return unmasking_question(fleet.circle, fleet.shares, fleet.sent, "d0")


def without(asked: PairwiseQuestion, *names: str) -> dict[str, Any]:
    return {"survivors": tuple(name for name in asked.survivors if name not in names)}


CHEATS: dict[str, tuple[int, Callable[[PairwiseQuestion], dict[str, Any]], str]] = {
    "itself": (
        SHARES,
        lambda asked: {"neighbours": {**asked.neighbours, "d0": "09" * 64}},
        "the device itself, d0, is named among its neighbours",
    ),
    "one key of two": (
        SHARES,
        lambda asked: {"neighbours": {**asked.neighbours, "d1": asked.neighbours["d2"]}},
        "two of the keys of this session are the same",
    ),
    "a sealing key of small order": (
        SHARES,
        lambda asked: {"neighbours": {**asked.neighbours, "d1": "00" * 32 + "09" * 32}},
        "the sealing key of d1 is none",
    ),
    "too few neighbours": (
        SHARES,
        lambda asked: {"neighbours": {"d1": asked.neighbours["d1"]}},
        "3 shares of 1 neighbours are to give a secret",
    ),
    "a threshold of one": (
        SHARES, lambda asked: {"threshold": 1}, "1 shares are to give a secret; the device wants 2",
    ),
    "no session": (SHARES, lambda asked: {"session": None}, "no session was named"),
    "both lists": (
        UNMASKING,
        lambda asked: {"dropped": ("d3",)},
        "d3 is said to have stayed and to be lost",
    ),
    "outside U1": (
        UNMASKING, lambda asked: {"dropped": ("d9",)}, "d9 sent this device no shares",
    ),
    "too few survivors": (
        UNMASKING,
        lambda asked: without(asked, "d1", "d2", "d3"),
        "2 neighbours stayed; the device wants 3",
    ),
    "another session": (
        UNMASKING, lambda asked: {"session": "11" * 32}, "shares of another session",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_refused_by_name_and_nothing_more_is_said(
    cheat: str, fleet: PairwiseFleet
) -> None:
    phase, changes, text = CHEATS[cheat]
    up_to(fleet, 1 if phase == SHARES else 3)
    good = asked_of(fleet, phase)
    with pytest.raises(UntrustedError, match=text):
        fleet.ask("d0", phase, replace(good, **changes(good)))
    with pytest.raises(UntrustedError, match="says nothing more in round 1: it refused before"):
        fleet.ask("d0", phase, good)
    if phase == SHARES:
        fleet.tell_shares("d1", "d2", "d3", "d4", "d5")
        fleet.train("d1", "d2", "d3", "d4", "d5")
        fleet.tell_unmasking("d1", "d2", "d3", "d4", "d5")
    else:
        fleet.tell_unmasking("d1", "d2", "d3", "d4", "d5")
    found, plain, _ = fleet.sum()
    assert (found == plain).all(), "nobody else suffers"


@pytest.mark.parametrize("phase", [SHARES, UNMASKING])
def test_a_second_question_with_another_content_is_refused(
    phase: int, fleet: PairwiseFleet
) -> None:
    """Of two lists that differ by one device, the difference would be its update."""
    up_to(fleet, 2 if phase == SHARES else 4)
    good = asked_of(fleet, phase)
    other: dict[str, Any] = {"threshold": 4}
    if phase == UNMASKING:
        other = {**without(good, "d1"), "dropped": ("d1",)}
    with pytest.raises(
        UntrustedError, match=f"phase {phase} was asked for twice, and not the same"
    ):
        fleet.ask("d0", phase, replace(good, **other))
    with pytest.raises(UntrustedError, match="says nothing more"):
        fleet.ask("d0", phase, good)


def test_shares_before_the_update_are_refused(fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    asked = unmasking_question(fleet.circle, fleet.shares, fleet.names, "d0")
    with pytest.raises(UntrustedError, match="before the device masked its update"):
        fleet.ask("d0", UNMASKING, asked)


@pytest.mark.parametrize(
    ("secure", "text"),
    [
        ({"session": "11" * 32}, "of another session than the device's shares"),
        ({"session": None}, "of another session than the device's shares"),
        ({"shares": {"d1": "00" * 82, "d2": "00" * 82}}, "0 neighbours sealed shares for this dev"),
        ({"shares": {"d9": "00" * 82}}, "d9 is no neighbour of this device"),
    ],
)
def test_tasks_that_are_refused(secure: dict[str, Any], text: str, fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    shares = sealed_for(fleet.circle, fleet.shares, "d0")
    with pytest.raises(UntrustedError, match=text):
        fleet.send("d0", fleet.task("d0", shares, secure=secure))


def test_a_session_masks_one_update(fleet: PairwiseFleet) -> None:
    up_to(fleet, 3)
    task = fleet.task("d0", sealed_for(fleet.circle, fleet.shares, "d0"))
    for step in (fleet.sessions["d0"].check, lambda task: fleet.send("d0", task)):
        with pytest.raises(UntrustedError, match=r"masked an update in this session|nothing more"):
            step(task)


def test_a_process_that_died_has_no_session(fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    task = fleet.task("d0", sealed_for(fleet.circle, fleet.shares, "d0"))
    fleet.restart("d0")
    with pytest.raises(LostSessionError, match=r"no session of round 1 \(it has none\)"):
        fleet.sessions["d0"].check(task)
    fleet.train("d1", "d2", "d3", "d4", "d5")
    with pytest.raises(LostSessionError):
        fleet.ask("d0", SHARES, shares_question(fleet.circle, "d0"))
    fleet.tell_unmasking("d1", "d2", "d3", "d4", "d5")
    found, plain, _ = fleet.sum()
    assert (found == plain).all()


def test_another_round_is_another_session(fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    old = fleet.circle
    fleet.begin(2)
    fleet.tell_keys()
    with pytest.raises(LostSessionError, match=r"no session of round 1 \(it has one of round 2"):
        fleet.ask("d0", SHARES, shares_question(old, "d0"))
    up_to(fleet, 4)
    found, plain, _ = fleet.sum()
    assert (found == plain).all()


def test_one_model_is_summed_once(fleet: PairwiseFleet) -> None:
    """Of two sums over one model, with one device more in the second, the difference is its
    update. The device remembers that when its process has died."""
    up_to(fleet, 4)
    fleet.begin(2)
    fleet.tell_keys()
    fleet.tell_shares()
    with pytest.raises(UntrustedError, match="a sum of updates of this very model be unmasked"):
        fleet.train("d0")
    fleet.restart("d1")
    fleet.begin(3)
    fleet.tell_keys()
    fleet.tell_shares()
    task = fleet.task("d1", sealed_for(fleet.circle, fleet.shares, "d1"))
    with pytest.raises(UntrustedError, match="this very model"):
        fleet.send("d1", task)
    other = replace(task.vectors[0], sha256="cc" * 32)
    fleet.restart("d1")
    fleet.begin(4)
    fleet.tell_keys()
    fleet.tell_shares()
    shares = sealed_for(fleet.circle, fleet.shares, "d1")
    fleet.send("d1", fleet.task("d1", shares, vectors=(other,)))


def test_a_damaged_list_of_models_ends_the_device(fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    (fleet.folder / "d0" / FILE).write_text("{")
    with pytest.raises(StateError, match="of which models sums were unmasked is not known"):
        fleet.train("d0")


def test_a_device_that_was_told_otherwise_spoils_the_sum_and_shows_nothing(
    fleet: PairwiseFleet,
) -> None:
    """With a learning rate of 0 for all others the sum would be one device's update."""
    up_to(fleet, 2)
    for name in fleet.names:
        lr = 0.1 if name == "d0" else 0.0
        shares = sealed_for(fleet.circle, fleet.shares, name)
        fleet.send(name, fleet.task(name, shares, hyper={"lr": lr}))
    fleet.tell_unmasking()
    found, plain, _ = fleet.sum()
    assert not (found == plain).any()


def test_the_owners_minimum(fleet: PairwiseFleet) -> None:
    for minimum in (4, 5):
        fleet.restart("d0", minimum=minimum)
        fleet.begin(minimum)
        fleet.tell_keys()
        if minimum == 4:  # three others and itself
            fleet.tell_shares("d0")
            continue
        with pytest.raises(UntrustedError, match="it could be of 4 updates, and this device's own"):
            fleet.tell_shares("d0")


def test_neighbours_that_the_owner_does_not_know(tmp_path: Path) -> None:
    fleet = PairwiseFleet(tmp_path, roster=True)
    up_to(fleet, 4)
    found, plain, _ = fleet.sum()
    assert (found == plain).all()
    for cheat, text in [
        ("unknown", "x is not in this device's list of devices"),
        ("unsigned", "the keys that are said to be d1's are not signed by the key that this"),
        ("another's", "the keys that are said to be d1's are not signed"),
        ("an earlier round's", "the keys that are said to be d1's are not signed"),
    ]:
        before = fleet.keys["d1"].keys
        assert before is not None
        fleet.begin(fleet.round + 1)
        fleet.tell_keys()
        asked = shares_question(fleet.circle, "d0")
        shown = dict(asked.neighbours)
        match cheat:
            case "unknown":
                shown["x"] = shown.pop("d1")
            case "unsigned":
                shown["d1"] = shown["d1"][:128]
            case "another's":
                shown["d1"] = shown["d1"][:128] + shown["d2"][128:]
            case _:
                shown["d1"] = before
        with pytest.raises(UntrustedError, match=text):
            fleet.ask("d0", SHARES, replace(asked, neighbours=shown))


def test_masked_words_stay_as_they_were(fleet: PairwiseFleet) -> None:
    up_to(fleet, 2)
    words = np.arange(4, dtype=np.uint32)
    task = fleet.task("d0", sealed_for(fleet.circle, fleet.shares, "d0"))
    sent = fleet.sessions["d0"].masked(task, words)
    assert words.tolist() == [0, 1, 2, 3]
    assert (sent != words).all()
