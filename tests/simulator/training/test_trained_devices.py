"""What training came to, in columns: rows of them, parts of them, and those that come in bit by
bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.training import trained_devices
from fleetlearn_simulator.training.trained_devices import (
    KEPT_STATE,
    NO_DEVICES,
    PendingResults,
    TrainedDevice,
    TrainedDevices,
    concatenate,
    from_rows,
    from_table,
    read_all,
)
from hypothesis import given
from hypothesis import strategies as st
from virtual import bits, one_by_one

NAMES = ("accuracy", "error")
MORE = {KEPT_STATE: 2}
TYPES = {
    "updates": "f4",
    "examples": "i8",
    "steps": "i8",
    "seen": "i8",
    "complete": "?",
    "loss": "f8",
    "largest": "f8",
    "diverged": "?",
    "metrics.accuracy": "f8",
    "metrics.error": "f8",
    "vectors.kept_state": "f4",
}


def row_of(number: int, size: int = 3) -> TrainedDevice:
    """Each value of each row is another."""
    return TrainedDevice(
        update=np.arange(size, dtype=np.float32) + 10 * number,
        metrics={"accuracy": number / 7, "error": number / 3},
        examples=100 + number,
        steps=200 + number,
        seen=300 + number,
        complete=number % 2 == 0,
        loss=number / 11,
        largest=number / 13,
        diverged=number % 3 == 0,
        vectors={KEPT_STATE: np.arange(2, dtype=np.float32) - number},
    )


def of(*numbers: int) -> TrainedDevices:
    return from_rows([row_of(number) for number in numbers], 3, NAMES, MORE)


def arrays(found: TrainedDevices) -> dict[str, Any]:
    columns = {column.name: getattr(found, column.name) for column in fields(found)}
    for more in ("metrics", "vectors"):
        columns |= {f"{more}.{name}": values for name, values in columns.pop(more).items()}
    return columns


def same(rows: Sequence[TrainedDevice], others: Sequence[TrainedDevice]) -> bool:
    return [told(row) for row in rows] == [told(row) for row in others]


def told(row: TrainedDevice) -> dict[str, Any]:
    vectors = {name: values.tobytes() for name, values in row.vectors.items()}
    return row._asdict() | {"update": row.update.tobytes(), "vectors": vectors}


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_rows_become_columns_and_rows_again(count: int) -> None:
    rows = [row_of(number) for number in range(count)]
    found = from_rows(rows, 3, NAMES, MORE)
    assert len(found) == count
    assert found.updates.shape == (count, 3)
    assert list(found.metrics) == [*NAMES]
    dtypes = {name: np.dtype(kind) for name, kind in TYPES.items()}
    assert {name: values.dtype for name, values in arrays(found).items()} == dtypes
    assert {len(values) for values in arrays(found).values()} == {count}
    assert same(one_by_one(found), rows)
    for row in one_by_one(found):
        kinds = {name: type(value) for name, value in row._asdict().items()}
        assert kinds == {
            "update": np.ndarray,
            "metrics": dict,
            **dict.fromkeys(("examples", "steps", "seen"), int),
            **dict.fromkeys(("loss", "largest"), float),
            **dict.fromkeys(("complete", "diverged"), bool),
            "vectors": dict,
        }
        assert {type(value) for value in row.metrics.values()} == {float}


def test_a_metric_that_a_device_has_not() -> None:
    rows = [
        row_of(0)._replace(metrics={"error": 1.0}),
        row_of(1)._replace(metrics={}),
        row_of(2),
        row_of(3)._replace(loss=np.inf, metrics={"accuracy": np.inf, "error": 2.0, "unknown": 7.0}),
    ]
    found = from_rows(rows, 3, NAMES, MORE)
    assert np.isnan(found.metrics["accuracy"]).tolist() == [True, True, False, False]
    assert [row.metrics for row in one_by_one(found)] == [
        {"error": 1.0},
        {},
        row_of(2).metrics,
        {"error": 2.0},
    ]
    assert one_by_one(found)[3].loss == np.inf


def test_without_metrics() -> None:
    rows = [row_of(number)._replace(metrics={}, vectors={}) for number in range(3)]
    found = from_rows(rows, 3, [])
    assert found.metrics == {}
    assert same(one_by_one(found), rows)
    assert one_by_one(from_rows([], 3, [])) == []


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("names", [NAMES, ("error",), ()])
def test_a_table_is_all_but_the_updates(count: int, names: tuple[str, ...]) -> None:
    """Counts up to 2^53, and what is no number, come through it."""
    rows = [row_of(number) for number in range(count)]
    if rows:
        rows[-1] = rows[-1]._replace(
            loss=np.nan,
            largest=np.inf,
            metrics={},
            seen=2**53 - 1,
            steps=2**53 - 2,
            examples=2**53 - 3,
        )
    found = from_rows(rows, 3, names, MORE)
    again = from_table(found.updates, found.table(), names, found.vectors)
    assert bits(again) == bits(found)
    assert {name: values.dtype for name, values in arrays(again).items()} == {
        name: values.dtype for name, values in arrays(found).items()
    }
    assert list(again.metrics) == [*names]
    assert again.updates is found.updates


def test_none_is_of_no_devices() -> None:
    assert len(NO_DEVICES) == 0
    assert one_by_one(NO_DEVICES) == []
    assert NO_DEVICES.updates.shape == (0, 0)


def test_rows_that_are_taken() -> None:
    found = of(0, 1, 2, 3)
    for rows in (
        [0, 1, 2],
        [1, 2, 3],
        [3],
        [2, 0],
        [3, 2, 1, 0],
        [1, 1],
        range(2),
        range(2, 4),
        [],
    ):
        taken = found.select(rows)
        assert bits(taken) == bits(of(*rows))
        assert taken.updates.shape == (len(rows), 3)
        assert [values.dtype for values in arrays(taken).values()] == [
            values.dtype for values in arrays(found).values()
        ]
        # In memory of their own: to spoil them changes nothing here.
        taken.updates[:] = -1
        taken.largest[:] = -1
    assert bits(found) == bits(of(0, 1, 2, 3))


def test_all_rows_in_order_are_the_outcomes_themselves() -> None:
    """No update is copied where all are wanted."""
    found = of(0, 1, 2)
    assert found.select([0, 1, 2]) is found
    assert found.select(range(3)) is found
    assert found.select([0, 2, 1]) is not found
    assert NO_DEVICES.select([]) is NO_DEVICES


def test_a_copy_has_memory_of_its_own() -> None:
    found = of(4, 5)
    for values in arrays(found).values():
        values.flags.writeable = False
    copy = found.copy()
    assert bits(copy) == bits(found)
    for name, values in arrays(copy).items():
        assert not np.shares_memory(values, arrays(found)[name]), name
        values[:] = 0
    assert bits(found) == bits(of(4, 5))


@pytest.mark.parametrize(
    "parts",
    [[[0]], [[0, 1], [2]], [[2], [], [0, 1]], [[], []], [[], [3]]],
    ids=lambda parts: str(parts),
)
def test_parts_are_joined_in_their_order(parts: list[list[int]]) -> None:
    found = concatenate([of(*numbers) for numbers in parts])
    assert bits(found) == bits(of(*(number for numbers in parts for number in numbers)))
    assert list(found.metrics) == [*NAMES]


class Blocks:
    """Blocks of places that come in, in this order, when they are asked for; each with its
    numbers."""

    def __init__(self, *blocks: Sequence[int] | tuple[Sequence[int], Exception]) -> None:
        self.left: Iterator[Any] = iter(blocks)
        self.asked: list[int] = []

    def __call__(self, pending: PendingResults, place: int) -> None:
        self.asked.append(place)
        match next(self.left):
            case list(places), Exception() as error:
                pending.put(places, error)
            case places:
                pending.put(places, of(*places))


def test_what_comes_in_is_given_as_far_as_it_is_there() -> None:
    """Results come in the order asked for, from blocks in any order."""
    blocks = Blocks([4, 0], [3, 1, 6], [5, 2], [7])
    pending = PendingResults(blocks)
    assert bits(pending.read([0, 1, 2])) == bits(of(0))
    assert blocks.asked == [0]
    assert bits(pending.read([1, 4, 3, 2])) == bits(of(1, 4, 3))
    assert blocks.asked == [0, 1]
    assert bits(pending.read([2, 6, 5])) == bits(of(2, 6, 5))
    assert bits(pending.read([7])) == bits(of(7))
    assert blocks.asked == [0, 1, 2, 7]


def test_whoever_is_not_there_yet_is_waited_for() -> None:
    """The reader waits, however often other results come in before."""
    blocks = Blocks([1], [2], [0], [3])
    pending = PendingResults(blocks)
    assert bits(pending.read([0, 1, 2, 3])) == bits(of(0, 1, 2))
    assert blocks.asked == [0, 0, 0]


def test_a_block_that_is_wanted_as_it_came_is_not_copied() -> None:
    found = of(3, 1)
    pending = PendingResults(lambda pending, place: pending.put([3, 1], found))
    assert pending.read([3, 1]) is found


def test_each_place_is_there_once() -> None:
    blocks = Blocks([0, 1])
    pending = PendingResults(blocks)
    pending.read([0])
    with pytest.raises(StopIteration):  # asked for again: there is no more
        pending.read([0, 1])
    assert bits(pending.read([1])) == bits(of(1))


def test_an_exception_is_raised_for_the_first_alone() -> None:
    """Results before it are given first, and results after it once it was raised."""
    blocks = Blocks([0, 3], ([1, 2], KeyError("no such patient")), [4])
    pending = PendingResults(blocks)
    assert bits(pending.read([0])) == bits(of(0))
    with pytest.raises(KeyError, match="no such patient"):
        pending.read([1, 3])
    assert bits(pending.read([3, 2, 4])) == bits(of(3)), "what came to nothing ends those before it"
    with pytest.raises(KeyError, match="no such patient"):
        pending.read([2, 4])
    assert bits(pending.read([4])) == bits(of(4))
    assert blocks.asked == [0, 1, 4]


def test_values_of_a_list_come_one_by_one() -> None:
    def produce(pending: PendingResults, place: int) -> None:
        places = [4, 5] if place > 3 else [1, 0]
        pending.put(places, KeyError("x") if place > 3 else ["one", "nought"])

    pending = PendingResults(produce)
    assert [pending.value(0), pending.value(1)] == ["nought", "one"]
    for place in (5, 4):
        with pytest.raises(KeyError):
            pending.value(place)


def test_the_whole_is_all_parts_in_the_jobs_order() -> None:
    assert bits(read_all(PendingResults(Blocks([2, 0], [3], [4, 1, 5])).read, 6)) == bits(
        of(0, 1, 2, 3, 4, 5)
    )
    assert read_all(PendingResults(Blocks()).read, 0) is NO_DEVICES
    found = of(0, 1)
    assert read_all(found.select, 2) is found
    with pytest.raises(KeyError):
        read_all(PendingResults(Blocks([0], ([1], KeyError()))).read, 2)


@given(st.data(), st.integers(1, 12))
def test_every_way_of_asking_gives_each_row_once(data: st.DataObject, count: int) -> None:
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {0, count})
    blocks = [order[start:end] for start, end in pairwise(cuts)]
    pending = PendingResults(Blocks(*data.draw(st.permutations(blocks))))
    wanted = [*data.draw(st.permutations(range(count)))]
    given = []
    while wanted:
        ask = wanted[: data.draw(st.integers(1, len(wanted)))]
        found = pending.read(ask)
        assert 0 < len(found) <= len(ask)
        assert bits(found) == bits(of(*ask[: len(found)]))
        given += ask[: len(found)]
        wanted = wanted[len(found) :]
    assert sorted(given) == list(range(count))
    assert not pending.found


def test_large_updates_are_not_copied_to_be_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one block at a time."""
    monkeypatch.setattr(trained_devices, "LARGE_UPDATE", 3)
    blocks = [of(0), of(1), of(2, 3)]
    pending = PendingResults(lambda pending, place: None)
    for places, block in zip(([0], [1], [2, 3]), blocks, strict=True):
        pending.put(places, block)
    taken = [pending.read(range(start, 4)) for start in (0, 1, 2)]
    assert all(each is block for each, block in zip(taken, blocks, strict=True))
