"""The coordinator's side of a session of pairwise masks: who is whose neighbour, what each device
is asked, whether an answer can be, and the sum of the masks at the end. No I/O, no clock.

All of it follows from a random number that is kept with the run, and from what devices answered,
which is durable: a coordinator that was restarted asks the same again, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.secure.about import length_prefixed
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.graph import Degrees, neighbours_of
from fleetlearn_protocol.secure.pairwise import Keys, UnmaskingShares, session_of, unmask
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS_BYTES,
    PairwiseAnswer,
    PairwiseQuestion,
    bytes_of,
    signed_keys,
)
from fleetlearn_protocol.secure.sealed import can_seal_for
from fleetlearn_protocol.secure.signatures import is_signed

Answers = Mapping[str, PairwiseAnswer]
"""Device -> what it answered in one phase."""


class WrongAnswerError(Exception):
    """What a device answered cannot be. The text says why; the device is left out of the round."""


class KeyRules(NamedTuple):
    """Which keys a round takes."""

    run: str
    """What names the run in its tasks."""
    round: int
    roster: Mapping[str, bytes] | None = None
    """Device -> its own public key (Ed25519). None: anybody takes part."""

    def check(self, device: str, answer: PairwiseAnswer, taken: Collection[str]) -> None:
        """Raise WrongAnswerError where these cannot be the device's keys. ``taken``: as
        ``keys_in`` returns, of the devices before it."""
        named = keys_in(answer)
        if len({*named} - {*taken}) != 2:
            raise WrongAnswerError("a key came twice: each is of one device and one use")
        for use, key in zip(Keys._fields, named, strict=True):
            if not can_seal_for(bytes.fromhex(key)):
                raise WrongAnswerError(f"the {use} key is of small order, so that it hides nothing")
        if self.roster is not None:
            self._check_signature(device, answer, self.roster.get(device))

    def _check_signature(self, device: str, answer: PairwiseAnswer, public: bytes | None) -> None:
        if public is None:
            raise WrongAnswerError(
                "the device is not in secure.roster: the line that `fleetlearn-device public-key` "
                "prints belongs there"
            )
        content = bytes.fromhex(answer.keys or "")
        keys, signature = content[:KEYS_BYTES], content[KEYS_BYTES:]
        if not is_signed(public, signature, signed_keys(self.run, self.round, device, keys)):
            raise WrongAnswerError(
                "the keys are not signed by the key that secure.roster has for the device"
            )


class Circle(NamedTuple):
    """Who is whose neighbour in a session. It follows from the keys of all devices."""

    round: int
    session: bytes
    order: Sequence[str]
    """The devices of the circle, in its order."""
    neighbours: Mapping[str, Sequence[str]]
    """Of each device."""
    threshold: int
    shown: Mapping[str, str]
    """Device -> its keys, with its signature if there is one, as its neighbours are told them."""

    @property
    def keys(self) -> dict[str, Keys]:
        return {name: _pair(bytes.fromhex(shown)) for name, shown in self.shown.items()}


def circle_of(
    rules: KeyRules, seed: bytes, answers: Answers, graph: Callable[[int], Degrees]
) -> Circle:
    """Return the circle of the devices that sent keys, which were checked.

    seed: the run's random number, which no device knows: nobody can choose its neighbours. graph:
    number of devices -> how many neighbours each has, and how many give its secrets. Raises
    ValueError where this number of devices cannot hide their updates.
    """
    shown = {name: answers[name].keys or "" for name in sorted(answers)}
    about = length_prefixed((rules.run.encode(), str(rules.round).encode()))
    keys = (part.encode() for item in shown.items() for part in item)
    drawn = hashlib.sha256(length_prefixed((seed, about, *keys))).digest()
    order = sorted(shown, key=lambda name: hashlib.sha256(drawn + name.encode()).digest())
    degree, threshold = graph(len(order))
    around = {name: neighbours_of(at, order, degree) for at, name in enumerate(order)}
    session = session_of(about, ((name, _pair(bytes.fromhex(shown[name]))) for name in order))
    return Circle(rules.round, session, order, around, threshold, shown)


def shares_question(circle: Circle, device: str) -> PairwiseQuestion:
    """Return what a device of the circle is asked in phase 2."""
    shown = {name: circle.shown[name] for name in circle.neighbours[device]}
    return PairwiseQuestion(circle.round, circle.session.hex(), circle.threshold, shown)


def check_shares(circle: Circle, device: str, answer: PairwiseAnswer) -> None:
    """Raise WrongAnswerError where this cannot be a device's answer in phase 2."""
    wanted = circle.neighbours.get(device, ())
    if answer.shares.keys() != {*wanted}:
        raise WrongAnswerError(
            f"shares for {len(answer.shares)} devices came; its {len(wanted)} neighbours each need "
            "them"
        )
    if answer.commitment is None:
        raise WrongAnswerError("no commitment to its own seed came")


def sealed_for(circle: Circle, shares: Answers, device: str) -> dict[str, str]:
    """Return what the neighbours of a device sealed for it: neighbour -> shares. The device masks
    its update with these neighbours. ``shares``: all answers of phase 2."""
    near = (name for name in circle.neighbours[device] if name in shares)
    return {name: shares[name].shares[device] for name in near}


def unmasking_question(
    circle: Circle, shares: Answers, survivors: Collection[str], device: str
) -> PairwiseQuestion:
    """Return what a survivor is asked in phase 3. ``survivors``: whose masked updates count."""
    near = [name for name in circle.neighbours[device] if name in shares]
    return PairwiseQuestion(
        circle.round,
        circle.session.hex(),
        survivors=tuple(name for name in near if name in survivors),
        dropped=tuple(name for name in near if name not in survivors),
    )


def check_unmasking(asked: PairwiseQuestion, answer: PairwiseAnswer) -> None:
    """Raise WrongAnswerError where this cannot be a device's answer in phase 3. A device may lack a
    share that it could not open. ``asked``: the question."""
    seeds = "own seed", answer.seeds, asked.survivors
    for what, told, wanted in (seeds, ("masking key", answer.masking_keys, asked.dropped)):
        strangers = told.keys() - {*wanted}
        if strangers:
            raise WrongAnswerError(f"a share of the {what} of {min(strangers)} was not asked for")


class MaskSum(NamedTuple):
    """The masks of a round's updates."""

    masks: Words
    """Their sum modulo 2^32, shape (P + 1,)."""
    liars: frozenset[str]
    """Devices that told wrong shares, which were not needed."""


def sum_of_masks(
    circle: Circle,
    shares: Answers,
    survivors: Collection[str],
    unmasking: Answers,
    size: int,
    about: bytes,
) -> MaskSum:
    """Return the sum of the masks of the survivors' updates. In any thread.

    shares, unmasking: all answers of phases 2 and 3. size: words of an update. about: what
    ``task_terms.pairwise_about`` returns of the round's tasks. Raises ValueError, and names the
    device, where a secret cannot be put together.
    """
    total = np.zeros(size, np.uint32)
    told = {
        name: UnmaskingShares(bytes_of(answer.seeds), bytes_of(answer.masking_keys))
        for name, answer in unmasking.items()
    }
    commitments = {name: bytes.fromhex(each.commitment or "") for name, each in shares.items()}
    keys = {name: pair for name, pair in circle.keys.items() if name in shares}
    liars = unmask(
        total,
        circle.session,
        keys,
        circle.neighbours,
        survivors,
        told,
        circle.threshold,
        commitments,
        about,
    )
    np.negative(total, out=total)  # modulo 2^32: what was taken off zeros
    return MaskSum(total, liars)


def keys_in(answer: PairwiseAnswer) -> tuple[str, str]:
    """Return the two public keys of an answer in phase 1, in hexadecimal digits. Raises
    WrongAnswerError where there are none."""
    if answer.keys is None:
        raise WrongAnswerError("no keys came")
    half = KEYS_BYTES  # digits of one key
    return answer.keys[:half], answer.keys[half : 2 * half]


def _pair(content: bytes) -> Keys:
    half = KEYS_BYTES // 2
    return Keys(content[:half], content[half:KEYS_BYTES])
