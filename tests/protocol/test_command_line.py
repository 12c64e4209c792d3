"""What the commands of the rooms have in common."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import termios
import time
from contextlib import suppress
from importlib import import_module

import pytest
from fleetlearn_protocol.command_line import LogLine, needs, version_of
from fleetlearn_protocol.typer_app import command_app, fail
from typer.testing import CliRunner


def run(arguments: list[str]) -> int:
    """The exit status of an application with one command."""
    app = command_app("fleetlearn-test", "Does nothing.")

    @app.command()
    def work(fails: bool = False) -> None:
        if fails:
            fail("fleetlearn-test", "x[bold] is\nwrong")

    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_each_application_has_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{version_of('fleetlearn-test')}\n"
    assert version_of("fleetlearn-test").startswith("fleetlearn-test 0.")


def test_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work"]) == 0
    assert run(["work", "--fails"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "fleetlearn-test: x[bold] is\nwrong\n")


def test_times_in_the_log_have_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        record = logging.LogRecord("x", logging.WARNING, "", 0, "round %d", (3,), None)
        record.created = 1_700_000_000.25
        assert LogLine().format(record) == "2023-11-15 03:43:20.250+05:30 WARNING round 3"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(SystemExit) as ended, needs("fleetlearn-test", "coordinator"):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    assert (
        ended.value.code
        == "fleetlearn-test needs: pip install \"fleetlearn[coordinator]\" (No module named 'rich')"
    )


def test_a_missing_part_of_the_package_itself_is_an_error_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError), needs("fleetlearn-test", "coordinator"):
        raise ModuleNotFoundError("No module named 'fleetlearn_x'", name="fleetlearn_x")


def test_the_device_needs_neither_typer_nor_rich() -> None:
    code = (
        "import sys, fleetlearn_device.__main__; sys.exit(not {'typer', "
        "'rich'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


NOHUP = """
import asyncio, os, signal
from fleetlearn_protocol.command_line import stop_signals

async def main():
    caught = []
    with stop_signals(asyncio.get_running_loop(), caught.append):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while not caught:
            await asyncio.sleep(0.01)
    assert caught == [signal.SIGTERM], caught
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
asyncio.run(main())
"""


def test_nohup_keeps_a_process_alive() -> None:
    subprocess.run([sys.executable, "-c", NOHUP], check=True, timeout=60)


TABLE = ("version", "made", "dropped", "accuracy (round)", "accuracy (held-out)", "for")
ROW = (
    "17",
    "of 3, rolled back",
    "3 lost, 4 late, 12 surplus",
    "0.9871",
    "0.9312",
    "tag [roof], runtime [tls]",
)
TERMINAL = f"""
import sys, typer
from fleetlearn_protocol.typer_app import plain_table, show_table
table = plain_table(*{TABLE!r}, wraps="dropped")
table.add_row(*{ROW!r})
show_table(table)
"""


def test_a_table_through_a_pipe_has_each_row_on_one_line_and_every_cell_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    (row,) = (line for line in done.stdout.splitlines() if line.strip().startswith("17"))
    assert re.split(r"  +", row.strip()) == [*ROW]


def test_a_table_in_a_narrow_terminal_keeps_every_cell_whole() -> None:
    shown = shown_in_a_terminal([sys.executable, "-c", TERMINAL], columns=96)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 96
    (first,) = (
        number
        for number, line in enumerate(lines)
        if all(cell in line for cell in ROW if cell != ROW[2])
    )
    begin, end = lines[first].index("3 lost"), lines[first].index("0.9871")
    assert " ".join(" ".join(line[begin:end] for line in lines[first:]).split()) == ROW[2]


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        ("coordinator", ["device-certificate", "--help"], "with `clients` in [tls] knows a device"),
        ("coordinator", ["--help"], "Make a certificate for a device"),
        ("coordinator", ["--help"], "Measure the newest model on the devices' data"),
        (
            "simulator",
            ["--help"],
            "Continue a stopped run from its last checkpoint, or the unfinished runs of a sweep",
        ),
        (
            "export",
            ["--help"],
            "Write an int8 model for faster and smaller inference, and say how it differs on a set",
        ),
    ],
)
def test_help_is_whole(module: str, arguments: list[str], text: str) -> None:
    app = import_module(f"fleetlearn_{module}.__main__").app
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert text in " ".join(shown.output.split())
    assert max(map(len, shown.output.splitlines())) <= 80


def shown_in_a_terminal(command: list[str], columns: int) -> str:
    """Run a command in a terminal of this width. Returns what it printed, without colours."""
    here, there = os.openpty()
    termios.tcsetwinsize(there, (24, columns))
    with subprocess.Popen(
        command, stdout=there, stderr=there, env={**os.environ, "TERM": "xterm"} | {"COLUMNS": ""}
    ) as process:
        os.close(there)
        shown = b""
        with suppress(OSError):  # how Linux says that the other end is closed
            while part := os.read(here, 65536):
                shown += part
        process.wait(60)
    os.close(here)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")
