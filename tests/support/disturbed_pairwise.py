"""Sessions of pairwise masks in which anything may die at any moment: devices and the coordinator,
and messages are lost or come twice.

Real are the devices' steps (``PairwiseDevice``), the coordinator's (``pairwise_session.py``), the
round and its modular sum. A device's secrets are in its memory alone: one that died says nothing
more, though its masked update may be in its outbox. What the coordinator was told is on its disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from unittest.mock import patch

import msgspec
import numpy as np
from disturbed_helper import BrokenPromiseError, DiedError, Disturbances, columns_of
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.secure.pairwise_session import (
    Circle,
    KeyRules,
    check_shares,
    check_unmasking,
    circle_of,
    sealed_for,
    shares_question,
    sum_of_masks,
    unmasking_question,
)
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure import pairwise
from fleetlearn_protocol.secure.fixed_point import Words, weighted_words
from fleetlearn_protocol.secure.graph import Degrees
from fleetlearn_protocol.secure.masks import add_mask
from fleetlearn_protocol.secure.pairwise import Keys, PairwiseDevice, SessionRefusedError
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS,
    KEYS_BYTES,
    SHARES,
    UNMASKING,
    PairwiseAnswer,
    PairwiseQuestion,
    bytes_of,
    hex_of,
)
from round_reports import masked_rules_of, state_of

SIZE = 4
MASKED = 0
"""The training between the exchanges, as a phase of its own."""
ORDER = (KEYS, SHARES, MASKED, UNMASKING)
WORDS = {KEYS: "keys", SHARES: "shares", MASKED: "masked updates", UNMASKING: "unmasking"}
CALM_STEPS = 1500
CHANCES = {
    "device dies": 0.02,
    "device is gone": 0.01,
    "coordinator dies": 0.06,
    "question is lost": 0.1,
    "answer is lost": 0.1,
    "answer comes twice": 0.1,
    "answer is late": 0.1,
    "update is late": 0.3,
    "device dies in training": 0.08,
    "training is over": 0.3,
    "deadline": 0.05,
    "curious too soon": 0.03,
    "curious": 0.3,
}
"""As in ``disturbed_helper``. A device that is asked for what would give its update away says
nothing more in the round."""
MISTAKES = {
    "a device answers a second question of a phase",
    "a device tells both secrets of one neighbour",
    "a device that died begins its session again",
    "a late update changes the lists",
    "the masks of lost devices stay in the sum",
    "the two ends of a mask have the same sign",
    "a device leaves its own mask out",
    "the weight is not masked",
    "an update that comes twice is added twice",
    "the lists are exchanged",
}
"""Planted one at a time: each must be found."""
ABOUT = b"what the updates are of"


class MaskingMember:
    """A device. Its memory is ``session`` and ``said``, its disk ``outbox``."""

    def __init__(self, name: str, rehearsal: PairwiseRehearsal) -> None:
        self.name, self.rehearsal = name, rehearsal
        self.session: PairwiseDevice | None = None
        self.said: dict[int, tuple[PairwiseQuestion, PairwiseAnswer]] = {}
        self.outbox: Words | None = None
        self.began = self.is_gone = False
        self.is_silent = False
        """Whether it refused: it says nothing more in this session."""
        draw = np.random.default_rng(rehearsal.disturbances.random.getrandbits(64))
        update = (0.9 / SIZE**0.5 * draw.uniform(-1, 1, SIZE)).astype(np.float32)
        share = 1.0 if rehearsal.numbers.equal else draw.uniform(0.1, 1.0)
        bits = rehearsal.numbers.bits
        self.plain = weighted_words(
            update * np.float32(share), share, 1.0, bits, draw.random(SIZE + 1)
        )

    def die(self) -> None:
        self.session = None
        self.said.clear()

    def answer(self, phase: int, asked: PairwiseQuestion) -> PairwiseAnswer | None:
        """Return what the device says, the same for the same question; None: it says nothing."""
        run = self.rehearsal
        if self.is_gone:
            return None
        again = "a device that died begins its session again" in run.mistakes
        if phase == KEYS and self.session is None and (again or not self.began):
            self.session, self.began = self._begun(), True
        if again and self.session is None and self.began:
            self._begin_again()
        if self.session is None:
            return None
        if phase not in self.said or (
            "a device answers a second question of a phase" in run.mistakes
            and self.said[phase][0] != asked
        ):
            try:
                made = self._answer(self.session, phase, asked)
            except SessionRefusedError:
                return None
            self.said[phase] = asked, made
        before, made = self.said[phase]
        return made if before == asked else None

    def _begin_again(self) -> None:
        """Take the steps with new keys that the dead process took with its own."""
        coordinator = self.rehearsal.coordinator
        self.session = self._begun()
        self._answer(self.session, KEYS, PairwiseQuestion(1))
        if coordinator.phase != SHARES and self.name in coordinator.answers[SHARES]:
            self._answer(self.session, SHARES, shares_question(coordinator.circle, self.name))

    def _begun(self) -> PairwiseDevice:
        run = self.rehearsal
        draw = Random(run.disturbances.random.getrandbits(64)).randbytes
        if "a device answers a second question of a phase" in run.mistakes:
            return Talkative(self.name, draw)
        if "a device tells both secrets of one neighbour" in run.mistakes:
            return Careless(self.name, draw)
        return PairwiseDevice(self.name, draw)

    def _answer(
        self, session: PairwiseDevice, phase: int, asked: PairwiseQuestion
    ) -> PairwiseAnswer:
        if phase == KEYS:
            return PairwiseAnswer(b"".join(session.keys()).hex())
        name = bytes.fromhex(asked.session or "")
        if phase == SHARES:
            half = KEYS_BYTES // 2
            shown = {other: bytes.fromhex(keys) for other, keys in asked.neighbours.items()}
            near = {
                other: Keys(keys[:half], keys[half:KEYS_BYTES]) for other, keys in shown.items()
            }
            sealed = session.shares(name, near, asked.threshold)
            return PairwiseAnswer(shares=hex_of(sealed), commitment=session.commitment().hex())
        told = session.unmasking(name, asked.survivors, asked.dropped)
        return PairwiseAnswer(seeds=hex_of(told.seeds), masking_keys=hex_of(told.keys))

    def masked(self, sealed: Mapping[str, str]) -> Words | None:
        """Return the masked update: made once, and in the outbox before it is sent."""
        run = self.rehearsal
        if self.is_gone:
            return None
        again = "a device that died begins its session again" in run.mistakes
        if again and self.session is None and self.outbox is None:
            self._begin_again()
        if self.outbox is None and self.session is not None:
            try:
                made = self.session.masked(self.plain, bytes_of(sealed), ABOUT)
            except SessionRefusedError:
                return None
            if "a device leaves its own mask out" in run.mistakes:
                add_mask(made, self.session._seed, -1)
            if "the weight is not masked" in run.mistakes:
                made[-1] = self.plain[-1]
            run.disturbances.may_die("device")
            self.outbox = made
        return self.outbox


class Talkative(PairwiseDevice):
    """A planted mistake: it takes each step as often as it is asked to."""

    def _begin(self, step: int) -> None:
        self._step = max(self._step, step + 1)


class Careless(PairwiseDevice):
    """A planted mistake: it does not compare the two lists that it is told."""

    def unmasking(
        self, session: bytes, survivors: Iterable[str], dropped: Iterable[str]
    ) -> pairwise.UnmaskingShares:
        survivors, dropped = [*survivors], [*dropped]
        held = self._held
        return pairwise.UnmaskingShares(
            {name: held[name][:33] for name in survivors if name in held},
            {name: held[name][33:] for name in dropped if name in held},
        )


class PairwiseCoordinator:
    """The coordinator: what it was told is on its disk, its memory is the round and the circle."""

    def __init__(self, rehearsal: PairwiseRehearsal) -> None:
        self.rehearsal = rehearsal
        self.answers: dict[int, dict[str, PairwiseAnswer]] = {KEYS: {}, SHARES: {}, UNMASKING: {}}
        self.updates: dict[str, Words] = {}
        self.phase = KEYS
        self.survivors: tuple[str, ...] | None = None
        """Written down before anybody is asked to unmask."""
        self.status, self.why = "open", ""
        self.restart()

    def restart(self) -> None:
        """Begin again from the disk."""
        run = self.rehearsal
        self._circle: Circle | None = None
        self.round = OpenRound(run.rules, state_of(run.rules, [0.0] * SIZE))
        for name in self.updates:
            self._add(name)

    def _add(self, name: str) -> None:
        columns = columns_of(self.updates[name])
        self.round.accept(columns)
        self.round.add(columns)

    @property
    def circle(self) -> Circle:
        if self._circle is None:
            run = self.rehearsal
            self._circle = circle_of(run.keys_rules, b"s" * 32, self.answers[KEYS], run.graph)
        return self._circle

    def members(self) -> list[str]:
        """Who is asked in this phase: those that answered the one before."""
        if self.phase == KEYS:
            return [*self.rehearsal.members]
        if self.phase == UNMASKING:
            assert self.survivors is not None
            return [*self.survivors]
        return [*self.answers[KEYS if self.phase == SHARES else SHARES]]

    def done(self) -> Iterable[str]:
        return self.updates if self.phase == MASKED else self.answers[self.phase]

    def question(self, device: str) -> PairwiseQuestion:
        if self.phase == KEYS:
            return PairwiseQuestion(1)
        if self.phase == SHARES:
            return shares_question(self.circle, device)
        assert self.survivors is not None
        asked = unmasking_question(self.circle, self.answers[SHARES], self.survivors, device)
        if "the lists are exchanged" in self.rehearsal.mistakes:
            return PairwiseQuestion(
                asked.round, asked.session, survivors=asked.dropped, dropped=asked.survivors
            )
        return asked

    def hear(self, device: str, phase: int, asked: PairwiseQuestion, told: PairwiseAnswer) -> None:
        """An answer came."""
        run = self.rehearsal
        run.learn(device, told)
        if phase != self.phase or device in self.answers[phase]:
            return
        if phase == KEYS:
            taken = [key for answer in self.answers[KEYS].values() for key in _keys_of(answer)]
            run.keys_rules.check(device, told, taken)
        elif phase == SHARES:
            check_shares(self.circle, device, told)
        else:
            check_unmasking(asked, told)
        run.disturbances.may_die("coordinator")
        self.answers[phase][device] = told
        run.disturbances.may_die("coordinator")

    def hear_update(self, device: str, words: Words) -> None:
        """A masked update came."""
        run = self.rehearsal
        run.see(device, words)
        joins = "a late update changes the lists" in run.mistakes and self.phase == UNMASKING
        if device in self.updates:
            if "an update that comes twice is added twice" in run.mistakes:
                self.round.add(columns_of(words))
            return
        if self.phase != MASKED and not joins:
            return
        run.disturbances.may_die("coordinator")
        self.updates[device] = words
        run.disturbances.may_die("coordinator")
        self._add(device)
        if joins:
            self.survivors = tuple(self.updates)

    def close_phase(self) -> None:
        """Go on with those that answered, or give the round up."""
        run, phase = self.rehearsal, self.phase
        there = [*self.done()]
        if phase == UNMASKING:
            self._unmask()
            return
        if len(there) < run.minimum:
            self.status, self.why = "abandoned", f"{len(there)} devices sent their {WORDS[phase]}"
            return
        if phase == MASKED:
            self.survivors = tuple(there)
        self.phase = ORDER[ORDER.index(phase) + 1]
        run.disturbances.may_die("coordinator")

    def _unmask(self) -> None:
        run = self.rehearsal
        assert self.survivors is not None
        shares = self.answers[SHARES]
        if "the masks of lost devices stay in the sum" in run.mistakes:
            shares = {name: shares[name] for name in self.survivors}
        told = self.answers[UNMASKING]
        try:
            found = sum_of_masks(self.circle, shares, self.survivors, told, SIZE + 1, ABOUT)
        except ValueError as error:
            self.status, self.why = "abandoned", str(error)
            return
        if found.liars:
            raise BrokenPromiseError(f"{sorted(found.liars)} are said to have told wrong shares")
        try:
            made = self.round.commit(1, self.round.summary({}), masks=found.masks)
        except ValueError as error:
            raise BrokenPromiseError(f"the round has no sum: {error}") from None
        run.disturbances.may_die("coordinator")
        run.check_sum(self.survivors, made.state.model.tobytes())
        self.status = "committed"


class PairwiseRehearsal:
    """One round. ``go`` raises BrokenPromiseError where something did not hold."""

    def __init__(self, seed: int, mistakes: Iterable[str] = ()) -> None:
        self.mistakes = frozenset(mistakes)
        assert self.mistakes <= MISTAKES, self.mistakes - MISTAKES
        self.disturbances = Disturbances(seed, CHANCES)
        random = self.disturbances.random
        count = random.randint(5, 10)
        degree = random.choice([each for each in (4, 6) if each < count])
        self.degrees = Degrees(degree, random.randint(degree // 2 + 1, degree // 2 + 2))
        self.minimum = self.degrees.threshold + 1
        self.numbers = FixedPoint(1.0, random.choice([16, 18, 20]), random.random() < 0.5)
        numbers = self.numbers
        self.rules = masked_rules_of(aggregators={UPDATE: modular_sum(numbers)}, secure=numbers)
        self.keys_rules = KeyRules("run_1", 1)
        self.members = {name: MaskingMember(name, self) for name in _names(count)}
        self._late: dict[str, Callable[[], None]] = {}
        """Devices whose answers are on their way, and what they do when they arrive."""
        self._seen: dict[str, bytes] = {}
        self._named: dict[str, str] = {}
        """Device -> what others were told of it in the unmasking."""
        self._holders: dict[tuple[str, str], set[str]] = {}
        """Which secret of whom -> who told the coordinator a share of it."""

    def graph(self, devices: int) -> Degrees:
        """All devices are neighbours where there are few."""
        degree = min(self.degrees.neighbours, (devices - 1) // 2 * 2)
        return Degrees(degree, min(self.degrees.threshold, degree))

    def go(self) -> PairwiseCoordinator:
        """Let the round end. Returns the coordinator."""
        same_sign = "the two ends of a mask have the same sign" in self.mistakes
        signs = (lambda *names: 1) if same_sign else pairwise.sign_of
        with patch.object(pairwise, "sign_of", signs):
            self._go()
        return self.coordinator

    def _go(self) -> None:
        self.coordinator = PairwiseCoordinator(self)
        for _ in range(self.disturbances.random.randint(5, 200)):
            if self.coordinator.status != "open":
                break
            self._step()
        self.disturbances.calm()
        for _ in range(CALM_STEPS):
            if self.coordinator.status != "open":
                self._check_why()
                return
            self._step()
        raise BrokenPromiseError(f"the round did not end: {WORDS[self.coordinator.phase]}")

    def _step(self) -> None:
        coordinator, disturbances = self.coordinator, self.disturbances
        waiting = [name for name in coordinator.members() if self._may_answer(name)]
        try:
            # Most deadlines come when enough have answered.
            enough = (
                len([*coordinator.done()]) >= self.minimum or disturbances.random.random() < 0.1
            )
            deadline = "training is over" if coordinator.phase == MASKED else "deadline"
            if not (waiting or self._late) or (enough and disturbances.happens(deadline)):
                coordinator.close_phase()
                return
            if self._late and (not waiting or disturbances.random.random() < 0.1):
                self._late.pop(disturbances.random.choice([*self._late]))()
                return
            self._ask(self.members[disturbances.random.choice(waiting)])
        except DiedError as died:
            if str(died) == "coordinator":
                coordinator.restart()

    def _may_answer(self, name: str) -> bool:
        """Whether the coordinator still waits for the device: it is connected, and has not said
        that it has nothing to say."""
        member, phase = self.members[name], self.coordinator.phase
        if member.is_gone or member.is_silent or name in self._late:
            return False
        if name in self.coordinator.done():
            return False
        if phase == MASKED and member.outbox is not None:
            return True
        again = "a device that died begins its session again" in self.mistakes
        return member.session is not None or (phase == KEYS and not member.began) or again

    def _ask(self, member: MaskingMember) -> None:
        coordinator, disturbances = self.coordinator, self.disturbances
        if disturbances.happens("device is gone"):
            member.is_gone = True
        if disturbances.happens("question is lost"):
            return
        try:
            disturbances.may_die("device")
            if coordinator.phase == MASKED:
                if disturbances.happens("device dies in training"):
                    raise DiedError("device")
                self._ask_for_update(member)
                return
            if coordinator.phase == UNMASKING and disturbances.happens("curious too soon"):
                self._cheat(member)
                return
            asked = coordinator.question(member.name)
            self._check_lists(asked)
            told = member.answer(coordinator.phase, asked)
            disturbances.may_die("device")
        except DiedError as died:
            if str(died) != "device":
                raise
            member.die()
            return
        if told is None:
            self._check_refusal(member)
            member.is_silent = True
            return
        phase = coordinator.phase
        self._deliver(member.name, lambda: coordinator.hear(member.name, phase, asked, told))
        if phase == UNMASKING and disturbances.happens("curious"):
            self._cheat(member)

    def _ask_for_update(self, member: MaskingMember) -> None:
        coordinator = self.coordinator
        sealed = sealed_for(coordinator.circle, coordinator.answers[SHARES], member.name)
        words = member.masked(sealed)
        if words is None:
            member.is_silent = True
        else:
            self._deliver(member.name, lambda: coordinator.hear_update(member.name, words))

    def _deliver(self, device: str, hear: Callable[[], None]) -> None:
        """Bring an answer to the coordinator, or not, or twice."""
        if self.disturbances.happens("answer is lost"):
            return
        late = "update is late" if self.coordinator.phase == MASKED else "answer is late"
        if self.disturbances.happens(late):
            self._late[device] = hear
            return
        hear()
        if self.disturbances.happens("answer comes twice"):
            hear()

    # What must hold

    def _cheat(self, member: MaskingMember) -> None:
        """The coordinator asks a device for what would give more away than the sum. The device
        must refuse."""
        asked = self.coordinator.question(member.name)
        near = [*asked.survivors, *asked.dropped]
        moved = self.disturbances.random.choice(near)
        cheats = {
            "one device is in both lists": (near, [*asked.dropped, moved]),
            "a device stays that was said to be lost, or the reverse": (
                [name for name in near if (name in asked.survivors) != (name == moved)],
                [name for name in near if (name in asked.dropped) != (name == moved)],
            ),
            "few are said to have stayed": (near[: self.degrees.threshold - 1], near[-1:]),
        }
        what = self.disturbances.random.choice([*cheats])
        survivors, dropped = map(tuple, cheats[what])
        if member.name not in self._has_told() and what.startswith("a device stays"):
            return  # before it has said anything, it cannot know
        changed = msgspec.structs.replace(asked, survivors=survivors, dropped=dropped)
        if member.answer(UNMASKING, changed) is not None:
            raise BrokenPromiseError(f"{member.name} answered where {what}")
        member.is_silent = True

    def _check_lists(self, asked: PairwiseQuestion) -> None:
        """All devices are told the same of who stayed."""
        for said, names in {"stayed": asked.survivors, "is lost": asked.dropped}.items():
            for name in names:
                if self._named.setdefault(name, said) != said:
                    raise BrokenPromiseError(f"devices were told that {name} stayed, and is lost")

    def _check_refusal(self, member: MaskingMember) -> None:
        """A device that is asked as it should be refuses where too few of its neighbours stayed,
        and for nothing else."""
        coordinator = self.coordinator
        if member.is_gone or member.session is None or coordinator.phase != UNMASKING:
            return
        near = {*coordinator.circle.neighbours[member.name]} & {*(coordinator.survivors or ())}
        if len(near) >= coordinator.circle.threshold:
            raise BrokenPromiseError(f"{member.name} refused, and {len(near)} neighbours stayed")

    def _has_told(self) -> set[str]:
        return {name for name, member in self.members.items() if UNMASKING in member.said}

    def see(self, device: str, words: Words) -> None:
        """The coordinator has this update. It must know nothing of its words."""
        if self._seen.setdefault(device, words.tobytes()) != words.tobytes():
            raise BrokenPromiseError(f"{device} sent two masked updates in one session")
        if (words == self.members[device].plain).any():
            raise BrokenPromiseError(f"{device} sent an element without a mask")

    def learn(self, device: str, told: PairwiseAnswer) -> None:
        """The coordinator was told shares. It must not have both secrets of one device."""
        for which, shares in {"seed": told.seeds, "key": told.masking_keys}.items():
            for name in shares:
                self._holders.setdefault((which, name), set()).add(device)
        threshold = self.coordinator.circle.threshold if self._holders else 0
        for name in {name for _, name in self._holders}:
            known = [len(self._holders.get((which, name), ())) for which in ("seed", "key")]
            if min(known) >= threshold:
                raise BrokenPromiseError(f"the coordinator can have both secrets of {name}")

    def check_sum(self, survivors: Iterable[str], found: bytes) -> None:
        """The model is made of exactly these updates in fixed point."""
        plain = OpenRound(self.rules, state_of(self.rules, [0.0] * SIZE))
        for name in survivors:
            columns = columns_of(self.members[name].plain)
            plain.accept(columns)
            plain.add(columns)
        nothing = np.zeros(SIZE + 1, np.uint32)
        exact = plain.commit(1, plain.summary({}), masks=nothing).state.model
        if exact.tobytes() != found:
            raise BrokenPromiseError("the sum is not the updates' sum")

    def _check_why(self) -> None:
        """A round is abandoned because too few devices answered, and for nothing else."""
        coordinator = self.coordinator
        if coordinator.status == "committed":
            return
        if not coordinator.why:
            raise BrokenPromiseError("the round was abandoned without a reason")
        if coordinator.phase != UNMASKING:
            return  # counted where it was abandoned
        if fewest := self._fewest_shares():
            raise BrokenPromiseError(
                f"the round was abandoned ({coordinator.why}), and at least {fewest} shares of "
                "each secret came"
            )

    def _fewest_shares(self) -> int:
        """Return how many of its neighbours answered, of the device with the fewest; 0 where these
        are below the threshold."""
        coordinator = self.coordinator
        circle, shares = coordinator.circle, coordinator.answers[SHARES]
        survivors, told = {*(coordinator.survivors or ())}, coordinator.answers[UNMASKING]
        counts = [
            sum(other in told for other in circle.neighbours[name])
            for name in shares
            if name in survivors or survivors & {*circle.neighbours[name]}
        ]
        return min(counts) if min(counts) >= circle.threshold else 0


def _names(count: int) -> list[str]:
    return [f"d{number}" for number in range(count)]


def _keys_of(answer: PairwiseAnswer) -> list[str]:
    content = answer.keys or ""
    return [content[:KEYS_BYTES], content[KEYS_BYTES : 2 * KEYS_BYTES]]


def first_found(mistake: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return how many seeds it took until a mistake was found, and what was said."""
    for count, seed in enumerate(seeds, 1):
        try:
            PairwiseRehearsal(seed, [mistake]).go()
        except BrokenPromiseError as error:
            return count, str(error)
    return None
