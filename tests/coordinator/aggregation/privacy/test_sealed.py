"""Buffers of correlated noise in a file: read by who has the secret, and by nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy.sealed import KEY_WORDS, _stream, seal, unseal

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
BUFFER = np.arange(-500, 500, dtype=np.int64) << 40


@pytest.mark.parametrize("buffer", [BUFFER, BUFFER[:0], BUFFER[::2]], ids=["all", "none", "steps"])
def test_what_is_sealed_is_read_with_the_secret(buffer: np.ndarray) -> None:
    sealed = seal(buffer, SECRET, "sum_0")
    assert sealed.dtype == np.int64
    assert sealed.shape == (buffer.size + KEY_WORDS,)
    assert (unseal(sealed, SECRET, "sum_0") == buffer).all()
    assert (seal(buffer, SECRET, "sum_0") == sealed).all()  # the same file


def test_without_the_secret_it_is_random() -> None:
    """Each of the 64 bits is 1 half of the times, whatever is sealed, and nothing of the buffer is
    left, nor of the difference of two buffers."""
    flat = np.zeros(4000, np.int64)
    first, second = seal(flat, SECRET, "sum_0"), seal(flat + 1, SECRET, "sum_0")
    for values in (first, first ^ second, seal(flat, OTHER, "sum_0"), seal(flat, SECRET, "sum_1")):
        bits = np.unpackbits(values.view(np.uint8)).reshape(-1, 64)
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(bits))
        assert len({*values.tolist()}) == values.size
    assert not (first == seal(flat, OTHER, "sum_0")).any()
    # The key, which the file has, does not open it without the secret.
    key = first[:KEY_WORDS].tobytes()
    assert (first[KEY_WORDS:] ^ _stream(key, SECRET, flat.size) == flat).all()
    assert (first[KEY_WORDS:] ^ _stream(key, OTHER, flat.size) == flat).sum() == 0
    assert not (first == seal(flat, SECRET, "sum_1")).any()


def test_another_secret_or_name_or_a_changed_bit_is_refused() -> None:
    sealed = seal(BUFFER, SECRET, "sum_0")
    changed = []
    for place in (0, KEY_WORDS, -1):
        changed.append(sealed.copy())
        changed[-1][place] ^= 1
    for values, secret, name in [
        (sealed, OTHER, "sum_0"),
        (sealed, SECRET, "sum_1"),
        (sealed[:-1], SECRET, "sum_0"),
        (sealed[:3], SECRET, "sum_0"),
        *((each, SECRET, "sum_0") for each in changed),
    ]:
        with pytest.raises(ValueError, match=f"buffer {name} is damaged, or another run's"):
            unseal(values, secret, name)
