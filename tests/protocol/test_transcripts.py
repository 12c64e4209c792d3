"""The transcripts: the Python device is held to all of them, and their program finds what
differs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_bundle import line_data, write_line_bundle

FOLDER = Path(__file__).parents[2] / "protocol" / "transcripts"
FILES = {
    path.stem: json.loads(path.read_text(encoding="ascii"))
    for path in sorted(FOLDER.glob("*.json"))
}
TRANSCRIPTS = [row for rows in FILES.values() for row in rows]
WITHOUT_KEYS = [
    row for name, rows in FILES.items() for row in rows if name not in ("signed", "masked")
]
WITH_KEYS = [row for name, rows in FILES.items() for row in rows if name != "masked"]
VALUES: dict[str, Any] = runpy.run_path(str(FOLDER / "values.py"))
QUICK = """
import sys
from fleetlearn_device import Device
from fleetlearn_device.driver.timing import Timing
Device(sys.argv[1], sys.argv[2], sys.argv[3], trust=sys.argv[4:], timing=Timing(base=0.01)).run()
"""
"""A device whose first waits before connecting again are short."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a bundle and data that fit it."""
    write_line_bundle(tmp_path / "line.bundle", references=("anchor",))
    x, y = line_data(20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return tmp_path


PUBLIC_KEY = f"{sys.executable} -m fleetlearn_device public-key --state {{state}}"


def play(folder: Path, *options: str, keys: Sequence[str] = ()) -> tuple[int, list[str]]:
    """The program's status and the lines that it prints. ``keys``: what the device is given to
    trust."""
    device = (sys.executable, "-c", QUICK, "{url}", str(folder / "data.npz"), "{state}", *keys)
    command = [
        sys.executable,
        FOLDER / "run.py",
        "--bundle",
        folder / "line.bundle",
        *options,
        "--",
        *device,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_the_device_holds_to_all(folder: Path) -> None:
    assert play(folder) == (0, as_written(WITHOUT_KEYS))


def as_written(rows: list[dict[str, Any]]) -> list[str]:
    """The lines that the program prints where a device holds to these transcripts."""
    return [
        *(f"ok         {row['name']}" for row in rows),
        f"{len(rows)} of {len(rows)} transcripts went as written",
    ]


def test_a_device_with_keys_holds_to_those_about_signatures(folder: Path) -> None:
    assert play(folder, "--file", str(FOLDER / "signed.json"), keys=["{key}"]) == (
        0,
        as_written(FILES["signed"]),
    )


@pytest.fixture
def without_buffers(tmp_path: Path) -> Path:
    """With a bundle whose updates can be masked, and data that fit it."""
    write_line_bundle(tmp_path / "line.bundle", references=("anchor",), buffer=False)
    x, y = line_data(20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return tmp_path


@pytest.mark.slow
def test_the_device_holds_to_those_about_masks(without_buffers: Path) -> None:
    masked = str(FOLDER / "masked.json")
    options = ("--masked", "--public-key", PUBLIC_KEY, "--file", masked)
    assert play(without_buffers, *options) == (0, as_written(FILES["masked"]))


SECURE: dict[str, Any] = {"mode": "helper", "minimum": 3, "bits": 20, "helper": "$helper"}
MASKED: list[dict[str, Any]] = [
    {"checks in": {}},
    {
        "coordinator": {
            "type": "task",
            "task": "5eed-1-1",
            "clip": 1e-3,
            "parts": {"update": "masked"},
            "secure": SECURE,
        }
    },
    {"device": {"type": "report", "task": "5eed-1-1"}},
    {"uploads": "5eed-1-1", "masked by": 1},
]


@pytest.mark.slow
def test_what_differs_of_masks_is_said(without_buffers: Path) -> None:
    """The device is right, and the program's side of it is changed."""
    wrong = {
        "the factor": ([*MASKED[:3], {"uploads": "5eed-1-1", "masked by": 0.5}], (), "norm is"),
        "the key": (MASKED, ("--public-key", f"echo {'ab' * 32}"), "signature is not the device's"),
        "the flag": (MASKED, None, "uses $helper before anything was bound"),
    }
    for name, (steps, more, said) in wrong.items():
        file = without_buffers / "wrong.json"
        file.write_text(json.dumps([{"name": name, "steps": steps}]))
        options = [] if more is None else ["--masked", *more]
        status, lines = play(without_buffers, "--file", str(file), *options)
        assert status == 1
        assert said in "\n".join(lines)


@pytest.mark.slow
def test_a_device_with_keys_holds_to_all(folder: Path) -> None:
    """Every task of every transcript is then signed."""
    assert play(folder, keys=["{key}"]) == (0, as_written(WITH_KEYS))


def test_each_has_a_name_of_its_own() -> None:
    names = [row["name"] for row in TRANSCRIPTS]
    assert len(set(names)) == len(names)


def test_a_device_that_stays_away_is_killed() -> None:
    """Its process may end a moment later by itself: whatever came next would find it or not."""
    for row in TRANSCRIPTS:
        for step, after in pairwise([*row["steps"], None]):
            assert "stays away" not in step or after == {"kill": True}, row["name"]


WELCOMED: list[dict[str, Any]] = [{"checks in": {}}]
TASK: list[dict[str, Any]] = [{"coordinator": {"type": "task", "task": "t"}}]
REPORT: list[dict[str, Any]] = [{"device": {"type": "report", "task": "t"}, "as": "$report"}]
GRANT: list[dict[str, Any]] = [
    {"coordinator": {"type": "grant", "task": "t", "transfer": 7, "offset": 0}}
]


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a field": ([{"checks in": {"examples": 21}}], "examples is 20; expected 21"),
    "a message": ([*WELCOMED, *TASK, {"device": {"type": "failed"}}], "a report is not a failed"),
    "a fetch": (
        [*WELCOMED, {"fetches are answered": False}, {**TASK[0], "model": 9}, *REPORT],
        "a fetch is not a report",
    ),
    "an update": (
        [
            *WELCOMED,
            *TASK,
            *REPORT,
            {"uploads": "t", "as": "$bytes"},
            {"coordinator": {"type": "task", "task": "u", "seed": 6}},
            {"device": {"type": "report", "task": "u"}},
            {"uploads": "u", "as": "$bytes"},
        ],
        "the upload is",
    ),
    "a chunk": (
        [
            *WELCOMED,
            *TASK,
            *REPORT,
            *GRANT,
            {"chunks": {"transfer": 7}},
            {"device": {"type": "uploaded"}},
            {"coordinator": {"type": "grant", "task": "t", "transfer": 8, "offset": 0}},
            {"coordinator": {"type": "grant", "task": "t", "transfer": 9, "offset": 4}},
            {"chunks": {"transfer": 9}},
        ],
        "the chunk.transfer is 8; expected 9",
    ),
    "a connection that ends": (
        [
            *WELCOMED,
            {"coordinator": {"type": "come-back", "after": 0.1, "reason": "busy"}},
            *REPORT,
        ],
        "the device closed the connection (code 1000)",
    ),
    "a closing code": (
        [*WELCOMED, {"coordinator sends": "{"}, {"closed": 1000}],
        "with code 1002; expected 1000",
    ),
    "a device that comes back": (
        [*WELCOMED, {"cut": True}, {"stays away": 20.0}],
        "the device connected again",
    ),
    "a process that ended": (
        [*WELCOMED, {"kill": True}, {"connects": True}],
        "the device's process has ended",
    ),
}


def test_what_differs_is_said(folder: Path) -> None:
    file = folder / "wrong.json"
    file.write_text(
        json.dumps([{"name": name, "steps": steps} for name, (steps, _) in WRONG.items()])
    )
    status, lines = play(folder, "--file", str(file))
    text = "\n".join(lines)
    for name, (_, said) in WRONG.items():
        assert f"DIFFERENT  {name}\n    step " in text, text
        assert said in text.split(f"DIFFERENT  {name}\n")[1].split("\nDIFFERENT")[0]
    assert lines[-1] == f"0 of {len(WRONG)} transcripts went as written"
    assert status == 1


def test_a_device_that_does_nothing_is_not_waited_for_longer(folder: Path) -> None:
    """The connection stays, where it is to be closed. A busy machine may need longer for the device
    to check in."""
    file = folder / "stays.json"
    file.write_text(json.dumps([{"name": "stays", "steps": [*WELCOMED, {"closed": None}]}]))
    for patience in ("1", "4", "30"):
        status, lines = play(folder, "--file", str(file), "--patience", patience)
        assert status == 1
        assert lines[0].split() == ["DIFFERENT", "stays"]
        assert lines[2].strip() == f"the device did nothing for {patience} s"
        if lines[1].startswith("    step 2, "):
            return
    raise AssertionError(lines)


@pytest.mark.parametrize(
    ("expected", "came", "lines"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1, "c": None}, {"a": 2}, ["a is 2; expected 1", "c is not there"]),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, ["a.b is [2]; expected [1]"]),
        ({"a": {"at least": 1, "at most": 3}}, {"a": 3}, []),
        (
            {"a": {"at least": 1, "at most": 3}},
            {"a": 4},
            ["a is 4; expected at least 1 and at most 3"],
        ),
        ({"a": {"at least": 1}}, {"a": None}, ["a is null; expected at least 1"]),
        ({"a": {"has": ["x"]}}, {"a": ["x", "y"]}, []),
        ({"a": {"has": ["x"]}}, {"a": ["y"]}, ['a is ["y"]; expected ["x"] in it']),
        ({"a": {"has": ["x"]}}, {"a": "x"}, ['a is "x"; expected ["x"] in it']),
        ({"a": "$x", "b": "$x"}, {"a": 1, "b": 1}, []),
        ({"a": "$x", "b": "$x"}, {"a": 1, "b": 2}, ["b is 2; expected 1"]),
    ],
)
def test_messages_are_compared(expected: Any, came: Any, lines: list[str]) -> None:
    assert VALUES["compare"](expected, came, {}) == lines


def test_placeholders_are_filled_in() -> None:
    assert VALUES["fill"]({"a": ["$x", "y"], "b": 1}, {"$x": 5}) == {"a": [5, "y"], "b": 1}
    with pytest.raises(VALUES["Mismatch"], match=r"\$x before"):
        VALUES["fill"]("$x", {})


def test_no_transcript_is_no_success(folder: Path) -> None:
    assert play(folder, "--only", "nothing is named like this") == (
        1,
        ["0 of 0 transcripts went as written"],
    )
