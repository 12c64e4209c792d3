"""The mean of rows: the whole updates' bits, whatever the order, and time by the rows that came."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import optimizers
from fleetlearn_coordinator.aggregation.aggregators import MEAN
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.row_mean import LEAST_ROWS, RowSums, row_mean
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, ArrayUpdate, Result, Update
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.sparse_rows import RowLayout, Rows, RowSegment, put_back, select
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st

N = 300
LAYOUT = RowLayout(
    N,
    (
        RowSegment(0, 3, 0),
        RowSegment(3, 3 + 4 * N, 4),
        RowSegment(3 + 4 * N, 5 + 4 * N, 0),
        RowSegment(5 + 4 * N, 5 + 5 * N, 1),
    ),
)
ALL, TOUCHED = row_mean(LAYOUT, touched=False), row_mean(LAYOUT, touched=True)


@dataclass
class RowsArray:
    """``RowsUpdate`` in memory."""

    rows: Rows
    selected: Vector

    def __iter__(self) -> Iterable[Vector]:
        yield self.selected

    def read(self, start: int, stop: int) -> Vector:
        return self.selected[start:stop]


@dataclass
class Sent:
    """One device's update."""

    rows: Rows
    selected: Vector
    weight: int
    factor: float

    @property
    def whole(self) -> Vector:
        vector = np.zeros(LAYOUT.size, np.float32)
        put_back(vector, LAYOUT, self.rows, self.selected)
        return vector

    @property
    def largest(self) -> float:
        return float(np.abs(self.selected).max())


def sent(seed: int) -> Sent:
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(N, random.integers(1, N), replace=False))
    scale = 10.0 ** random.integers(-8, 9)
    selected = (random.normal(size=LAYOUT.elements(len(rows))) * scale).astype(np.float32)
    return Sent(rows, selected, int(random.integers(1, 100)), 1 - float(random.random()) * 0.9)


def add(state: RowSums, update: Sent, *, whole: bool = False) -> None:
    content: Update = (
        ArrayUpdate(update.whole) if whole else RowsArray(update.rows, update.selected)
    )
    ALL.add(state, content, update.weight, update.largest, update.factor, NO_VALUES)


def spread(result: Result) -> np.ndarray:
    """The whole delta."""
    assert result.changed is not None
    vector = np.zeros(LAYOUT.size)
    put_back(vector, LAYOUT, result.changed.rows, result.delta)
    return vector


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 11), st.integers(0, 2**32))
def test_whole_updates_give_the_same_bits(order: list[int], cut: int, seed: int) -> None:
    """In any order, in two sums that are merged, saved and restored, and with devices that send
    whole tables among them."""
    updates = [sent(seed + number) for number in range(12)]
    expected = MEAN.init(LAYOUT.size)
    for update in updates:
        MEAN.add(
            expected,
            ArrayUpdate(update.whole),
            update.weight,
            update.largest,
            update.factor,
            NO_VALUES,
        )
    state, other = ALL.init(LAYOUT.size), ALL.init(LAYOUT.size)
    for place, number in enumerate(order):
        add(state if place < cut else other, updates[number], whole=number % 3 == 0)
    state = ALL.from_tensors({name: each.copy() for name, each in ALL.to_tensors(state).items()})
    ALL.merge(state, other)
    found = ALL.result(state, NO_VALUES.present)
    assert np.array_equal(spread(found), MEAN.result(expected, NO_VALUES.present).delta)
    assert np.array_equal(
        found.changed.rows, np.unique(np.concatenate([each.rows for each in updates]))
    )


def test_many_at_a_time() -> None:
    updates = [sent(number) for number in range(5)]
    one, many = ALL.init(LAYOUT.size), ALL.init(LAYOUT.size)
    for update in updates:
        add(one, update)
    ALL.add_many(
        many,
        [np.stack([each.whole for each in updates])],
        np.array([each.weight for each in updates]),
        np.array([each.largest for each in updates]),
        np.array([each.factor for each in updates]),
        NO_VALUES,
    )
    results = [ALL.result(state, NO_VALUES.present) for state in (one, many)]
    assert np.array_equal(*(spread(each) for each in results))


def test_what_a_row_is_divided_by() -> None:
    """By hand: rows 1 and 2 of one device (weight 3), 2 and 5 of another (weight 1)."""
    ones = LAYOUT.elements(2)
    state = ALL.init(LAYOUT.size)
    for rows, value, weight in (([1, 2], 4.0, 3), ([2, 5], 8.0, 1)):
        update = RowsArray(np.array(rows), np.full(ones, value, np.float32))
        ALL.add(state, update, weight, value, 1.0, NO_VALUES)
    of_all = spread(ALL.result(state, NO_VALUES.present))
    of_touched = spread(TOUCHED.result(state, NO_VALUES.present))
    assert of_all[0] == of_touched[0] == 5.0  # (3 * 4 + 8) / 4
    table = slice(3, 3 + 4 * N)
    assert of_all[table].reshape(N, 4)[[0, 1, 2, 5], 0].tolist() == [0.0, 3.0, 5.0, 2.0]
    assert of_touched[table].reshape(N, 4)[[0, 1, 2, 5], 0].tolist() == [0.0, 4.0, 5.0, 8.0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_optimizer_moves_rows_that_came_alone(name: str) -> None:
    """Two rounds: the second one's untouched rows keep their values and their moments."""
    optimizer = optimizers.make(name)
    model = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)
    states, models = [optimizer.init(model)], [model]
    for number in range(2):
        state = ALL.init(LAYOUT.size)
        rows = np.arange(10 * number, 10 * number + 20)
        update = RowsArray(rows, np.ones(LAYOUT.elements(20), np.float32))
        ALL.add(state, update, 1, 1.0, 1.0, NO_VALUES)
        made = next_model(ALL, state, optimizer, states[-1], models[-1])
        states.append(made.optimizer_state)
        models.append(made.model)
        assert made.change == pytest.approx(np.linalg.norm(models[-1] - models[-2]))
    others = np.setdiff1d(np.arange(N), np.arange(10, 30))  # the second round has 10 to 29
    in_tables = np.ones(LAYOUT.elements(len(others)), np.bool_)
    in_tables[[0, 1, 2]] = False
    in_tables[3 + 4 * len(others) : 5 + 4 * len(others)] = False
    pairs = [tuple(models[1:]), *((states[1][slot], states[2][slot]) for slot in states[1])]
    for before, after in pairs:
        kept = [select(each, LAYOUT, others)[in_tables] for each in (before, after)]
        assert np.array_equal(*kept)
        assert not np.array_equal(before, after)


def test_a_sum_is_as_large_as_the_rows_that_came() -> None:
    """Not as large as the tables: 10^6 rows of 64, of which two devices have 100."""
    layout = RowLayout(10**6, (RowSegment(0, 64 * 10**6, 64),))
    aggregator = row_mean(layout, touched=False)
    state = aggregator.init(layout.size)
    for device in range(2):
        rows = np.arange(100) * 7919 + device
        update = RowsArray(rows, np.ones(6400, np.float32))
        aggregator.add(state, update, 1, 1.0, 1.0, NO_VALUES)
    written = sum(each.nbytes for each in aggregator.to_tensors(state).values())
    assert written < 4 * 8 * 200 * 65
    assert LEAST_ROWS < 200
    assert len(aggregator.result(state, NO_VALUES.present).delta) == 200 * 64


def test_updates_that_are_none() -> None:
    state = ALL.init(LAYOUT.size)
    with pytest.raises(ProtocolError, match="0 to 299"):
        ALL.add(
            state,
            RowsArray(np.array([300]), np.ones(LAYOUT.elements(1), np.float32)),
            1,
            1.0,
            1.0,
            NO_VALUES,
        )
    with pytest.raises(ValueError, match="expected 10"):
        ALL.add(state, RowsArray(np.array([3]), np.ones(4, np.float32)), 1, 1.0, 1.0, NO_VALUES)
    with pytest.raises(ValueError, match="no updates"):
        ALL.result(state, NO_VALUES.present)
    with pytest.raises(ValueError, match="no sum of rows"):
        ALL.from_tensors({"size": np.zeros(1, np.int64)})
    saved = ALL.to_tensors(state) | {
        "rows": np.array([5, 5]),
        "rows.weights": np.ones(2, np.int64),
    }
    with pytest.raises(ValueError, match="twice"):
        ALL.from_tensors(saved)
