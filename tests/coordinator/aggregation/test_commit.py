"""A round's end by hand: the mean, the server optimizer, the next model; and nothing else is
touched."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.commit import next_model, weights_of
from fleetlearn_protocol.errors import Code, FleetError

MEAN, MOMENTUM = aggregators.make("mean"), optimizers.make("momentum", lr=1.0, momentum=0.5)


def test_the_next_model_by_hand() -> None:
    """The mean of (4, 8) with weight 1 and (0, 0) with weight 3 is (1, 2); v is 0.5 * 4 + 1 and
    0.5 * 2 + 2."""
    aggregate = MEAN.init(2)
    for update, weight in (([4.0, 8.0], 1), ([0.0, 0.0], 3)):
        MEAN.add(aggregate, (np.array(update, np.float32),), weight, max(update))
    model, state = np.array([10.0, 20.0], np.float32), {"v": np.array([4.0, 2.0], np.float32)}
    for _ in range(2):  # the same again: it changed nothing that it was given
        made = next_model(MEAN, aggregate, MOMENTUM, state, model)
        assert made.model.tolist() == [13.0, 23.0]
        assert made.optimizer_state["v"].tolist() == [3.0, 3.0]
        assert made.change == pytest.approx(18**0.5)
    assert (model.tolist(), state["v"].tolist()) == ([10.0, 20.0], [4.0, 2.0])
    assert made.model.dtype == np.float32


def test_a_model_that_would_not_stay_finite_is_not_made() -> None:
    aggregate = MEAN.init(1)
    MEAN.add(aggregate, (np.array([2e8], np.float32),), 1, 2e8)
    far = optimizers.make("sgd")._replace(step=lambda delta, state, share: delta * 1e38)
    with pytest.raises(FleetError, match="Training has diverged") as raised:
        next_model(MEAN, aggregate, far, {}, np.zeros(1, np.float32))
    assert raised.value.code is Code.NOT_FINITE


def test_a_weight_is_the_examples_up_to_the_limit() -> None:
    assert weights_of(np.array([1, 5, 6]), 5).tolist() == [1, 5, 5]
