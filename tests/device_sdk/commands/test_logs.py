"""Where the log of ``run`` goes, and how its lines are written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fleetlearn_device.commands.logs import begin_log
from fleetlearn_device.settings.sources import SettingError, SettingValue, Values
from fleetlearn_device.settings.table import SETTINGS
from fleetlearn_protocol.command_line import JournalLine
from fleetlearn_protocol.json_log import said


def values(**chosen: object) -> Values:
    """The settings' defaults, with others of the table [log]."""
    found = {row.key: SettingValue(row.default, "default") for row in SETTINGS}
    found.update({f"log.{key}": SettingValue(value, "--x") for key, value in chosen.items()})
    return found


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The logger of all rooms, which is as before afterwards."""
    found = logging.getLogger("fleetlearn")
    before, level = [*found.handlers], found.level
    yield found
    for handler in {*found.handlers} - {*before}:
        found.removeHandler(handler)
        with suppress(OSError):  # a disk that is full
            handler.close()
    found.setLevel(level)


def test_the_file_is_put_aside_at_its_size_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    file = tmp_path / "device.log"
    begin_log(values(file=str(file), size=1, files=2))
    for number in range(2200):
        logger.info("%d %s", number, "x" * 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.log", "device.log.1"]
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) <= 2**20
    assert " INFO 2199 xxx" in file.read_text()


def test_lines_of_json_have_the_event_and_its_fields(
    tmp_path: Path, logger: logging.Logger
) -> None:
    begin_log(values(file=str(tmp_path / "d.log"), format="json", level="warning"))
    logger.warning("round %d", 3, extra=said("trained", round=3))
    logger.info("not at this level")
    (line,) = (tmp_path / "d.log").read_text().splitlines()
    found = json.loads(line)
    assert (found["event"], found["round"], found["message"]) == ("trained", 3, "round 3")
    assert (found["level"], found["time"][-1]) == ("warning", "Z")


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--x: the log file .*no/d.log cannot be opened: No su"):
        begin_log(values(file=str(tmp_path / "no" / "d.log")))


def test_a_file_that_cannot_be_written_is_said_once(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    begin_log(values(file="/dev/full", size=1))
    logger.info("a")
    logger.info("b")
    said_of_it = capsys.readouterr().err.count("the log file cannot be written: ")
    assert said_of_it == 1


def test_the_journal_gets_the_level_and_no_time() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a\n  b", (), None)
    assert JournalLine().format(record) == "<4>a\n<4>  b"
    levels = [logging.DEBUG, logging.INFO, logging.ERROR, logging.CRITICAL]
    records = [logging.LogRecord("x", level, "", 0, "a", (), None) for level in levels]
    assert [JournalLine().format(each) for each in records] == ["<7>a", "<6>a", "<3>a", "<3>a"]


IN_A_SERVICE = """
import os, sys
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino + int(sys.argv[1])}"
sys.path.insert(0, sys.argv[2])
from test_logs import values
from fleetlearn_device.commands.logs import begin_log
import logging
begin_log(values())
logging.getLogger("fleetlearn.device").info("hello")
"""


@pytest.mark.parametrize(("other", "line"), [("0", "<6>hello\n"), ("1", " INFO hello\n")])
def test_under_systemd_standard_error_is_the_journal_unless_it_leads_elsewhere(
    other: str, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_SERVICE, other, str(Path(__file__).parent)],
        capture_output=True, text=True, check=True, env={**os.environ},
    )  # fmt: skip
    assert done.stderr.endswith(line)
    assert (done.stderr == line) == (other == "0")
