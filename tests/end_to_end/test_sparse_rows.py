"""Devices that fetch and send the rows of a table that their data name: real processes, sockets and
kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import ROUNDS as ROWS_OF_ROUNDS
from fleetlearn_simulator.results.run_folder import read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from peers import plan_text
from processes import Processes, free_port, processes, service_file
from sparse_fleet import FILMS, WIDTH, ratings_bundle, ratings_files, ratings_of

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
ROUNDS = {
    "round__goal": 4,
    "round__minimum": 4,
    "round__gather": 30.0,
    "round__grace": 30.0,
    "stop__rounds": 3,
    "local__lr": 0.5,
    "local__batch_size": 10,
    "server__optimizer": "adam",
    "server__lr": 0.05,
}
"""Three rounds of four devices, all of whom must report."""
ROW_BYTES = 4 * (WIDTH + 1)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ratings_bundle(tmp_path_factory.mktemp("ratings"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return ratings_files(tmp_path_factory.mktemp("data"))


def train(
    run: Processes,
    bundle: Path,
    files: list[Path],
    crash: tuple[str, int] | None = None,
    device_crash: str | None = None,
    serve: tuple[str, ...] = (),
    **settings: object,
) -> np.ndarray:
    """Three rounds; returns the final model. ``serve``: more of the coordinator's command.
    ``crash``, ``device_crash``: where the coordinator, or a device, dies before it is started
    again."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_text(bundle, data_dir, **(ROUNDS | settings)))
    service_file(plan, port)
    url = f"ws://127.0.0.1:{port}"
    names = [name_of(number) for number in range(4)]
    for name, file in zip(names[1:], files[1:], strict=True):
        run.device(name, url, file)
    if device_crash is None:
        run.device(names[0], url, files[0])
    if crash is not None:
        process = run.coordinator(plan, CRASH, crash[0], str(crash[1]), plan)
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
    run.coordinator(plan, "-m", "fleetlearn_coordinator", "serve", plan, *serve)
    if device_crash is not None:
        dying = run.device(names[0], url, files[0], CRASH_DEVICE, device_crash, "2")
        assert dying.wait(60) == -9, run.log(names[0])
        run.device(names[0], url, files[0])
    assert run.wait("coordinator") == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == 3
    assert [row.summary["reports"] for row in read_status(data_dir).rounds] == [4, 4, 4]
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    return model


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle: Path, files: list[Path]
) -> np.ndarray:
    with processes(tmp_path_factory.mktemp("undisturbed-rows"), warm) as run:
        return train(run, bundle, files)


def test_rows_alone_travel_and_the_model_is_that_of_whole_tables(
    run: Processes, bundle: Path, files: list[Path]
) -> None:
    """FedAvg's mean: bit for bit the model of devices that fetch and send whole tables, for about a
    tenth of the bytes."""
    plain = {"server__optimizer": "sgd", "server__lr": 1.0}
    model = train(run, bundle, files, **plain)
    sparse = read_status(run.folder / "run").rounds
    apart = run.folder / "whole"
    apart.mkdir()
    with processes(apart, run.warm) as other:
        whole = train(other, bundle, files, aggregation__rows="whole", **plain)
        dense = read_status(other.folder / "run").rounds
    assert np.array_equal(model, whole)
    manifest = open_bundle(bundle).manifest
    rows = [len(np.unique(ratings_of(device)["film"])) for device in range(4)]
    selected = sum(4 + count * ROW_BYTES for count in rows)
    header = 16
    assert sparse[-1].summary["bytes_up"] == selected + 4 * sum(rows) + 4 * 2 * header
    # Frames of contents have a header of the WebSocket's too.
    assert selected < sparse[-1].summary["bytes_down"] <= selected + 4 * (header + 4)
    assert dense[-1].summary["bytes_up"] == 4 * (4 * manifest.size + header)
    assert sparse[-1].summary["bytes_up"] < dense[-1].summary["bytes_up"] / 8


def test_rows_of_no_device_stay_as_they_are(
    bundle: Path, files: list[Path], undisturbed: np.ndarray
) -> None:
    """Also with Adam on the server, whose moments move only rows that came."""
    manifest = open_bundle(bundle).manifest
    before = open_bundle(bundle).parameters()
    touched = np.unique(np.concatenate([ratings_of(device)["film"] for device in range(4)]))
    untouched = np.setdiff1d(np.arange(FILMS), touched)
    assert len(untouched) > 100
    for row in manifest.parameters:
        if row.name in ("films.weight", "film_bias.weight"):
            place = slice(row.offset, row.offset + int(np.prod(row.shape)))
            old, new = (each[place].reshape(row.shape) for each in (before, undisturbed))
            assert np.array_equal(old[untouched], new[untouched])
            assert (old[touched] != new[touched]).any(axis=1).all()


@pytest.mark.parametrize(
    ("point", "turn"),
    [
        pytest.param("an update is recorded but not acknowledged", 6),
        pytest.param("a small sum is written but not recorded", 2, marks=pytest.mark.slow),
        pytest.param("an update is acknowledged but not summed", 2, marks=pytest.mark.slow),
        pytest.param("the new model is half recorded", 2, marks=pytest.mark.slow),
    ],
)
def test_the_coordinator_killed_changes_nothing(
    run: Processes,
    bundle: Path,
    files: list[Path],
    undisturbed: np.ndarray,
    point: str,
    turn: int,
) -> None:
    assert np.array_equal(train(run, bundle, files, (point, turn)), undisturbed)


@pytest.mark.parametrize(
    "point", ["the work is done but not on disk", "the work is on disk and not reported"]
)
def test_a_device_killed_changes_nothing(
    run: Processes, bundle: Path, files: list[Path], undisturbed: np.ndarray, point: str
) -> None:
    assert np.array_equal(train(run, bundle, files, device_crash=point), undisturbed)


def test_behind_gateways(
    run: Processes, bundle: Path, files: list[Path], undisturbed: np.ndarray
) -> None:
    """Which read rows out of the model's file, and store updates whose size follows from theirs."""
    model = train(run, bundle, files, serve=("--gateways", "2"))
    assert np.array_equal(model, undisturbed)


FILES = """
from pathlib import Path
import numpy as np

def make(device, seed):
    with np.load(FOLDER / f"ratings-{device}.npz") as file:
        return {name: file[name] for name in file.files}
"""
SCENARIO = """
name = "rows"
plan = "plan.toml"
population = { size = 4, connected = 4 }
data = { kind = "function", function = "ratings:make" }
compute = { step_seconds = 1.0 }
"""


@pytest.mark.parametrize(
    ("rows", "up", "down"),
    [
        ("touched", "int8", "float16"),
        pytest.param("all", "float32", "delta", marks=pytest.mark.slow),
    ],
)
def test_the_simulator_makes_the_same_model_and_counts_the_same_bytes(
    run: Processes, bundle: Path, files: list[Path], rows: str, up: str, down: str
) -> None:
    settings = {"aggregation__rows": rows, "encoding__up": up, "encoding__down": down}
    model = train(run, bundle, files, **settings)
    folder = repr(str(files[0].parent))
    text = FILES.replace("FOLDER", f"Path({folder})")
    (run.folder / "ratings.py").write_text(text)
    (run.folder / "scenario.toml").write_text(SCENARIO)
    scenario = Scenario.load(run.folder / "scenario.toml")
    outcome = simulate(scenario, run.folder / "sim", Options(backend="bundle", workers=1))
    assert outcome is not None
    assert np.array_equal(outcome.model, model)
    real = read_status(run.folder / "run").rounds[-1].summary
    simulated = read_rows(outcome.folder, ROWS_OF_ROUNDS)[-1]["bytes"]
    headers = 4 * 16
    assert real["bytes_up"] == simulated["up"] + 2 * headers
    assert 0 < real["bytes_down"] - simulated["down"] <= headers + 16
