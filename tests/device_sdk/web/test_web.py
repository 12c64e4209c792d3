"""The SDK for browsers, in Node: its own tests, and the protocol's transcripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from line_bundle import line_data, write_line_bundle
from web_sdk import node, npm, script

TRANSCRIPTS = Path(__file__).parents[3] / "protocol" / "transcripts"
OWN = ("signed", "masked")
"""Files that need a device with keys to trust, or one that masks."""


def test_its_own_tests_pass() -> None:
    """Vitest: the protocol's vectors, the session, the store, the data."""
    node()
    done = npm("test", "--silent")
    assert done.returncode == 0, done.stdout + done.stderr


def play(
    tmp_path: Path,
    files: list[Path],
    *options: str,
    keys: tuple[str, ...] = (),
    buffer: bool = True,
) -> None:
    """Play transcripts to a device in Node, and compare what the program prints. ``buffer``:
    whether the bundle's model has one."""
    write_line_bundle(tmp_path / "line.bundle", references=("anchor",), buffer=buffer)
    x, y = line_data(20)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    device = (
        *script("node_device"),
        "{url}",
        str(tmp_path / "data.npz"),
        "{state}",
        "--base",
        "0.01",
        *keys,
    )
    command = [
        sys.executable,
        TRANSCRIPTS / "run.py",
        "--bundle",
        tmp_path / "line.bundle",
        *options,
        "--",
        *device,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    names = [row["name"] for path in files for row in json.loads(path.read_text("ascii"))]
    assert done.stdout.splitlines() == [
        *(f"ok         {name}" for name in names),
        f"{len(names)} of {len(names)} transcripts went as written",
    ]
    assert done.stderr == ""


def test_it_holds_to_all_transcripts(tmp_path: Path) -> None:
    others = [path for path in sorted(TRANSCRIPTS.glob("*.json")) if path.stem not in OWN]
    play(tmp_path, others)


@pytest.mark.slow
def test_it_holds_to_those_about_masks(tmp_path: Path) -> None:
    masked = TRANSCRIPTS / "masked.json"
    play(tmp_path, [masked], "--masked", "--file", str(masked), buffer=False)


def test_with_keys_it_holds_to_those_about_signatures(tmp_path: Path) -> None:
    signed = TRANSCRIPTS / "signed.json"
    play(tmp_path, [signed], "--file", str(signed), keys=("--trust", "{key}"))


@pytest.mark.slow
def test_with_keys_it_holds_to_all_transcripts(tmp_path: Path) -> None:
    """Every task of every transcript is then signed."""
    others = [path for path in sorted(TRANSCRIPTS.glob("*.json")) if path.stem != "masked"]
    play(tmp_path, others, keys=("--trust", "{key}"))
