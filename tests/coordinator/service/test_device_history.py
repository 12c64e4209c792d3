"""What a run has seen of its devices: a row for each that did something, and nothing else."""

from __future__ import annotations

import asyncio

from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    PAUSED,
    STALLED,
    STOPPED,
    Ended,
    Revived,
)
from fleetlearn_coordinator.service.device_history import MOST_ERROR, DeviceHistory
from fleetlearn_coordinator.service.observers import (
    DeviceJoined,
    DeviceLeft,
    MessageRefused,
    RunEvent,
    TaskFailed,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import DeviceActivity
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import CheckIn, Failed
from peers import PlanMaker, fleet


def ended(device: str, cause: str) -> Ended:
    return Ended(device, "t1", 1, cause)


def rows_after(*events: RunEvent) -> dict[str, DeviceActivity]:
    history = DeviceHistory(lambda: 50.0)
    history(events)
    rows = history.take_rows()
    assert history.take_rows() == []
    return {row.device: row for row in rows}


def test_each_end_of_a_task_is_counted_once() -> None:
    rows = rows_after(
        ended("a", LOST), ended("a", LATE), Revived("a", "t1", 1),
        ended("b", STALLED), TaskFailed("b", "t2", "failed: bad-data", "KeyError: 3"),
        ended("b", "failed: bad-data"),
        ended("c", "surplus"), ended("c", "stale"),
        TaskFailed("c", "t3", STOPPED, "stops"), ended("c", STOPPED),
    )  # fmt: skip
    assert set(rows) == {"a", "b"}, "a task that was not needed, or that stopped, is no failure"
    assert rows["a"] == DeviceActivity("a", lost=1), "who was lost was not seen"
    assert (rows["b"].failed, rows["b"].done, rows["b"].lost) == (2, 0, 0)
    assert (rows["b"].error, rows["b"].error_at) == ("bad-data: KeyError: 3", 50.0)


def test_a_device_that_paused_did_not_fail_and_says_why_it_is_away() -> None:
    why = "on battery (12 %, needs 30 %)"
    row = rows_after(TaskFailed("a", "t1", PAUSED, why), ended("a", PAUSED))["a"]
    assert row == DeviceActivity("a", error=f"paused: {why}", error_at=50.0)


def test_what_a_device_says_is_kept_whole_up_to_a_bound() -> None:
    long = rows_after(TaskFailed("a", "t", "failed: diverged", "x" * 2000))["a"].error
    assert long is not None
    assert long.startswith("diverged: xxx")
    assert len(long) == MOST_ERROR
    assert rows_after(TaskFailed("a", "t", "failed: diverged", ""))["a"].error == "diverged"


def test_a_device_that_cannot_work_says_so_when_it_checks_in() -> None:
    row = rows_after(DeviceJoined(CheckIn(1, "a", 7, error="onnxruntime is not installed")))["a"]
    assert (row.error, row.error_at) == ("cannot-work: onnxruntime is not installed", 50.0)
    assert rows_after(DeviceJoined(CheckIn(1, "a", 7)))["a"].error is None


def test_a_rejected_update_has_the_reason_that_the_device_was_told() -> None:
    refused = MessageRefused("a", Code.NORM_TOO_LARGE, "the norm is 9, 5 is the most")
    row = rows_after(refused, ended("a", "rejected: norm-too-large"))["a"]
    assert row.error == "rejected: norm-too-large: the norm is 9, 5 is the most"
    assert row.failed == 1
    assert rows_after(refused) == {}, "a message that was refused is no task that failed"


def test_a_connected_device_stays_so_until_it_leaves() -> None:
    history = DeviceHistory(lambda: 7.0)
    history([DeviceJoined(CheckIn(1, "a", 10, runtime="onnx 1", tags=("roof",), tier="pi"))])
    (row,) = history.take_rows()
    assert row == DeviceActivity("a", 7.0, 7.0, "onnx 1", "", "pi", ("roof",))
    history([ended("a", LATE)])
    assert [row.connected for row in history.take_rows()] == [7.0]
    history([DeviceLeft("a"), DeviceLeft("a"), DeviceLeft("b")])
    assert history.take_rows() == [DeviceActivity("a", 7.0, None)]


def test_a_run_writes_what_it_saw(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1, round__minimum=1)

    def read() -> list[DeviceActivity]:
        with find_storage(plan.data_dir).read_ledger() as reader:
            return reader.device_activity()

    async def test() -> None:
        async with asyncio.timeout(30), fleet(plan) as (_, join):
            peer = await join("roof-7")
            task = await peer.task()
            while not any(row.connected for row in read()):  # written once a second
                await asyncio.sleep(0.01)
            await peer.send(Failed(task.task, "diverged", "loss is <nan>"))
            await peer.connection.close()
            while not any(row.failed and row.connected is None for row in read()):
                await asyncio.sleep(0.01)

    asyncio.run(test())
    (row,) = read()
    assert (row.device, row.failed, row.done, row.lost) == ("roof-7", 1, 0, 0)
    assert row.error == "diverged: loss is <nan>"
