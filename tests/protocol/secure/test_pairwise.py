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
    first.shares(session, others, 3)
    sealed = {}
    for each in devices[1:]:
        around = {name: pair for name, pair in keys.items() if name != each.name}
        # A coordinator that shows two devices two sessions.
        shown = bytes(32) if cheat == "changed" and each.name == "d002" else session
        sealed[each.name] = each.shares(shown, around, 3)["d000"]
    if cheat == "stranger":
        sealed["d099"] = sealed["d001"]
    with pytest.raises(SessionRefusedError, match=r"d002 sealed|d099 is no neighbour"):
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


def test_a_wrong_share_is_found() -> None:
    devices = [device(number, 3) for number in range(5)]
    keys = {each.name: each.keys() for each in devices}
    session = session_of(b"", keys.items())
    around = {each.name: sorted(keys.keys() - {each.name}) for each in devices}
    shares = {
        each.name: each.shares(session, {name: keys[name] for name in around[each.name]}, 2)
        for each in devices
    }
    total = np.zeros(3, np.uint32)
    for each in devices[1:]:
        sealed = {other: shares[other][each.name] for other in around[each.name]}
        total += each.masked(np.zeros(3, np.uint32), sealed)
    names = [each.name for each in devices[1:]]
    answers = {
        each.name: each.unmasking(session, [n for n in names if n != each.name], ["d000"])
        for each in devices[1:]
    }
    wrong = {**answers["d001"].keys, "d000": answers["d002"].keys["d000"]}
    answers["d001"] = UnmaskingShares(answers["d001"].seeds, wrong)
    with pytest.raises(ValueError, match=r"another key|no secret"):
        unmask(total, session, keys, around, names, answers, 2)
