"""Real processes, real sockets, real SIGKILL: what the fleet does when its parts die."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import psutil
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file, status_of, wait_for

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
LATE_DEVICE = Path(__file__).with_name("late_device.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    POINTS, SYNCHRONOUS = _names["POINTS"], _names["SYNCHRONOUS"]
    CRASH_DEVICE_POINTS = list(runpy.run_path(str(CRASH_DEVICE))["POINTS"])
THREE_ROUNDS = {
    "round__goal": 4,
    "round__minimum": 4,
    "round__gather": 30.0,
    "round__grace": 30.0,
    "stop__rounds": 3,
    "server__optimizer": "adam",
    "server__lr": 0.05,
}
"""Three rounds of four devices, all of whom must report."""
TURNS = {
    "tasks are decided but not recorded": 2,
    "tasks are recorded but not sent": 2,
    "a task was sent": 7,
    "an upload is granted": 2,
    "a chunk is spooled": 6,
    "an update is complete but not recorded": 3,
    "an update is recorded but not acknowledged": 6,
    "an update is acknowledged but not summed": 2,
    "an update is half summed": 3,
    "an update is summed": 5,
    "a small update is summed and counted": 4,
    "a small sum is being written": 2,
    "a small sum is written but not recorded": 2,
    "a sum is to be written": 1,
    "a sum is being written": 2,
    "a sum is written but not recorded": 1,
    "a sum is recorded": 1,
    "a round is closed and its commit not begun": 2,
    "the new model is made but not written": 2,
    "the new model is written but not in its place": 3,
    "the new model is in its place but not recorded": 3,
    "the thread has made the new model": 2,
    "the new model is half recorded": 3,
    "a round is committed but its batch is open": 2,
    "a round is recorded and the engine not told": 2,
    "a round is recorded and nobody told": 2,
}
"""Point -> which time it kills."""


def write_plan(
    folder: Path, bundle: Path, recipe: str = "fedprox", **settings: object
) -> tuple[Path, Path, str]:
    """A plan file; returns it, its data directory and the coordinator's address."""
    port = free_port()
    data_dir = folder / "run"
    values: dict[str, object] = {"local__lr": 0.1, "local__mu": 0.01, "local__epochs": 1}
    text = plan_text(bundle, data_dir, recipe, **(values | settings))
    path = folder / "plan.toml"
    path.write_text(text)
    service_file(path, port)
    return path, data_dir, f"ws://127.0.0.1:{port}"


def test_half_of_the_cohort_killed_in_mid_round(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Eight devices train for long enough to be caught at it; four die; the round ends with the
    other four."""
    plan, data_dir, url = write_plan(
        run.folder,
        bundle_path,
        round__goal=8,
        round__minimum=4,
        round__grace=0.3,
        round__gather=30.0,
        stop__rounds=1,
        local__epochs=100_000,
        local__time_budget=4.0,
    )
    run.coordinator(plan)
    devices = [f"device-{number}" for number in range(8)]
    for name, shard in zip(devices, shards, strict=True):
        run.device(name, url, shard)
    wait_for(
        lambda: all("epochs" in run.log(name) for name in devices), "every device to have its task"
    )
    for name in devices[:4]:
        run.kill(name)
    assert run.wait("coordinator") == 0
    status = read_status(data_dir)
    (round_,) = status.rounds
    assert round_.summary["reports"] == 4
    assert round_.summary["partial"] == 4, "the time budget ended their work, and they said so"
    assert round_.summary["dropped"] == {"lost": 4}
    assert status.version == 1
    for name in devices[4:]:
        assert run.wait(name) == 0, run.log(name)


@pytest.mark.slow
def test_a_device_that_was_stopped_in_order_has_another_turn_in_the_round(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """The round needs both devices. One is stopped by SIGTERM in its training and started again."""
    plan, data_dir, url = write_plan(
        run.folder,
        bundle_path,
        round__goal=2,
        round__minimum=2,
        round__deadline=600.0,
        round__grace=300.0,
        stop__rounds=1,
        local__epochs=100_000,
        local__time_budget=4.0,
    )
    run.coordinator(plan)
    for name, shard in zip("ab", shards, strict=False):
        run.device(name, url, shard)
    wait_for(lambda: all("training" in run.log(name) for name in "ab"), "both devices to train")
    run.running["b"].terminate()
    assert run.wait("b") == 0
    assert "connecting again" not in run.log("b").partition("stopping: SIGTERM")[2]
    run.device("b", url, shards[1])
    assert run.wait("coordinator") == 0
    (round_,) = read_status(data_dir).rounds
    assert round_.summary["reports"] == 2
    assert round_.summary["dropped"] == {"failed: stopping": 1}


def train(run: Processes, bundle: Path, shards: list[Path], crash: tuple[str, int] | None) -> bytes:
    """THREE_ROUNDS, and the final model's bytes. ``crash``: where the coordinator dies before it is
    started again.

    Another thread saves a sum only if no update waits to be added and the round is open. So that it
    does, the last device reports after the crash."""
    plan, data_dir, url = write_plan(run.folder, bundle, **THREE_ROUNDS)
    names = [f"device-{number}" for number in range(4)]
    for name, shard in zip(names[:3], shards, strict=False):
        run.device(name, url, shard)
    late = crash is not None and crash[0].startswith("a sum ")
    last = run.device(names[3], url, shards[3], *([LATE_DEVICE] if late else []))
    if crash is not None:
        process = run.coordinator(plan, CRASH, crash[0], str(crash[1]), plan)
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
        status = status_of(data_dir)
        assert status is not None
        assert status.finished is None
        assert not status.running
    if late:
        wait_for(
            lambda: psutil.Process(last.pid).status() == psutil.STATUS_STOPPED,
            "the late device to have trained",
        )
        last.send_signal(signal.SIGCONT)
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == 3
    assert [row.summary["reports"] for row in read_status(data_dir).rounds] == [4, 4, 4]
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    return model.tobytes()


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> bytes:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return train(run, bundle_path, shards, None)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in SYNCHRONOUS else pytest.mark.slow)
        for point in POINTS
    ],
)
def test_the_coordinator_killed_changes_nothing(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: bytes, point: str
) -> None:
    """SIGKILL at each point, and a new start: the undisturbed run's model, bit for bit.

    The process that is killed adds, saves and commits in another thread, except at the points of
    small models; the new one and the undisturbed one do not."""
    assert train(run, bundle_path, shards, (point, TURNS[point])) == undisturbed


@pytest.fixture(scope="session")
def undisturbed_large(
    tmp_path_factory: pytest.TempPathFactory,
    warm: Path,
    large_bundle_path: Path,
    shards: list[Path],
) -> bytes:
    with processes(tmp_path_factory.mktemp("undisturbed-large"), warm) as run:
        return train(run, large_bundle_path, shards, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "turn"),
    [
        ("an update is acknowledged but not summed", 6),
        ("an update is half summed", 100),
        ("a sum is being written", 2),
        ("the new model is made but not written", 2),
    ],
)
def test_the_coordinator_of_a_large_model_killed_changes_nothing(
    run: Processes,
    large_bundle_path: Path,
    shards: list[Path],
    undisturbed_large: bytes,
    point: str,
    turn: int,
) -> None:
    """The same with a model above the real threshold: all processes add, save and commit in another
    thread."""
    assert train(run, large_bundle_path, shards, (point, turn)) == undisturbed_large


def test_the_coordinator_killed_before_its_last_commit(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: bytes
) -> None:
    """The next start makes the last model before it listens, and ends well; one that stays tells
    the devices."""
    plan, data_dir, url = write_plan(run.folder, bundle_path, **THREE_ROUNDS)
    for number in range(4):
        run.device(f"device-{number}", url, shards[number])
    assert (
        run.coordinator(plan, CRASH, "the new model is made but not written", "3", plan).wait(60)
        == -9
    )
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    assert read_status(data_dir).finished == "3 rounds done"
    assert read_model(data_dir)[1].tobytes() == undisturbed
    coordinator = run.coordinator(plan, "-m", "fleetlearn_coordinator", "serve", plan, "--stay")
    for number in range(4):
        assert run.wait(f"device-{number}") == 0, run.log(f"device-{number}")
    coordinator.terminate()
    assert coordinator.wait(30) == 0, run.log("coordinator")


def test_sigterm_ends_cleanly_and_a_new_start_goes_on(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: bytes
) -> None:
    plan, data_dir, url = write_plan(run.folder, bundle_path, **THREE_ROUNDS)
    coordinator = run.coordinator(plan)
    for number in range(2):
        run.device(f"device-{number}", url, shards[number])
    wait_for(
        lambda: (status := status_of(data_dir)) is not None and status.live.get("connected") == 2,
        "two devices",
    )
    coordinator.terminate()
    assert coordinator.wait(30) == 0
    assert "stopped by SIGTERM" in run.log("coordinator")
    run.coordinator(plan)
    for number in range(2, 4):
        run.device(f"device-{number}", url, shards[number])
    assert run.wait("coordinator") == 0
    assert read_model(data_dir)[1].tobytes() == undisturbed


@pytest.mark.parametrize("point", CRASH_DEVICE_POINTS)
def test_a_device_killed_changes_nothing(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: bytes, point: str
) -> None:
    """SIGKILL in the second round, and a new start. Work that was on disk is sent, not done
    again."""
    plan, data_dir, url = write_plan(run.folder, bundle_path, **THREE_ROUNDS)
    run.coordinator(plan)
    for number in range(1, 4):
        run.device(f"device-{number}", url, shards[number])
    dying = run.device("device-0", url, shards[0], CRASH_DEVICE, point, "2")
    assert dying.wait(60) == -9, run.log("device-0")
    run.device("device-0", url, shards[0])
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert read_model(data_dir)[1].tobytes() == undisturbed
    trained = run.log("device-0").count(": trained ")
    assert trained == (4 if point == "the work is done but not on disk" else 3)


OWN = {
    "moon": {**THREE_ROUNDS, "local__lr": 0.01, "local__mu": 1.0, "local__epochs": 2},
    "ditto": {**THREE_ROUNDS, "local__lr": 0.1, "local__mu": 0.5, "local__personal_epochs": 2},
}


def train_with_own(
    run: Processes,
    bundle: Path,
    shards: list[Path],
    crash: tuple[str, int] | None,
    recipe: str = "moon",
) -> dict[str, bytes]:
    """Three rounds in which each device keeps something of its own. Returns the final model's
    bytes, and what each device keeps at the end."""
    plan, data_dir, url = write_plan(run.folder, bundle, recipe, **OWN[recipe])
    run.coordinator(plan)
    for number in range(1, 4):
        run.device(f"device-{number}", url, shards[number])
    if crash is not None:
        dying = run.device("device-0", url, shards[0], CRASH_DEVICE, crash[0], str(crash[1]))
        assert dying.wait(60) == -9, run.log("device-0")
    run.device("device-0", url, shards[0])
    assert run.wait("coordinator") == 0, run.log("coordinator")
    found = {"model": read_model(data_dir)[1].tobytes()}
    for number in range(4):
        name = f"device-{number}"
        assert run.wait(name) == 0, run.log(name)
        (path,) = (run.folder / f"{name}.state" / "kept").iterdir()
        found[name] = path.read_bytes()
    return found


@pytest.fixture(scope="session")
def undisturbed_own(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, own_bundle_path: Path, shards: list[Path]
) -> dict[str, bytes]:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return train_with_own(run, own_bundle_path, shards, None)


@pytest.mark.parametrize(
    "point",
    CRASH_DEVICE_POINTS[:1]
    + [pytest.param(point, marks=pytest.mark.slow) for point in CRASH_DEVICE_POINTS[1:]],
)
def test_a_device_killed_keeps_its_own(
    run: Processes,
    own_bundle_path: Path,
    shards: list[Path],
    undisturbed_own: dict[str, bytes],
    point: str,
) -> None:
    """SIGKILL in the second round: the same personal parameters and previous model at the end, bit
    for bit, and so the same model. Work that is done again begins where it began before."""
    # the directory is settled when it is opened, and in drop_pending
    turn = 4 if "not in its place" in point else 2
    assert train_with_own(run, own_bundle_path, shards, (point, turn)) == undisturbed_own
    parts = [undisturbed_own[f"device-{number}"] for number in range(4)]
    assert len(set(parts)) == 4
    assert {len(part) for part in parts} == {4 * (16 * 10 + 10 + 64 * 16 + 16) + 4}


@pytest.fixture(scope="session")
def undisturbed_ditto(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> dict[str, bytes]:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        found = train_with_own(run, bundle_path, shards, None, "ditto")
        rows = [row.summary for row in read_status(run.folder / "run").rounds]
    assert [row["behind"]["personal.loss"] for row in rows] == [4, 4, 4]
    assert rows[0]["metrics"]["personal.accuracy"] == rows[0]["metrics"]["accuracy"], (
        "at first it is the round's model"
    )
    assert rows[2]["metrics"]["personal.loss"] < rows[2]["metrics"]["loss"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_DEVICE_POINTS[:2])
def test_a_device_killed_keeps_its_personal_model(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    undisturbed_ditto: dict[str, bytes],
    point: str,
) -> None:
    """Ditto: v_k goes on from the second round's, or from the first round's where the second is
    trained again."""
    turn = 4 if "not in its place" in point else 2
    assert train_with_own(run, bundle_path, shards, (point, turn), "ditto") == undisturbed_ditto
    models = {undisturbed_ditto[f"device-{number}"] for number in range(4)}
    assert len(models) == 4
    assert {len(model) for model in models} == {4 * 650 + 4}
