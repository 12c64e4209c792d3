"""What devices and coordinator say in the exchanges of the kind `pairwise`: keys, sealed shares,
and the shares that take masks off. PROTOCOL.md, section 4, "Pairwise masks", is the specification.

There are three, of one series for each round: ``KEYS`` and ``SHARES`` come before the round's
tasks, ``UNMASKING`` after its reports. A question and a reply have the fields of their phase, and
leave the others empty. Byte strings are lower-case hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetlearn_protocol.messages import (
    MOST_NEIGHBOURS,
    Bytes32,
    Bytes82,
    Identifier,
    RoundNumber,
)
from fleetlearn_protocol.secure.about import length_prefixed

PAIRWISE = "pairwise"
"""The kind of these exchanges."""
KEYS, SHARES, UNMASKING = 1, 2, 3
"""Phases of a series."""
KEYS_BYTES, SEALED_BYTES, SHARE_BYTES = 64, 82, 33
"""Two public X25519 keys; two sealed shares with their tag; one share."""

NeighbourKeys = Annotated[str, Meta(pattern=r"^(([0-9a-f]{2}){64}){1,2}\Z")]
"""A device's two public X25519 keys (64 bytes: for sealing, for masking), and its signature of them
(64 bytes) where it has one."""
SecretShare = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){33}\Z")]
"""A share of a secret: 33 bytes, a number below 2^257 - 93, big-endian."""
Names = Annotated[tuple[Identifier, ...], Meta(max_length=MOST_NEIGHBOURS)]
SharesByName = Annotated[dict[Identifier, SecretShare], Meta(max_length=MOST_NEIGHBOURS)]
SealedByName = Annotated[dict[Identifier, Bytes82], Meta(max_length=MOST_NEIGHBOURS)]
KeysByName = Annotated[dict[Identifier, NeighbourKeys], Meta(max_length=MOST_NEIGHBOURS)]


class PairwiseQuestion(msgspec.Struct, frozen=True):
    """The content of a `question` of the kind `pairwise`."""

    round: RoundNumber = 0
    """The round whose updates are to be masked."""
    session: Bytes32 | None = None
    """Phases 2 and 3: the session, which is made of all devices' keys."""
    threshold: Annotated[int, Meta(ge=0, le=MOST_NEIGHBOURS)] = 0
    """Phase 2: how many shares give a secret."""
    neighbours: KeysByName = {}
    """Phase 2: the devices that this one shares its secrets with, and masks its update with; their
    keys."""
    survivors: Names = ()
    """Phase 3: the neighbours whose masked updates came. The share of their own seed is wanted."""
    dropped: Names = ()
    """Phase 3: the other neighbours that this device masked with. The share of their masking key is
    wanted."""


class PairwiseAnswer(msgspec.Struct, frozen=True):
    """The content of a `reply` of the kind `pairwise`."""

    keys: NeighbourKeys | None = None
    """Phase 1: the device's keys, with its signature where it has a key of its own."""
    shares: SealedByName = {}
    """Phase 2: for each neighbour what only it can open."""
    commitment: Bytes32 | None = None
    """Phase 2: SHA-256 of the session and of the device's own seed, with which a wrong share of it
    is found."""
    seeds: SharesByName = {}
    """Phase 3: a survivor -> the share of its own seed."""
    masking_keys: SharesByName = {}
    """Phase 3: a dropped device -> the share of its private masking key."""


_SIGNED = b"fleetlearn.v1 pairwise keys"


def signed_keys(run: str, round: int, device: str, keys: bytes) -> bytes:
    """Return the bytes that a device signs with its own key (Ed25519, RFC 8032) to say that these
    are its keys in this round, so that nobody can be taken for it. They begin with words of their
    own, so that nothing else that the key signs is such a signature.

    run: what names the run in its tasks. keys: both public keys, 64 bytes.
    """
    return length_prefixed((_SIGNED, run.encode(), str(round).encode(), device.encode(), keys))


def hex_of(contents: Mapping[str, bytes]) -> dict[str, str]:
    """Return byte strings by name as a message has them."""
    return {name: content.hex() for name, content in contents.items()}


def bytes_of(contents: Mapping[str, str]) -> dict[str, bytes]:
    """Return the byte strings by name of a message."""
    return {name: bytes.fromhex(content) for name, content in contents.items()}
