"""What secure aggregation is made of, against published vectors and closed forms."""

from __future__ import annotations

import secrets
from random import Random

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.secure import fixed_point, masks, sealed, shamir
from hypothesis import given
from hypothesis import strategies as st


def test_the_stream_is_rfc_8439_s() -> None:
    """RFC 8439, A.1, test vector 1: the zero key, counter 0."""
    begin = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert masks.mask_of(bytes(32), 8).tobytes() == begin


def test_agreement_is_rfc_7748_s() -> None:
    """RFC 7748, 6.1."""
    alice = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
    bob = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
    keys = [X25519PrivateKey.from_private_bytes(bytes.fromhex(each)) for each in (alice, bob)]
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert keys[0].exchange(keys[1].public_key()).hex() == shared


def test_both_agree_on_a_key_about_one_thing() -> None:
    private = X25519PrivateKey.generate()
    other = X25519PrivateKey.generate()
    publics = [key.public_key().public_bytes_raw() for key in (private, other)]
    one = sealed.agreed_key(private, publics[1], b"x", *publics)
    assert one == sealed.agreed_key(other, publics[0], b"x", *publics)
    assert one != sealed.agreed_key(other, publics[0], b"y", *publics)


@given(st.integers(1, 12), st.data())
def test_any_threshold_of_shares(count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    secret = data.draw(st.binary(min_size=32, max_size=32))
    places = data.draw(st.lists(st.integers(1, 200), min_size=count, max_size=count, unique=True))
    shares = shamir.split(secret, places, threshold, Random(1).randrange)
    chosen = data.draw(st.permutations(places))
    assert shamir.combine({place: shares[place] for place in chosen[:threshold]}) == secret


@given(st.integers(1, 30), st.integers(0, 2**32))
def test_a_masked_sum_is_the_plain_one(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits, bound = 20, 0.5
    updates = rng.uniform(-bound, bound, (count, 7)).astype(np.float32)
    words = [fixed_point.to_words(row, bound, bits, rng.random(7)) for row in updates]
    plain = np.add.reduce(words, axis=0, dtype=np.uint32)
    seeds = [secrets.token_bytes(32) for _ in words]
    total = np.zeros(7, np.uint32)
    for row, own in zip(words, seeds, strict=True):
        masked = row.copy()
        masks.add_mask(masked, own)
        total += masked
    for own in seeds:
        masks.add_mask(total, own, -1)
    assert (total == plain).all()
    found = fixed_point.sum_of(total, count, bound, bits)
    step = 2 * bound / (2**bits - 1)
    assert np.abs(found - updates.astype(np.float64).sum(axis=0)).max() <= count * step


def test_sealed_for_one_about_one_thing() -> None:
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    content = secrets.token_bytes(32)
    found = sealed.seal(content, public, b"run 1")
    assert len(found) == 80
    assert sealed.unseal(found, private, b"run 1") == content
    for wrong in (
        lambda: sealed.unseal(found, private, b"run 2"),
        lambda: sealed.unseal(found, X25519PrivateKey.generate(), b"run 1"),
        lambda: sealed.unseal(found[:-1] + bytes([found[-1] ^ 1]), private, b"run 1"),
        lambda: sealed.unseal(found[:40], private, b"run 1"),
    ):
        with pytest.raises(ValueError, match="sealed"):
            wrong()


@pytest.mark.parametrize("size", [0, 1, 15, 2**16 - 1, 2**16, 2**16 + 1, 2**17 + 5])
def test_masks_added_in_parts_are_whole_masks(size: int) -> None:
    draw = np.random.default_rng(size)
    plain = draw.integers(0, 2**32, size, np.uint32)
    words = plain.copy()
    adder = masks.MaskAdder(size)
    for number in range(3):
        adder.add(words, bytes([number]) * 32)
    with np.errstate(over="ignore"):
        expected = plain + sum(masks.mask_of(bytes([number]) * 32, size) for number in range(3))
    assert (words == expected).all()
    for number in range(3):
        adder.add(words, bytes([number]) * 32, -1)
    assert (words == plain).all()


def test_a_seed_of_another_length_is_refused() -> None:
    words = np.zeros(4, np.uint32)
    for seed in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="a seed of"):
            masks.mask_of(seed, 4)
        with pytest.raises(ValueError, match="a seed of"):
            masks.add_mask(words, seed)


def test_numbers_that_cannot_be_added_are_refused() -> None:
    assert [fixed_point.bits_for(n) for n in (1, 4096, 4097, 16384, 16385, 65536)] == [
        20, 20, 18, 18, 16, 16
    ]  # fmt: skip
    with pytest.raises(ValueError, match="70000 updates were given; at most 65537"):
        fixed_point.bits_for(70_000)
    update = np.array([0.5, -1.25], "<f4")
    with pytest.raises(ValueError, match=r"magnitude 1.25 was given; the bound is 1"):
        fixed_point.to_words(update, 1.0, 20, np.zeros(2))
    with pytest.raises(ValueError, match="magnitude nan"):
        fixed_point.to_words(update * np.float32("nan"), 1.0, 20, np.zeros(2))
    with pytest.raises(ValueError, match="A mask was not taken off"):
        fixed_point.sum_of(np.array([2**21], np.uint32), 2, 1.0, 20)


@pytest.mark.parametrize(
    ("secret", "places", "threshold", "words"),
    [
        (bytes(31), [1, 2], 2, "a secret of 31 bytes"),
        (bytes(32), [1, 1], 2, "they are different"),
        (bytes(32), [0, 1], 2, "from 1 on"),
        (bytes(32), [1, 2], 3, "3 of 2 shares"),
        (bytes(32), [1, 2], 0, "0 of 2 shares"),
    ],
)
def test_a_secret_that_cannot_be_shared_is_refused(
    secret: bytes, places: list[int], threshold: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shamir.split(secret, places, threshold)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({1: bytes(32)}, "a share of 32 bytes at place 1"),
        ({0: bytes(33)}, "at place 0"),
        ({1: b"\xff" * 33}, "no number below"),
        ({1: (2**256).to_bytes(33, "big")}, "belong to no secret"),
    ],
)
def test_shares_of_no_secret_are_refused(shares: dict[int, bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shamir.combine(shares)
