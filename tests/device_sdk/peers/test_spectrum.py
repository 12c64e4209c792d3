"""Spectral gaps against closed forms and numpy's eigenvalues."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from fleetlearn_device.peers import spectrum
from fleetlearn_device.peers.mixing import MixingMatrix, from_weights, metropolis, without
from fleetlearn_device.peers.spectrum import reached_from_first, spectral_gap
from fleetlearn_device.peers.topologies import (
    complete,
    exponential,
    one_peer_exponential,
    random_regular,
    ring,
    torus,
)

FULL_TURN = 2 * np.pi


def by_numpy(matrix: MixingMatrix) -> float:
    values = np.sort(np.linalg.eigvalsh(matrix.dense()))
    return float(1 - max(abs(values[0]), abs(values[-2])))


def hypercube(dimensions: int) -> MixingMatrix:
    here = np.arange(2**dimensions)
    pairs = [np.stack([here, here ^ 2**bit], axis=-1) for bit in range(dimensions)]
    return metropolis(len(here), np.concatenate(pairs))


@pytest.mark.parametrize("peers", [3, 4, 16, 101])
def test_ring(peers: int) -> None:
    turns = np.cos(FULL_TURN * np.arange(1, peers) / peers)
    assert spectral_gap([ring(peers)]) == pytest.approx(1 - np.abs((1 + 2 * turns) / 3).max())


def test_ring_of_ten_thousand() -> None:
    expected = 2 / 3 * (1 - np.cos(FULL_TURN / 10_000))
    assert spectral_gap([ring(10_000)]) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(1.3159e-7, rel=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 6), (40, 50)])
def test_torus(rows: int, columns: int) -> None:
    slowest = (3 + 2 * np.cos(FULL_TURN / max(rows, columns))) / 5
    assert spectral_gap([torus(rows, columns)]) == pytest.approx(1 - slowest, abs=1e-9)


@pytest.mark.parametrize("dimensions", [2, 5, 10])
def test_hypercube(dimensions: int) -> None:
    """Eigenvalues (d + 1 - 2 k) / (d + 1): the largest magnitude after 1 is (d - 1) / (d + 1)."""
    assert spectral_gap([hypercube(dimensions)]) == pytest.approx(2 / (dimensions + 1), abs=1e-9)


@pytest.mark.parametrize("peers", [5, 16, 100, 1000])
def test_exponential(peers: int) -> None:
    distances = {2**power for power in range(20) if 2**power < peers}
    distances |= {peers - distance for distance in distances}
    angles = FULL_TURN * np.arange(1, peers)[:, None] * np.array(sorted(distances)) / peers
    values = (1 + np.cos(angles).sum(axis=1)) / (1 + len(distances))
    assert spectral_gap([exponential(peers)]) == pytest.approx(1 - np.abs(values).max())


@pytest.mark.parametrize("peers", [1, 2, 9, 70])
def test_complete(peers: int) -> None:
    assert spectral_gap([complete(peers)]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "matrix",
    [
        ring(10),
        torus(4, 5),
        exponential(24),
        hypercube(4),
        random_regular(600, 4, seed=2),
        metropolis(30, np.array([(row, row + 1) for row in range(29)])),
        without(torus(5, 5), [3, 4]),
    ],
)
def test_all_against_numpy(matrix: MixingMatrix) -> None:
    assert spectral_gap([matrix]) == pytest.approx(by_numpy(matrix), abs=1e-9)


@pytest.mark.parametrize("peers", [6, 13, 100, 600])
def test_matrices_by_turns_against_the_singular_values_of_their_product(peers: int) -> None:
    matrices = one_peer_exponential(peers)
    product = reduce(np.matmul, [matrix.dense() for matrix in reversed(matrices)])
    second = np.linalg.svd(product - 1 / peers, compute_uv=False)[0]
    assert spectral_gap(matrices) == pytest.approx(1 - second ** (1 / len(matrices)), abs=1e-9)
    assert 0 < spectral_gap(matrices) < 1


@pytest.mark.parametrize("peers", [16, 1024])
def test_matrices_by_turns_that_reach_the_mean(peers: int) -> None:
    assert spectral_gap(one_peer_exponential(peers)) == 1.0


@pytest.mark.parametrize("half", [3, 300])
def test_the_eigenvalue_of_the_largest_magnitude_may_be_negative(half: int) -> None:
    """Two groups that give nine tenths to each other: the eigenvalues are 1, .1 and .1 - .9."""
    rows = np.repeat(np.arange(half), half)
    columns = half + np.tile(np.arange(half), half)
    weights = np.full(2 * half * half, 0.9 / half)
    there, back = np.append(rows, columns), np.append(columns, rows)
    assert spectral_gap([from_weights(2 * half, there, back, weights)]) == pytest.approx(0.2)


def test_a_line_that_lanczos_does_not_finish_is_left_to_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = metropolis(520, np.array([(row, row + 1) for row in range(519)]))
    monkeypatch.setattr(spectrum, "_MOST_STEPS", 30)
    assert spectral_gap([line]) == pytest.approx(by_numpy(line), abs=1e-12)


def test_unconnected_peers_have_no_gap_and_are_not_reached() -> None:
    matrix = metropolis(5, np.array([[0, 1], [1, 2], [3, 4]]))
    assert spectral_gap([matrix]) == pytest.approx(0.0)
    np.testing.assert_array_equal(
        reached_from_first(matrix).any(axis=1), [True, True, True, False, False]
    )


def test_swapping_models_for_ever_has_no_gap() -> None:
    zero = np.zeros(2)
    swap = MixingMatrix(zero, np.array([0, 1, 2]), np.array([1, 0]), np.ones(2))
    assert spectral_gap([swap]) == pytest.approx(0.0)
    np.testing.assert_array_equal(reached_from_first(swap), [[True, False], [False, True]])
