"""Sessions of devices that vanish in any exchange: the unmasked sum is the plain one, or there is
none. And what a device refuses."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.secure.graph import neighbours_of
from fleetlearn_protocol.secure.pairwise import (
    Keys,
    PairwiseDevice,
    SessionRefusedError,
    UnmaskingShares,
    session_of,
    unmask,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def device(number: int, seed: int) -> PairwiseDevice:
    return PairwiseDevice(f"d{number:03}", Random(seed * 1000 + number).randbytes)


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 14), st.integers(0, 2**20), st.data())
def test_the_sum_is_the_plain_one_or_there_is_none(
    count: int, seed: int, data: st.DataObject
) -> None:
    degree = data.draw(st.sampled_from([k for k in (4, 6, 8) if k < count]))
    threshold = data.draw(st.integers(2, degree))
    there = [data.draw(st.integers(0, 3)) for _ in range(count)]
    """For each device the number of exchanges that it answers after the first."""
    devices = {each.name: each for each in (device(number, seed) for number in range(count))}
    lasts = dict(zip(devices, there, strict=True))
    order = sorted(devices)
    Random(seed).shuffle(order)
    keys = {name: each.keys() for name, each in devices.items()}
    session = session_of(b"run 1, round 2", ((name, keys[name]) for name in order))
    around = {name: neighbours_of(at, order, degree) for at, name in enumerate(order)}
    first = [name for name in order if lasts[name] >= 1]
    shares = {
        name: devices[name].shares(session, {o: keys[o] for o in around[name]}, threshold)
        for name in first
    }
    edges = {name: [other for other in around[name] if other in shares] for name in first}
    rng = np.random.default_rng(seed)
    updates = {name: rng.integers(0, 2**20, 5).astype(np.uint32) for name in order}
    total, plain, survivors = np.zeros(5, np.uint32), np.zeros(5, np.uint32), []
    for name in first:
        if lasts[name] < 2:
            continue
        try:
            total += devices[name].masked(
                updates[name], {other: shares[other][name] for other in edges[name]}
            )
        except SessionRefusedError:
            continue
        plain += updates[name]
        survivors.append(name)
    answers = {}
    for name in survivors:
        if lasts[name] < 3:
            continue
        alive = [other for other in edges[name] if other in survivors]
        gone = [other for other in edges[name] if other not in survivors]
        try:
            answers[name] = devices[name].unmasking(session, alive, gone)
        except SessionRefusedError:
            continue
    # Shares were split over all neighbours, those that are gone included.
    arguments: Any = total, session, keys, around, survivors, answers, threshold
    if all(last == 3 for last in there):
        unmask(*arguments)
    else:
        with suppress(ValueError):  # too few shares: the round is abandoned
            unmask(*arguments)
            assert (total == plain).all()
        return
    assert (total == plain).all()


def started(threshold: int = 3) -> tuple[PairwiseDevice, bytes, dict[str, bytes]]:
    """A device that has sent its masked update, its session, and what its neighbours sealed."""
    devices = [device(number, 1) for number in range(5)]
    keys = {each.name: each.keys() for each in devices}
    session = session_of(b"", keys.items())
    sealed = {}
    for each in devices:
        others = {name: pair for name, pair in keys.items() if name != each.name}
        found = each.shares(session, others, threshold)
        if each is not devices[0]:
            sealed[each.name] = found["d000"]
    devices[0].masked(np.zeros(3, np.uint32), sealed)
    return devices[0], session, sealed


@pytest.mark.parametrize(
    ("survivors", "dropped", "text"),
    [
        (["d001", "d002", "d003"], ["d003", "d004"], "d003 is said to have stayed and to be lost"),
        (["d001", "d002", "d003"], ["d099"], "d099 sent this device no shares"),
        (["d001", "d002"], ["d003", "d004"], "2 neighbours stayed; the device wants 3"),
        (["d001", "d001", "d001"], [], "1 neighbours stayed"),
    ],
)
def test_what_is_refused_at_the_end(survivors: Any, dropped: Any, text: str) -> None:
    first, session, _ = started()
    with pytest.raises(SessionRefusedError, match=text):
        first.unmasking(session, survivors, dropped)
    with pytest.raises(SessionRefusedError, match="twice, or too early"):
        first.unmasking(session, ["d001", "d002", "d003"], ["d004"])


def test_no_second_answer() -> None:
    first, session, _ = started()
    told = first.unmasking(session, ["d001", "d002", "d003"], ["d004"])
    assert (sorted(told.seeds), sorted(told.keys)) == (["d001", "d002", "d003"], ["d004"])
    with pytest.raises(SessionRefusedError, match="twice"):
        first.unmasking(session, ["d001", "d002", "d004"], ["d003"])


def test_another_session() -> None:
    first, _, _ = started()
    with pytest.raises(SessionRefusedError, match="another session"):
        first.unmasking(bytes(32), ["d001", "d002", "d003"], [])


@pytest.mark.parametrize(
    "cheat",
    ["self", "twice", "few", "fewer than the device wants", "low order", "changed", "stranger"],
)
def test_what_is_refused_before(cheat: str) -> None:
    devices = [device(number, 2) for number in range(5)]
    keys = {each.name: each.keys() for each in devices}
    session = session_of(b"", keys.items())
    others = {name: pair for name, pair in keys.items() if name != "d000"}
    first = devices[0]
    if cheat not in ("changed", "stranger"):
        if cheat == "self":
            others["d000"] = keys["d000"]
        if cheat == "twice":
            others["d001"] = keys["d002"]
        if cheat == "low order":
            others["d001"] = Keys(bytes(32), keys["d001"].masking)
        threshold = {"few": 5, "fewer than the device wants": 1}.get(cheat, 3)
        with pytest.raises(SessionRefusedError):
            first.shares(session, others, threshold)
        return
    first.shares(session, others, 4)
    sealed = {}
    for each in devices[1:]:
        around = {name: pair for name, pair in keys.items() if name != each.name}
        # A coordinator that shows two devices two sessions.
        shown = bytes(32) if cheat == "changed" and each.name == "d002" else session
        sealed[each.name] = each.shares(shown, around, 4)["d000"]
    if cheat == "stranger":
        sealed["d099"] = sealed["d001"]
    text = "d099 is no neighbour|3 neighbours sealed shares for this device and session, and 4"
    with pytest.raises(SessionRefusedError, match=text):
        first.masked(np.zeros(3, np.uint32), sealed)


def test_a_masking_key_of_small_order_is_refused() -> None:
    """Everybody knows what such a key agrees on."""
    devices = [device(number, 4) for number in range(5)]
    keys = {each.name: each.keys() for each in devices}
    keys["d001"] = keys["d001"]._replace(masking=bytes(32))
    session = session_of(b"", keys.items())
    sealed = {}
    for each in devices:
        others = {name: pair for name, pair in keys.items() if name != each.name}
        found = each.shares(session, others, 3)
        if each is not devices[0]:
            sealed[each.name] = found["d000"]
    with pytest.raises(SessionRefusedError, match="masking key of d001 is none"):
        devices[0].masked(np.zeros(3, np.uint32), sealed)
    with pytest.raises(SessionRefusedError, match="too early"):
        devices[0].unmasking(session, ["d002", "d003", "d004"], [])


class Fleet:
    """Some devices, each a neighbour of all others, that answer all exchanges."""

    def __init__(self, count: int, threshold: int, lost: int = 0) -> None:
        self.devices = {each.name: each for each in (device(at, 3) for at in range(count))}
        names = sorted(self.devices)
        self.keys = {name: each.keys() for name, each in self.devices.items()}
        self.session = session_of(b"", self.keys.items())
        self.around = {name: [other for other in names if other != name] for name in names}
        self.threshold = threshold
        self.shares = {
            name: each.shares(
                self.session, {other: self.keys[other] for other in self.around[name]}, threshold
            )
            for name, each in self.devices.items()
        }
        self.commitments = {name: each.commitment() for name, each in self.devices.items()}
        self.stayed, self.gone = names[lost:], names[:lost]
        self.total, self.plain = np.zeros(3, np.uint32), np.zeros(3, np.uint32)
        self.answers: dict[str, UnmaskingShares] = {}

    def mask(self, about: dict[str, bytes] | None = None) -> None:
        for number, name in enumerate(self.stayed):
            sealed = {other: self.shares[other][name] for other in self.around[name]}
            words = np.full(3, number, np.uint32)
            self.plain += words
            told = (about or {}).get(name, b"")
            self.total += self.devices[name].masked(words, sealed, told)

    def answer(self) -> None:
        for name in self.stayed:
            alive = [other for other in self.stayed if other != name]
            self.answers[name] = self.devices[name].unmasking(self.session, alive, self.gone)

    def lie(self, liar: str, about: str) -> None:
        """Let a device tell another share of a secret than it has."""
        seeds, keys = map(dict, self.answers[liar])
        wrong = seeds if about in seeds else keys
        wrong[about] = bytes(32) + bytes([wrong[about][-1] ^ 1])
        self.answers[liar] = UnmaskingShares(seeds, keys)

    def unmask(self, about: bytes = b"") -> frozenset[str]:
        return unmask(
            self.total, self.session, self.keys, self.around, self.stayed, self.answers,
            self.threshold, self.commitments, about,
        )  # fmt: skip


@pytest.mark.parametrize("about", ["d000", "d003"])
def test_a_wrong_share_is_found_and_not_needed(about: str) -> None:
    """Of the masking key of a lost device, and of the own seed of one that stayed."""
    fleet = Fleet(6, 3, lost=1)
    fleet.mask()
    fleet.answer()
    fleet.lie("d001", about)
    assert fleet.unmask() == {"d001"}
    assert (fleet.total == fleet.plain).all()


def test_too_many_wrong_shares_name_the_secret() -> None:
    fleet = Fleet(5, 3, lost=1)
    fleet.mask()
    fleet.answer()
    for liar in ("d001", "d002"):
        fleet.lie(liar, "d000")
    with pytest.raises(ValueError, match="shares of the masking key of d000 do not give it"):
        fleet.unmask()
    for liar in ("d001", "d002"):
        del fleet.answers[liar]
    with pytest.raises(ValueError, match=r"own seed of d001 are too few: 2 came, and 3 are needed"):
        fleet.unmask()


def test_what_a_neighbour_sealed_wrong_changes_no_mask() -> None:
    """A device that seals nothing of use for one neighbour harms nobody."""
    fleet = Fleet(5, 3)
    fleet.shares["d001"]["d000"] = bytes(82)
    fleet.mask()
    fleet.answer()
    assert "d001" not in fleet.answers["d000"].seeds
    assert fleet.unmask() == frozenset()
    assert (fleet.total == fleet.plain).all()


def test_devices_that_were_told_different_things_give_no_sum() -> None:
    """A coordinator that lets all but one train with a learning rate of 0 learns nothing."""
    fleet = Fleet(5, 3)
    fleet.mask({name: b"lr 0" for name in fleet.stayed if name != "d003"})
    fleet.answer()
    fleet.unmask(b"lr 0")
    assert not (fleet.total == fleet.plain).any()
    same = Fleet(5, 3, lost=1)
    same.mask(dict.fromkeys(same.stayed, b"lr 0.1"))
    same.answer()
    same.unmask(b"lr 0.1")
    assert (same.total == same.plain).all()
