"""q-FedAvg by hand: the paper's lines, in NumPy, beside the factor and the scale."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.fair import MOST_BITS, fair
from fleetlearn_coordinator.aggregation.weighing.norms import measure
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, Weighing

LR, SIZE = 0.1, 6
RANDOM = np.random.default_rng(8)
MODEL = RANDOM.standard_normal(SIZE).astype(np.float32)
UPDATES = 0.1 * RANDOM.standard_normal((5, SIZE)).astype(np.float32)
LOSSES, WEIGHTS = np.array([0.3, 2.5, 1.0, 0.05, 4.0]), np.array([1, 1, 2, 1, 7])


def reports(losses: np.ndarray = LOSSES) -> list[Reported]:
    return [
        Reported(int(weight), 1, float(loss), measure(ArrayUpdate(update), SIZE))
        for update, loss, weight in zip(UPDATES, losses, WEIGHTS, strict=True)
    ]


def moved(
    weighing: Weighing,
    rows: list[Reported],
    level: float | None = 1.0,
    model: np.ndarray = MODEL,
) -> np.ndarray:
    """The model after a round. ``level``: None in the first."""
    mean, total = aggregators.make("mean"), aggregators.make("mean").init(SIZE)
    state = weighing.state_after(None if level is None else {"weighing": {"next_level": level}})
    for update, row in zip(UPDATES, rows, strict=True):
        factor = weighing.factor(row, state)
        assert 0 < factor <= 1
        mean.add(total, ArrayUpdate(update), row.weight, float(np.abs(update).max()), factor)
    sgd = optimizers.make("sgd", lr=1.0)
    return next_model(mean, total, sgd, {}, model, scale=weighing.scale(rows, state)).model


def algorithm_2(losses: np.ndarray, q: float) -> np.ndarray:
    """How far the paper's round moves the model, in float64."""
    big_l, updates = 1 / LR, UPDATES.astype(np.float64)
    delta = losses[:, None] ** q * big_l * -updates  # w - w_k
    h = q * losses ** (q - 1) * ((big_l * updates) ** 2).sum(axis=1) + big_l * losses**q
    return -(WEIGHTS[:, None] * delta).sum(axis=0) / (WEIGHTS * h).sum()


@pytest.mark.parametrize("q", [0.0, 0.001, 0.1, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_a_round_is_algorithm_2(q: float, size: float) -> None:
    """Whatever the size of the losses, as long as the level is near them."""
    level = 2.0 ** round(np.log2(size))
    found = moved(Weighing(fair(q, LR)), reports(size * LOSSES), level)
    np.testing.assert_allclose(found, MODEL + algorithm_2(size * LOSSES, q), rtol=0, atol=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
@pytest.mark.parametrize("size", [1e-6, 1e-4, 0.01, 0.3, 2.3, 9.0, 250.0])
def test_the_first_round_is_algorithm_2_whatever_the_losses(q: float, size: float) -> None:
    """Losses of 5e-8 to 1e3. The model is 0, so that it shows the move to all digits of float32."""
    losses = size * LOSSES
    found = moved(Weighing(fair(q, LR)), reports(losses), None, np.zeros_like(MODEL))
    expected = algorithm_2(losses, q)
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-7 * np.abs(expected).max())


def test_the_first_round_s_losses_count_within_2_to_the_128() -> None:
    """With q = 10: losses of 1.4e-4 to 7131. Beyond these the round is off, and nothing is lost or
    overflows."""
    for q in (0.0, 0.001, 0.128, 1.0, 10.0):
        rule = fair(q, LR)
        losses = (0.0, 1e-300, 1e-10, 1e-4, 1.0, 1e4, 1e300)
        factors = [rule.factor(Reported(1, 1, loss), None) for loss in losses]
        assert factors == sorted(factors)
        assert 0.999 * 2.0**-256 <= factors[0] <= factors[-1] <= 1
        assert factors[4] == 2.0**-128
    np.testing.assert_allclose([factors[3], factors[-1]], [2.0**-256, 1.0], rtol=1e-12)


def test_a_first_round_without_a_loss_above_0_leaves_the_next_one_to_find_the_level() -> None:
    weighing = Weighing(fair(2.0, LR))
    summary = weighing.summary(reports(0 * LOSSES), {}, weighing.state_after(None))
    assert weighing.state_after(summary).level is None
    next_summary = weighing.summary(reports(), {}, weighing.state_after(summary))
    assert weighing.state_after(next_summary).level == 1.0


def test_three_rounds_by_hand() -> None:
    """Losses of another size in each round. The level follows by itself, one round behind."""
    weighing, q = Weighing(fair(2.0, LR)), 2.0
    model, by_hand, summary = MODEL, MODEL.astype(np.float64), None
    mean, sgd = aggregators.make("mean"), optimizers.make("sgd", lr=1.0)
    for size in (0.2, 3.0, 1.0):
        rows, total, state = reports(size * LOSSES), mean.init(SIZE), weighing.state_after(summary)
        for update, row in zip(UPDATES, rows, strict=True):
            factor, largest = weighing.factor(row, state), float(np.abs(update).max())
            mean.add(total, ArrayUpdate(update), row.weight, largest, factor)
        model = next_model(mean, total, sgd, {}, model, scale=weighing.scale(rows, state)).model
        summary = weighing.summary(rows, {}, state)
        losses, delta = size * LOSSES, -UPDATES.astype(np.float64) / LR
        h = q * losses ** (q - 1) * (delta**2).sum(axis=1) + losses**q / LR
        by_hand = by_hand - (WEIGHTS * losses**q) @ delta / (WEIGHTS @ h)
        np.testing.assert_allclose(model, by_hand, rtol=0, atol=2e-6)
    assert summary is not None
    assert (summary["weighing"]["rule"], summary["weighing"]["next_level"]) == ("fair", 1.0)


def test_without_q_it_is_the_mean() -> None:
    expected = MODEL + np.average(UPDATES.astype(np.float64), axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(
        moved(Weighing(fair(0.0, LR)), reports()), expected, rtol=0, atol=1e-6
    )


def test_the_level_is_a_power_of_two_near_the_median_loss() -> None:
    rule = fair(1.0, LR)
    assert rule.next_level(reports(), 1.0) == 1.0
    assert rule.next_level(reports(100 * LOSSES), 1.0) == 128.0
    assert rule.next_level(reports(np.array([1e-3, 1e300, 1e-3, 1e-3, 1e300])), 1.0) == 2.0**-10
    assert rule.next_level(reports(0 * LOSSES), 8.0) == 8.0


def test_a_claimed_loss_counts_up_to_a_limit() -> None:
    """A device that claims 10^30 has 4096 times the say of one at the level, not all of it for
    ever."""
    rule = fair(2.0, LR)
    factors = [rule.factor(Reported(1, 1, loss), 1.0) for loss in (1e30, 64.0, 1.0, 0.0, -1.0)]
    assert factors[:3] == [1.0, 1.0, 2.0**-MOST_BITS]
    assert all(
        0 < fair(q, LR).factor(Reported(1, 1, 1e308), 2.0**-300) <= 1
        for q in (0.0, 0.001, 0.012, 10.0)
    )
    assert 0 < factors[3] == factors[4] < 1e-20
