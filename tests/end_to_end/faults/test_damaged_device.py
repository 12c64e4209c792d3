"""Each file of a device that was killed with a finished update is cut short or has a byte changed. The next start sends
or trains the update again, with the same bits; or it names the file: then it ends, or says what takes its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import Processes, processes
from test_damaged_data import DAMAGES, damage
from test_device_disk import Found, outcome, prepare, start

CRASH = Path(__file__).parents[1] / "crash_device.py"
FILES = (
    "pending/*.bin", "pending/report.json", "kept/*", "tied/*", "models/*", "bundles/*/manifest.json",
    "bundles/*/train.onnx", "identity.json", "credential.json", "training.json", "lock",
)  # fmt: skip
USUAL = {"first half", "a byte in its middle"}
"""Damages that the usual tests try, of the files that only the device has."""
CASES = [
    (file, how)
    if how in USUAL and file[:4] in ("pend", "kept", "tied", "cred")
    else pytest.param(file, how, marks=pytest.mark.slow)
    for file in FILES
    for how in DAMAGES
]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, warm: Path, own_bundle_path: Path, shards: list[Path]) -> Path:
    folder = tmp_path_factory.mktemp("killed-device")
    plan, url, token = prepare(folder, own_bundle_path)
    with processes(folder, warm) as run:
        coordinator = run.coordinator(plan)
        point = "the work is on disk and the device's own part not in its place"
        run.device("a", url, shards[0], CRASH, point, "4", "--token", token)
        assert run.wait("a") == -9, run.log("a")
        coordinator.terminate()
        assert coordinator.wait(60) == 0, run.log("coordinator")
    return folder


def finish(run: Processes, bundle: Path, data: Path) -> Found | str:
    """Go on in a copy of the template. Returns what came of it, or the device's error."""
    plan, url, _ = prepare(run.folder, bundle)
    coordinator = run.coordinator(plan)
    start(run, url, data, "")
    if run.wait("a"):
        coordinator.kill()
        return run.log("a")
    assert coordinator.wait(60) == 0, run.log("coordinator")
    return outcome(run)


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, template: Path, warm: Path, own_bundle_path: Path, shards: list[Path]
) -> Found:
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    with processes(folder, warm) as run:
        found = finish(run, own_bundle_path, shards[0])
    assert isinstance(found, Found), found
    return found


@pytest.mark.parametrize(("file", "how"), CASES)
def test_a_damaged_file(
    tmp_path: Path, template: Path, warm: Path, own_bundle_path: Path, shards: list[Path], undisturbed: Found,
    file: str, how: str,
) -> None:  # fmt: skip
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    paths = [*(tmp_path / "a.state").glob(file)]
    for path in paths:
        damage(path, DAMAGES[how])
    with processes(tmp_path, warm) as run:
        found = finish(run, own_bundle_path, shards[0])
        said = run.log("a")
    assert "Traceback" not in said, said
    if isinstance(found, str):
        assert said.splitlines()[-1].startswith("fleetlearn-device: "), said
        assert str(paths[0]) in said.splitlines()[-1]
    elif found != undisturbed:
        assert found.failed or "is damaged" in said, "something else in silence"
