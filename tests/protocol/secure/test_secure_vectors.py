"""protocol/vectors/secure.json, read as another SDK reads it: with the standard library's hashes,
and arithmetic of this file's own."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from fleetlearn_protocol.secure.about import length_prefixed
from fleetlearn_protocol.secure.helper_messages import MaskSumRequest, read_message
from fleetlearn_protocol.secure.sealed import unseal

FILE = Path(__file__).parents[3] / "protocol" / "vectors" / "secure.json"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
"""RFC 7748, section 6.1: the helper's private key."""
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text("ascii"))


def prefixed(*parts: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def chacha20(key: bytes, elements: int) -> list[int]:
    """RFC 8439, section 2.3, with nonce 0, from counter 0 on."""
    found: list[int] = []
    constants = struct.unpack("<4I", b"expand 32-byte k")
    for counter in range(math.ceil(elements / 16)):
        begin = [*constants, *struct.unpack("<8I", key), counter, 0, 0, 0]
        state = [*begin]
        for _ in range(10):
            for a, b, c, d in (
                (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
                (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
            ):  # fmt: skip
                for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    state[x] = (state[x] + state[y]) % 2**32
                    word = state[z] ^ state[x]
                    state[z] = (word << turn | word >> 32 - turn) % 2**32
        found += [(x + y) % 2**32 for x, y in zip(state, begin, strict=True)]
    return found[:elements]


def hkdf(shared: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, without a salt, for 32 bytes."""
    extracted = hmac.digest(bytes(32), shared, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_words() -> None:
    for case in VECTORS["words"]:
        update = np.frombuffer(bytes.fromhex(case["update"]), "<f4").tolist()
        most, bound = 2 ** case["bits"] - 1, case["bound"]
        expected = [
            min(math.floor((x + bound) * (most / (2 * bound)) + fraction), most)
            for x, fraction in zip(update, case["fractions"], strict=True)
        ]
        assert case["words"] == expected
        assert max(expected) == most
        assert min(expected) == 0


def test_masks() -> None:
    for case in VECTORS["masks"]:
        assert case["mask"] == chacha20(bytes.fromhex(case["seed"]), len(case["mask"]))
    (case,) = VECTORS["masked"]
    mask = chacha20(bytes.fromhex(case["seed"]), len(case["words"]))
    sums = [x + y for x, y in zip(case["words"], mask, strict=True)]
    assert case["masked"] == [x % 2**32 for x in sums]


def travelling(words: list[int], bits: int) -> str:
    """Masked words as they travel: 4 bytes each, or the lower 3 of them where sums are modulo
    2^24."""
    width = 3 if bits <= 12 else 4
    return b"".join(struct.pack("<I", word)[:width] for word in words).hex()


@pytest.mark.parametrize("case", VECTORS["sums"], ids=lambda case: case["name"])
def test_sums(case: dict[str, Any]) -> None:
    most, bound = 2 ** case["bits"] - 1, case["bound"]
    sums = [0] * len(case["masks"])
    for report in case["reports"]:
        update = np.frombuffer(bytes.fromhex(report["update"]), "<f4").tolist()
        pairs = zip(update, report["fractions"], strict=False)
        words = [math.floor((x + bound) * (most / (2 * bound)) + rest) for x, rest in pairs]
        words.append(min(most, math.floor(report["share"] * most + report["fractions"][-1])))
        assert report["words"] == words
        mask = chacha20(bytes.fromhex(report["seed"]), len(words))
        travels = [(x + y) % 2**32 for x, y in zip(words, mask, strict=True)]
        assert report["part"] == travelling(travels, case["bits"])
        sums = [x + y for x, y in zip(sums, travels, strict=True)]
    assert case["masked"] == [x % 2**32 for x in sums]
    modulus = 2**24 if case["bits"] <= 12 else 2**32
    left = [(x - y) % modulus for x, y in zip(case["masked"], case["masks"], strict=True)]
    count = len(case["reports"])
    assert case["total"] == [(2 * x - count * most) * (bound / most) for x in left[:-1]]
    assert case["weight"] == left[-1] / most


def test_uploads() -> None:
    for case in VECTORS["uploads"]:
        update = np.frombuffer(bytes.fromhex(case["update"]), "<f4")
        scaled = (update * np.float32(case["share"] * case["factor"])).tolist()
        most, bound = 2 ** case["bits"] - 1, case["bound"]
        rest = [x / 2**32 for x in chacha20(bytes.fromhex(case["rounding"]), len(scaled) + 1)]
        words = [
            math.floor((x + bound) * (most / (2 * bound)) + y)
            for x, y in zip(scaled, rest, strict=False)
        ]
        words.append(min(most, math.floor(case["share"] * most + rest[-1])))
        assert case["words"] == words
        mask = chacha20(bytes.fromhex(case["seed"]), len(words))
        travels = [(x + y) % 2**32 for x, y in zip(words, mask, strict=True)]
        assert case["part"] == travelling(travels, case["bits"])
        helper = X25519PrivateKey.from_private_bytes(bytes.fromhex(BOB))
        assert helper.public_key().public_bytes_raw().hex() == case["helper"]
        about, sealed = bytes.fromhex(case["about"]), bytes.fromhex(case["sealed"])
        assert unseal(sealed, helper, about).hex() == case["seed"]
        signed = prefixed(b"fleetlearn.v1 signed seed", about, hashlib.sha256(sealed).digest())
        signer = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case["secret"]))
        assert signer.sign(signed).hex() == case["signature"]


def test_about() -> None:
    for case in VECTORS["about"]:
        named = ("device", "task", "round", "model")
        terms = [case[name] for name in ("run", "bundle", "size", "minimum", "training")]
        terms += ["1" if case["one_model"] else "0"]
        texts = [str(text).encode() for text in (*terms, *(case[name] for name in named))]
        helper = bytes.fromhex(case["helper"])
        assert case["bytes"] == prefixed(b"fleetlearn.v1 masked update", helper, *texts).hex()


def test_training() -> None:
    """The digest, and what a seed is sealed about, of whole tasks."""
    for case in VECTORS["training"]:
        task, secure = case["task"], case["task"]["secure"]
        named = [("epochs", str), ("batch_size", str), ("personal_epochs", str), ("clip", double)]
        parts = [task["algorithm"].encode()]
        parts += [written(task[name], how) for name, how in named]
        named = [("bits", str), ("most_weight", str), ("least_factor", double), ("noise", double)]
        parts += [written(secure[name], how) for name, how in named]
        for table, how in ((task["hyper"], double), (task["parts"], str)):
            parts.append(str(len(table)).encode())
            for name in sorted(table):
                parts += [name.encode(), written(table[name], how)]
        if schedule := task["schedule"]:
            parts += [schedule["kind"].encode(), written(schedule["warm_up"], str)]
            for name, how in (
                ("start", double),
                ("every", str),
                ("factor", double),
                ("steps", str),
                ("least", double),
                ("first", str),
            ):
                parts.append(written(schedule[name], how))
        whole = prefixed(b"fleetlearn.v1 training", *parts)
        assert case["digest"] == hashlib.sha256(whole).hexdigest()
        one_model = "1" if secure["least_factor"] is None else "0"
        texts = [
            *(task["task"].split("-")[0], task["bundle"], case["size"], secure["minimum"]),
            *(case["digest"], one_model),
            *(case["device"], task["task"], task["round"], task["vectors"][0]["sha256"]),
        ]
        about = prefixed(
            b"fleetlearn.v1 masked update",
            bytes.fromhex(secure["helper"]),
            *(str(text).encode() for text in texts),
        )
        assert case["about"] == about.hex()


def double(value: float) -> bytes:
    return struct.pack(">d", value)


def written(value: Any, how: Callable[[Any], str | bytes]) -> bytes:
    found = b"" if value is None else how(value)
    return found.encode() if isinstance(found, str) else found


def test_sealed() -> None:
    for case in VECTORS["sealed"]:
        content, own, public, about, sealed = (
            bytes.fromhex(case[name])
            for name in ("content", "one_use", "public", "about", "sealed")
        )
        private = X25519PrivateKey.from_private_bytes(own)
        key = private.public_key().public_bytes_raw()
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
        secret = hkdf(shared, prefixed(b"fleetlearn.v1 sealed", about, key, public))
        assert sealed == key + ChaCha20Poly1305(secret).encrypt(bytes(12), content, about)
        opener = X25519PrivateKey.from_private_bytes(bytes.fromhex(case["private"]))
        assert unseal(sealed, opener, about) == content


@pytest.mark.parametrize("case", VECTORS["not_opened"], ids=lambda case: case["name"])
def test_not_opened(case: dict[str, Any]) -> None:
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(case["private"]))
    with pytest.raises(ValueError):
        unseal(bytes.fromhex(case["sealed"]), private, bytes.fromhex(case["about"]))


def test_signed() -> None:
    for case in VECTORS["signed"]:
        sealed = hashlib.sha256(bytes.fromhex(case["sealed"])).digest()
        content = prefixed(b"fleetlearn.v1 signed seed", bytes.fromhex(case["about"]), sealed)
        assert case["bytes"] == content.hex()
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(case["public"]))
        key.verify(bytes.fromhex(case["signature"]), content)


def test_sets() -> None:
    (case,) = VECTORS["sets"]
    digests = sorted(hashlib.sha256(bytes.fromhex(each)).digest() for each in case["signed"])
    whole = prefixed(b"fleetlearn.v1 set of masked updates", *digests)
    assert case["digest"] == hashlib.sha256(whole).hexdigest()


def test_messages() -> None:
    request = read_message(bytes.fromhex(VECTORS["messages"][0]["hex"]), MaskSumRequest)
    assert [content.hex() for content in request.signed()] == VECTORS["sets"][0]["signed"]
    assert request.digest().hex() == VECTORS["sets"][0]["digest"]


def test_no_two_lists_of_parts_are_the_same_bytes() -> None:
    lists = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), ()]
    assert len({length_prefixed(parts) for parts in lists}) == len(lists)


PRIME = 2**257 - 93


def agreed(private: str, public: str, about: bytes) -> bytes:
    own = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    mine, theirs = own.public_key().public_bytes_raw(), bytes.fromhex(public)
    shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    return hkdf(shared, prefixed(b"fleetlearn.v1 sealed", about, *sorted((mine, theirs))))


def added(words: list[int], seed: bytes, sign: int) -> list[int]:
    return [
        (word + sign * mask) % 2**32
        for word, mask in zip(words, chacha20(seed, len(words)), strict=True)
    ]


def interpolated(shares: dict[int, int]) -> bytes:
    """Lagrange's polynomial through the shares, at 0."""
    found = 0
    for x, y in shares.items():
        for other in shares:
            if other != x:
                y = y * other * pow(other - x, -1, PRIME) % PRIME
        found += y
    return (found % PRIME).to_bytes(32, "big")


@pytest.mark.parametrize("case", VECTORS["pairwise"], ids=lambda case: case["name"])
def test_a_session_of_pairwise_masks(case: dict[str, Any]) -> None:
    devices = {row["device"]: row for row in case["devices"]}
    for row in devices.values():
        for public, private in zip(row["keys"], (row["sealing"], row["masking"]), strict=True):
            own = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
            assert own.public_key().public_bytes_raw().hex() == public
    parts = [
        part
        for name, row in devices.items()
        for part in (name.encode(), *map(bytes.fromhex, row["keys"]))
    ]
    session = hashlib.sha256(prefixed(bytes.fromhex(case["about"]), *parts)).digest()
    assert session.hex() == case["session"]
    of_updates = bytes.fromhex(case["about_updates"])
    for name, row in devices.items():
        seed = bytes.fromhex(row["seed"])
        commitment = hashlib.sha256(prefixed(b"seed", session, seed)).hexdigest()
        assert row["commitment"] == commitment
        masked = added(row["words"], seed, 1)
        for place, other in enumerate(sorted(devices.keys() - {name}), 1):
            shares = [
                sum(
                    int(each, 16) * place**power
                    for power, each in enumerate((row[secret], *row[coefficients]))
                )
                % PRIME
                for secret, coefficients in (
                    ("seed", "coefficients_of_seed"),
                    ("masking", "coefficients_of_key"),
                )
            ]
            content = b"".join(share.to_bytes(33, "big") for share in shares)
            assert "".join(row["shares"][other]) == content.hex()
            about = b"shares" + session + other.encode()
            key = agreed(row["sealing"], devices[other]["keys"][0], about)
            sealed = ChaCha20Poly1305(key).encrypt(bytes(12), content, session)
            assert row["sealed"][other] == sealed.hex()
            about = b"mask" + session + of_updates
            common = agreed(row["masking"], devices[other]["keys"][1], about)
            assert row["agreed"][other] == common.hex()
            masked = added(masked, common, 1 if name < other else -1)
        assert row["masked"] == masked


@pytest.mark.parametrize("case", VECTORS["pairwise"], ids=lambda case: case["name"])
def test_pairwise_masks_are_taken_off(case: dict[str, Any]) -> None:
    """By what those who stayed tell alone: shares of each other's seeds, and of the key of the
    device that was lost."""
    devices = {row["device"]: row for row in case["devices"]}
    stayed, session = case["stayed"], bytes.fromhex(case["session"])

    def secret(name: str, which: str) -> bytes:
        places = {o: place for place, o in enumerate(sorted(devices.keys() - {name}), 1)}
        told = {
            places[other]: int(answer[which][name], 16)
            for other, answer in case["answers"].items()
            if name in answer[which]
        }
        return interpolated(dict([*told.items()][: case["threshold"]]))

    total = [
        sum(column) % 2**32 for column in zip(*(devices[n]["masked"] for n in stayed), strict=True)
    ]
    assert case["sum"] == total
    for name in stayed:
        assert secret(name, "seeds").hex() == devices[name]["seed"]
        total = added(total, secret(name, "seeds"), -1)
    for lost in devices.keys() - {*stayed}:
        key = secret(lost, "keys").hex()
        assert key == devices[lost]["masking"]
        for name in stayed:
            about = b"mask" + session + bytes.fromhex(case["about_updates"])
            common = agreed(key, devices[name]["keys"][1], about)
            total = added(total, common, 1 if lost < name else -1)
    assert total == case["unmasked"]
    words = [devices[name]["words"] for name in stayed]
    assert total == [sum(column) % 2**32 for column in zip(*words, strict=True)]
