"""Each call of a device on its state directory finds the disk full, read-only or broken: the device
says so in one line and ends, or goes on. Started again, it finishes its work, once.

And each file of a device that was killed with a finished update is cut short or has a byte changed.
The next start sends or trains the update again, with the same bits; or it names the file, and ends
or says what takes its place."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults import DAMAGES, KINDS, Fault, counted, damage
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.identities import Identities
from peers import plan_text
from processes import Processes, free_port, processes, wait_for

SAMPLE = 2
"""Calls of each kind that fail in the usual tests; the slow tests let each one fail."""
ROUNDS = 2


class Found(NamedTuple):
    model: bytes
    kept: bytes
    """What the device keeps for itself."""
    failed: bool
    """Whether a task failed, as the coordinator was told, or its deadline cut a training short (on
    a busy machine). The next task has other random numbers, and less training makes another
    model."""


class Undisturbed(NamedTuple):
    found: Found
    calls: dict[str, list[tuple[str, Path]]]


def prepare(folder: Path, bundle: Path) -> tuple[Path, str, str]:
    """Write a plan for one device, which keeps personal parameters and the previous model (MOON),
    and what did not travel of its updates (top-k). Returns its file, the coordinator's address, and
    a token."""
    plan, port = folder / "plan.toml", free_port()
    text = plan_text(
        bundle,
        folder / "run",
        "moon",
        round__goal=1,
        round__grace=60.0,
        round__deadline=8.0,
        stop__rounds=ROUNDS,
        local__lr=0.01,
        local__mu=1.0,
        encoding__up="topk-0.1-int8",
    )
    plan.write_text(text)
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    identities = Identities(folder / "identities")
    token = identities.make_token(1, time.time() + 3600, [], time.time())
    identities.close()
    return plan, f"ws://127.0.0.1:{port}", token


def serve_and_stay(run: Processes, plan: Path) -> Any:
    """A device that is started again when the training is finished already is told so."""
    return run.coordinator(plan, "-m", "fleetlearn_coordinator", "serve", plan, "--stay")


def start(run: Processes, url: str, data: Path, token: str, fault: Fault | None = None) -> None:
    env = os.environ | {"FLEETLEARN_TOKEN": token} | ({} if fault is None else fault.env())
    run.device("a", url, data, env=env)


def check_end(run: Processes) -> None:
    """Check that the device ended well, or with one line."""
    said = run.log("a")
    assert "Traceback" not in said, said
    if run.running["a"].returncode:
        assert run.running["a"].returncode == 1, said
        assert said.splitlines()[-1].startswith("fleetlearn-device: "), said


def outcome(run: Processes) -> Found:
    """Check the run that is over, and return what came of it."""
    rounds = read_status(run.folder / "run").rounds
    assert [row.summary["reports"] for row in rounds if row.outcome == "committed"] == [1] * ROUNDS
    (kept,) = (run.folder / "a.state" / "kept").glob("*[0-9a-f]")
    failed = any(row.summary["dropped"] or row.summary["partial"] for row in rounds)
    return Found(read_model(run.folder / "run")[1].tobytes(), kept.read_bytes(), failed)


def train(run: Processes, bundle: Path, data: Path, fault: Fault | None) -> Found:
    """Train with a fault, and go on without it if that ended the device."""
    plan, url, token = prepare(run.folder, bundle)
    coordinator = serve_and_stay(run, plan)
    start(run, url, data, token, fault)
    wait_for(lambda: run.running["a"].poll() is not None, "the device's end")
    check_end(run)
    if run.running["a"].returncode:
        start(run, url, data, token)
        assert run.wait("a") == 0, run.log("a")
    coordinator.terminate()
    assert coordinator.wait(60) == 0, run.log("coordinator")
    return outcome(run)


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, own_bundle_path: Path, shards: list[Path]
) -> Undisturbed:
    found, calls = set(), {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(f"undisturbed-{kind}")
        fault = Fault(folder / "a.state", kind, log=folder / "calls")
        with processes(folder, warm) as run:
            found.add(train(run, own_bundle_path, shards[0], fault))
        calls[kind] = counted(folder / "calls")
    (only,) = found
    return Undisturbed(only, calls)


def check_fault(
    folder: Path, warm: Path, bundle: Path, data: Path, kind: str, nth: int, expected: Found
) -> None:
    folder.mkdir()
    with processes(folder, warm) as run:
        found = train(run, bundle, data, Fault(folder / "a.state", kind, nth, folder / "calls"))
        assert found.failed or found == expected, run.log("a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_some_calls_fail(
    tmp_path: Path,
    warm: Path,
    own_bundle_path: Path,
    shards: list[Path],
    undisturbed: Undisturbed,
    kind: str,
) -> None:
    number = len(undisturbed.calls[kind])
    for nth in range(1, number + 1, number // SAMPLE):
        check_fault(
            tmp_path / str(nth), warm, own_bundle_path, shards[0], kind, nth, undisturbed.found
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_fails(
    tmp_path: Path,
    warm: Path,
    own_bundle_path: Path,
    shards: list[Path],
    undisturbed: Undisturbed,
    kind: str,
) -> None:
    failed = {}
    for nth in range(1, len(undisturbed.calls[kind]) + 1):
        try:
            check_fault(
                tmp_path / str(nth), warm, own_bundle_path, shards[0], kind, nth, undisturbed.found
            )
        except Exception as error:
            failed[nth] = error
    assert not failed


# Damaged files

CRASH = Path(__file__).parents[1] / "crash_device.py"
FILES = (
    "version.json",
    "pending/*.bin",
    "pending/report.json",
    "kept/*",
    "tied/*",
    "models/*",
    "bundles/*/manifest.json",
    "bundles/*/train.onnx",
    "identity.json",
    "credential.json",
    "training.json",
    "lock",
)
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
def template(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, own_bundle_path: Path, shards: list[Path]
) -> Path:
    folder = tmp_path_factory.mktemp("killed-device")
    plan, url, token = prepare(folder, own_bundle_path)
    with processes(folder, warm) as run:
        coordinator = run.coordinator(plan)
        point = "the work is on disk and the device's own part not in its place"
        run.device(
            "a", url, shards[0], CRASH, point, "4", env=os.environ | {"FLEETLEARN_TOKEN": token}
        )
        assert run.wait("a") == -9, run.log("a")
        coordinator.terminate()
        assert coordinator.wait(60) == 0, run.log("coordinator")
    return folder


def finish(run: Processes, bundle: Path, data: Path) -> Found | str:
    """Go on in a copy of the template. Returns what came of it, or the device's error."""
    plan, url, _ = prepare(run.folder, bundle)
    coordinator = serve_and_stay(run, plan)
    start(run, url, data, "")
    if run.wait("a"):
        coordinator.kill()
        return run.log("a")
    coordinator.terminate()
    assert coordinator.wait(60) == 0, run.log("coordinator")
    return outcome(run)


@pytest.fixture(scope="session")
def undisturbed_after_kill(
    tmp_path_factory: pytest.TempPathFactory,
    template: Path,
    warm: Path,
    own_bundle_path: Path,
    shards: list[Path],
) -> Found:
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    with processes(folder, warm) as run:
        found = finish(run, own_bundle_path, shards[0])
    assert isinstance(found, Found), found
    return found


@pytest.mark.parametrize(("file", "how"), CASES)
def test_a_damaged_file(
    tmp_path: Path, template: Path, warm: Path, own_bundle_path: Path, shards: list[Path],
    undisturbed_after_kill: Found,
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
    elif found != undisturbed_after_kill:
        assert found.failed or "is damaged" in said, "something else in silence"
