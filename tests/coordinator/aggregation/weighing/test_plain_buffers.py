"""Buffers take the plain mean beside trained parameters that have factors, in every way of adding."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, exact_mean, optimizers
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, ArrayUpdate
from fleetlearn_protocol.manifest import Parameter

SIZE, COUNT = 2 * ALIGNMENT + 10, 6
BUFFERS = [slice(2, 5), slice(ALIGNMENT - 1, ALIGNMENT + 1), slice(SIZE - 2, SIZE)]
RANDOM = np.random.default_rng(3)
UPDATES = RANDOM.standard_normal((COUNT, SIZE)).astype(np.float32)
WEIGHTS = RANDOM.integers(1, 90, COUNT)
LARGEST = np.abs(UPDATES).max(axis=1).astype(np.float64)
FACTORS, TRAINED = RANDOM.random(COUNT), RANDOM.random(COUNT)
MEAN = aggregators.mean_with_plain_buffers(BUFFERS)


def add(state: object, rows: range) -> None:
    for row in rows:
        numbers = int(WEIGHTS[row]), float(LARGEST[row]), float(FACTORS[row]), float(TRAINED[row])
        MEAN.add(state, ArrayUpdate(UPDATES[row]), *numbers)


def test_the_mean_by_numpy() -> None:
    state = MEAN.init(SIZE)
    add(state, range(COUNT))
    updates, found = UPDATES.astype(np.float64), MEAN.result(state)
    expected = ((WEIGHTS * FACTORS * TRAINED)[:, None] * updates).sum(axis=0) / WEIGHTS.sum()
    for place in BUFFERS:
        expected[place] = ((WEIGHTS * FACTORS)[:, None] * updates[:, place]).sum(axis=0) / WEIGHTS.sum()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)


def test_one_by_one_together_and_over_a_restart_are_the_same_bits() -> None:
    one, many, restarted = MEAN.init(SIZE), MEAN.init(SIZE), MEAN.init(SIZE)
    add(one, range(COUNT))
    MEAN.add_many(many, [UPDATES[:1], UPDATES[1:]], WEIGHTS, LARGEST, FACTORS, TRAINED)
    add(restarted, range(3, COUNT))
    tensors = {name: tensor.copy() for name, tensor in MEAN.to_tensors(restarted).items()}
    empty = MEAN.to_tensors(MEAN.init(SIZE))
    assert {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in empty.items()
    }
    restarted = MEAN.from_tensors(tensors)
    add(restarted, range(3))
    assert len({MEAN.result(state).tobytes() for state in (one, many, restarted)}) == 1


def test_without_factors_it_is_the_mean() -> None:
    plain, state = exact_mean.init(SIZE), MEAN.init(SIZE)
    exact_mean.add_many(plain, [UPDATES], WEIGHTS, LARGEST)
    MEAN.add_many(state, [UPDATES], WEIGHTS, LARGEST, None, None)
    assert MEAN.result(state).tobytes() == exact_mean.mean(plain).tobytes()


def test_the_sum_of_the_plain_mean_is_not_read_as_this_one() -> None:
    """A restart with another plan: the open round's saved sum is of another kind."""
    with pytest.raises(ValueError, match="a saved sum has the flat arrays"):
        MEAN.from_tensors(exact_mean.to_tensors(exact_mean.init(SIZE)))


def test_a_model_without_buffers_needs_no_second_sum() -> None:
    assert aggregators.mean_with_plain_buffers([]) is aggregators.MEAN


def test_the_scale_leaves_the_buffers_alone() -> None:
    """The model's buffer is 1, the devices' 3: their mean is 3, whatever the scale."""
    table = (Parameter("w", (1,), 0), Parameter("mean", (1,), 1, buffer=True))
    sgd, model = optimizers.make("sgd", table, lr=1.0), np.array([1.0, 1.0], np.float32)
    mean = aggregators.mean_with_plain_buffers(sgd.buffers)
    state = mean.init(2)
    mean.add(state, ArrayUpdate(np.array([2.0, 2.0], np.float32)), 5, 2.0, 1.0, 0.25)
    assert next_model(mean, state, sgd, {}, model, scale=8.0).model.tolist() == [5.0, 3.0]
