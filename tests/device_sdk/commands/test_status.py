"""``fleetlearn-device status``: its exit statuses, its JSON by the schema, and --watch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.commands import status as command
from fleetlearn_device.commands.status_view import schema_text
from fleetlearn_device.driver.status import StatusFile
from fleetlearn_device.session.history import History
from fleetlearn_device.session.privacy_demands import PrivacyDemands
from fleetlearn_device.session.session import Session
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.unmasked import UnmaskedUpdate, report_of_unmasked
from fleetlearn_protocol.messages import (
    Part,
    PrivacyNote,
    Report,
    SecureTask,
    Task,
    VectorReference,
)

SCHEMA = Path(__file__).parents[3] / "docs" / "start" / "device-status.schema.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    StateDirectory(tmp_path / "s", "sensor-7").close()
    return tmp_path / "s"


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status, and the JSON, which the schema describes."""
    status = main(["status", "--state", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    return status, found


def test_the_schema_is_made_of_the_code() -> None:
    text = schema_text()
    hint = "python -m fleetlearn_device.commands.status_view docs/start/device-status.schema.json"
    assert text == SCHEMA.read_text(), hint
    schema = json.loads(text)
    (kind,) = [each for name, each in schema["$defs"].items() if name == "StatusView"]
    assert {"does", "why", "error", "paused_by"} <= {*kind["required"]}


def test_the_schema_refuses_what_is_not_a_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = shown(folder, capsys)
    for wrong in ({**found, "does": "sleeps"}, {**found, "running": 1}, {"device": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json.loads(SCHEMA.read_text()))


def test_the_exit_status_says_whether_it_runs_and_is_connected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = shown(folder, capsys)
    assert (status, found["does"], found["device"]) == (3, "stopped", "sensor-7")
    open_directory = StateDirectory(folder)
    file = StatusFile(folder, Session("sensor-7", 7), coordinator="wss://fleet.example")
    file.update("not connected (no network)")
    status, found = shown(folder, capsys)
    assert (status, found["does"], found["running"]) == (4, "offline", True)
    file.update("connected to wss://fleet.example")
    status, found = shown(folder, capsys)
    assert (status, found["connected"]) == (0, True)
    open_directory.close()
    status, found = shown(folder, capsys)
    assert (status, found["connected"]) == (3, False)
    assert main(["status", "--state", str(folder / "none")]) == 1


def test_watch_shows_what_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session("sensor-7", 7)
    file = StatusFile(folder, session)

    def change() -> None:
        session.history = History(accepted=1)
        file.update("connected to ws://x")

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    def nothing() -> None:
        pass

    steps: list[Callable[[], None]] = [nothing, change, nothing, ctrl_c]
    monkeypatch.setattr(command.time, "sleep", lambda _: steps.pop(0)())
    assert main(["status", "--state", str(folder), "--watch", "--json"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["accepted"] for line in lines] == [0, 1]


def test_a_pipe_that_is_closed_is_no_traceback(folder: Path) -> None:
    words = [sys.executable, "-m", "fleetlearn_device", "status", "--state", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("note", "demands", "line"),
    [
        (
            PrivacyNote(3.1, 1e-6, 8.0),
            PrivacyDemands(),
            "privacy  epsilon 3.1 of 8 (delta 1e-06) before its newest task, as the coordinator "
            "says; this device took part 4 times",
        ),
        (
            PrivacyNote(1.5449, 1e-6, 7.9999),
            PrivacyDemands(),
            "privacy  epsilon 1.55 of 7.9999 (delta 1e-06) before its newest task, as the "
            "coordinator says; this device took part 4 times",
        ),
        (
            PrivacyNote(0.0, 1e-5),
            PrivacyDemands(participations=10),
            "privacy  epsilon 0 (delta 1e-05) before its newest task, as the coordinator says; "
            "this device took part 4 times; its owner allows 10 in one run",
        ),
        (None, PrivacyDemands(participations=10), None),
    ],
)
def test_it_says_what_the_coordinator_says_of_privacy(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    note: PrivacyNote | None,
    demands: PrivacyDemands,
    line: str | None,
) -> None:
    session = Session("sensor-7", 7, demands=demands, took_part={"r1": 4}.__getitem__)
    file = StatusFile(folder, session)
    session.history = History(task="r1-3-1", what="round 3", round=3, privacy=note)
    file.update("connected to ws://c")
    _, found = shown(folder, capsys)
    if note is None:
        assert found["privacy"] is None
    else:
        assert found["privacy"] == {
            "spent": note.spent,
            "epsilon": note.epsilon,
            "delta": note.delta,
            "took_part": 4,
            "may_take_part": demands.participations,
        }
    main(["status", "--state", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert [each for each in lines if each.startswith("privacy")] == ([line] if line else [])


def test_it_says_how_the_last_update_was_masked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, helper = Session("sensor-7", 7), "0a" * 32
    file = StatusFile(folder, session)
    secure = SecureTask("helper", 20, 20, helper=helper)
    session.history = History(task="r1-3-1", what="round 3", round=3, secure=secure)
    file.update("connected to ws://c")
    _, found = shown(folder, capsys)
    assert found["secure"] == {"mode": "helper", "minimum": 20, "helper": helper}
    main(["status", "--state", str(folder)])
    assert (
        "secure   the coordinator learns the sum of at least 20 devices' updates, with the helper "
        "0a0a0a0a0a0a0a0a...\n"
    ) in capsys.readouterr().out


def test_it_says_that_an_update_waits_to_be_masked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = (VectorReference("model", "c" * 64, 8, "float32"),)
    secure = SecureTask("helper", 3, 20, least_factor=0.5, helper="0a" * 32)
    task = Task("t1", 3, "b" * 64, vectors, {"update": "masked"}, {}, 1, 8, 5, 60.0, secure=secure)
    report = Report("t1", 3, (Part("update", "float32", 8, 0),), 1, 1, 1.0, True, 0.0)
    later = UnmaskedUpdate(task, 1.0, report_of_unmasked(report, bytes(8)))
    state = StateDirectory(folder)
    state.outbox.save(later.report, (bytes(8),), later=later)
    state.close()
    _, found = shown(folder, capsys)
    assert found["held"] == {"task": "t1", "round": 3, "bytes": 8, "unmasked": True}
    main(["status", "--state", str(folder)])
    assert (
        "update   task t1 of round 3, 8 bytes, is on this disk alone, and masked when the "
        "coordinator says what it counts\n"
    ) in capsys.readouterr().out
