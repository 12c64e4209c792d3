"""Shamir's secret sharing: any t of n shares give a secret, and fewer say nothing of it.

Adi Shamir, "How to share a secret" (1979). Arithmetic is modulo the prime 2^257 - 93, so that each
secret of 32 bytes is one number. A share is the value of a random polynomial of degree t - 1, whose
constant term is the secret, at the share's place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**257 - 93
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(
    secret: bytes,
    places: Sequence[int],
    threshold: int,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, bytes]:
    """Return a share of 33 bytes for each place.

    secret: 32 bytes. places: different numbers from 1 on. threshold: how many shares give the
    secret, from 1 to their number. draw: n -> a random number below n. Raises ValueError.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes was given; it has {SECRET_BYTES}")
    if len({*places}) != len(places) or not all(0 < place < PRIME for place in places):
        raise ValueError(f"the places {list(places)} were given; they are different, from 1 on")
    if not 1 <= threshold <= len(places):
        raise ValueError(f"{threshold} of {len(places)} shares were to give the secret")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [draw(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of as many shares as its threshold: Lagrange's interpolation at 0.

    shares: place -> share. Raises ValueError where they are shares of no secret of 32 bytes; of
    wrong shares that is not sure.
    """
    secret = value_at(0, shares)
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("these shares belong to no secret: one is wrong, or there are too few")
    return secret.to_bytes(SECRET_BYTES, "big")


def share_at(place: int, shares: Mapping[int, bytes]) -> bytes:
    """Return the share of another place that goes with as many shares as the secret's threshold.
    Raises ValueError where one of them is none."""
    return value_at(place, shares).to_bytes(SHARE_BYTES, "big")


def value_at(where: int, shares: Mapping[int, bytes]) -> int:
    """Return the value of the polynomial of these shares at a place that none of them is of.
    Raises ValueError where one is no share."""
    values = {}
    for place, share in shares.items():
        if not (0 < place < PRIME and len(share) == SHARE_BYTES):
            raise ValueError(f"a share of {len(share)} bytes at place {place} was given")
        values[place] = int.from_bytes(share, "big")
        if values[place] >= PRIME:
            raise ValueError(f"the share at place {place} is no number below 2^257 - 93")
    # One fraction for all: an inverse modulo the prime takes as long as 50 products.
    above, below = 0, 1
    for place, value in values.items():
        up, down = value, 1
        for other in values:
            if other != place:
                up = up * (other - where) % PRIME
                down = down * (other - place) % PRIME
        above, below = (above * down + up * below) % PRIME, below * down % PRIME
    return above * pow(below, -1, PRIME) % PRIME
