"""Devices of pairwise masks and a coordinator that does whatever it likes in any order: keys of its
own, other sessions, lists that differ from device to device, replays, early and late questions,
tasks that differ. No update is ever shown by itself.

What the coordinator knows is worked out as it would: an update is open where its own seed can be
put together, and each of its masks either was agreed on with the coordinator's own key, or comes of
a masking key that can be put together.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from fleetlearn_coordinator.secure.pairwise_session import shares_question
from fleetlearn_device.training.pairwise_sessions import LostSessionError, UntrustedError
from fleetlearn_protocol.secure.graph import Degrees
from fleetlearn_protocol.secure.pairwise import PairwiseDevice
from fleetlearn_protocol.secure.pairwise_messages import KEYS, SHARES, UNMASKING, PairwiseQuestion
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pairwise_fleet import PairwiseFleet

COUNT, THRESHOLD = 5, 3
NAMES = [f"d{number}" for number in range(COUNT)]
REFUSED = (UntrustedError, LostSessionError)
names = st.sampled_from(NAMES)
rarely = st.sampled_from([False, False, False, False, True])
few = st.one_of(st.just(set[str]()), st.sets(names, max_size=2))
"""Mostly nobody: who departs from the protocol in all things at once gets nowhere."""


def forged_keys(name: str) -> str:
    """Return keys whose private ones the coordinator has, in the place of a device's."""
    return b"".join(PairwiseDevice(name, Random(f"forged {name}").randbytes).keys()).hex()


class CheatingCoordinator(RuleBasedStateMachine):
    """Rules are what a coordinator may say to one device."""

    roster = True

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.fleet = PairwiseFleet(
            Path(self._folder.name), COUNT, Degrees(COUNT - 1, THRESHOLD), roster=self.roster
        )
        self.sums: set[tuple[str, str, int]] = set()
        """(device, model, round): the device let a sum of the model be unmasked in the round."""
        self._next()

    def teardown(self) -> None:
        self._folder.cleanup()

    def _next(self) -> None:
        self.killed = False
        """Whether a device's process died since the round began."""
        self.masked: dict[str, frozenset[str]] = {}
        """Device -> the neighbours that it masked with."""
        self.abouts: dict[str, tuple[float, str]] = {}
        """Device -> the learning rate and the model of its task."""
        self.forged: set[tuple[str, str]] = set()
        """(device, neighbour): the device was told a key of the coordinator's in its place."""
        self.told: list[dict[str, set[str]]] = [defaultdict(set), defaultdict(set)]
        """Of seeds, and of masking keys: device -> who told a share."""

    @rule()
    def begin_the_next_round(self) -> None:
        self.fleet.begin(self.fleet.round + 1)
        self._next()

    @rule(name=names)
    def ask_for_keys(self, name: str) -> None:
        with suppress(*REFUSED):
            self.fleet.keys[name] = self.fleet.ask(name, KEYS, PairwiseQuestion(self.fleet.round))

    @initialize(until=st.integers(1, 3))
    def begin(self, until: int) -> None:
        self.go_on_honestly(until, set())

    @rule(until=st.integers(1, 4), lost=few)
    def go_on_honestly(self, until: int, lost: set[str]) -> None:
        """Most of what devices say needs all of what came before."""
        for name in NAMES:
            self.ask_for_keys(name)
        for name in NAMES * (until >= 2):
            self.ask_for_shares(name, set(), set(), THRESHOLD, False)
        for name in NAMES * (until >= 3):
            if name not in lost:
                self.give_a_task(name, set(), 0.1, "aa", False)
        if until == 4:
            self.ask_all_to_unmask({*NAMES} - self.masked.keys())

    @rule(
        name=names,
        without=few,
        forge=few,
        threshold=st.sampled_from([THRESHOLD, THRESHOLD, THRESHOLD, 1, 4]),
        other=rarely,
    )
    def ask_for_shares(
        self, name: str, without: set[str], forge: set[str], threshold: int, other: bool
    ) -> None:
        if len(self.fleet.keys) < COUNT:
            return
        asked = shares_question(self.fleet.circle, name)
        near = {each: keys for each, keys in asked.neighbours.items() if each not in without}
        forge = forge & near.keys()
        near |= {each: forged_keys(each) for each in forge}
        session = "77" * 32 if other else asked.session
        changed = msgspec.structs.replace(
            asked, neighbours=near, threshold=threshold, session=session
        )
        with suppress(*REFUSED):
            self.fleet.shares[name] = self.fleet.ask(name, SHARES, changed)
            self.forged |= {(name, each) for each in forge}

    @rule(
        name=names,
        without=few,
        lr=st.sampled_from([0.1, 0.0]),
        model=st.sampled_from(["aa", "cc"]),
        spoil=rarely,
    )
    def give_a_task(self, name: str, without: set[str], lr: float, model: str, spoil: bool) -> None:
        fleet = self.fleet
        if len(fleet.keys) < COUNT:
            return
        shares = {
            each: answer.shares[name]
            for each, answer in fleet.shares.items()
            if each not in without and name in answer.shares
        }
        if spoil:
            shares |= dict.fromkeys([*shares][:1], "00" * 82)
        task = fleet.task(name, shares, hyper={"lr": lr})
        vector = msgspec.structs.replace(task.vectors[0], sha256=model * 32)
        with suppress(*REFUSED):
            fleet.send(name, msgspec.structs.replace(task, vectors=(vector,)))
            assert name not in self.masked, "masked twice in one session"
            self.masked[name], self.abouts[name] = frozenset(shares), (lr, model)

    @rule(name=names, lost=few, both=few, stranger=rarely, other=rarely)
    def ask_to_unmask(
        self, name: str, lost: set[str], both: set[str], stranger: bool, other: bool
    ) -> None:
        if len(self.fleet.keys) < COUNT:
            return
        near = {*NAMES} - {name}
        asked = PairwiseQuestion(
            self.fleet.round,
            "77" * 32 if other else self.fleet.circle.session.hex(),
            survivors=tuple(sorted(near - lost | (both & near))),
            dropped=tuple(sorted(near & (lost | both) | ({"d9"} if stranger else set()))),
        )
        with suppress(*REFUSED):
            found = self.fleet.ask(name, UNMASKING, asked)
            self.sums.add((name, self.abouts[name][1], self.fleet.round))
            for told, kind in zip(self.told, (found.seeds, found.masking_keys), strict=True):
                for about in kind:
                    told[about].add(name)

    @rule(lost=few)
    def ask_all_to_unmask(self, lost: set[str]) -> None:
        for name in NAMES:
            self.ask_to_unmask(name, lost, set(), False, False)

    @rule(about=names)
    def ask_each_for_both_of_one(self, about: str) -> None:
        """A split view: some are told that it stayed, the others that it was lost."""
        for place, name in enumerate(NAMES):
            self.ask_to_unmask(name, {about} if place % 2 else set(), set(), False, False)

    @rule(name=names)
    def kill(self, name: str) -> None:
        self.fleet.restart(name)
        self.killed = True

    # What must never be

    def knows(self, which: int, name: str) -> bool:
        return len(self.told[which][name]) >= THRESHOLD

    @invariant()
    def no_device_tells_both(self) -> None:
        for name in NAMES:
            assert not self.told[0][name] & self.told[1][name]
            assert not (self.knows(0, name) and self.knows(1, name))

    @invariant()
    def no_update_is_open(self) -> None:
        for name, near in self.masked.items():
            open_masks = [
                (name, other) in self.forged or self.knows(1, name) or self.knows(1, other)
                for other in near
            ]
            assert not (self.knows(0, name) and all(open_masks)), f"{name}'s update is known"

    @invariant()
    def no_device_is_in_two_sums_of_a_model(self) -> None:
        assert len({(name, model) for name, model, _ in self.sums}) == len(self.sums)

    @invariant()
    def nobody_masks_with_a_key_of_the_coordinators(self) -> None:
        assert not self.forged

    @invariant()
    def an_honest_sum_is_exact(self) -> None:
        """Where everybody answered everything the sum is right: refusals are no excuse."""
        fleet = self.fleet
        told = [self.told[0][name] for name in NAMES]
        everybody = self.masked.keys() == {*NAMES} and all(len(each) == COUNT - 1 for each in told)
        full = all(len(near) == COUNT - 1 for near in self.masked.values())
        if everybody and full and not self.killed and {*self.abouts.values()} == {(0.1, "aa")}:
            for name in NAMES:
                others = tuple(sorted({*NAMES} - {name}))
                with suppress(*REFUSED):  # it was killed since then
                    fleet.unmasking[name] = fleet.ask(
                        name, UNMASKING,
                        PairwiseQuestion(fleet.round, fleet.circle.session.hex(), survivors=others),
                    )  # fmt: skip
            if len(fleet.unmasking) == COUNT:
                found, plain, _ = fleet.sum()
                assert (np.asarray(found) == plain).all()


LIKE = settings(
    max_examples=120,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCheats = CheatingCoordinator.TestCase
TestCheats.settings = LIKE
