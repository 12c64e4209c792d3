"""What ``fleetlearn-device info`` says of a device, and when the file is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_device.driver.status import StatusFile
from fleetlearn_device.session.history import History
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Idle
from fleetlearn_device.storage.status import FILE, in_lines, read_status
from fleetlearn_protocol.messages import Part, Report, Welcome, encode

REPORT = Report("t1", 3, (Part("update", "float32", 8, 12),), 7, 3, 2.0, True, 0.5)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def lines(folder: Path, running: bool = True) -> dict[str, str]:
    status = read_status(folder)
    assert status is not None
    return dict(in_lines(status, running))


def at(second: int) -> str:
    """A time as ``info`` shows it; in UTC, which ``utc`` sets."""
    return f"2001-09-09 01:46:{40 + second}+00:00"


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_the_file_says_what_the_device_does(tmp_path: Path) -> None:
    session = Session("dev", 7, held=REPORT)
    status = StatusFile(tmp_path, session, Clock())
    status.update("not connected (no network)", 1e9 + 9.0)
    assert lines(tmp_path) == {
        "process": f"runs since {at(1)}",
        "link": f"not connected (no network), since {at(2)}; it connects again at {at(9)}",
        "task": "none was given to this device yet",
        "tasks": "0 accepted, 0 questions answered, 0 not counted, 0 failed",
    }
    status.update("connected to ws://x (127.0.0.1 port 1)")
    session.connected(0.0)
    session.received(encode(Welcome("c", 10.0, 8)), 0.0)
    session.work = Idle()
    session.history = History(
        accepted=2,
        failed=1,
        task="t2",
        what="round 4",
        end="failed: KeyError: 3",
        reason="task t2 failed: KeyError: 3",
    )
    status.update()
    shown = lines(tmp_path)
    assert (
        shown["link"]
        == f"connected to ws://x (127.0.0.1 port 1), since {at(3)}, waiting for a task"
    )
    assert shown["task"] == f"t2 (round 4) failed: KeyError: 3, since {at(4)}"
    assert shown["tasks"] == "2 accepted, 0 questions answered, 0 not counted, 1 failed"
    assert shown["reason"] == f"task t2 failed: KeyError: 3 ({at(4)})"


def test_a_dead_device_is_told_from_one_that_ended(tmp_path: Path) -> None:
    session = Session("dev", 7, held=REPORT)
    session.history = History(task="t1", what="round 3")
    status = StatusFile(tmp_path, session, Clock())
    status.update("not connected yet")
    shown = lines(tmp_path, running=False)
    assert shown["process"] == (
        f"does not run, and did not end in order: it was killed, or the power failed, after {at(2)}"
    )
    assert shown["task"].startswith(
        "t1 (round 3) when the process ended: is trained, and its update waits to be sent"
    )
    status.update("not connected", end="the training is finished")
    assert (
        lines(tmp_path, running=False)["process"] == f"ended at {at(3)}: the training is finished"
    )


def test_the_file_is_written_only_if_something_changed(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, Session("dev", 7), Clock())
    status.update("not connected yet")
    (tmp_path / FILE).unlink()
    for _ in range(3):
        status.update()
        status.update("not connected yet")
    assert not (tmp_path / FILE).exists()
    status.update("connected to ws://x (127.0.0.1 port 1)")
    assert (tmp_path / FILE).exists()


def test_the_counts_go_on_after_a_restart_and_a_damaged_file_begins_at_nothing(
    tmp_path: Path,
) -> None:
    first = Session("dev", 7)
    status = StatusFile(tmp_path, first, Clock())
    first.history = History(accepted=5, task="t9", end="its update was accepted")
    status.update("not connected yet")
    again = Session("dev", 7)
    StatusFile(tmp_path, again)
    assert again.history == first.history
    (tmp_path / FILE).write_bytes(b"{")
    begun = Session("dev", 7)
    StatusFile(tmp_path, begun)
    assert begun.history == History()


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()
    status = StatusFile(tmp_path, Session("dev", 7), Clock())
    with caplog.at_level(logging.WARNING, "fleetlearn.device"):
        status.update("not connected yet")
        status.update("connected to ws://x (127.0.0.1 port 1)")
    assert len(caplog.messages) == 1
    assert "the status for `fleetlearn-device info` cannot be written" in caplog.text
