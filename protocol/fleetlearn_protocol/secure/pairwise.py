"""Secure aggregation without a helper: what a device says in each of four exchanges, and when it
refuses. No I/O, no clock.

Bell, Bonawitz, Gascon, Lepoint and Raykova, "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead" (CCS 2020), eprint 2020/704, Algorithm 2, which is Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), eprint 2017/281,
on a sparse graph:

1. ``keys``: two public X25519 keys, one to seal shares, one to agree on masks.
2. ``shares``: for each neighbour, sealed, a share of the own mask's seed and one of the private
   masking key.
3. ``masked``: y = x + PRG(own seed) + the sum over neighbours of +-PRG(agreed seed), modulo 2^32.
   Neighbours are those whose shares came.
4. ``unmasking``: of each neighbour that sent its y the share of its own seed; of each that did not
   the share of its masking key. Never both: with both the coordinator would read y.

What one device says is bound to a session: a number of 32 bytes that the coordinator derives from
all keys (``session_of``). A device that is told anything that would give away more than the sum
raises ``SessionRefusedError``, and says nothing more in this session.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from random import Random
from typing import NamedTuple, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fleetlearn_protocol.secure import shamir
from fleetlearn_protocol.secure.about import length_prefixed
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.masks import SEED_BYTES, MaskAdder
from fleetlearn_protocol.secure.sealed import agreed_key

_NONCE = bytes(12)
"""A pair of devices seals one text in each direction of a session, each under a key of its own."""


class SessionRefusedError(Exception):
    """The device says nothing more in this session: it was told what would give its update away."""


class Keys(NamedTuple):
    """A device's public keys."""

    sealing: bytes
    masking: bytes
    """Both 32 bytes."""


class UnmaskingShares(NamedTuple):
    """What a device tells of its neighbours at the end."""

    seeds: dict[str, bytes]
    """Neighbour that sent its masked update -> share of its own seed."""
    keys: dict[str, bytes]
    """Neighbour that did not -> share of its private masking key."""


def session_of(about: bytes, keys: Iterable[tuple[str, Keys]]) -> bytes:
    """Return the name of a session: SHA-256 of what it is about and of all keys, each part with its
    length before it. ``keys``: in the order of the circle."""
    named = (part for name, pair in keys for part in (name.encode(), *pair))
    return hashlib.sha256(length_prefixed((about, *named))).digest()


def mask_seed(
    private: X25519PrivateKey, public: bytes, session: bytes, about: bytes = b""
) -> bytes:
    """Return the seed that two devices agree on by their masking keys. ``about``: what both say
    that their updates are about."""
    own = private.public_key().public_bytes_raw()
    return agreed_key(private, public, b"mask" + session + about, *sorted((own, public)))


def commitment_of(session: bytes, seed: bytes) -> bytes:
    """Return what a device says of its own seed before anybody may know it: 32 bytes that no other
    seed has, and that tell nothing of it."""
    return hashlib.sha256(length_prefixed((b"seed", session, seed))).digest()


def sign_of(name: str, neighbour: str) -> int:
    """Return whether ``name`` adds the mask that it shares with its neighbour (1) or subtracts it
    (-1)."""
    return 1 if name < neighbour else -1


class PairwiseDevice:
    """A device's side of one session.

    Each step may be taken once, in order. ``draw``: n -> n random bytes, unknown to anybody else.
    """

    def __init__(self, name: str, draw: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self.name = name
        self._sealing = X25519PrivateKey.from_private_bytes(draw(32))
        self._masking = X25519PrivateKey.from_private_bytes(draw(32))
        self._seed = draw(SEED_BYTES)
        self._draw = draw
        self._step = 0
        self._session = b""
        self._neighbours: dict[str, Keys] = {}
        self._threshold = 0
        self._held: dict[str, bytes] = {}
        """Neighbour -> what it sealed for this device, opened: two shares."""
        self._masked_with: frozenset[str] = frozenset()
        """The neighbours whose masks the update has: U1, as far as this device sees it."""

    def keys(self) -> Keys:
        """Return the public keys."""
        self._begin(0)
        return Keys(
            self._sealing.public_key().public_bytes_raw(),
            self._masking.public_key().public_bytes_raw(),
        )

    def shares(
        self, session: bytes, neighbours: Mapping[str, Keys], threshold: int, least: int = 2
    ) -> dict[str, bytes]:
        """Return what is sealed for each neighbour.

        neighbours: their keys. threshold: how many shares give a secret. least: the device's own
        bound on it. Raises SessionRefusedError where neighbours are too few or not different.
        """
        self._begin(1)
        if self.name in neighbours:
            self._refuse(f"the device itself, {self.name}, is named among its neighbours")
        keys = [key for pair in neighbours.values() for key in pair]
        own = (self._sealing.public_key(), self._masking.public_key())
        if len({*keys, *(key.public_bytes_raw() for key in own)}) != len(keys) + 2:
            self._refuse("two of the keys of this session are the same")
        if threshold < least:
            self._refuse(f"{threshold} shares are to give a secret; the device wants {least}")
        if threshold > len(neighbours):
            self._refuse(f"{threshold} shares of {len(neighbours)} neighbours are to give a secret")
        self._session, self._threshold = session, threshold
        self._neighbours = dict(neighbours)
        places = {name: place for place, name in enumerate(sorted(neighbours), 1)}
        drawn = self._below
        seeds = shamir.split(self._seed, [*places.values()], threshold, drawn)
        masking = self._masking.private_bytes_raw()
        masks = shamir.split(masking, [*places.values()], threshold, drawn)
        return {
            name: ChaCha20Poly1305(self._sealing_key(name, name)).encrypt(
                _NONCE, seeds[place] + masks[place], session
            )
            for name, place in places.items()
        }

    def commitment(self) -> bytes:
        """Return the commitment to the own seed, 32 bytes; ``shares`` was called."""
        return commitment_of(self._session, self._seed)

    def masked(self, words: Words, sealed: Mapping[str, bytes], about: bytes = b"") -> Words:
        """Return the update with its masks: uint32, shape (P,).

        words: the update, uint32, shape (P,), which stays as it is. sealed: neighbour -> what it
        sealed for this device; who is not named takes no part any more. What cannot be opened may
        be its neighbour's fault or the coordinator's; the masks that the two share stay. about:
        what the update is of, such as the round, the model and the training. Masks of devices that
        were told different things do not cancel each other out, so that the coordinator learns
        nothing from a sum of different trainings. Raises SessionRefusedError.
        """
        self._begin(2)
        for name, content in sealed.items():
            if name not in self._neighbours:
                self._refuse(f"{name} is no neighbour of this device")
            with suppress(InvalidTag):
                key = ChaCha20Poly1305(self._sealing_key(name, self.name))
                self._held[name] = key.decrypt(_NONCE, content, self._session)
        if len(self._held) < self._threshold:
            self._refuse(
                f"{len(self._held)} neighbours sealed shares for this device and session, and "
                f"{self._threshold} shares give a secret"
            )
        self._masked_with = frozenset(sealed)
        found, masks = words.copy(), MaskAdder(len(words))
        masks.add(found, self._seed)
        for name in sealed:
            try:
                public = self._neighbours[name].masking
                seed = mask_seed(self._masking, public, self._session, about)
            except ValueError:
                self._refuse(f"the masking key of {name} is none")
            masks.add(found, seed, sign_of(self.name, name))
        return found

    def unmasking(
        self, session: bytes, survivors: Collection[str], dropped: Collection[str]
    ) -> UnmaskingShares:
        """Return the shares that take the masks off. ``survivors``: the neighbours whose masked
        updates came, ``dropped``: those whose did not. Raises SessionRefusedError."""
        self._begin(3)
        if session != self._session:
            self._refuse("shares of another session were asked for")
        both = {*survivors} & {*dropped}
        if both:
            self._refuse(f"{min(both)} is said to have stayed and to be lost")
        strangers = ({*survivors} | {*dropped}) - self._masked_with
        if strangers:
            self._refuse(f"{min(strangers)} sent this device no shares in this session")
        if len({*survivors}) < self._threshold:
            self._refuse(
                f"{len({*survivors})} neighbours stayed; the device wants {self._threshold}"
            )
        size = shamir.SHARE_BYTES
        held = self._held
        return UnmaskingShares(
            {name: held[name][:size] for name in survivors if name in held},
            {name: held[name][size:] for name in dropped if name in held},
        )

    def _sealing_key(self, neighbour: str, receiver: str) -> bytes:
        """Return the key under which one of the pair seals for the other, the receiver."""
        public = self._neighbours[neighbour].sealing
        own = self._sealing.public_key().public_bytes_raw()
        about = b"shares" + self._session + receiver.encode()
        try:
            return agreed_key(self._sealing, public, about, *sorted((own, public)))
        except ValueError:
            self._refuse(f"the sealing key of {neighbour} is none")

    def _below(self, most: int) -> int:
        """Return a random number below ``most``; 128 bits more than needed make it uniform."""
        return int.from_bytes(self._draw((most.bit_length() + 7) // 8 + 16), "big") % most

    def _begin(self, step: int) -> None:
        if self._step != step:
            self._refuse("a step of the session was asked for twice, or too early")
        self._step += 1

    def _refuse(self, why: str) -> NoReturn:
        self._step = -1
        self._held.clear()
        raise SessionRefusedError(why)


def unmask(
    total: Words,
    session: bytes,
    keys: Mapping[str, Keys],
    neighbours: Mapping[str, Collection[str]],
    survivors: Collection[str],
    answers: Mapping[str, UnmaskingShares],
    threshold: int,
    commitments: Mapping[str, bytes] | None = None,
    about: bytes = b"",
) -> frozenset[str]:
    """Take all masks off the sum of masked updates, in place. Returns the devices that told wrong
    shares, which were not needed.

    total: modulo 2^32, uint32, shape (P,), of the ``survivors``. keys: of the devices that sent
    shares. neighbours: of each of these all for which it sealed shares, gone ones included.
    answers: device -> what it told. commitments: device -> ``commitment_of`` its own seed; of a
    device without one a wrong share is not found. about: as in ``PairwiseDevice.masked``. Raises
    ValueError, and names the device, where a secret cannot be put together; the total is of no use
    then.
    """
    shares = _Shares(session, keys, neighbours, answers, threshold, commitments or {}, set())
    masks, stayed = MaskAdder(len(total)), frozenset(survivors)
    for name in sorted(stayed):
        masks.add(total, shares.secret(name, _SEED), -1)
    for name in sorted(keys.keys() - stayed):
        left = [other for other in neighbours.get(name, ()) if other in stayed]
        if not left:
            continue
        private = X25519PrivateKey.from_private_bytes(shares.secret(name, _KEY))
        for other in left:
            seed = mask_seed(private, keys[other].masking, session, about)
            masks.add(total, seed, -sign_of(other, name))
    return frozenset(shares.liars)


_TRIES = 500
"""Sets of shares that are tried for one secret where some are wrong."""
_SEED, _KEY = 0, 1
"""Which secret of a device, as in ``UnmaskingShares``."""
_WHICH = ("own seed", "masking key")


class _Shares(NamedTuple):
    """The shares that devices told. The fields are those of ``unmask``."""

    session: bytes
    keys: Mapping[str, Keys]
    neighbours: Mapping[str, Collection[str]]
    answers: Mapping[str, UnmaskingShares]
    threshold: int
    commitments: Mapping[str, bytes]
    liars: set[str]
    """Who told a wrong share. Nothing of what they told is used from then on."""

    def secret(self, name: str, which: int) -> bytes:
        """Return a secret of a device: of any set of right shares, as many as the threshold."""
        places = {other: place for place, other in enumerate(sorted(self.neighbours[name]), 1)}
        found = {
            other: self.answers[other][which][name]
            for other in places
            if other not in self.liars
            and other in self.answers
            and name in self.answers[other][which]
        }
        text = f"the shares of the {_WHICH[which]} of {name}"
        if len(found) < self.threshold:
            raise ValueError(
                f"{text} are too few: {len(found)} came, and {self.threshold} are needed"
            )
        draw, chosen = Random(0), [*found][: self.threshold]
        for attempt in range(_TRIES if len(found) > self.threshold else 1):
            parts = {places[other]: found[other] for other in chosen}
            secret = self._try(name, which, parts)
            if secret is not None:
                if attempt:  # looking takes as long as a secret for each share
                    self._look_for_liars(places, found, parts)
                return secret
            chosen = draw.sample([*found], self.threshold)
        raise ValueError(f"{text} do not give it: some are wrong, or {name} sealed wrong ones")

    def _try(self, name: str, which: int, parts: Mapping[int, bytes]) -> bytes | None:
        """Return the secret that these shares give where it is the device's."""
        try:
            secret = shamir.combine(parts)
        except ValueError:
            return None
        if which == _SEED:
            wanted = self.commitments.get(name)
            good = wanted is None or commitment_of(self.session, secret) == wanted
        else:
            private = X25519PrivateKey.from_private_bytes(secret)
            good = private.public_key().public_bytes_raw() == self.keys[name].masking
        return secret if good else None

    def _look_for_liars(
        self, places: Mapping[str, int], found: Mapping[str, bytes], parts: Mapping[int, bytes]
    ) -> None:
        """Note who told another share than the one that goes with ``parts``, which are right."""
        for other, share in found.items():
            place = places[other]
            if place not in parts and shamir.share_at(place, parts) != share:
                self.liars.add(other)
