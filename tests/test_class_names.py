"""A public class name of the packages exists once: ``.ci/class_names.py``, which ``make check``
runs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / ".ci" / "class_names.py"


def check(*folders: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_each_name_of_the_packages_exists_once() -> None:
    assert check() == (0, [])


def test_a_name_that_exists_twice_is_seen(tmp_path: Path) -> None:
    """In two rooms, and within another class. A private name may exist twice."""
    one = tmp_path / "one" / "fleetlearn_one" / "a.py"
    two = tmp_path / "two" / "fleetlearn_two" / "deep" / "b.py"
    for path in (one, two):
        path.parent.mkdir(parents=True)
    one.write_text("class Twice: ...\nclass _Private: ...\nclass Once: ...\n")
    two.write_text("class Outer:\n    class Twice: ...\nclass _Private: ...\n")
    expected = f"2 classes are called Twice: {one}:1, {two}:2. Rename all but one"
    assert check(tmp_path / "one", tmp_path / "two") == (1, [expected])
    assert check(tmp_path / "one") == (0, [])


def test_an_exception_that_is_not_needed_is_seen() -> None:
    faults = runpy.run_path(str(SCRIPT))["faults"]
    places = {"Twice": ["a.py:1", "b.py:1"], "Once": ["a.py:2"]}
    assert faults(places, {"Twice": "why"}) == []
    assert [text.split(":")[0] for text in faults(places, {"Twice": "why", "Once": "why"})] == [
        "Once may exist twice, and does not"
    ]
