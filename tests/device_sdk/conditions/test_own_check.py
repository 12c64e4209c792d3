"""A check of the owner's own: real commands, and functions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import UnreadableError
from fleetlearn_device.conditions.own_check import needs_check

SHELL = ["/bin/sh", "-c"]


def test_a_command_says_it_by_its_exit_status() -> None:
    assert needs_check([*SHELL, "exit 0"], 10.0)(True) is None
    why = needs_check([*SHELL, "echo the pump runs; echo more; exit 3"], 10.0)(True)
    assert why == "/bin/sh says no (exit status 3): the pump runs"
    assert needs_check("false", 10.0)(True) == "false says no (exit status 1)"


def test_a_command_s_words_are_split_as_a_shell_does() -> None:
    assert needs_check("/bin/sh -c 'test 1 = 1'", 10.0)(True) is None


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    check = needs_check([*SHELL, f"sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; wait"], 0.5)
    with pytest.raises(UnreadableError, match=r"/bin/sh did not end in 0\.5 s"):
        check(True)
    for pid in map(int, pids.read_text().split()):
        stat = Path(f"/proc/{pid}/stat")  # a zombie, until init has seen it
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_command_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="'no-such-command' cannot be run: there is no such"):
        needs_check("no-such-command --quietly", 10.0)


def test_a_command_that_is_deleted_does_not_hold(tmp_path: Path) -> None:
    program = tmp_path / "may-train"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    check = needs_check(str(program), 10.0)
    assert check(True) is None
    program.unlink()
    with pytest.raises(UnreadableError, match="may-train cannot be run"):
        check(True)


@pytest.mark.parametrize("command", ["", [], "echo 'open"])
def test_what_cannot_be_a_command_is_refused(command: str | list[str]) -> None:
    with pytest.raises(ValueError, match="expected a command"):
        needs_check(command, 10.0)


def test_a_function_says_it() -> None:
    def may_train() -> bool | str:
        return answers.pop()

    check = needs_check(may_train, 10.0)
    answers: list[bool | str] = ["the pump runs", False, True]
    assert [check(True) for _ in range(3)] == [None, "may_train says False", "the pump runs"]


def test_a_function_that_fails_does_not_hold() -> None:
    def broken() -> bool:
        raise KeyError("pump")

    with pytest.raises(UnreadableError, match="broken failed: KeyError"):
        needs_check(broken, 10.0)(True)


def test_the_command_gets_no_input_and_its_environment() -> None:
    assert os.environ.get("PATH")
    check = [sys.executable, "-c", "import sys, os; sys.exit(sys.stdin.read() or not os.environ)"]
    assert needs_check(check, 60.0)(True) is None
