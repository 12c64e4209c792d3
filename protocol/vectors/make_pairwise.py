"""Secure aggregation without a helper: a whole session of four devices, one of which is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.secure import pairwise, shamir
from fleetlearn_protocol.secure.pairwise import Keys, PairwiseDevice

NAMES, LOST, THRESHOLD, SIZE = ("a", "b", "camera-7", "roof"), "b", 2, 5
ABOUT, ABOUT_UPDATES = b"what the session is about", b"what the updates are about"


def session() -> dict[str, Any]:
    """What is drawn of each device, and all that follows from it."""
    drawn: dict[str, list[bytes]] = {name: [] for name in NAMES}
    devices = {name: PairwiseDevice(name, _draw(name, drawn[name])) for name in NAMES}
    keys = {name: device.keys() for name, device in devices.items()}
    named = pairwise.session_of(ABOUT, keys.items())
    others = {name: [other for other in NAMES if other != name] for name in NAMES}
    sealed = {
        name: device.shares(named, {other: keys[other] for other in others[name]}, THRESHOLD)
        for name, device in devices.items()
    }
    words = {
        name: np.arange(SIZE, dtype=np.uint32) * 1000 + number for number, name in enumerate(NAMES)
    }
    masked = {
        name: device.masked(
            words[name], {other: sealed[other][name] for other in others[name]}, ABOUT_UPDATES
        )
        for name, device in devices.items()
    }
    stayed = [name for name in NAMES if name != LOST]
    answers = {
        name: devices[name].unmasking(named, [o for o in stayed if o != name], [LOST])
        for name in stayed
    }
    total = np.sum([masked[name] for name in stayed], axis=0, dtype=np.uint32)
    without = total.copy()
    pairwise.unmask(without, named, keys, others, stayed, answers, THRESHOLD, about=ABOUT_UPDATES)
    return {
        "name": "four devices, one of which is lost after it has sealed its shares",
        "about": ABOUT.hex(),
        "about_updates": ABOUT_UPDATES.hex(),
        "session": named.hex(),
        "threshold": THRESHOLD,
        "devices": [
            {
                **_secrets(drawn[name], others[name]),
                "device": name,
                "keys": [key.hex() for key in keys[name]],
                "commitment": devices[name].commitment().hex(),
                "sealed": {other: each.hex() for other, each in sealed[name].items()},
                "agreed": _agreed(drawn[name], named, {o: keys[o] for o in others[name]}),
                "words": words[name].tolist(),
                "masked": masked[name].tolist(),
            }
            for name in NAMES
        ],
        "stayed": stayed,
        "sum": total.tolist(),
        "answers": {
            name: {
                "seeds": {other: share.hex() for other, share in answer.seeds.items()},
                "keys": {other: share.hex() for other, share in answer.keys.items()},
            }
            for name, answer in answers.items()
        },
        "unmasked": without.tolist(),
    }


def _draw(name: str, drawn: list[bytes]) -> Callable[[int], bytes]:
    def draw(size: int) -> bytes:
        content = hashlib.shake_128(f"{name} {len(drawn)}".encode()).digest(size)
        drawn.append(content)
        return content

    return draw


def _secrets(drawn: list[bytes], others: list[str]) -> dict[str, Any]:
    """The keys, the seed, the polynomials' other coefficients, and the shares before they are
    sealed."""
    sealing, masking, seed, *rest = drawn
    numbers = [int.from_bytes(each, "big") % shamir.PRIME for each in rest]
    of_seed, of_key = numbers[: THRESHOLD - 1], numbers[THRESHOLD - 1 :]
    places = range(1, len(others) + 1)
    shares = [
        shamir.split(secret, places, THRESHOLD, lambda _, left=[*more]: left.pop(0))
        for secret, more in ((seed, of_seed), (masking, of_key))
    ]
    return {
        "sealing": sealing.hex(),
        "masking": masking.hex(),
        "seed": seed.hex(),
        "coefficients_of_seed": [f"{each:066x}" for each in of_seed],
        "coefficients_of_key": [f"{each:066x}" for each in of_key],
        "shares": {
            other: [each[place].hex() for each in shares]
            for place, other in zip(places, sorted(others), strict=True)
        },
    }


def _agreed(drawn: list[bytes], named: bytes, keys: dict[str, Keys]) -> dict[str, str]:
    """The seeds of the masks that the device has in common with others."""
    own = X25519PrivateKey.from_private_bytes(drawn[1])
    return {
        other: pairwise.mask_seed(own, pair.masking, named, ABOUT_UPDATES).hex()
        for other, pair in keys.items()
    }
