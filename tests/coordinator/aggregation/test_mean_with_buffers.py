"""Buffers are values: their mean beside that of the updates, in every way of adding."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, exact_mean, optimizers
from fleetlearn_coordinator.aggregation.commit import TaskBase, next_model
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, ArrayUpdate, Values
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.vector import gather

SIZE, COUNT = 2 * ALIGNMENT + 10, 6
BUFFERS = [slice(2, 5), slice(ALIGNMENT - 1, ALIGNMENT + 1), slice(SIZE - 2, SIZE)]
RANDOM = np.random.default_rng(3)
UPDATES = RANDOM.standard_normal((COUNT, SIZE)).astype(np.float32)
WEIGHTS = RANDOM.integers(1, 90, COUNT)
LARGEST = np.abs(UPDATES).max(axis=1).astype(np.float64)
FACTORS, SHARES = RANDOM.random(COUNT), RANDOM.random(COUNT)
ROWS = RANDOM.random((COUNT, 7)).astype(np.float32)
PRESENT = RANDOM.random(7).astype(np.float32)
VALUES = Values(ROWS, SHARES, PRESENT)
MEAN = aggregators.make("mean", buffers=BUFFERS)


def add(state: object, rows: range) -> None:
    for row in rows:
        numbers = int(WEIGHTS[row]), float(LARGEST[row]), float(FACTORS[row])
        MEAN.add(state, ArrayUpdate(UPDATES[row]), *numbers, VALUES.select(row))


def bits(state: object) -> tuple[bytes, bytes]:
    found = MEAN.result(state, PRESENT)
    return found.delta.tobytes(), found.buffers.tobytes()


def test_the_mean_by_numpy() -> None:
    state = MEAN.init(SIZE)
    add(state, range(COUNT))
    found = MEAN.result(state, PRESENT)
    expected = ((WEIGHTS * FACTORS)[:, None] * UPDATES.astype(np.float64)).sum(
        axis=0
    ) / WEIGHTS.sum()
    np.testing.assert_allclose(found.delta, expected, rtol=0, atol=1e-8)
    counted = PRESENT + SHARES[:, None] * (ROWS - PRESENT.astype(np.float64))
    np.testing.assert_allclose(
        found.buffers, np.average(counted, axis=0, weights=WEIGHTS), rtol=1e-8
    )


def test_one_by_one_together_and_over_a_restart_are_the_same_bits() -> None:
    one, many, restarted = MEAN.init(SIZE), MEAN.init(SIZE), MEAN.init(SIZE)
    add(one, range(COUNT))
    MEAN.add_many(many, [UPDATES[:1], UPDATES[1:]], WEIGHTS, LARGEST, FACTORS, VALUES)
    add(restarted, range(3, COUNT))
    tensors = {name: tensor.copy() for name, tensor in MEAN.to_tensors(restarted).items()}
    assert {each.ndim for each in tensors.values()} == {1}
    restarted = MEAN.from_tensors(tensors)
    add(restarted, range(3))
    assert len({bits(state) for state in (one, many, restarted)}) == 1


def test_the_sum_of_an_earlier_version_is_not_read_as_this_one() -> None:
    with pytest.raises(
        ValueError, match="a saved sum of a model with buffers has the sum of their values"
    ):
        MEAN.from_tensors(exact_mean.to_tensors(exact_mean.init(SIZE)))


def test_a_model_without_buffers_needs_no_second_sum() -> None:
    assert aggregators.make("mean", buffers=[]) is aggregators.MEAN


TABLE = (Parameter("w", (1,), 0), Parameter("mean", (1,), 1, buffer=True))
MODEL = np.array([1.0, 1.0], np.float32)


def committed(optimizer: optimizers.Optimizer, share: float = 1.0, **more: object) -> list[float]:
    """The model after a device moved the parameter by 2 and measured 3 where the model's buffer is
    1."""
    mean = aggregators.make("mean", buffers=optimizer.buffers)
    state, values = (
        mean.init(2),
        Values(np.array([[3.0]], np.float32), np.array([share]), MODEL[1:]),
    )
    mean.add(state, ArrayUpdate(np.array([2.0, 0.0], np.float32)), 5, 2.0, share, values)
    return next_model(mean, state, optimizer, optimizer.init(MODEL), MODEL, **more).model.tolist()  # type: ignore


def test_the_scale_leaves_the_buffers_alone() -> None:
    assert committed(optimizers.make("sgd", TABLE, lr=1.0), scale=4.0) == [9.0, 3.0]


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_the_servers_optimizer_leaves_the_buffers_alone(name: str) -> None:
    optimizer = optimizers.make(name, TABLE, **({} if name == "feddyn" else {"lr": 0.25}))
    assert committed(optimizer)[1] == 3.0
    assert committed(optimizer, share=0.5)[1] == 2.0


def test_fedasync_mixes_buffers_as_it_mixes_parameters() -> None:
    """alpha .5, s .5: x + .25 (x_i - x). Its task began at 0, so that x_i is 2 and 3."""
    base = TaskBase(np.array([0.0, 0.0], np.float32), 0.5, 0.5)
    assert committed(optimizers.make("sgd", TABLE, lr=0.5), share=0.5, base=base) == [1.25, 1.5]


def test_what_a_device_puts_into_the_buffers_places_is_not_used() -> None:
    state = MEAN.init(SIZE)
    MEAN.add_many(
        state, [np.full((COUNT, SIZE), 1e3, np.float32)], WEIGHTS, np.full(COUNT, 1e3), None, VALUES
    )
    sgd = optimizers.make("sgd")._replace(buffers=BUFFERS)
    made = next_model(MEAN, state, sgd, {}, np.zeros(SIZE, np.float32))
    assert 0 < gather(made.model, BUFFERS).min() <= gather(made.model, BUFFERS).max() < 1
