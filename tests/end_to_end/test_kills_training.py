"""A long training that is killed and stopped in the middle goes on, and gives the same model: real
processes, a real coordinator."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file, wait_for

CRASH = Path(__file__).with_name("crash_training.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    POINTS = list(runpy.run_path(str(CRASH))["POINTS"])
pytestmark = pytest.mark.slow


def write_plan(folder: Path, bundle: Path) -> tuple[Path, Path, str]:
    """A round of two devices, whose training takes some seconds; with dropout, momentum, a personal
    head, and MOON's previous model."""
    port, data_dir, path = free_port(), folder / "run", folder / "plan.toml"
    text = plan_text(
        bundle,
        data_dir,
        "moon",
        round__goal=2,
        round__minimum=2,
        round__gather=60.0,
        round__grace=60.0,
        round__deadline=600.0,
        stop__rounds=1,
        local__lr=0.01,
        local__mu=1.0,
        local__epochs=2000,
    )
    path.write_text(text)
    service_file(path, port)
    return path, data_dir, f"ws://127.0.0.1:{port}"


def outcome(run: Processes, data_dir: Path) -> tuple[bytes, bytes]:
    """The model, and what device a keeps."""
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for name in "ab":
        assert run.wait(name) == 0, run.log(name)
    (round_,) = read_status(data_dir).rounds
    assert round_.summary["reports"] == 2
    assert round_.summary["dropped"] == {}, "no task was given back, and none was lost"
    (kept,) = (run.folder / "a.state" / "kept").iterdir()
    return read_model(data_dir)[1].tobytes(), kept.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, own_bundle_path: Path, shards: list[Path]
) -> tuple[bytes, bytes]:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        plan, data_dir, url = write_plan(run.folder, own_bundle_path)
        run.coordinator(plan)
        for name, shard in zip("ab", shards, strict=False):
            run.device(name, url, shard)
        return outcome(run, data_dir)


@pytest.mark.parametrize("point", POINTS)
def test_a_training_that_is_killed_and_stopped_goes_on(
    run: Processes,
    own_bundle_path: Path,
    shards: list[Path],
    undisturbed: tuple[bytes, bytes],
    point: str,
) -> None:
    plan, data_dir, url = write_plan(run.folder, own_bundle_path)
    run.coordinator(plan)
    run.device("b", url, shards[1])
    dying = run.device("a", url, shards[0], CRASH, point, "2")
    assert dying.wait(120) == -9, run.log("a")
    stopped = run.device("a", url, shards[0])
    wait_for(lambda: "training goes on after step" in run.log("a"), "the training to go on")
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 0, run.log("a")
    log = run.log("a")
    if ": trained " not in log:  # else it was done just before the signal
        assert "is kept: the next start goes on with its training" in log
        assert (run.folder / "a.state" / "checkpoint").exists()
    run.device("a", url, shards[0])
    assert outcome(run, data_dir) == undisturbed
    assert run.log("a").count(": trained ") == 1
