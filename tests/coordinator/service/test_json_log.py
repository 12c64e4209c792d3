"""The log as JSON: each line is whole, and its events are those that the page lists."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import fleetlearn_coordinator
import pytest
from fleetlearn_coordinator.service.event_log import SHOWN, EventLog
from fleetlearn_coordinator.service.json_log import NOTE, PEER, PEERS, json_lines, said
from fleetlearn_coordinator.service.observers import RoundEnded
from fleetlearn_coordinator.service.run_log import RunLog
from peers import PlanMaker, plan_text

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operate" / "monitoring.md"
PACKAGE = Path(fleetlearn_coordinator.__file__).parent


def events_in_the_code() -> dict[str, set[str]]:
    """Return event -> the names of its fields, as the calls of ``said`` give them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "said":
                continue
            (event,) = node.args
            assert isinstance(event, ast.Constant), f"{file}: {ast.unparse(node)}"
            found[event.value] |= {key.arg for key in node.keywords if key.arg is not None}
    return dict(found)


def events_on_the_page() -> dict[str, set[str]]:
    section = PAGE.read_text("utf-8").partition("## The log as JSON")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): {*row[2].replace(",", " ").split()} for row in rows}


def test_the_page_lists_every_event_with_its_fields() -> None:
    page, code = events_on_the_page(), events_in_the_code()
    assert {*page} == {*code, PEER, NOTE}
    for event, fields in code.items():
        of_a_summary = page[event] - fields
        assert fields <= page[event], event
        assert of_a_summary <= {*SHOWN}, event


def line_of(record: logging.LogRecord) -> dict[str, object]:
    text = json_lines().format(record)
    assert "\n" not in text
    return dict(json.loads(text))


def record_of(name: str, text: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger(name).makeRecord(
        name, logging.WARNING, "f", 1, text, arguments, None, extra=extra or None
    )


def test_a_line_has_time_level_event_fields_and_text() -> None:
    record = record_of("fleetlearn.x", "a %s\nb", "c", run="digits", **said("ended", reason="r"))
    record.created = 1790000000.25
    assert line_of(record) == {
        "time": "2026-09-21T14:13:20.250Z", "level": "warning", "event": "ended",
        "run": "digits", "reason": "r", "message": "a c\nb",
    }  # fmt: skip
    assert line_of(record_of(PEERS, "x"))["event"] == PEER
    assert line_of(record_of("fleetlearn.x", "x"))["event"] == NOTE


def test_what_json_has_no_type_for_is_text_and_an_exception_is_kept() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = record_of("fleetlearn.x", "x", **said("ended", reason=Path("a"), value=1e999))
        record.exc_info = sys.exc_info()
    found = line_of(record)
    assert (found["reason"], found["value"]) == ("a", None)
    assert str(found["exception"]).endswith("ValueError: no")


def test_a_round_has_its_numbers(make_plan: PlanMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fleetlearn")
    summary = {
        "reports": 2, "partial": 0, "dropped": {"lost": 1}, "metrics": {"loss": 0.5},
        "left_out": {}, "behind": {"loss": 2}, "change": 0.25, "seconds": 3.0, "bytes_up": 8,
        "bytes_down": 9, "train": None, "evaluation": None,
    }  # fmt: skip
    EventLog(RunLog("a"), make_plan())([RoundEnded(7, "committed", 5, summary, "")])
    found = line_of(caplog.records[0])
    assert found["event"] == "round-committed"
    assert (found["run"], found["round"], found["version"]) == ("a", 7, 5)
    assert (found["reports"], found["metrics"], found["dropped"]) == (2, {"loss": 0.5}, {"lost": 1})
    assert str(found["message"]).startswith("run a: round 7 committed: ")


@pytest.mark.parametrize("where", ["flag", "service file"])
def test_the_command_writes_json_alone(tmp_path: Path, bundle_path: Path, where: str) -> None:
    plan, service = tmp_path / "plan.toml", tmp_path / "service.toml"
    plan.write_text(plan_text(bundle_path, tmp_path / "run"))
    service.write_text("port = 0\n" + ('log_format = "json"\n' if where != "flag" else ""))
    flag = ["--log-format", "json"] if where == "flag" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "fleetlearn_coordinator", "serve", str(plan),
         "--service", str(service), *flag],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        lines = [json.loads(process.stderr.readline())]
        while lines[-1]["event"] != "listening":
            lines.append(json.loads(process.stderr.readline()))
        process.terminate()
        lines += [json.loads(line) for line in process.stderr.readlines()]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert [line["event"] for line in lines if line["event"] != NOTE] == [
        "listening", "stopping", "ended",
    ]  # fmt: skip
    assert lines[-1]["version"] == 0
