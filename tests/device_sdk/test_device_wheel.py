"""The wheel of the device alone: what is in it, what comes with it, and that it trains, with the
oldest and the newest Pythons too."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_status
from line_bundle import write_line_bundle
from packaging.requirements import Requirement
from peers import plan_text
from processes import ROOT, free_port, processes, service_file

ALONE = tomllib.loads((ROOT / "device_sdk" / "pyproject.toml").read_text())["project"]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plainly(requirements: list[str]) -> list[str]:
    """Return the requirements of today's Pythons, without their markers."""
    today = (each for each in requirements if "python_version <" not in each)
    return sorted(each.split(";")[0].strip() for each in today)


def test_it_needs_what_the_device_of_the_whole_needs() -> None:
    extras: dict[str, Any] = WHOLE["optional-dependencies"]
    assert plainly(ALONE["dependencies"]) == plainly(WHOLE["dependencies"] + extras["device"])
    for name, needed in ALONE["optional-dependencies"].items():
        assert needed == extras[name], name
    assert ALONE["scripts"].items() <= WHOLE["scripts"].items()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT / "device_sdk"]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_two_rooms_and_the_version_of_the_whole(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "fleetlearn_device",
        "fleetlearn_protocol",
    }
    assert wheel.name == f"fleetlearn_device-{WHOLE['version']}-py3-none-any.whl"
    assert "fleetlearn_device/LICENSE" in names
    assert not [name for name in names if name.endswith(".pyc")]


@functools.cache
def python_of(version: str) -> str | None:
    """Return a Python of this version, if this machine has one that can make environments."""
    places = [shutil.which(f"python{version}")]
    places += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for place in filter(None, places):
        done = subprocess.run([place, "-c", "import ensurepip"], capture_output=True)
        if done.returncode == 0:
            return place
    return None


def lacking(*what: str | Path) -> list[str]:
    """Return what mypy, with the standard library of Python 3.10, does not find there."""
    options = ["--python-version", "3.10", "--disable-error-code", "no-any-return"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *what], cwd=ROOT, capture_output=True, text=True
    )
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.slow
def test_it_uses_nothing_that_python_3_10_lacks(tmp_path: Path) -> None:
    assert not lacking("-p", "fleetlearn_device", "-p", "fleetlearn_protocol")
    planted = tmp_path / "planted.py"
    planted.write_text(
        "import asyncio\nfrom enum import StrEnum\n\nprint(asyncio.timeout, StrEnum)\n"
    )
    assert len(lacking(planted)) == 2, "asyncio.timeout and StrEnum"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.13", "3.14"])
def test_a_device_with_another_python_trains(version: str, tmp_path: Path, wheel: Path) -> None:
    """With what pip finds for that Python: for 3.10, older releases of NumPy, ONNX Runtime,
    websockets. Its settings are in a file, which Python 3.10 reads by a package."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    own = tmp_path / "env" / "bin" / "python"
    install = [own, "-m", "pip", "install", "--quiet", wheel]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode and "Could not find a version" not in done.stderr:
        pytest.skip(f"pip has no index here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    bundle, data = tmp_path / "line.bundle", tmp_path / "data.npz"
    write_line_bundle(bundle)
    random = np.random.default_rng(1)
    np.savez(
        data, x=random.normal(size=(40, 3)).astype("f4"), y=random.normal(size=40).astype("f4")
    )
    plan, port = tmp_path / "plan.toml", free_port()
    settings = {"round__goal": 1, "stop__rounds": 3, "local__lr": 0.05}
    plan.write_text(plan_text(bundle, tmp_path / "run", **settings))
    service_file(plan, port)
    (tmp_path / "device.toml").write_text(
        f'coordinator = "ws://127.0.0.1:{port}"\nstate = "state"\nuntil_finished = true\n'
        '[data]\nsource = "data.npz"\n'
    )
    with processes(tmp_path) as run:
        run.coordinator(plan)
        run.start(
            "other", own, "-W", "error::DeprecationWarning:fleetlearn_device", "-m",
            "fleetlearn_device", "run", "--config", tmp_path / "device.toml",
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        assert run.wait("coordinator", 120) == 0, run.log("coordinator")
        assert run.wait("other") == 0, run.log("other")
    losses = [row.summary["metrics"]["loss"] for row in read_status(tmp_path / "run").rounds]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


MASKS = """
import json, sys
import numpy as np
from fleetlearn_device.training.masking import counted_words, mask_words
for case in json.load(open(sys.argv[1]))["uploads"]:
    given = {name: bytes.fromhex(case[name]) for name in ("rounding", "seed", "one_use")}
    update = np.frombuffer(bytes.fromhex(case["update"]), "<f4")
    numbers = case["share"], case["factor"], case["bound"], case["bits"]
    words = counted_words(update, *numbers, lambda size: given["rounding"])
    assert words.tolist() == case["words"]
    draws = [given["seed"], given["one_use"]]
    about, helper, secret = (bytes.fromhex(case[name]) for name in ("about", "helper", "secret"))
    upload = mask_words(words, about, helper, secret, case["bits"], lambda size: draws.pop(0))
    assert bytes(upload.content).hex() == case["part"]
    assert (upload.sealed, upload.signature) == (case["sealed"], case["signature"])
    print(case["name"])
"""
"""A device's side of secure aggregation against the vectors, without pytest."""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_a_device_with_another_python_masks(version: str, tmp_path: Path, wheel: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    own = tmp_path / "env" / "bin" / "python"
    install = [own, "-m", "pip", "install", "--quiet", f"{wheel}[secure]"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode and "Could not find a version" not in done.stderr:
        pytest.skip(f"pip has no index here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    vectors = ROOT / "protocol" / "vectors" / "secure.json"
    words = [own, "-W", "error", "-c", MASKS, vectors]
    plain = os.environ | {"PYTHONPATH": ""}
    found = subprocess.run(words, capture_output=True, text=True, env=plain)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("factor") >= 2
    line = [own, "-m", "fleetlearn_device", "public-key", "--state", tmp_path / "state"]
    shown = subprocess.run([*line, "--name", "roof"], capture_output=True, text=True, env=plain)
    assert shown.stdout.startswith("roof "), shown.stderr


MOST_WHEELS, MOST_BYTES = 8, 40 * 2**20
"""What a device may bring to a board, beside its own wheel."""
MORE_WHEELS = {"3.10": 13}
"""Python 3.10 has ONNX Runtime 1.23 at most, which asks for coloredlogs, humanfriendly, sympy and
mpmath; and it needs tomli."""
BOARD = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def requirements_for(version: str) -> list[str]:
    """Return what the device alone needs with this Python. pip itself would ask the Python that
    runs."""
    found = map(Requirement, ALONE["dependencies"])
    environment = {"python_version": version}
    return [
        str(each).partition(";")[0].strip()
        for each in found
        if each.marker is None or each.marker.evaluate(environment)
    ]


def test_what_a_python_needs_is_told_apart() -> None:
    assert "websockets>=16.1" in requirements_for("3.10")
    assert "tomli>=2" in requirements_for("3.10")
    assert "websockets>=17.4" in requirements_for("3.11")
    assert not [each for each in requirements_for("3.11") if each.startswith("tomli")]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.13", "3.14"])
def test_what_comes_with_a_device_to_a_board_is_small(version: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    words += [word for each in BOARD for word in ("--platform", each)]
    words += ["--python-version", version, "--dest", str(tmp_path), *requirements_for(version)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "No matching distribution" not in done.stderr:
        pytest.skip(f"the index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.whl")}
    assert len(sizes) <= MORE_WHEELS.get(version, MOST_WHEELS), sorted(sizes)
    assert sum(sizes.values()) <= MOST_BYTES, sizes
    assert not [name for name in sizes if not name.endswith(("aarch64.whl", "any.whl"))]


@pytest.mark.slow
def test_a_board_of_32_bit_gets_no_runtime(tmp_path: Path) -> None:
    """As the page says: if this fails, the page can say something better."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps"]
    words += ["--platform", "manylinux_2_31_armv7l", "--platform", "linux_armv7l"]
    words += ["--python-version", "3.11", "--dest", str(tmp_path), "onnxruntime"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and "No matching distribution" not in done.stderr:
        pytest.skip(f"the index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode, "onnxruntime has a wheel for 32-bit ARM"
