"""For tests: the code of the last release, from the repository's history, for processes of their
own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from web_sdk import FOLDER, node

LAST_RELEASE = "fe1f608d85bc9aef5d83ecfd5cd2b4c3cf12c6ad"
ROOMS = ("protocol", "device_sdk", "coordinator")


def unpack(commit: str, folder: Path) -> dict[str, str]:
    """Write the packages of a commit below a folder. Returns the environment of a process that
    imports these and not this tree's. Skips the test where there is no such commit, as in a source
    archive."""
    paths = [f"{room}/fleetlearn_{room.removesuffix('_sdk')}" for room in ROOMS]
    _write(commit, paths, folder)
    path = os.pathsep.join(str(folder / room) for room in ROOMS)
    return {**os.environ, "PYTHONPATH": path}


def build_web_device(commit: str, folder: Path) -> tuple[str, ...]:
    """Build the SDK for browsers of a commit below a folder, with this tree's node_modules, which
    have the packages of both. Returns the command that runs its device in Node."""
    web = "device_sdk/web"
    _write(commit, [web], folder)
    here = _packages(FOLDER)
    other = [name for name, row in _packages(folder / web).items() if here.get(name) != row]
    assert not other, f"other packages: install {other} for the last release's own SDK"
    command = node()
    (folder / web / "node_modules").symlink_to(FOLDER / "node_modules")
    done = subprocess.run(
        ["npm", "run", "--silent", "build:node"],
        cwd=folder / web,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return *command, str(folder / web / "build" / "node_device.mjs")


def _packages(folder: Path) -> dict[str, Any]:
    """Return the packages that a lock file names, without the SDK itself."""
    packages: dict[str, Any] = json.loads((folder / "package-lock.json").read_bytes())["packages"]
    return {name: package for name, package in packages.items() if name}


def _write(commit: str, paths: list[str], folder: Path) -> None:
    done = subprocess.run(
        ["git", "archive", commit, *paths], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the history does not have {commit[:8]}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
