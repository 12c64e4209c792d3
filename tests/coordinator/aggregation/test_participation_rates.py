"""Weights by inverse participation rate, by hand, and where they take a model that fast devices
would pull away."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.participation_rates import (
    FULL_WEIGHT,
    WINDOW,
    ParticipationRates,
    UpdateWeights,
)
from fleetlearn_coordinator.storage.ledger import ROUNDS_KEPT


def test_an_update_weighs_the_less_the_more_of_its_device_count() -> None:
    rates = ParticipationRates()
    for round, device in [(1, "a"), (1, "a"), (1, "b"), (2, "a"), (3, "b")]:
        rates.add(round, device)
    assert rates.weight(1, "a") == FULL_WEIGHT, (
        "its own round does not count: the order within it does not matter"
    )
    assert rates.weight(2, "a") == round_to_nearest(3)
    assert rates.weight(3, "a") == FULL_WEIGHT // 4
    assert rates.weight(3, "b") == FULL_WEIGHT // 2
    assert rates.weight(4, "b") == round_to_nearest(3)
    assert rates.weight(4, "new") == FULL_WEIGHT


def round_to_nearest(parts: int) -> int:
    return round(FULL_WEIGHT / parts)


def test_old_rounds_are_forgotten_and_the_ledger_has_the_others() -> None:
    rates = ParticipationRates()
    for number in range(1, 301):
        rates.add(number, "a")
    assert rates.weight(300, "a") == round_to_nearest(WINDOW + 1)
    assert rates.weight(301, "a") == round_to_nearest(WINDOW + 1)
    assert len(rates.rounds) <= WINDOW + 1
    assert WINDOW <= ROUNDS_KEPT


def test_a_weight_is_never_nothing() -> None:
    rates = ParticipationRates()
    rates.rounds[1] = Counter({"a": 10**9})
    assert rates.weight(2, "a") == 1


@pytest.mark.parametrize(
    ("inverse", "expected"), [(False, 9 / 11), (True, 0.0)], ids=["uniform", "inverse"]
)
def test_where_two_groups_with_speeds_of_one_to_ten_take_the_model(
    inverse: bool, expected: float
) -> None:
    """The fast group's optimum is 1, the slow group's -1. Each buffer has ten updates of the fast
    one, and one of the other. The fixed point of x + mean(w (c - x) / 2) is the weighted mean of
    the optima: (10 - 1) / 11 with equal weights, and 0 where both groups weigh the same, as they do
    once their rates are known."""
    rates, x = ParticipationRates(), np.float64(0.5)
    for number in range(1, 400):
        total = exact_mean.init(1)
        buffer = [*["fast"] * 10, "slow"]
        for device in buffer:
            update = np.array([((1 if device == "fast" else -1) - x) / 2], np.float32)
            weight = rates.weight(number, device) if inverse else 1
            exact_mean.add(total, (update,), weight, 2.0)
        for device in buffer:
            rates.add(number, device)
        x = x + exact_mean.mean(total)[0]
    # 10 / (10 m + 1) against 1 / (m + 1) for m = WINDOW rounds: the one beside m is what is left.
    left = (
        (10 / (10 * WINDOW + 1) - 1 / (WINDOW + 1)) / (10 / (10 * WINDOW + 1) + 1 / (WINDOW + 1))
        if inverse
        else 0.0
    )
    assert x == pytest.approx(expected + left, abs=5e-4)  # weights are whole numbers
    assert abs(left) < 0.005


def test_weights_are_the_examples_up_to_the_limit_or_follow_the_rates() -> None:
    """One report, and many."""
    names, examples = ["a", "b", "a"], np.array([1, 5, 6])
    assert UpdateWeights(5).of(1, names, examples).tolist() == [1, 5, 5]
    assert [UpdateWeights(5).of_one(1, "a", count) for count in (1, 5, 6)] == [1, 5, 5]
    weights = UpdateWeights(FULL_WEIGHT, ParticipationRates())
    weights.count(1, ["a", "a"])
    assert weights.of(2, names, examples).tolist() == [
        FULL_WEIGHT // 3,
        FULL_WEIGHT,
        FULL_WEIGHT // 3,
    ]
    assert weights.of_one(2, "a", 6) == FULL_WEIGHT // 3
