from __future__ import annotations

import numpy as np
import pytest
import strategy_matrices
from fleetlearn_coordinator.aggregation.privacy.blt import (
    BltStrategy,
    correlated_sensitivity,
    strategy_for,
)
from fleetlearn_coordinator.aggregation.privacy.blt_search import log_loss, parameters, residues
from strategy_matrices import inverse, prefix_errors, square_root, toeplitz, tree

SMALL = [(1, 1, 1), (2, 1, 2), (12, 3, 2), (20, 30, 1)]


def errors(column: np.ndarray, separation: int, participations: int) -> np.ndarray:
    """Return the standard deviation of the noise in each prefix sum, (n,), where the noise z is as
    large as the sensitivity."""
    columns = [*range(0, len(column), separation)][:participations]
    moved = np.linalg.norm(toeplitz(column)[:, columns].sum(axis=1))
    return moved * np.sqrt(np.cumsum(np.cumsum(inverse(column)) ** 2))


def greatest_error(column: np.ndarray, separation: int, participations: int) -> float:
    return float(errors(column, separation, participations).max())


def test_coefficients_worked_by_hand() -> None:
    strategy = BltStrategy(theta=(0.5, 0.0), omega=(0.4, 0.1))
    assert strategy.coefficients(4) == pytest.approx([1.0, 0.5, 0.2, 0.1])
    assert strategy.coefficients(1).tolist() == [1.0]


@pytest.mark.parametrize(
    ("theta", "omega"),
    [
        ((0.5,), (-0.1,)),
        ((1.0,), (0.1,)),
        ((-0.1,), (0.1,)),
        ((0.5, 0.5), (0.6, 0.5)),
        ((0.5,), ()),
        ((), ()),
    ],
)
def test_refuses_parameters_whose_sensitivity_is_not_known(
    theta: tuple[float, ...], omega: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="omega >= 0 whose sum is at most 1"):
        BltStrategy(theta, omega)


@pytest.mark.parametrize(("releases", "separation", "participations"), SMALL)
def test_sensitivity_is_that_of_the_dense_matrix(
    releases: int, separation: int, participations: int
) -> None:
    strategy = strategy_for(releases, separation, participations)
    few = min(releases, 9)  # all patterns of twenty releases are too many
    dense = toeplitz(strategy.coefficients(few))
    assert strategy.sensitivity(few, separation, participations) == pytest.approx(
        strategy_matrices.sensitivity(dense, separation, participations), rel=1e-13
    )


@pytest.mark.parametrize(("releases", "separation", "participations"), SMALL)
@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_what_the_search_minimises_is_error_times_sensitivity(
    releases: int, separation: int, participations: int, buffers: int
) -> None:
    """The closed form against the dense matrices, at a point of the search."""
    point = np.random.default_rng(buffers).normal(size=2 * buffers, scale=0.3) - 0.5
    theta, zeta = parameters(point)
    omega = residues(theta, zeta)
    assert (omega > 0).all()
    assert omega.sum() == pytest.approx((zeta - theta).sum())
    strategy = BltStrategy(tuple(1 - theta), tuple(omega))
    expected = greatest_error(strategy.coefficients(releases), separation, participations)
    found = np.exp(log_loss(point, releases, separation, participations))
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_inverse_is_a_blt_with_poles_and_zeros_changed() -> None:
    theta, zeta = parameters(np.array([-1.0, -0.5, 0.0, -0.2]))
    column = BltStrategy(tuple(1 - theta), tuple(residues(theta, zeta))).coefficients(9)
    other = residues(zeta, theta)
    later = (other[:, None] * (1 - zeta[:, None]) ** np.arange(8)).sum(axis=0)
    assert inverse(column) == pytest.approx([1.0, *later])


def test_one_participation_in_2048_releases() -> None:
    """Independent noise has 45.25; the best Toeplitz matrix 3.493."""
    assert greatest_error(np.eye(2048)[0], 2048, 1) == pytest.approx(45.25, abs=0.005)
    assert greatest_error(square_root(2048), 2048, 1) == pytest.approx(3.493, abs=0.0005)
    found = greatest_error(strategy_for(2048, 2048, 1).coefficients(2048), 2048, 1)
    assert found == pytest.approx(3.4942, abs=0.0002)
    by_buffers = [strategy_for(2048, 2048, 1, buffers) for buffers in (1, 2, 3, 5)]
    errors = [greatest_error(each.coefficients(2048), 2048, 1) for each in by_buffers]
    assert errors == pytest.approx([4.321, 3.585, 3.503, 3.493], abs=0.001)


def test_ten_participations_in_1000_releases() -> None:
    """Independent noise has 100 (RMS 70.75), 100 bands of the square root 15.69 (12.10)."""
    for column, greatest, root_mean_square in [
        (np.eye(1000)[0], 100.0, 70.75),
        (square_root(1000, 100), 15.69, 12.10),
        (strategy_for(1000, 100, 10).coefficients(1000), 14.885, 12.926),
    ]:
        found = errors(column, 100, 10)
        assert found.max() == pytest.approx(greatest, abs=0.005)
        assert np.sqrt((found**2).mean()) == pytest.approx(root_mean_square, abs=0.005)


def test_better_than_the_tree() -> None:
    """Of 256 releases. A sum of 255 is made of 8 nodes, and a leaf is in 9. Honaker's best decoder
    looks at later releases as well, which no coordinator can."""
    found = greatest_error(strategy_for(256, 256, 1).coefficients(256), 256, 1)
    assert found == pytest.approx(2.830, abs=0.002)
    nodes = tree(256)
    moved = strategy_matrices.sensitivity(nodes, 256, 1)
    assert moved == pytest.approx(3.0)
    assert moved * np.sqrt(8) == pytest.approx(8.485, abs=0.001)
    assert moved * prefix_errors(nodes).max() == pytest.approx(3.757, abs=0.001)


@pytest.mark.parametrize(("separation", "participations"), [(1, 50), (1, 900)])
def test_independent_noise_where_a_device_may_be_in_every_release(
    separation: int, participations: int
) -> None:
    """It moves the sum of n releases by n, and no matrix has less error than that."""
    strategy = strategy_for(50, separation, participations)
    assert strategy.coefficients(50).tolist() == [1.0] + [0.0] * 49
    assert greatest_error(strategy.coefficients(50), 1, 50) == pytest.approx(50.0)
    almost = strategy_for(50, 1, 40).coefficients(50)
    assert greatest_error(almost, 1, 40) < 0.999 * greatest_error(np.eye(50)[0], 1, 40)


def test_the_same_arguments_give_the_same_bits() -> None:
    first = strategy_for(50, 50, 1)
    strategy_for.cache_clear()
    assert strategy_for(50, 50, 1) == first


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)])
def test_no_strategy_for_less_than_one(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        strategy_for(*arguments)


@pytest.mark.parametrize("separation", [1, 7, 2000])
@pytest.mark.parametrize("participations", [1, 30])
@pytest.mark.parametrize("releases", [3, 1000])
def test_any_plan_has_a_strategy_and_a_sensitivity(
    releases: int, separation: int, participations: int
) -> None:
    strategy = strategy_for(releases, separation, participations)
    moved = strategy.sensitivity(releases, separation, participations)
    columns = min(participations, -(-releases // separation))
    assert moved >= np.sqrt(columns)
    assert strategy.coefficients(releases)[0] == 1.0


def test_sensitivity_of_a_part_of_what_was_planned() -> None:
    """It is that of the first rows of the planned matrix, and grows with each release, beyond the
    plan too."""
    planned = strategy_for(40, 10, 3)
    matrix = toeplitz(planned.coefficients(60))
    found = [correlated_sensitivity(done, 10, 3, 40) for done in range(1, 61)]
    assert found == sorted(found)
    for done in (1, 9, 11, 40, 60):
        moved = np.linalg.norm(matrix[:done, [0, 10, 20]].sum(axis=1))
        assert found[done - 1] == pytest.approx(moved)
    assert found[39] == correlated_sensitivity(40, 10, 3)
