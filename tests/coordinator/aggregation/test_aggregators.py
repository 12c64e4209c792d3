"""What every aggregator promises to the store and to the server optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.aggregators import AGGREGATORS, Aggregator, make
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate, Values
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vector import Vector

SIZE, COUNT = 40, 9
RANDOM = np.random.default_rng(4)
UPDATES = (
    RANDOM.standard_normal((COUNT, SIZE)) * 10.0 ** RANDOM.integers(-6, 4, (COUNT, 1))
).astype(np.float32)
WEIGHTS = RANDOM.integers(1, 500, COUNT)
LARGEST = np.abs(UPDATES).max(axis=1).astype(np.float64)


BUFFERS = (slice(3, 5), slice(30, 31))
VALUES = Values(
    RANDOM.random((COUNT, 3)).astype(np.float32), RANDOM.random(COUNT), np.ones(3, np.float32)
)


@pytest.fixture(params=sorted(AGGREGATORS))
def aggregator(request: pytest.FixtureRequest) -> Aggregator[Any]:
    return make(request.param, buffers=BUFFERS)


class InThreeParts(ArrayUpdate):
    def __iter__(self) -> Iterator[Vector]:
        return iter(np.split(self.vector, [7, 30]))


def added(aggregator: Aggregator[Any], rows: list[int], state: Any = None) -> Any:
    """A state with these updates, in this order."""
    state = aggregator.init(SIZE) if state is None else state
    for row in rows:
        numbers = int(WEIGHTS[row]), float(LARGEST[row]), 1.0
        aggregator.add(state, InThreeParts(UPDATES[row]), *numbers, VALUES.select(row))
    return state


def bits(aggregator: Aggregator[Any], state: Any) -> bytes:
    delta, buffers, _ = aggregator.result(state, VALUES.present)
    assert (delta.dtype, delta.shape) == (np.dtype(np.float64), (SIZE,))
    assert (buffers.dtype, buffers.shape) == (np.dtype(np.float64), (3,))
    return delta.tobytes() + buffers.tobytes()


def test_its_result_is_the_same_in_every_order_and_division(aggregator: Aggregator[Any]) -> None:
    expected = bits(aggregator, added(aggregator, [*range(COUNT)]))
    assert bits(aggregator, added(aggregator, [*range(COUNT)][::-1])) == expected
    for parts in ([UPDATES], [UPDATES[:2], UPDATES[2:3], UPDATES[3:]]):
        together = aggregator.init(SIZE)
        aggregator.add_many(together, parts, WEIGHTS, LARGEST, None, VALUES)
        assert bits(aggregator, together) == expected
    mixed = added(aggregator, [0, 1, 2])
    aggregator.add_many(
        mixed,
        [UPDATES[3:]],
        WEIGHTS[3:],
        LARGEST[3:],
        None,
        Values(VALUES.rows[3:], VALUES.factors[3:], VALUES.present),
    )
    assert bits(aggregator, mixed) == expected


def test_its_state_goes_on_from_its_tensors(aggregator: Aggregator[Any]) -> None:
    """They are flat: so the store can write and read them."""
    if aggregator.keeps_updates:
        with pytest.raises(ValueError, match="added up by another aggregator"):
            aggregator.from_tensors(make("mean").to_tensors(make("mean").init(SIZE)))
        return
    half = added(aggregator, [4, 5, 6])
    tensors = aggregator.to_tensors(half)
    assert all(each.ndim == 1 for each in tensors.values())
    restored = aggregator.from_tensors({name: each.copy() for name, each in tensors.items()})
    rest = [0, 1, 2, 3, 7, 8]
    assert bits(aggregator, added(aggregator, rest, restored)) == bits(
        aggregator, added(aggregator, rest, half)
    )


def test_it_refuses_one_update_and_one_of_many_alike(aggregator: Aggregator[Any]) -> None:
    largest = np.array([1.0, 1e30, 0.0, np.inf, np.nan, 2.0**27, 2.0**28])
    weights = np.array([1, 1, 0, 5, 5, 2, 2])
    passes = aggregator.passes_check(largest, weights)
    for one, weight, well in zip(largest.tolist(), weights.tolist(), passes.tolist(), strict=True):
        if well:
            aggregator.check(one, weight)
        else:
            with pytest.raises(ProtocolError):
                aggregator.check(one, weight)
    assert passes[0]
    assert not passes.all()


def test_nothing_has_no_result(aggregator: Aggregator[Any]) -> None:
    with pytest.raises(ValueError, match="no updates"):
        aggregator.result(aggregator.init(SIZE), VALUES.present)


def test_the_mean_is_weighted() -> None:
    mean = make("mean")
    np.testing.assert_allclose(
        mean.result(added(mean, [*range(COUNT)])).delta,
        np.average(UPDATES.astype(np.float64), axis=0, weights=WEIGHTS),
        rtol=1e-9,
        atol=1e-12,
    )


def test_an_unknown_aggregator_is_named() -> None:
    with pytest.raises(ValueError, match="there is no aggregator 'mode'; there are mean, median"):
        make("mode")


def buffers_of(
    aggregator: Aggregator[Any], rows: list[list[float]], factors: list[float], present: list[float]
) -> Any:
    """The next values of three buffers whose devices' updates are otherwise the same."""
    state, now = aggregator.init(SIZE), np.array(present, np.float32)
    for row, factor in zip(rows, factors, strict=True):
        values = Values(np.array([row], np.float32), np.array([factor]), now)
        aggregator.add(state, ArrayUpdate(np.ones(SIZE, np.float32)), 5, 1.0, 1.0, values)
    return aggregator.result(state, now).buffers


def test_every_rule_keeps_buffers_within_the_range_of_what_counts(
    aggregator: Aggregator[Any],
) -> None:
    """Small variances far from the present model's, some of them stale."""
    rows = (1e-6 + RANDOM.random((COUNT, 3)) * 1e-6).tolist()
    found = buffers_of(aggregator, rows, [1.0] * 5 + [0.5] * 4, [1.0, 2e-6, 1e10])
    for place, present in enumerate((1.0, 2e-6, 1e10)):
        assert min(row[place] for row in rows) * (1 - 1e-6) <= found[place] <= present


@pytest.mark.parametrize("name", sorted({*AGGREGATORS} - {"mean", "centred-clipping"}))
def test_a_robust_rule_is_not_moved_by_one_devices_buffers(name: str) -> None:
    """A negative variance, of a device whose update is as the others': it would make the model
    NaN."""
    honest = [[1.0 + row / 10, 2.0 + row / 10, 3.0] for row in range(8)]
    found = buffers_of(
        make(name, buffers=BUFFERS), [*honest, [-1e30, 1e30, -1e30]], [1.0] * 9, [1.0, 1.0, 1.0]
    )
    assert 1.0 <= found[0] <= 1.7 + 1e-6
    assert 2.0 <= found[1] <= 2.7 + 1e-6
    assert found[2] == pytest.approx(3.0, abs=0.05), (
        "the geometric median is moved a little, by no distance"
    )


def test_the_median_of_buffers_is_that_of_their_values() -> None:
    found = buffers_of(
        make("median", buffers=BUFFERS), [[1, 5, 9], [2, 6, 9], [4, 4, 9]], [1.0] * 3, [0, 5, 8]
    )
    assert found.tolist() == [2.0, 5.0, 9.0]
