"""Masked words: the vectors, their sums, and what of them must be random."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_device.training import masking
from fleetlearn_device.training.masking import (
    MaskedUpload,
    RandomBytes,
    counted_words,
    counted_words_with_noise,
    mask_words,
    share_of,
)
from fleetlearn_protocol.encodings import SLAB
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.secure.about import signed_seed
from fleetlearn_protocol.secure.distributed_noise import largest_step, noisy_sum
from fleetlearn_protocol.secure.fixed_point import excess_of, weighted_sum
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.sealed import can_seal_for, unseal

FILE = Path(__file__).parents[3] / "protocol" / "vectors" / "secure.json"
UPLOADS = json.loads(FILE.read_text("ascii"))["uploads"]
HELPER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = HELPER.public_key().public_bytes_raw()
OWN = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SMALL = ["00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "ed" + "ff" * 30 + "7f"]
"""Public keys of order 1, 2 and 4, and one that is no number below the prime (RFC 7748)."""


def drawn(*given: str) -> Callable[[int], bytes]:
    left = [bytes.fromhex(each) for each in given]

    def draw(size: int) -> bytes:
        found = left.pop(0)
        assert len(found) == size
        return found

    return draw


@pytest.mark.parametrize("case", UPLOADS, ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    update = np.frombuffer(bytes.fromhex(case["update"]), "<f4")
    numbers = case["share"], case["factor"], case["bound"], case["bits"]
    words = counted_words(update, *numbers, drawn(case["rounding"]))
    assert words.tolist() == case["words"]
    about, helper, secret = (bytes.fromhex(case[name]) for name in ("about", "helper", "secret"))
    draw = drawn(case["seed"], case["one_use"])
    upload = mask_words(words, about, helper, secret, case["bits"], draw)
    assert bytes(upload.content).hex() == case["part"]
    assert (upload.sealed, upload.signature) == (case["sealed"], case["signature"])


def opened(upload: MaskedUpload, about: bytes) -> np.ndarray[Any, Any]:
    """The words without their mask, as helper and coordinator together know them."""
    OWN.public_key().verify(
        bytes.fromhex(upload.signature), signed_seed(about, bytes.fromhex(upload.sealed))
    )
    seed = unseal(bytes.fromhex(upload.sealed), HELPER, about)
    words = words_from_bytes(upload.content)
    return words - mask_of(seed, len(words))


def test_a_sum_of_many_slabs_is_that_of_the_floats() -> None:
    draw = np.random.default_rng(3)
    size, bound, bits = SLAB + 5, 1.0, 20
    total, expected, shares = np.zeros(size + 1, np.uint32), np.zeros(size), 0.0
    for number, (share, factor) in enumerate([(1.0, 1.0), (0.25, 0.5), (0.7, 0.1)]):
        update = draw.normal(size=size).astype(np.float32)
        update /= np.linalg.norm(update)
        about = bytes([number])
        words = counted_words(update, share, factor, bound, bits)
        upload = mask_words(words, about, PUBLIC, OWN.private_bytes_raw(), 20)
        total += opened(upload, about)
        expected += update.astype(np.float64) * share * factor
        shares += share
    found = weighted_sum(total, 3, bound, bits)
    step = 2 * bound / (2**bits - 1)
    assert np.abs(found.total - expected).max() <= 3 * step
    assert found.weight == pytest.approx(shares, abs=3 / (2**bits - 1))
    # The rounding is right in the mean: an error of a third of a step in one direction would show.
    assert abs(np.mean(found.total - expected)) < 0.02 * step


def test_nothing_is_the_same_twice() -> None:
    """Neither the rounding nor the mask follows from what the coordinator knows."""
    update = np.full(1000, 1 / 3 / 32, np.float32)
    secret, words = OWN.private_bytes_raw(), [counted_words(update, 1.0, 1.0, 1.0, 20)] * 2
    words[1] = counted_words(update, 1.0, 1.0, 1.0, 20)
    assert (words[0] != words[1]).any()
    assert np.abs(words[0].astype(int) - words[1]).max() == 1
    one, two = (mask_words(words[0].copy(), b"", PUBLIC, secret, 20) for _ in range(2))
    assert (opened(one, b"") == opened(two, b"")).all()
    assert bytes(one.content) != bytes(two.content)
    assert one.sealed != two.sealed


def test_masked_words_say_nothing_of_their_update() -> None:
    """64 updates of zeros and ones, masked: each bit of each word is 1 about half of the time."""
    bits = np.zeros(32)
    for number in range(64):
        update = np.full(64, (number % 2) / 8, np.float32)
        words = counted_words(update, 1.0, 1.0, 1.0, 20)
        masked = words_from_bytes(
            mask_words(words, b"", PUBLIC, OWN.private_bytes_raw(), 20).content
        )
        bits += [(masked >> bit & 1).mean() for bit in range(32)]
    assert (np.abs(bits / 64 - 0.5) < 5 * 0.5 / np.sqrt(64 * 65)).all()


@pytest.mark.parametrize(("examples", "most", "share"), [(3, None, 1.0), (3, 4, 0.75), (9, 4, 1.0)])
def test_shares(examples: int, most: int | None, share: float) -> None:
    assert share_of(examples, most) == share


@pytest.mark.parametrize("factor", [0.0, -0.5, 1.0001, float("nan")])
def test_a_factor_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="expected above 0 and at most 1"):
        counted_words(np.zeros(2, np.float32), 1.0, factor, 1.0, 20)


def test_an_element_beyond_the_bound_is_refused_in_any_slab() -> None:
    update = np.zeros(SLAB + 2, np.float32)
    update[-1] = 1.5
    with pytest.raises(ValueError, match="the bound is 1"):
        counted_words(update, 1.0, 1.0, 1.0, 20)


@pytest.mark.parametrize(("size", "bits"), [(1, 20), (50, 20), (50_000, 16), (200, 8)])
def test_what_the_words_mean_is_no_longer_than_the_bound(size: int, bits: int) -> None:
    """An update that is as long as it may be is rounded to a longer one in about every second draw,
    and in nearly each where it has many elements. No draw's words are longer, and none is much
    shorter."""
    update = np.random.default_rng(size).normal(size=size)
    update = (update / np.linalg.norm(update) * 0.5).astype(np.float32)
    update *= np.float32(0.5 / max(np.linalg.norm(update.astype(np.float64)), 0.5))
    most, longer = 2**bits - 1, 0
    for number in range(20):
        seed = bytes([number]) * 32
        words = masking._rounded(update, np.float32(1), 1.0, 0.5, bits, seed)
        longer += excess_of(words[:-1], bits) > 0
        words = counted_words(update, 1.0, 1.0, 0.5, bits)
        steps = 2 * words[:-1].astype(object) - most
        assert (steps**2).sum() <= most**2, "in whole numbers of any length"
        assert (steps**2).sum() >= (0.95 * most) ** 2
    assert longer >= (3 if size > 1 else 0)


def test_bits_that_are_too_few_for_so_many_elements_are_refused() -> None:
    """With 8 bits each word means at least 1/255 of the bound, whatever its element is."""
    update = np.zeros(255**2 + 1, np.float32)
    with pytest.raises(ValueError, match="more bits are needed"):
        counted_words(update, 1.0, 1.0, 1.0, 8)


@pytest.mark.parametrize("key", SMALL)
def test_a_key_of_small_order_is_none(key: str) -> None:
    assert can_seal_for(PUBLIC)
    assert not can_seal_for(bytes.fromhex(key))
    with pytest.raises(ValueError):
        mask_words(np.zeros(2, np.uint32), b"", bytes.fromhex(key), OWN.private_bytes_raw(), 20)


def test_a_sum_of_noisy_updates_under_masks_has_the_noise_of_all_of_them() -> None:
    draw = np.random.default_rng(3)
    size, bound, bits, noise = 20_000, 2.0, 18, 5000.0
    total, expected = np.zeros(size + 1, np.uint32), np.zeros(size)
    for number, factor in enumerate([1.0, 0.5, 0.1]):
        update = draw.normal(size=size)
        update *= bound * 0.999 / np.linalg.norm(update)
        small = update.astype(np.float32)
        words = counted_words_with_noise(small, 1.0, factor, bound, bits, noise)
        about = bytes([number])
        total += opened(mask_words(words, about, PUBLIC, OWN.private_bytes_raw(), 20), about)
        expected += small * factor
    found = noisy_sum(total, 3, bound, bits, noise)
    beside = (found.total - expected) * largest_step(bits) / bound
    # Three devices' noise; five standard deviations of such a figure of 20,000 numbers.
    assert beside.std() == pytest.approx(noise * 3**0.5, rel=5 / (2 * size) ** 0.5)
    assert abs(beside.mean()) < 5 * beside.std() / size**0.5


def noise_follows_from(make: Callable[[], np.ndarray[Any, Any]]) -> bool:
    """Whether what a device adds is the same each time, so that who knows what it follows from
    could take it off."""
    return bool((make()[:-1] == make()[:-1]).mean() > 0.1)


def test_the_noise_is_of_the_systems_random_bytes_and_not_of_the_tasks_seed() -> None:
    update, numbers = np.zeros(1000, np.float32), (1.0, 1.0, 1.0, 18, 500.0)

    def made(draw: RandomBytes = secrets.token_bytes) -> np.ndarray[Any, Any]:
        np.random.seed(7)  # what a library may have set does not matter
        return counted_words_with_noise(update, *numbers, draw)

    assert not noise_follows_from(made)
    # A planted mistake: the random numbers of the task's seed, which the coordinator knows.
    assert noise_follows_from(lambda: made(np.random.default_rng(123).bytes))


def test_noise_does_not_hide_an_update_that_nobody_clipped() -> None:
    with pytest.raises(ValueError, match=r"an update of norm 2 was given; the bound is 1"):
        counted_words_with_noise(np.full(4, 1, np.float32), 1.0, 1.0, 1.0, 18, 500.0)
    for share, factor in ((0.0, 1.0), (1.0, 1.5)):
        with pytest.raises(ValueError, match="expected above 0 and at most 1"):
            counted_words_with_noise(np.zeros(4, np.float32), share, factor, 1.0, 18, 500.0)
