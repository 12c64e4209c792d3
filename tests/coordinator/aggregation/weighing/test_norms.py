"""Norms: of all elements and of the trained ones, the same bits however an update is read."""

from __future__ import annotations

from math import fsum, sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.norms import BLOCK, Norms, measure
from fleetlearn_simulator.fleet.update_file import UpdateFile

SIZE = 2 * BLOCK + 4321
UPDATE = np.random.default_rng(2).standard_normal(SIZE).astype(np.float32) * 1e3
BUFFERS = [slice(5, 9), slice(BLOCK - 3, 2 * BLOCK + 3), slice(SIZE - 1, SIZE)]


def test_norms_by_hand() -> None:
    update = ArrayUpdate(np.array([3.0, 12.0, -4.0], np.float32))
    assert measure(update, 3) == Norms(13.0, 13.0)
    assert measure(update, 3, [slice(1, 2)]) == Norms(13.0, 5.0)
    assert measure(update, 3, [slice(0, 1), slice(1, 3)]) == Norms(13.0, 0.0)


def test_norms_over_several_blocks() -> None:
    trained = np.ones(SIZE, bool)
    for place in BUFFERS:
        trained[place] = False
    found = measure(ArrayUpdate(UPDATE), SIZE, BUFFERS)
    squares = UPDATE.astype(np.float64) ** 2
    assert found.update == pytest.approx(sqrt(fsum(squares.tolist())), rel=1e-14)
    assert found.trained == pytest.approx(sqrt(fsum(squares[trained].tolist())), rel=1e-14)


def test_an_update_in_a_file_has_the_same_bits() -> None:
    assert BLOCK % ALIGNMENT == 0
    assert measure(UpdateFile(SIZE).keep(UPDATE), SIZE, BUFFERS) == measure(
        ArrayUpdate(UPDATE), SIZE, BUFFERS
    )
