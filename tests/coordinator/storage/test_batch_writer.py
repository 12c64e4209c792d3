"""Batches that are written beside the event loop: their order, what waits for them, and errors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from fleetlearn_coordinator.storage.batch_writer import BatchWriter
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_protocol import Code

FULL = StoreUnavailableError(Code.BUSY, "the disk is full")


class Desk:
    """A writer whose batches the test lets through one by one, and the calls of its event loop."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.let = threading.Semaphore(0)
        self.writing = threading.Semaphore(0)
        self.written: list[list[object]] = []
        self.error: BaseException | None = None
        self.failed: list[BaseException] = []
        self.writer = BatchWriter(self._write, self.calls.put, self.failed.append)

    def _write(self, rows: Sequence[Row]) -> None:
        self.writing.release()
        assert self.let.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self.written.append([row.value for row in rows if isinstance(row, Metadata)])

    def submit(self, value: str) -> int:
        return self.writer.submit([Metadata("a", value)])

    def begins(self) -> None:
        assert self.writing.acquire(timeout=20)

    def call(self) -> None:
        """Do what the event loop is asked for next."""
        self.calls.get(timeout=20)()


@pytest.fixture
def desk() -> Iterator[Desk]:
    found = Desk()
    yield found
    found.let.release(100)
    found.writer.close()


def test_what_comes_meanwhile_is_the_next_batch(desk: Desk) -> None:
    assert desk.submit("1") == 1
    desk.begins()
    assert [desk.submit(value) for value in "234"] == [2, 3, 4]
    assert not desk.writer.is_safe
    desk.let.release()
    desk.call()
    assert (desk.written, desk.writer.safe) == ([["1"]], 1)
    desk.let.release()
    desk.call()
    assert (desk.written, desk.writer.safe) == ([["1"], ["2", "3", "4"]], 4)
    assert desk.writer.is_safe


def test_actions_wait_for_their_batches_in_order(desk: Desk) -> None:
    done: list[str] = []
    desk.writer.when_safe(lambda: done.append("at once"))
    assert done == ["at once"]
    desk.submit("1")
    desk.begins()
    desk.writer.when_safe(lambda: done.append("1"))
    desk.submit("2")
    desk.writer.when_safe(lambda: done.append("2"))
    desk.writer.when_safe(lambda: done.append("2 again"))
    desk.let.release()
    desk.call()
    assert done == ["at once", "1"]
    desk.let.release()
    desk.call()
    assert done == ["at once", "1", "2", "2 again"]


def test_an_action_that_comes_after_the_write_and_before_the_others_waits_for_its_turn(
    desk: Desk,
) -> None:
    done: list[str] = []
    desk.submit("1")
    desk.writer.when_safe(lambda: done.append("first"))
    desk.let.release()
    desk.writer.wait()
    desk.writer.when_safe(lambda: done.append("second"))
    assert done == []
    desk.call()
    assert done == ["first", "second"]


def test_nothing_is_written_after_an_error(desk: Desk) -> None:
    done: list[str] = []
    desk.error = FULL
    desk.submit("1")
    desk.begins()
    desk.submit("2")
    desk.writer.when_safe(lambda: done.append("never"))
    desk.let.release(3)
    desk.call()
    assert desk.failed == [FULL]
    for ask in (desk.writer.wait, lambda: desk.submit("3")):
        with pytest.raises(StoreUnavailableError, match="the disk is full"):
            ask()
    assert (desk.written, done) == ([], [])
    assert not desk.writer.is_safe


def test_what_waits_is_written_at_the_end(desk: Desk) -> None:
    for value in "123":
        desk.submit(value)
    desk.let.release(3)
    desk.writer.close()
    assert [value for batch in desk.written for value in batch] == ["1", "2", "3"]
    with suppress(queue.Empty):
        while True:
            desk.calls.get_nowait()()
    assert desk.writer.is_safe
