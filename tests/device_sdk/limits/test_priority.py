"""The priority of a real thread, read back from the kernel."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading
from pathlib import Path

import pytest
from fleetlearn_device.limits import priority
from fleetlearn_device.limits.priority import IO_PRIORITIES, IOPRIO_SET, lower_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads of Linux")
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def nice_of_thread(native_id: int) -> int:
    fields = Path(f"/proc/self/task/{native_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[16])


def io_priority() -> int:
    return int(ctypes.CDLL(None).syscall(IOPRIO_GET[platform.machine()], 1, 0))


def in_thread(nice: int | None, io: priority.IoClass | None) -> dict[str, int]:
    """What a thread and a thread that it begins have after ``lower_priority``."""
    found: dict[str, int] = {}

    def look(name: str) -> None:
        found[f"{name} nice"] = nice_of_thread(threading.get_native_id())
        found[f"{name} io"] = io_priority()

    def work() -> None:
        lower_priority(nice, io)
        look("own")
        child = threading.Thread(target=look, args=("child",))
        child.start()
        child.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(platform.machine() not in IOPRIO_GET, reason="the test reads it back")
@pytest.mark.parametrize("io", ["low", "idle"])
def test_the_training_s_thread_and_those_it_begins_have_the_priority(io: priority.IoClass) -> None:
    before = nice_of_thread(threading.get_native_id())
    wanted = min(before + 3, 19)
    found = in_thread(wanted, io)
    assert found == {
        "own nice": wanted, "child nice": wanted,
        "own io": IO_PRIORITIES[io], "child io": IO_PRIORITIES[io],
    }  # fmt: skip
    assert nice_of_thread(threading.get_native_id()) == before, "the other threads keep theirs"


def test_a_priority_is_never_raised() -> None:
    before = nice_of_thread(threading.get_native_id())
    if before == 0:
        pytest.skip("there is no lower value to ask for")
    assert in_thread(0, None)["own nice"] == before


def test_where_the_system_refuses_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(priority.platform, "machine", lambda: "vax")
    with caplog.at_level(logging.WARNING):
        lower_priority(None, "idle")
    assert "the number of ioprio_set is not known for vax" in caplog.text


def test_the_numbers_are_the_kernel_s() -> None:
    assert IOPRIO_SET["x86_64"] == 251
    assert IOPRIO_SET["aarch64"] == 30
    assert os.PRIO_PROCESS == 0


def test_a_system_that_refuses_a_priority_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(priority.os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING):
        lower_priority(19, None)
    assert "the training's priority stays as it is: Operation not permitted" in caplog.text


def test_a_system_without_nice_values_trains_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Windows: an exception in the thread's beginning would end the device."""
    monkeypatch.delattr(os, "getpriority")
    monkeypatch.delattr(os, "setpriority")
    caplog.set_level(logging.WARNING, "fleetlearn.device")
    lower_priority(10, None)
    assert "this system has no nice values" in caplog.text
