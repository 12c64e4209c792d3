"""What ``fleetlearn-device status`` says of a device, and when the file is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_device.commands.status_view import StatusView, lines_of, view_of
from fleetlearn_device.driver.status import StatusFile
from fleetlearn_device.session.history import History
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Holding, Idle
from fleetlearn_device.storage.state_directory import Summary
from fleetlearn_device.storage.status import FILE, PAUSES, read_status
from fleetlearn_protocol.messages import Part, Report, Welcome, encode

REPORT = Report("t1", 3, (Part("update", "float32", 8, 12),), 7, 3, 2.0, True, 0.5)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def lines(folder: Path, running: bool = True, checkpoint: bool = False) -> dict[str, str]:
    about = "process", "link", "task", "tasks", "reason"
    rows = dict(lines_of(view(folder, running, checkpoint), 1e9 + 60.0))
    return {name: rows[name] for name in about if name in rows}


def view(folder: Path, running: bool = True, checkpoint: bool = False) -> StatusView:
    """What ``status --json`` prints of a state directory."""
    status = read_status(folder)
    return view_of(Summary("dev", [], None, [], [], (), running, status, checkpoint))


def at(second: int) -> str:
    """A time as ``status`` shows it; in UTC, which ``utc`` sets."""
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
        "process": f"runs since {at(1)} (59 s)",
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
    assert shown["link"] == f"connected to ws://x (127.0.0.1 port 1), since {at(3)}"
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
    kept = "; the next start goes on from its checkpoint"
    assert not shown["task"].endswith(kept)
    assert lines(tmp_path, running=False, checkpoint=True)["task"].endswith(kept)
    assert not lines(tmp_path, running=True, checkpoint=True)["task"].endswith(kept)
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
    assert "the status for `fleetlearn-device status` cannot be written" in caplog.text


def test_it_says_why_nothing_happens_in_a_sentence(tmp_path: Path) -> None:
    def now(running: bool = True) -> tuple[str, str]:
        found = view(tmp_path, running)
        return found.does, found.why

    assert now(running=False) == (
        "stopped", "it does not run, and never ran with this state directory"
    )  # fmt: skip
    assert now() == ("offline", "it has just begun")
    session = Session("dev", 7)
    status = StatusFile(tmp_path, session, Clock(), coordinator="ws://x")
    status.update("not connected (no network)", 1e9 + 9.0)
    assert now() == ("offline", "not connected (no network)")
    session.connected(0.0)
    status.update("connected to ws://x")
    assert now() == ("waiting", "waiting: the coordinator has not answered the check-in yet")
    session.received(encode(Welcome("c", 10.0, 8, "tags [roof]; this device has none")), 0.0)
    status.update()
    assert now() == ("ineligible", "not eligible: tags [roof]; this device has none")
    session.ineligible, session.waits = "", "round 12 has its devices"
    status.update()
    text = f"waiting: round 12 has its devices (so said the coordinator at {at(3)})"
    assert now() == ("waiting", text)
    session.waits = ""
    status.update()
    text = f"waiting: the coordinator has not chosen it for a round since {at(3)}"
    assert now() == ("waiting", text)
    session.begin_pause(Pause(("battery", "hours"), "on battery (12 %, needs 30 %)"))
    status.update()
    assert now() == ("paused", f"paused: on battery (12 %, needs 30 %), since {at(7)}")
    assert view(tmp_path).paused_by in PAUSES
    session.history = History(task="t2", what="round 4", round=4)
    session.work = Holding(REPORT, reported_again=False)
    status.update()
    text = "working: task t2 (round 4) is trained, and its update waits to be sent"
    assert now() == ("working", text)
    assert view(tmp_path).round == 4
    assert now(running=False) == (
        "stopped", "it does not run: it was killed, or the power failed"
    )  # fmt: skip
    status.update("not connected", end="it was stopped")
    assert now(running=False) == ("stopped", "it does not run: it was stopped")
    assert view(tmp_path, running=False).coordinator == "ws://x"


def test_bytes_and_the_last_error_go_on_after_a_restart(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, Session("dev", 7), Clock())
    status.traffic.sent += 30
    status.traffic.received += 4
    status.fail("cannot connect to ws://x: no network")
    status.update("not connected (no network)")
    found = view(tmp_path)
    assert (found.bytes_sent, found.bytes_received) == (30, 4)
    assert (found.error, found.error_at) == ("cannot connect to ws://x: no network", 1e9 + 2.0)
    again = StatusFile(tmp_path, Session("dev", 7), Clock())
    again.traffic.sent += 5
    again.update("not connected yet")
    found = view(tmp_path)
    assert (found.bytes_sent, found.bytes_received) == (35, 4)
    assert found.error == "cannot connect to ws://x: no network"


def test_bytes_alone_write_nothing(tmp_path: Path) -> None:
    """A chunk is no reason to write: flash would wear out."""
    status = StatusFile(tmp_path, Session("dev", 7), Clock())
    status.update("not connected yet")
    (tmp_path / FILE).unlink()
    status.traffic.received += 131072
    status.update()
    assert not (tmp_path / FILE).exists()


def test_an_error_that_repeats_is_written_again(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, Session("dev", 7), Clock())
    status.update("not connected yet")
    first = view(tmp_path)
    status.fail("no network")
    status.update()
    assert (first.error, view(tmp_path).error) == ("", "no network")


def test_a_status_of_the_last_release_is_read(tmp_path: Path) -> None:
    """Written by 0.1.0: no bytes, no error, no address."""
    (tmp_path / FILE).write_text(
        '{"started":1e9,"connection":"connected to ws://x","connection_since":1e9,"again_at":null,'
        '"ready":true,"task":"its update was accepted","task_since":1e9,"history":{"accepted":3,'
        '"task":"t1","what":"round 3","end":"its update was accepted"},"reason_since":1e9}'
    )
    found = view(tmp_path)
    assert (found.accepted, found.connected, found.error) == (3, True, "")
