"""Combinations of updates, from their inner products alone: against definitions over the updates
themselves."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from fleetlearn_coordinator.aggregation.robust.distances import (
    bulyan_selection,
    centred_clipping,
    distances_from,
    geometric_median,
    krum_scores,
    multi_krum,
    squared_distances,
)
from numpy.typing import NDArray

POINTS = np.random.default_rng(1).normal(size=(11, 4))
PRODUCTS = POINTS @ POINTS.T


def test_distances() -> None:
    found = squared_distances(PRODUCTS)
    for one, other in combinations(range(len(POINTS)), 2):
        np.testing.assert_allclose(found[one, other], np.sum((POINTS[one] - POINTS[other]) ** 2))
    shares = np.full(11, 1 / 11)
    np.testing.assert_allclose(
        distances_from(shares, PRODUCTS),
        np.linalg.norm(POINTS - POINTS.mean(axis=0), axis=1),
        rtol=1e-6,
    )


def test_krum_by_hand() -> None:
    """On a line: 0, 1, 2, 10 and one hostile device: each score is of the 4 - 1 - 2 = 1 closest
    other."""
    line = np.array([[0.0], [1.0], [2.0], [10.0]])
    scores = krum_scores(squared_distances(line @ line.T), 1)
    np.testing.assert_allclose(scores, [1, 1, 1, 64])
    five = np.array([[0.0], [1.0], [3.0], [4.0], [50.0]])  # two closest others each
    scores = krum_scores(squared_distances(five @ five.T), 1)
    np.testing.assert_allclose(scores, [1 + 9, 1 + 4, 1 + 4, 1 + 9, 46**2 + 47**2])
    np.testing.assert_array_equal(
        multi_krum(squared_distances(five @ five.T), 1, 1), [0, 1, 0, 0, 0]
    )
    np.testing.assert_array_equal(
        multi_krum(squared_distances(five @ five.T), 1, 2), [0, 0.5, 0.5, 0, 0]
    )


def test_bulyan_takes_the_best_by_krum_again_and_again() -> None:
    """Seven points and one hostile device: five are taken, each the best of those that are left."""
    line = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [100.0]])
    distances = squared_distances(line @ line.T)
    left, taken = list(range(7)), []
    for _ in range(5):
        scores = []
        for row in left:
            others = sorted(distances[row, other] for other in left if other != row)
            scores.append(sum(others[: max(1, len(left) - 1 - 2)]))
        taken.append(left.pop(int(np.argmin(scores))))
    assert bulyan_selection(distances, 1) == sorted(taken)
    assert 6 not in bulyan_selection(distances, 1)


def _objective(point: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float(weights @ np.linalg.norm(POINTS - point, axis=1))


def test_the_geometric_median_is_where_the_mean_distance_is_least() -> None:
    weights = np.arange(1.0, 12.0)
    point = geometric_median(PRODUCTS, weights) @ POINTS
    random = np.random.default_rng(2)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(50):
            assert _objective(point, weights) <= _objective(
                point + size * random.normal(size=4), weights
            )
    # On a line it is the median.
    line = np.array([[0.0], [1.0], [7.0]])
    np.testing.assert_allclose(geometric_median(line @ line.T, np.ones(3)) @ line, [1.0], atol=1e-5)


def test_equal_updates_are_their_own_geometric_median() -> None:
    same = np.ones((4, 3))
    np.testing.assert_allclose(geometric_median(same @ same.T, np.ones(4)) @ same, [1, 1, 1])
    zeros = np.zeros((4, 4))
    np.testing.assert_array_equal(geometric_median(zeros, np.ones(4)) @ np.zeros((4, 3)), [0, 0, 0])


def test_centred_clipping_by_its_definition() -> None:
    centre = np.zeros(4)
    for _ in range(10):
        moves = POINTS - centre
        lengths = np.linalg.norm(moves, axis=1, keepdims=True)
        centre = centre + (moves * np.minimum(1, 0.5 / lengths)).mean(axis=0)
    np.testing.assert_allclose(centred_clipping(PRODUCTS, 0.5) @ POINTS, centre, rtol=1e-9)
    # A radius that reaches all is the mean.
    np.testing.assert_allclose(centred_clipping(PRODUCTS, 1e9) @ POINTS, POINTS.mean(axis=0))
