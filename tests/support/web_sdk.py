"""For tests: the SDK for browsers, in Node. Where Node is not there, or npm's registry cannot be
reached, they are skipped, and pytest says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

FOLDER = Path(__file__).parents[2] / "device_sdk" / "web"
RUNTIME_FILES = ("ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""What a page serves of onnxruntime-web beside its script."""
WEBGPU_FILES = ("ort.jspi.bundle.min.mjs", "ort-wasm-simd-threaded.jspi.wasm")
"""What it serves for browsers with WebGPU and stack switching."""
UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH")


@cache
def node() -> tuple[str, ...]:
    """The command that runs Node with a WebSocket, after the SDK's packages are installed. Skips
    where it cannot be."""
    program = shutil.which("node")
    if program is None or shutil.which("npm") is None:
        pytest.skip("the SDK for browsers is not tested: Node and npm are not here")
    found = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if tuple(map(int, found.lstrip("v").split(".")[:2])) < (20, 19):
        pytest.skip(f"the SDK for browsers is not tested: Node is {found}; expected 20.19 or newer")
    installed = FOLDER / "node_modules" / ".package-lock.json"
    with FileLock(FOLDER / "build.lock"):
        if (
            not installed.exists()
            or installed.stat().st_mtime < (FOLDER / "package-lock.json").stat().st_mtime
        ):
            done = npm("ci", "--no-fund", "--no-audit")
            if done.returncode and UNREACHABLE.search(done.stderr):
                pytest.skip("the SDK for browsers is not tested: npm's registry cannot be reached")
            assert done.returncode == 0, done.stderr
            installed.touch()
    return program, "--experimental-websocket"


def npm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )


@cache
def built(name: str) -> Path:
    """One of the files that are built of the SDK's scripts for tests (test/support/)."""
    build("build:tests", "src", "test/support")
    return FOLDER / "build" / name


def build(script: str, *sources: str) -> None:
    """Run one of the SDK's build scripts, if one of its source folders was changed since.

    Only the first process that needs the files builds them. Another one would write the files again
    that devices and browsers of the first are reading.
    """
    node()
    stamp = FOLDER / "build" / f"{script.replace(':', '-')}.stamp"
    read = [path for folder in sources for path in (FOLDER / folder).rglob("*")]
    with FileLock(FOLDER / "build.lock"):
        began = time.time()
        newest = max(path.stat().st_mtime for path in [FOLDER / "package-lock.json", *read])
        if not stamp.exists() or stamp.stat().st_mtime < newest:
            done = npm("run", "--silent", script)
            assert done.returncode == 0, done.stderr
            stamp.touch()
            os.utime(stamp, (began, began))  # what is changed during the build is built again


def script(name: str) -> tuple[str, ...]:
    """The command that runs one of the SDK's scripts for tests in Node."""
    return *node(), str(built(f"{name}.mjs"))


def runtime_file(name: str) -> Path:
    """One of onnxruntime-web's files."""
    return FOLDER / "node_modules" / "onnxruntime-web" / "dist" / name


def link_runtime(folder: Path, names: tuple[str, ...] = RUNTIME_FILES) -> None:
    """Put these files of onnxruntime-web into a folder that a page is served from."""
    for name in names:
        (folder / name).symlink_to(runtime_file(name))
