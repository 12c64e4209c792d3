"""What every aggregator promises to the store and to the server optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.aggregators import AGGREGATORS, Aggregator, make
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vector import Vector

SIZE, COUNT = 40, 9
RANDOM = np.random.default_rng(4)
UPDATES = (RANDOM.standard_normal((COUNT, SIZE)) * 10.0 ** RANDOM.integers(-6, 4, (COUNT, 1))).astype(np.float32)
WEIGHTS = RANDOM.integers(1, 500, COUNT)
LARGEST = np.abs(UPDATES).max(axis=1).astype(np.float64)


@pytest.fixture(params=sorted(AGGREGATORS))
def aggregator(request: pytest.FixtureRequest) -> Aggregator[Any]:
    return make(request.param)


class InThreeParts(ArrayUpdate):
    def __iter__(self) -> Iterator[Vector]:
        return iter(np.split(self.vector, [7, 30]))


def added(aggregator: Aggregator[Any], rows: list[int], state: Any = None) -> Any:
    """A state with these updates, in this order."""
    state = aggregator.init(SIZE) if state is None else state
    for row in rows:
        aggregator.add(state, InThreeParts(UPDATES[row]), int(WEIGHTS[row]), float(LARGEST[row]), 1.0)
    return state


def bits(aggregator: Aggregator[Any], state: Any) -> bytes:
    result = aggregator.result(state)
    assert (result.dtype, result.shape) == (np.dtype(np.float64), (SIZE,))
    return result.tobytes()


def test_its_result_is_the_same_in_every_order_and_division(aggregator: Aggregator[Any]) -> None:
    expected = bits(aggregator, added(aggregator, [*range(COUNT)]))
    assert bits(aggregator, added(aggregator, [*range(COUNT)][::-1])) == expected
    for parts in ([UPDATES], [UPDATES[:2], UPDATES[2:3], UPDATES[3:]]):
        together = aggregator.init(SIZE)
        aggregator.add_many(together, parts, WEIGHTS, LARGEST, None)
        assert bits(aggregator, together) == expected
    mixed = added(aggregator, [0, 1, 2])
    aggregator.add_many(mixed, [UPDATES[3:]], WEIGHTS[3:], LARGEST[3:], None)
    assert bits(aggregator, mixed) == expected


def test_its_state_goes_on_from_its_tensors(aggregator: Aggregator[Any]) -> None:
    """Flat, and of the same dtypes and sizes as those of a state without updates: so the store can read them."""
    if aggregator.keeps_updates:
        with pytest.raises(ValueError, match="added up by another aggregator"):
            aggregator.from_tensors(make("mean").to_tensors(make("mean").init(SIZE)))
        return
    half = added(aggregator, [4, 5, 6])
    tensors = aggregator.to_tensors(half)
    empty = aggregator.to_tensors(aggregator.init(SIZE))
    assert {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in empty.items()
    }
    assert all(each.ndim == 1 for each in tensors.values())
    restored = aggregator.from_tensors({name: each.copy() for name, each in tensors.items()})
    rest = [0, 1, 2, 3, 7, 8]
    assert bits(aggregator, added(aggregator, rest, restored)) == bits(aggregator, added(aggregator, rest, half))


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
        aggregator.result(aggregator.init(SIZE))


def test_the_mean_is_weighted() -> None:
    mean = make("mean")
    np.testing.assert_allclose(
        mean.result(added(mean, [*range(COUNT)])),
        np.average(UPDATES.astype(np.float64), axis=0, weights=WEIGHTS),
        rtol=1e-9,
        atol=1e-12,
    )


def test_an_unknown_aggregator_is_named() -> None:
    with pytest.raises(ValueError, match="there is no aggregator 'mode'; there are mean, median"):
        make("mode")
