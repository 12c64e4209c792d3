from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy.toeplitz import sensitivity
from strategy_matrices import patterns, square_root, toeplitz
from strategy_matrices import sensitivity as by_trying_all


def test_of_columns_worked_by_hand() -> None:
    column = np.array([1.0, 0.5, 0.25, 0.25])
    assert sensitivity(column, 1, 1) == pytest.approx(np.sqrt(1 + 0.25 + 2 / 16))
    # Columns 0 and 2: 1, 0.5, 0.25 + 1, 0.25 + 0.5.
    assert sensitivity(column, 2, 9) == pytest.approx(np.sqrt(1 + 0.25 + 1.5625 + 0.5625))
    assert sensitivity(column, 9, 9) == sensitivity(column, 1, 1)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("participations", [1, 2, 3, 12])
def test_no_pattern_of_participations_moves_more(separation: int, participations: int) -> None:
    random = np.random.default_rng(separation + 100 * participations)
    for column in (
        square_root(10),
        square_root(10, 4),
        np.ones(10),
        np.sort(random.random(10))[::-1],
        np.eye(10)[0],
    ):
        expected = by_trying_all(toeplitz(column), separation, participations)
        assert sensitivity(column, separation, participations) == pytest.approx(expected, rel=1e-14)


def test_vectors_of_any_direction_do_not_move_more_than_those_of_one() -> None:
    """The columns' sum is the worst of vector contributions too, because no coefficient is
    negative."""
    random = np.random.default_rng(3)
    matrix = toeplitz(square_root(9))
    most = sensitivity(square_root(9), 2, 3)
    for pattern in patterns(9, 2, 3):
        updates = np.zeros((9, 4))
        directions = random.normal(size=(len(pattern), 4))
        updates[pattern] = directions / np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ updates) <= most


def test_bands_within_the_separation() -> None:
    """No two participations share a row then: k times the square of one column."""
    column = square_root(1000, 100)
    assert sensitivity(column, 100, 10) ** 2 == pytest.approx(10 * (column**2).sum(), rel=1e-13)


@pytest.mark.parametrize(
    "column", [[1.0, -0.1], [1.0, 0.2, 0.3], [-1.0, -2.0], [0.5, 0.6]], ids=str
)
def test_refuses_columns_of_which_it_does_not_know(column: list[float]) -> None:
    with pytest.raises(ValueError, match="must not be negative or increase"):
        sensitivity(np.array(column), 1, 1)


def test_a_column_that_increases_may_have_a_worse_pattern() -> None:
    """Why such columns are refused: the first columns are not the worst."""
    matrix = toeplitz(np.array([1.0, 0.0, 2.0, 0.0, 0.0]))
    first = np.linalg.norm(matrix[:, [0, 1]].sum(axis=1))
    assert first**2 == pytest.approx(1 + 1 + 4 + 4)
    assert by_trying_all(matrix, 1, 2) ** 2 == pytest.approx(1 + 9 + 4)  # columns 0 and 2


@pytest.mark.parametrize(("separation", "participations"), [(0, 1), (1, 0)])
def test_refuses_less_than_one(separation: int, participations: int) -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        sensitivity(np.ones(3), separation, participations)
