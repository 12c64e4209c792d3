"""The coordinator's side of pairwise masks: which answers count, and the sum of the masks."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_coordinator.secure.pairwise_session import (
    Circle,
    KeyRules,
    WrongAnswerError,
    check_shares,
    check_unmasking,
    circle_of,
    keys_in,
    sealed_for,
    shares_question,
    sum_of_masks,
    unmasking_question,
)
from fleetlearn_protocol.secure.graph import Degrees, graph_of
from fleetlearn_protocol.secure.pairwise import Keys, PairwiseDevice
from fleetlearn_protocol.secure.pairwise_messages import (
    PairwiseAnswer,
    bytes_of,
    hex_of,
    signed_keys,
)

ABOUT = b"what is trained"
OWN = {name: Ed25519PrivateKey.from_private_bytes(name.encode() * 32) for name in "abc"}
ROSTER = {name: key.public_key().public_bytes_raw() for name, key in OWN.items()}
ALL = partial(graph_of, hostile=0.0, lost=0.2)


def keys_of(name: str, signer: str | None = None, round: int = 3) -> PairwiseAnswer:
    keys = b"".join(PairwiseDevice(name, Random(name).randbytes).keys())
    signature = b"" if signer is None else OWN[signer].sign(signed_keys("run", round, name, keys))
    return PairwiseAnswer((keys + signature).hex())


def test_keys_that_a_device_may_have() -> None:
    KeyRules("run", 3).check("a", keys_of("a"), ())
    KeyRules("run", 3, ROSTER).check("a", keys_of("a", "a"), keys_in(keys_of("b")))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (PairwiseAnswer(), "no keys came"),
        (PairwiseAnswer("00" * 32 + "09" * 32), "the sealing key is of small order"),
        (PairwiseAnswer("09" * 32 + "00" * 32), "the masking key is of small order"),
        (PairwiseAnswer("09" * 64), "a key came twice"),
        (keys_of("b"), "a key came twice"),
        (keys_of("a"), "not signed by the key that secure.roster has"),
        (keys_of("a", "c"), "not signed by the key that secure.roster has"),
        (keys_of("a", "a", round=2), "not signed by the key that secure.roster has"),
    ],
)
def test_keys_that_are_refused(answer: PairwiseAnswer, text: str) -> None:
    with pytest.raises(WrongAnswerError, match=text):
        KeyRules("run", 3, ROSTER).check("a", answer, keys_in(keys_of("b")))


def test_a_stranger_takes_no_part() -> None:
    with pytest.raises(WrongAnswerError, match=r"the device is not in secure\.roster"):
        KeyRules("run", 3, ROSTER).check("d", keys_of("d"), ())


class Fleet:
    """Devices with real secrets, and what they answered."""

    def __init__(self, count: int, graph: Any = ALL, seed: bytes = bytes(32)) -> None:
        names = [f"d{number}" for number in range(count)]
        self.devices = {name: PairwiseDevice(name, Random(name).randbytes) for name in names}
        self.keys = {
            name: PairwiseAnswer(b"".join(each.keys()).hex()) for name, each in self.devices.items()
        }
        self.circle = circle_of(KeyRules("run", 3), seed, self.keys, graph)
        self.shares = {name: self.share(name) for name in names}
        self.unmasking: dict[str, PairwiseAnswer] = {}

    def share(self, name: str) -> PairwiseAnswer:
        asked, device = shares_question(self.circle, name), self.devices[name]
        assert asked.session is not None
        told = {
            other: Keys(bytes.fromhex(shown)[:32], bytes.fromhex(shown)[32:64])
            for other, shown in asked.neighbours.items()
        }
        sealed = device.shares(bytes.fromhex(asked.session), told, asked.threshold)
        return PairwiseAnswer(shares=hex_of(sealed), commitment=device.commitment().hex())

    def mask(self, names: list[str]) -> tuple[Any, Any]:
        total = plain = np.zeros(4, np.uint32)
        for number, name in enumerate(names):
            words = np.full(4, 7 * number, np.uint32)
            sealed = bytes_of(sealed_for(self.circle, self.shares, name))
            total = total + self.devices[name].masked(words, sealed, ABOUT)
            plain = plain + words
        return total, plain

    def unmask(self, name: str, survivors: list[str]) -> PairwiseAnswer:
        asked = unmasking_question(self.circle, self.shares, survivors, name)
        found = self.devices[name].unmasking(self.circle.session, asked.survivors, asked.dropped)
        answer = PairwiseAnswer(seeds=hex_of(found.seeds), masking_keys=hex_of(found.keys))
        check_unmasking(asked, answer)
        return answer

    def sum(self, survivors: list[str]) -> Any:
        return sum_of_masks(self.circle, self.shares, survivors, self.unmasking, 4, ABOUT)


@pytest.mark.parametrize("graph", [ALL, lambda devices: Degrees(8, 3)], ids=["all", "sparse"])
def test_the_sum_of_the_masks(graph: Any) -> None:
    """One device is lost before it seals shares, two before their updates, one before it tells."""
    fleet = Fleet(12, graph)
    del fleet.shares["d3"]
    for name in fleet.shares:
        check_shares(fleet.circle, name, fleet.shares[name])
    survivors = [name for name in fleet.shares if name not in ("d5", "d8")]
    total, plain = fleet.mask(survivors)
    fleet.unmasking = {name: fleet.unmask(name, survivors) for name in survivors if name != "d0"}
    found = fleet.sum(survivors)
    assert found.liars == frozenset()
    assert (total - found.masks == plain).all()
    name = min(fleet.unmasking)
    wrong = fleet.unmasking[name]
    lie = dict.fromkeys(wrong.seeds, "00" * 33)
    fleet.unmasking[name] = PairwiseAnswer(seeds=lie, masking_keys=wrong.masking_keys)
    found = fleet.sum(survivors)
    assert (total - found.masks == plain).all()
    assert found.liars <= {name}


def test_a_secret_without_enough_shares_ends_the_round() -> None:
    fleet = Fleet(6)
    survivors = ["d0", "d1", "d2", "d3", "d4"]
    fleet.mask(survivors)
    fleet.unmasking = {name: fleet.unmask(name, survivors) for name in survivors[:2]}
    with pytest.raises(ValueError, match="the shares of the own seed of d0 are too few: 1 came"):
        fleet.sum(survivors)


def test_the_circle_follows_from_the_number_of_the_run_and_from_all_keys() -> None:
    same = [Fleet(9).circle for _ in range(2)]
    assert same[0] == same[1]
    others = [Fleet(9, seed=b"x" * 32).circle, Fleet(8).circle]
    assert len({tuple(each.order) for each in [same[0], *others]}) == 3
    assert same[0].session != others[1].session
    assert set(same[0].order) == {f"d{number}" for number in range(9)}
    for name, around in same[0].neighbours.items():
        assert all(name in same[0].neighbours[other] for other in around)


def changed(answer: PairwiseAnswer, **fields: Any) -> PairwiseAnswer:
    return PairwiseAnswer(
        shares=fields.get("shares", answer.shares),
        commitment=fields.get("commitment", answer.commitment),
    )


def test_answers_in_phase_2_that_are_refused() -> None:
    fleet = Fleet(5)
    good = fleet.shares["d0"]
    for name in ("d1", "stranger"):
        lacking = {other: sealed for other, sealed in good.shares.items() if other != name}
        if name == "stranger":
            lacking[name] = "00" * 82
        with pytest.raises(WrongAnswerError, match="its 4 neighbours each need them"):
            check_shares(fleet.circle, "d0", changed(good, shares=lacking))
    with pytest.raises(WrongAnswerError, match="no commitment"):
        check_shares(fleet.circle, "d0", changed(good, commitment=None))


def test_answers_in_phase_3_that_are_refused() -> None:
    fleet = Fleet(5)
    asked = unmasking_question(fleet.circle, fleet.shares, ["d0", "d1", "d2", "d3"], "d0")
    assert (sorted(asked.survivors), asked.dropped) == (["d1", "d2", "d3"], ("d4",))
    check_unmasking(asked, PairwiseAnswer())
    for told, text in [
        ({"seeds": {"d4": "00" * 33}}, "a share of the own seed of d4 was not asked for"),
        ({"masking_keys": {"d1": "00" * 33}}, "a share of the masking key of d1 was not asked for"),
    ]:
        with pytest.raises(WrongAnswerError, match=text):
            check_unmasking(asked, PairwiseAnswer(**told))


def test_nobody_is_told_of_a_stranger() -> None:
    circle: Circle = Fleet(4).circle
    with pytest.raises(WrongAnswerError, match="its 0 neighbours"):
        check_shares(circle, "stranger", PairwiseAnswer(shares={"d0": "00" * 82}))
