"""Updates in fixed point, many at once: the numbers that the protocol gives for each, and no
error that stays."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_protocol.secure.distributed_noise import noisy_words
from fleetlearn_protocol.secure.fixed_point import Words, to_words, weighted_sum, weighted_words
from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.fleet import fixed_point_updates
from fleetlearn_simulator.fleet.fixed_point_updates import NOISE, PURPOSE, weighted_rows
from numpy.typing import NDArray

ROWS, SIZE, SEED = 40, 37, 5
NUMBERS = FixedPoint(0.5, 20, equal=False)
DEVICES, TURNS = np.arange(ROWS) % 30, np.arange(ROWS) // 30
DRAW = np.random.default_rng(1)
SHARES = DRAW.uniform(1e-3, 1.0, ROWS)
FACTORS = DRAW.choice([1.0, 0.5**0.5, 0.25], ROWS)


def updates() -> NDArray[np.float32]:
    """Of norms up to the bound."""
    rows = np.random.default_rng(2).standard_normal((ROWS, SIZE))
    rows *= 0.49 / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def written(numbers: FixedPoint = NUMBERS, turns: NDArray[np.int64] = TURNS) -> Words:
    return weighted_rows(updates(), SHARES, FACTORS, numbers, SEED, DEVICES, turns)


@pytest.mark.parametrize("together", [2**16, 100, 10])
def test_each_row_is_what_one_device_writes(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """However many rows and columns are worked on together."""
    monkeypatch.setattr(fixed_point_updates, "ROWS_TOGETHER", together)
    found, rows = written(), updates()
    assert (found.shape, found.dtype) == ((ROWS, SIZE + 1), np.uint32)
    for row, (device, turn) in enumerate(zip(DEVICES, TURNS, strict=True)):
        fractions = keyed_random.uniform(SEED, PURPOSE, device, turn, np.arange(SIZE + 1))
        counted = rows[row] * np.float32(SHARES[row] * FACTORS[row])
        expected = weighted_words(counted, SHARES[row], NUMBERS.bound, NUMBERS.bits, fractions)
        np.testing.assert_array_equal(found[row], expected)


def test_another_turn_is_rounded_otherwise_and_the_same_turn_is_not() -> None:
    coarse = NUMBERS._replace(bits=16)
    assert written(coarse).tobytes() == written(coarse).tobytes()
    assert (written(coarse) != written(coarse, TURNS + 7))[:, :-1].mean() > 0.2


def test_the_mean_of_many_roundings_is_the_update() -> None:
    """4,000 devices write the same update: their sum is within five standard errors of it."""
    update, count = updates()[:1], 4000
    ones, once = np.ones(count), np.zeros(count, np.int64)
    rows, equal = np.repeat(update, count, axis=0), FixedPoint(0.5, 20, equal=True)
    words = weighted_rows(rows, ones, ones, equal, SEED, np.arange(count), once)
    total = words.sum(axis=0, dtype=np.uint32)
    found = weighted_sum(total, count, 0.5, 20, equal=True)
    assert found.weight == count
    step = 1.0 / (2**20 - 1)
    errors = found.total / count - update[0]
    assert np.abs(errors).max() < 5 * step / 2 / np.sqrt(count)


def test_with_noise_each_row_is_what_one_device_writes() -> None:
    numbers = FixedPoint(0.5, 20, equal=True, noise=700.0)
    found, rows = written(numbers), updates()
    for row, (device, turn) in enumerate(zip(DEVICES.tolist(), TURNS.tolist(), strict=True)):
        secret = keyed_random.secret_bytes(SEED, NOISE, device, turn)
        counted = rows[row] * np.float32(SHARES[row] * FACTORS[row])
        np.testing.assert_array_equal(found[row], noisy_words(counted, 0.5, 20, 700.0, secret))
    assert (written(numbers, TURNS + 7)[:, :-1] != found[:, :-1]).mean() > 0.9


@pytest.mark.parametrize("together", [2**16, 100, 10])
def test_rows_that_rounding_made_too_long_are_rounded_again(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(fixed_point_updates, "ROWS_TOGETHER", together)
    rows, ones = (updates() * (0.5 / 0.49)).astype(np.float32), np.ones(ROWS)
    rows[0] *= 0.5
    coarse = NUMBERS._replace(bits=16)
    words = weighted_rows(rows, ones, ones, coarse, SEED, DEVICES, TURNS)
    elements = (2.0 * words[:, :-1] - (2**16 - 1)) * coarse.bound / (2**16 - 1)
    norms = np.linalg.norm(elements, axis=1)
    assert norms.max() <= coarse.bound
    assert norms[1:].min() > coarse.bound * (1 - 1e-3)
    assert np.abs(elements - rows).max() < 2 * 2 * coarse.bound / (2**16 - 1)
    once = []
    for row, (device, turn) in enumerate(zip(DEVICES, TURNS, strict=True)):
        fractions = keyed_random.uniform(SEED, PURPOSE, device, turn, np.arange(SIZE))
        once.append(to_words(rows[row], coarse.bound, coarse.bits, fractions))
    again = (np.array(once) != words[:, :-1]).any(axis=1)
    assert 0 < again.sum() < ROWS, "some were too long, and some are as they were"
