"""What the commands of the rooms have in common."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fleetlearn_protocol.command_line import needs, version_of
from fleetlearn_protocol.typer_app import command_app, fail


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


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(SystemExit) as ended, needs("fleetlearn-test", "coordinator"):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    assert ended.value.code == "fleetlearn-test needs: pip install \"fleetlearn[coordinator]\" (No module named 'rich')"


def test_a_missing_part_of_the_package_itself_is_an_error_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError), needs("fleetlearn-test", "coordinator"):
        raise ModuleNotFoundError("No module named 'fleetlearn_x'", name="fleetlearn_x")


def test_the_device_needs_neither_typer_nor_rich() -> None:
    code = "import sys, fleetlearn_device.__main__; sys.exit(not {'typer', 'rich'}.isdisjoint(sys.modules))"
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
