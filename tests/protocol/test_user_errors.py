"""What an exception of a user's code says in one line, and which exceptions are ours."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.errors import MAX_TEXT, Code, FleetError
from fleetlearn_protocol.manifest_file import read_manifest
from fleetlearn_protocol.user_errors import (
    in_one_line,
    is_expected,
    own_traceback,
    traceback_lines,
)

LOADER = """
import json

def load(what):
    return look_up(what)

def look_up(what):
    if what == "key":
        return {}[3]
    if what == "library":
        return json.loads("{")
    if what == "empty":
        raise NotImplementedError
    if what == "value":
        raise ValueError("one\\ntwo")
    if what == "long":
        raise RuntimeError("begin" + 5000 * "x" + "KeyError: 3")
"""


@pytest.fixture
def loader(tmp_path: Path) -> ModuleType:
    """A user's module, in a folder whose name resembles ours."""
    folder = tmp_path / "fleetlearn_project"
    folder.mkdir()
    file = folder / "mydata.py"
    file.write_text(LOADER)
    module = ModuleType("mydata")
    exec(compile(LOADER, str(file), "exec"), module.__dict__)
    return module


def caught(function: Any, *arguments: Any) -> Exception:
    with pytest.raises(Exception) as found:
        function(*arguments)
    error = found.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    return error


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("key", "KeyError: 3 (in look_up, mydata.py line 9)"),
        (
            "library",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1) (in look_up, mydata.py line 11)",
        ),
        ("empty", "NotImplementedError (in look_up, mydata.py line 13)"),
        ("value", "ValueError: one two (in look_up, mydata.py line 15)"),
    ],
)
def test_an_error_of_the_user_has_its_type_and_its_place(
    what: str, text: str, loader: ModuleType
) -> None:
    error = caught(loader.load, what)
    assert not is_expected(error)
    assert in_one_line(error) == text
    lines = traceback_lines(error)
    assert lines[0] == "Traceback (most recent call last):"
    assert any("mydata.py" in line and "in look_up" in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_a_long_text_keeps_its_beginning_its_end_and_the_place(loader: ModuleType) -> None:
    text = in_one_line(caught(loader.load, "long"))
    assert text.startswith("RuntimeError: begin")
    assert text.endswith("KeyError: 3 (in look_up, mydata.py line 17)")
    assert len(text) <= MAX_TEXT


def test_an_error_without_the_user_s_code_has_the_place_in_an_installed_package(
    tmp_path: Path,
) -> None:
    error = caught(import_module, "no_such_module")
    assert not is_expected(error)
    assert in_one_line(error) == "ModuleNotFoundError: No module named 'no_such_module'"
    error = caught(np.load, tmp_path / "none.npy")
    assert re.search(r"none\.npy' \(in load, \w+\.py line \d+\)$", in_one_line(error))


def test_errors_of_ours_are_enough_by_themselves(tmp_path: Path) -> None:
    for function, argument in ((open_bundle, tmp_path / "none"), (read_manifest, b"{")):
        error = caught(function, argument)
        assert is_expected(error)
        assert in_one_line(error) == str(error)
    assert in_one_line(MemoryError()) == "MemoryError"
    assert is_expected(MemoryError())


def test_a_user_s_error_in_our_call_is_the_user_s() -> None:
    """As of an object whose elements cannot be made numbers."""

    class Broken:
        def __array__(self, *_: Any) -> Any:
            raise MemoryError("no room")

    error = caught(np.asarray, Broken())
    assert not is_expected(error)
    assert "MemoryError: no room (in __array__, test_user_errors.py line " in in_one_line(error)


def wrapped(error: Exception) -> Exception:
    """Return an error of ours whose cause is another one."""
    try:
        raise FleetError(Code.BAD_MESSAGE, "stop.rule failed") from error
    except FleetError as ours:
        return ours.with_traceback(None)  # without this test's own frame


def test_the_traceback_of_own_code_has_its_frames_alone(loader: ModuleType) -> None:
    lines = own_traceback(wrapped(caught(loader.load, "library")))
    assert lines[0] == "Traceback (most recent call last):"
    places = [line.strip() for line in lines if line.startswith("  File")]
    assert [place.rpartition(", in ")[2] for place in places] == ["load", "look_up"]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_an_installed_package_is_own_code_where_it_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "cut_rules" / "mean.py"
    spaces = {"__name__": "cut_rules.mean"}
    exec(compile("def fail():\n    return [][1]\n", str(file), "exec"), spaces)
    error = caught(spaces["fail"])
    assert own_traceback(wrapped(error)) == []
    assert own_traceback(wrapped(error), ["other", "cut"]) == []
    assert own_traceback(wrapped(error), ["cut_rules"])[-1] == "IndexError: list index out of range"


def test_a_module_that_cannot_be_parsed_shows_its_line() -> None:
    lines = own_traceback(wrapped(caught(compile, "x = (\n", "mine.py", "exec")))
    assert lines[0].strip() == 'File "mine.py", line 1'
    assert lines[-1] == "SyntaxError: '(' was never closed"


def test_errors_of_ours_and_of_other_packages_have_no_own_traceback(tmp_path: Path) -> None:
    missing = caught(read_manifest, tmp_path)
    assert own_traceback(missing) == own_traceback(wrapped(missing)) == []
    assert own_traceback(wrapped(caught(np.zeros, -1))) == []
