"""Aggregators of other packages: what their functions are told, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.aggregators import MEAN, Aggregator
from fleetlearn_coordinator.aggregation.own_aggregators import RoundUpdates, own_aggregator
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate, Values
from fleetlearn_protocol.errors import FleetError

SIZE = 9000  # more than a block of any number of updates begins with
RANDOM = np.random.default_rng(2)
UPDATES = RANDOM.standard_normal((5, SIZE)).astype(np.float32)
WEIGHTS, FACTORS = [4, 1, 7, 2, 2], [1.0, 0.5, 1.0, 0.25, 1.0]
BUFFERS = (slice(10, 12), slice(8990, 8991))
VALUES = Values(
    RANDOM.random((5, 3)).astype(np.float32), np.ones(5), np.array([0.5, 1.0, 2.0], np.float32)
)


def result(aggregator: Aggregator[Any], order: Any = range(5)) -> Any:
    state = aggregator.init(SIZE)
    for row in order:
        largest = float(np.abs(UPDATES[row]).max())
        aggregator.add(
            state,
            ArrayUpdate(UPDATES[row]),
            WEIGHTS[row],
            largest,
            FACTORS[row],
            VALUES.select(row),
        )
    return aggregator.result(state, VALUES.present)


def test_a_function_is_told_weights_norms_products_and_elements() -> None:
    told: dict[str, Any] = {}

    def combine(updates: RoundUpdates) -> Any:
        told["weights"], told["norms"] = updates.weights, updates.norms()
        told["products"] = updates.inner_products()
        told["medians"] = updates.by_columns(lambda values: np.median(values, axis=0))
        return updates.combination(np.arange(1.0, 6.0))

    found = result(own_aggregator("mine", combine, BUFFERS))
    order = [WEIGHTS.index(weight) if weight != 2 else -1 for weight in told["weights"]]
    two = [row for row in range(5) if WEIGHTS[row] == 2]
    expected = UPDATES.astype(np.float64) * np.array(FACTORS)[:, None]
    moves = VALUES.rows.astype(np.float64) - VALUES.present
    expected[:, 10:12], expected[:, 8990] = moves[:, :2], moves[:, 2]
    trained = expected.copy()
    trained[:, [10, 11, 8990]] = 0.0
    norms = np.sqrt((trained**2).sum(axis=1))
    for place in range(5):  # the two of weight 2 are told apart by their norms
        if order[place] < 0:
            order[place] = min(two, key=lambda row: abs(norms[row] - told["norms"][place]))
    assert sorted(order) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(told["norms"], norms[order], rtol=1e-12)
    rows = expected[order]
    np.testing.assert_allclose(told["products"], rows @ rows.T, rtol=1e-10)
    np.testing.assert_allclose(told["medians"], np.median(expected, axis=0), rtol=1e-12)
    delta = np.arange(1.0, 6.0) @ rows
    np.testing.assert_allclose(found.delta, delta, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.buffers, VALUES.present + delta[[10, 11, 8990]], rtol=1e-9)


def test_the_order_of_arrival_is_unseen() -> None:
    aggregator = own_aggregator(
        "mine", lambda updates: updates.combination(np.arange(5.0)), BUFFERS
    )
    first = result(aggregator).delta.tobytes()
    assert result(aggregator, [3, 1, 4, 0, 2]).delta.tobytes() == first


@pytest.mark.parametrize(
    ("combine", "says"),
    [
        (lambda updates: 1 / 0, r"aggregation\.aggregator failed: ZeroDivisionError: division by"),
        (lambda updates: sys.exit(3), r"aggregation\.aggregator failed: SystemExit: 3"),
        (lambda updates: np.zeros(4), r"an array of shape \(4,\); expected \(9000,\)"),
        (lambda updates: np.full(SIZE, np.inf), "made element 0 of the mean update inf"),
        (
            lambda updates: None,
            r"failed: TypeError: nothing \(None\) was returned; expected an arr",
        ),
        (
            lambda updates: updates.combination([1.0]),
            r"combination\(\) was given shares of shape \(1,\); expected \(\d+,\), one for each",
        ),
        (lambda updates: "mean", "failed: TypeError: an array of <U4"),
        (lambda updates: np.zeros(SIZE) * 1j, "failed: TypeError: an array of complex128"),
    ],
)
def test_what_is_no_change_of_the_model_is_refused(combine: Any, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        result(own_aggregator("mine", combine, ()))


def test_a_whole_aggregator_has_the_plans_name_and_no_buffers() -> None:
    """By its name gateways would take it for ours, and add updates for it."""
    assert own_aggregator("mine:mean", MEAN, ()).name == "mine:mean"
    with pytest.raises(ValueError, match=r"mine:mean.*the bundle's model has buffers"):
        own_aggregator("mine:mean", MEAN, BUFFERS)
