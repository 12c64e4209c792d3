"""What each store must do, as the docstrings of the protocols say it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.storage.blobs import PARAMETERS, Blobs
from fleetlearn_coordinator.storage.errors import DuplicateRowError, StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    Ledger,
    Metadata,
    RoundClosed,
    RoundOpened,
    TaskGiven,
)
from fleetlearn_coordinator.storage.run_storage import RunStorage
from fleetlearn_protocol import Code
from fleetlearn_protocol.vector import digest


@pytest.fixture
def storage(place: Path) -> RunStorage:
    return find_storage(place)


@pytest.fixture
def ledger(storage: RunStorage) -> Iterator[Ledger]:
    with storage.lock(), closing(storage.open_ledger(power=False, any_thread=False)) as found:
        found.create({"run": "r"})
        yield found


@pytest.fixture
def blobs(storage: RunStorage) -> Iterator[Blobs]:
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=2)) as found:
        found.open_aggregator()
        yield found


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until this is so."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_coordinator_holds_the_lock(storage: RunStorage, place: Path) -> None:
    assert not storage.is_locked()
    with storage.lock():
        assert find_storage(place).is_locked()
        with pytest.raises(StoreError) as caught, find_storage(place).lock():
            pass
        assert caught.value.code is Code.BUSY
        assert storage.is_locked(), "the one who was refused has not freed it"
    assert not storage.is_locked()
    with storage.lock():
        pass


def test_there_is_nothing_to_read_or_to_ask_before_the_first_start(storage: RunStorage) -> None:
    with pytest.raises(StoreError) as caught, storage.read_ledger():
        pass
    assert caught.value.code is Code.UNKNOWN_CONTENT
    assert storage.requests.evaluation() is None
    assert storage.requests.roll_back() is None
    assert storage.models.model_versions() == []
    assert storage.models.model_size(0) is None
    assert storage.held_out.read_all() == {}


def test_a_ledger_is_made_once(storage: RunStorage) -> None:
    with storage.lock(), closing(storage.open_ledger(power=False, any_thread=False)) as first:
        assert first.is_new
        first.create({"run": "r", "bundle": "b"})
        assert not first.is_new
    with storage.lock(), closing(storage.open_ledger(power=True, any_thread=True)) as second:
        assert not second.is_new
        assert (second.get("run"), second.get("bundle"), second.get("x")) == ("r", "b", None)


def test_a_batch_counts_as_a_whole_or_not_at_all(ledger: Ledger, storage: RunStorage) -> None:
    with pytest.raises(DuplicateRowError):
        ledger.write([Metadata("a", 1), RoundOpened(1, 0.0), RoundOpened(1, 0.0)])
    assert ledger.get("a") is None
    assert ledger.unfinished(None).round is None
    with storage.read_ledger() as reader:
        assert reader.metadata() == {"run": "r"}
    ledger.write([Metadata("a", 1), RoundOpened(1, 0.0), TaskGiven("t", 1, "d", 0)])
    for rows in ([RoundOpened(1, 0.0)], [TaskGiven("t", 1, "e", 0)]):
        with pytest.raises(DuplicateRowError):
            ledger.write([Metadata("a", 2), *rows])
    assert ledger.get("a") == 1


def test_a_reader_sees_one_moment(ledger: Ledger, storage: RunStorage) -> None:
    ledger.write([RoundOpened(1, 0.0)])
    with storage.read_ledger() as before:
        assert before.open_round() == 1
        ledger.write([RoundClosed(1, "committed", {"reports": 2}, 5.0), Metadata("a", 1)])
        assert (before.open_round(), before.metadata(), before.closed_rounds(0)) == (
            1,
            before.metadata(),
            [],
        )
        assert "a" not in before.metadata()
        with storage.read_ledger() as after:
            assert after.open_round() is None
            assert after.closed_rounds(1) == [(1, "committed", 0.0, 5.0, {"reports": 2})]
            assert after.closed_rounds(2) == []


def test_what_is_read_is_the_reader_s(ledger: Ledger) -> None:
    summary = {"metrics": {"loss": 1.0}}
    ledger.write([RoundOpened(1, 0.0), RoundClosed(1, "committed", summary, 1.0)])
    summary["metrics"]["loss"] = 2.0
    found = ledger.last_committed() or {}
    assert found["metrics"]["loss"] == 1.0
    found["metrics"]["loss"] = 3.0
    assert ledger.last_committed() == {"metrics": {"loss": 1.0}}


def test_requests_are_there_until_they_are_removed(
    ledger: Ledger, storage: RunStorage, place: Path
) -> None:
    requests, others = storage.requests, find_storage(place).requests
    others.ask_for_evaluation()
    first = others.evaluation()
    assert first is not None
    others.ask_for_evaluation()
    second = others.evaluation()
    assert second not in (None, first), "the last one counts, under its own name"
    eventually(lambda: requests.evaluation() == second)
    others.ask_for_roll_back(3, "ada")
    others.ask_for_roll_back(4, "an administrator")
    found = others.roll_back()
    assert found is not None
    assert (found.version, found.who) == (4, "an administrator")
    eventually(lambda: requests.roll_back() == found)
    for _ in range(2):
        requests.remove_evaluation()
        requests.remove_roll_back()
    assert (others.evaluation(), others.roll_back()) == (None, None)


def test_a_result_never_changes(ledger: Ledger, storage: RunStorage, place: Path) -> None:
    storage.held_out.write(7, {"examples": 1, "metrics": {"loss": 0.5}})
    find_storage(place).held_out.write(7, {"examples": 2, "metrics": {}})
    storage.held_out.write(3, {"examples": 3, "metrics": {}})
    assert storage.held_out.read(7) == {"examples": 1, "metrics": {"loss": 0.5}}
    assert storage.held_out.read(4) is None
    assert [*find_storage(place).held_out.read_all()] == [3, 7]


def test_spool_files_are_taken_and_freed(blobs: Blobs) -> None:
    first, second = blobs.take_spool_file(), blobs.take_spool_file()
    assert first != second
    assert not blobs.has_room()
    blobs.write_spool_file(first, 4, b"4567")
    blobs.write_spool_file(second, 0, b"other")
    blobs.write_spool_file(first, 0, b"0123")
    blobs.settle_spool_files({first: 8})
    parts = [bytes(part) for part in blobs.read_spool_file(first, 6, 1, part_bytes=4)]
    assert parts == [b"1234", b"56"]
    with pytest.raises(StoreError) as caught:
        [*blobs.read_spool_file(first, 9)]
    assert caught.value.code is Code.WRONG_LENGTH
    blobs.free_spool_file(second)
    assert blobs.has_room()
    assert blobs.take_spool_file() == second


def test_spool_files_are_found_again(storage: RunStorage) -> None:
    with storage.lock(), closing(storage.open_blobs(power=True, spool_files=3)) as before:
        numbers = [before.take_spool_file() for _ in range(2)]
        before.write_spool_file(numbers[1], 0, b"update")
        before.settle_spool_files({numbers[1]: 6})
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=3)) as blobs:
        blobs.reserve_spool_file(numbers[1])
        others = [blobs.take_spool_file() for _ in range(2)]
        assert numbers[1] not in others
        assert [bytes(part) for part in blobs.read_spool_file(numbers[1], 6)] == [b"update"]


def test_checkpoints_are_found_again_until_their_spool_file_is_free(storage: RunStorage) -> None:
    with storage.lock(), closing(storage.open_blobs(power=True, spool_files=3)) as before:
        first, second = before.take_spool_file(), before.take_spool_file()
        for number, content in ((first, b"0"), (second, b"1"), (first, b"2")):
            before.write_spool_file(number, 0, b"update")
            before.write_checkpoint(number, content)
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=3)) as blobs:
        assert blobs.checkpoints() == {first: b"2", second: b"1"}
        blobs.reserve_spool_file(first)
        blobs.free_spool_file(first)
        assert blobs.checkpoints() == {second: b"1"}
        blobs.drop_checkpoint(second)
        blobs.drop_checkpoint(first)
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=3)) as blobs:
        assert blobs.checkpoints() == {}


def test_the_aggregator_s_state_is_kept_in_turns(storage: RunStorage) -> None:
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=1)) as first:
        assert not first.has_aggregator()
        first.open_aggregator()
        sums = {"high": np.arange(3.0), "count": np.array([7])}
        crc32 = first.save_aggregator(1, sums)
        first.save_aggregator(0, {"high": np.zeros(3), "count": np.array([8])})
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=1)) as blobs:
        assert blobs.has_aggregator()
        blobs.open_aggregator()
        found = blobs.load_aggregator(1, sums, crc32)
        assert [*found] == ["high", "count"]
        np.testing.assert_array_equal(found["high"], sums["high"])
        assert (found["count"].dtype, found["count"].tolist()) == (np.dtype(int), [7])
        with pytest.raises(StoreError, match="was changed after it was written"):
            blobs.load_aggregator(1, sums, crc32 ^ 1)
        with pytest.raises(StoreError, match="shorter than the sum of a round"):
            blobs.load_aggregator(1, {"high": np.zeros(300)}, crc32)


def test_a_model_is_read_until_it_is_dropped(blobs: Blobs, storage: RunStorage) -> None:
    vector = np.arange(1000, dtype=np.float32)
    for version in (3, 1, 20):
        blobs.save_model(version, {PARAMETERS: vector * version, "state.m": vector})
    outside = storage.models
    assert outside.model_versions() == blobs.model_versions() == [1, 3, 20]
    assert (outside.model_size(3) or 0) >= 8000
    tensors = outside.load_model(3, digest(vector * 3))
    np.testing.assert_array_equal(tensors[PARAMETERS], vector * 3)
    np.testing.assert_array_equal(tensors["state.m"], vector)
    tensors["state.m"][:] = 0
    assert outside.load_model(3, digest(vector * 3))["state.m"][5] == 5
    with pytest.raises(StoreError, match="was changed after it was committed"):
        outside.load_model(3, digest(vector))
    opened = outside.open_tensor(3), outside.open_tensor(3, "state.m")
    with pytest.raises(StoreError, match=r"has no tensor state\.v"):
        outside.open_tensor(3, "state.v")
    blobs.drop_models([3, 4])
    assert outside.model_versions() == [1, 20]
    assert outside.model_size(3) is None
    assert [each.size for each in opened] == [4000, 4000]
    assert opened[0].read(8, 12) == (vector * 3)[2:5].tobytes()
    assert opened[1].read(3996, 100) == vector[-1:].tobytes(), "no more than there is"
    for gone in (lambda: outside.load_model(3, ""), lambda: outside.open_tensor(3)):
        with pytest.raises(StoreError) as caught:
            gone()
        assert caught.value.code is Code.UNKNOWN_CONTENT


def test_a_model_that_is_there_is_replaced(blobs: Blobs) -> None:
    """An earlier process died before the model's rows counted."""
    vector = np.ones(4, np.float32)
    for value in (vector, vector * 2):
        blobs.save_model(1, {PARAMETERS: value})
    assert blobs.load_model(1, digest(vector * 2))[PARAMETERS].tolist() == [2.0] * 4
