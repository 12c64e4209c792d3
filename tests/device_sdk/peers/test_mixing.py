"""Mixing against mini-batch SGD, closed forms, and dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_device.peers.mixing import MixingMatrix, average, metropolis, mix, mix_all, without
from fleetlearn_device.peers.topologies import complete, exponential, random_regular, ring, torus

MATRICES = {
    "ring": ring(16),
    "torus": torus(3, 5),
    "random-regular": random_regular(14, 3, seed=1),
    "exponential": exponential(13),
    "complete": complete(9),
    "star": metropolis(6, np.array([(0, other) for other in range(1, 6)])),
}


def test_complete_graph_in_adapt_then_combine_form_is_mini_batch_sgd() -> None:
    """Least squares: x_i <- sum_j W_ij (x_j - lr grad F_j(x_j)) with W = 11^T/n takes the steps of
    SGD over the union of the peers' batches."""
    random = np.random.default_rng(0)
    peers, features, rate = 8, 5, 0.1
    inputs = random.normal(size=(peers, 20, features))
    targets = random.normal(size=(peers, 20))
    models = np.zeros((peers, features))
    alone = np.zeros(features)
    matrix = complete(peers)
    for _ in range(30):
        errors = np.einsum("nbf,nf->nb", inputs, models) - targets
        gradients = np.einsum("nb,nbf->nf", errors, inputs) / 20
        models = mix_all(models - rate * gradients, matrix)
        together = inputs.reshape(-1, features)
        alone -= rate * together.T @ (together @ alone - targets.reshape(-1)) / len(together)
    np.testing.assert_allclose(models, np.broadcast_to(alone, models.shape), rtol=0, atol=1e-14)
    assert np.linalg.norm(alone) > 0.1


def test_disagreement_on_a_ring_of_16_shrinks_by_lambda_2_each_step() -> None:
    """Learning rate 0, W = 1/3: the slowest mode shrinks by (1 + 2 cos(2 pi / 16)) / 3 = .9493."""
    matrix, rate = ring(16), (1 + 2 * np.cos(2 * np.pi / 16)) / 3
    assert rate == pytest.approx(0.9493, abs=5e-5)
    models = np.cos(2 * np.pi * np.arange(16) / 16)[:, None] + 3.0
    distance = np.linalg.norm(models - 3.0)
    for _ in range(50):
        models = mix_all(models, matrix)
        assert np.linalg.norm(models - 3.0) == pytest.approx(rate * distance, rel=1e-11)
        distance = np.linalg.norm(models - 3.0)
    # No other disagreement shrinks more slowly.
    models = np.random.default_rng(1).normal(size=(16, 100))
    before = models - models.mean(axis=0)
    after = mix_all(models, matrix) - models.mean(axis=0)
    assert (np.linalg.norm(after, axis=0) <= rate * np.linalg.norm(before, axis=0)).all()


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_symmetric_and_doubly_stochastic(name: str) -> None:
    dense = MATRICES[name].dense()
    assert (dense >= 0).all()
    np.testing.assert_array_equal(dense, dense.T)
    np.testing.assert_allclose(dense.sum(axis=0), 1.0, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", MATRICES)
def test_mixing_of_all_is_the_product_and_each_peers_own_mixing(name: str) -> None:
    matrix = MATRICES[name]
    models = np.random.default_rng(2).normal(size=(len(matrix), 7)).astype(np.float32)
    mixed = mix_all(models, matrix)
    np.testing.assert_allclose(mixed, matrix.dense() @ models, rtol=0, atol=1e-6)
    for peer in range(len(matrix)):
        row = matrix.row(peer)
        received = {neighbour: models[neighbour] for neighbour in reversed(row)}
        np.testing.assert_array_equal(mix(models[peer], received, row), mixed[peer])


def test_many_neighbours_are_mixed_as_dense_matrices() -> None:
    models = np.random.default_rng(3).normal(size=(100, 4))
    expected = np.broadcast_to(models.mean(axis=0), models.shape)
    np.testing.assert_allclose(mix_all(models, complete(100)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", MATRICES)
def test_the_mean_of_those_present_is_kept_while_others_are_gone(name: str) -> None:
    matrix, gone = MATRICES[name], [1, 4, 5]
    there = np.setdiff1d(np.arange(len(matrix)), gone)
    models = np.random.default_rng(4).normal(size=(len(matrix), 3))
    left = without(matrix, gone)
    mixed = mix_all(models, left)
    np.testing.assert_allclose(
        mixed[there].mean(axis=0), models[there].mean(axis=0), rtol=0, atol=1e-15
    )
    np.testing.assert_array_equal(mixed[gone], models[gone])
    np.testing.assert_allclose(left.dense(), left.dense().T, rtol=0, atol=0)
    np.testing.assert_allclose(left.dense().sum(axis=1), 1.0, rtol=0, atol=1e-15)
    # Weights between peers that are there stay as they are.
    between = ~np.eye(len(matrix), dtype=bool)[np.ix_(there, there)]
    kept, before = left.dense()[np.ix_(there, there)], matrix.dense()[np.ix_(there, there)]
    np.testing.assert_array_equal(kept[between], before[between])


@pytest.mark.parametrize("name", MATRICES)
def test_a_peer_that_misses_neighbours_mixes_as_without_them(name: str) -> None:
    matrix, gone = MATRICES[name], {0, 3}
    models = np.random.default_rng(5).normal(size=(len(matrix), 3)).astype(np.float32)
    mixed = mix_all(models, without(matrix, gone))
    for peer in set(range(len(matrix))) - gone:
        received = {other: models[other] for other in matrix.row(peer) if other not in gone}
        np.testing.assert_array_equal(mix(models[peer], received, matrix.row(peer)), mixed[peer])


def test_scaling_rows_of_those_present_would_move_their_mean() -> None:
    """What `without` does not do: to divide each row by what is left of it keeps its sum, not its
    columns'."""
    matrix = ring(5)
    dense = matrix.dense()[:4, :4]
    models = np.array([0.0, 0, 0, 1])[:, None]
    scaled = dense / dense.sum(axis=1, keepdims=True) @ models
    assert abs(scaled.mean() - models.mean()) > 0.01
    kept = mix_all(np.append(models, [[9.0]], axis=0), without(matrix, [4]))[:4]
    assert kept.mean() == pytest.approx(models.mean(), abs=1e-15)


def test_metropolis_weights_of_a_star_by_hand() -> None:
    matrix: MixingMatrix = metropolis(4, np.array([[0, 1], [2, 0], [0, 3], [1, 0]]))
    quarter = 1 / 4
    expected = [
        [quarter, quarter, quarter, quarter],
        [quarter, 3 / 4, 0, 0],
        [quarter, 0, 3 / 4, 0],
        [quarter, 0, 0, 3 / 4],
    ]
    np.testing.assert_array_equal(matrix.dense(), expected)


def test_a_pair_has_its_mean_with_the_same_bits() -> None:
    first, second = np.random.default_rng(6).normal(size=(2, 1000)).astype(np.float32)
    found = average(first, second)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, average(second, first))
    np.testing.assert_array_equal(average(first, first), first)
    np.testing.assert_allclose(found, (first + second.astype(np.float64)) / 2, atol=1e-7)


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlearn_device.peers.mixing.MOST_WEIGHTS", 90)
    assert len(complete(10)) == 10
    with pytest.raises(ValueError, match="11 peers with 55 pairs"):
        complete(11)
