"""For tests: the code of the last release, from the repository's history, for processes of their
own."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from processes import ROOT

LAST_RELEASE = "fe1f608d85bc9aef5d83ecfd5cd2b4c3cf12c6ad"
ROOMS = ("protocol", "device_sdk", "coordinator")


def unpack(commit: str, folder: Path) -> dict[str, str]:
    """Write the packages of a commit below a folder. Returns the environment of a process that
    imports these and not this tree's. Skips the test where there is no such commit, as in a source
    archive."""
    paths = [f"{room}/fleetlearn_{room.removesuffix('_sdk')}" for room in ROOMS]
    done = subprocess.run(
        ["git", "archive", commit, *paths], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the history does not have {commit[:8]}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    path = os.pathsep.join(str(folder / room) for room in ROOMS)
    return {**os.environ, "PYTHONPATH": path}
