"""Any requests to a helper, in any order, with restarts between them: what must hold whatever is
asked."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_protocol.secure.about import MaskedUpdate
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumAnswer,
    MaskSumRequest,
    SealedReport,
    write_message,
)
from helper_fleet import MINIMUM, SIZE, SecureDevice, exact_sum, model, request_of, terms_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

DEVICES = [f"d{number}" for number in range(6)]
STRANGERS = ["s0", "s1"]
BOUNDS = HelperBounds(MINIMUM, 12, 100)


class Masked(NamedTuple):
    """One masked update of one device."""

    device: str
    run: str
    round: int
    size: int
    minimum: int
    draw: int
    """Which seed the device drew: the same update may be masked again."""


updates = st.builds(
    Masked,
    st.sampled_from([*DEVICES, *STRANGERS]),
    st.just("run-1"),
    st.integers(1, 2),
    st.just(SIZE),
    st.just(MINIMUM),
    st.integers(0, 1),
)
groups = st.lists(st.sampled_from(DEVICES), min_size=2, max_size=6, unique=True)


@cache
def template() -> Path:
    """A helper's file with the devices enrolled. Each machine has a copy."""
    path = Path(tempfile.mkdtemp()) / "helper.sqlite"
    atexit.register(shutil.rmtree, path.parent)
    make_helper_store(path, 1.0)
    with closing(HelperStore(path)) as store:
        store.enrol([(name, SecureDevice(name).public) for name in DEVICES], 1.0)
    return path


@cache
def private_key() -> X25519PrivateKey:
    with closing(HelperStore(template())) as store:
        return store.private_key()


@cache
def sealed_report(update: Masked) -> tuple[SealedReport, bytes]:
    """What the device sent for the helper, and its seed."""
    device = SecureDevice(update.device)
    key = private_key().public_key().public_bytes_raw()
    terms = terms_of(key, run=update.run, size=update.size, minimum=update.minimum)
    named = MaskedUpdate(
        update.device, f"{update.device}-{update.round}", update.round, model(update.round)
    )
    seed = device.seed(terms, named, update.draw)
    return device.report(terms, update.round, seed=seed), seed


class HelperMachine(RuleBasedStateMachine):
    """A helper, and a coordinator that may ask anything. What is expected is said by sets."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(template(), self.folder)
        self.helper = self._started()
        self.answers: dict[frozenset[Masked], bytes] = {}
        self.sizes: dict[str, int] = {}
        self.revoked: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def _started(self) -> Helper:
        return Helper(self.folder / "helper.sqlite", BOUNDS)

    # What a coordinator may do

    @rule(
        group=groups,
        run=st.sampled_from(["run-1", "run-2"]),
        round=st.integers(1, 2),
        size=st.sampled_from([SIZE, SIZE, SIZE, SIZE + 1]),
        minimum=st.sampled_from([2, MINIMUM, 5]),
        draw=st.integers(0, 1),
    )
    def ask(
        self, group: list[str], run: str, round: int, size: int, minimum: int, draw: int
    ) -> None:
        """An ordinary set."""
        self._ask([Masked(name, run, round, size, minimum, draw) for name in group])

    @rule(chosen=st.lists(updates, min_size=1, max_size=9))
    def ask_anything(self, chosen: list[Masked]) -> None:
        """Strangers, devices twice, rounds and draws that are mixed."""
        self._ask(chosen)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        members = data.draw(st.sampled_from(sorted(map(sorted, self.answers))))
        self._ask(data.draw(st.permutations(members)))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), other=updates, add=st.booleans(), remove=st.booleans())
    def ask_nearly_the_same(
        self, data: st.DataObject, other: Masked, add: bool, remove: bool
    ) -> None:
        """A set that differs from an answered one by one or two devices."""
        members = data.draw(st.sampled_from(sorted(map(sorted, self.answers))))
        if remove:
            members = data.draw(st.permutations(members))[1:]
        if add:
            first = members[0]
            other = other._replace(run=first.run, size=first.size, minimum=first.minimum)
            members = [*members, other]
        self._ask(members)

    @rule(group=groups, data=st.data(), kind=st.sampled_from(["signature", "sealed", "terms"]))
    def forge(self, group: list[str], data: st.DataObject, kind: str) -> None:
        """A set in which one thing is not what its device signed."""
        chosen = [Masked(name, "run-1", 1, SIZE, MINIMUM, 0) for name in group]
        request = self._request(chosen)
        index = data.draw(st.integers(0, len(group) - 1))
        reports = [*request.reports]
        if kind == "signature":
            bad = bytes(64)
            reports[index] = msgspec.structs.replace(reports[index], signature=bad)
        elif kind == "sealed":
            other, _ = sealed_report(chosen[index]._replace(draw=1))
            reports[index] = msgspec.structs.replace(reports[index], sealed=other.sealed)
        else:
            request = msgspec.structs.replace(request, run="run-2")
        forged = msgspec.structs.replace(request, reports=tuple(reports))
        assert not isinstance(self._answer(forged), MaskSumAnswer), f"{kind} was forged"

    @rule()
    def restart(self) -> None:
        self.helper = self._started()

    @rule(name=st.sampled_from(DEVICES[4:]))
    def revoke(self, name: str) -> None:
        with closing(HelperStore(self.folder / "helper.sqlite")) as store:
            store.revoke(name, 2.0)
        self.revoked.add(name)

    # What must hold

    @invariant()
    def no_seed_is_in_two_answers(self) -> None:
        used = [sealed_report(each)[1] for members in self.answers for each in members]
        assert len({*used}) == len(used)

    def _ask(self, chosen: list[Masked]) -> None:
        members = frozenset(chosen)
        expected = len(members) == len(chosen) and self._is_allowed(members)
        answer = self._answer(self._request(chosen))
        assert isinstance(answer, MaskSumAnswer) == expected, (answer, chosen)
        if isinstance(answer, MaskSumAnswer):
            seeds = [sealed_report(each)[1] for each in chosen]
            assert answer.words == exact_sum(seeds, chosen[0].size).tobytes()
            assert self.answers.setdefault(members, answer.words) == answer.words
            self.sizes.setdefault(chosen[0].run, chosen[0].size)

    def _is_allowed(self, members: frozenset[Masked]) -> bool:
        first = next(iter(members))
        devices = {each.device for each in members}
        if len(devices) < max(MINIMUM, first.minimum):
            return False
        if members in self.answers:
            return True  # also where a device was revoked since
        if not devices <= {*DEVICES} - self.revoked:
            return False
        if self.sizes.get(first.run, first.size) != first.size:
            return False
        return not _counted([*members]) & _counted(_all(self.answers)) and (
            len(_counted([*members])) == len(members)
        )

    def _request(self, chosen: list[Masked]) -> MaskSumRequest:
        first = chosen[0]
        key = self.helper.card.key
        terms = terms_of(key, run=first.run, size=first.size, minimum=first.minimum)
        return request_of(terms, [sealed_report(each)[0] for each in chosen])

    def _answer(self, request: MaskSumRequest) -> object:
        return self.helper.answer(write_message(request))


def _all(answers: Iterable[frozenset[Masked]]) -> list[Masked]:
    return [each for members in answers for each in members]


def _counted(members: Iterable[Masked]) -> set[tuple[str, str, int]]:
    """A device counts once for each model of a run."""
    return {(each.run, each.device, each.round) for each in members}
