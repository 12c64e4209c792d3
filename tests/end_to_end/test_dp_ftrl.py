"""Correlated noise with real processes: four devices, of which two take part in a release, and not
in the next one. The same model after any kill, and in the simulator."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Outcome
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import EVENTS, read_rows
from peers import plan_text
from processes import DIGITS, Processes, free_port, service_file, status_of, wait_for
from simulated_shards import give_simulator_s_secret, simulate_shards

pytestmark = pytest.mark.slow

CRASH = Path(__file__).with_name("crash_coordinator.py")
ROUNDS, DEVICES = 6, 4
PRIVATE: dict[str, object] = {
    "local__lr": 0.2,
    "local__epochs": 20,
    "local__batch_size": 0,
    "round__goal": 2,
    "round__minimum": 2,
    "round__over_selection": 1.0,
    "round__grace": 30.0,
    "round__gather": 30.0,
    "round__deadline": 600.0,
    "stop__rounds": ROUNDS,
    "privacy__noise": 0.05,
    "privacy__delta": 1e-6,
    "privacy__population": DEVICES,
    "privacy__clip": 2.0,
    "privacy__separation": 2,
    "privacy__participations": 3,
}


def simulated(folder: Path, bundle: Path, shards: list[Path], **more: object) -> Outcome:
    """The four devices' run in the simulator."""
    text = plan_text(bundle, folder / "run", "dp-ftrl", **(PRIVATE | more))
    (folder / "plan.toml").write_text(text)
    return simulate_shards(folder, shards[:DEVICES])


def pairs_of(outcome: Outcome) -> list[set[str]]:
    """Return who took part in each round."""
    rows = [row for row in read_rows(outcome.folder, EVENTS) if row["event"] == "accepted"]
    rounds: list[set[str]] = [set() for _ in range(ROUNDS)]
    for row in rows:
        rounds[int(row["task"].split("-")[1]) - 1].add(name_of(int(row["device"])))
    return rounds


def train(
    run: Processes,
    bundle: Path,
    shards: list[Path],
    pairs: list[set[str]],
    crash: tuple[str, int] | None = None,
) -> Vector:
    """The same run with real processes and the simulator's secret. Returns the last model."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_text(bundle, data_dir, "dp-ftrl", **PRIVATE))
    service_file(plan, port)
    give_simulator_s_secret(data_dir, bundle)
    paths = {name_of(device): shards[device] for device in range(DEVICES)}

    def start(name: str) -> None:
        # This interpreter for all, whatever ONNX Runtime it has: another may add in another order.
        url = f"ws://127.0.0.1:{port}"
        run.device(name, url, paths[name], options=("--runtime", "onnx"))

    words = () if crash is None else (CRASH, crash[0], str(crash[1]), plan)
    process = run.coordinator(plan, *words)
    for name in sorted(pairs[0]):
        start(name)
    wait_for(lambda: bool((found := status_of(data_dir)) and found.rounds), "the first round")
    for name in sorted(pairs[1]):
        start(name)
    if crash is not None:
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
        process = run.coordinator(plan)
    assert process.wait(120) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == ROUNDS
    assert [row.summary["reports"] for row in read_status(data_dir).rounds] == [2] * ROUNDS
    return model


def accuracy(model: Vector) -> float:
    """Of the digits that no device has."""
    x, y = DIGITS["data"]()[2:4]
    weights, bias = model[:640].reshape(10, 64), model[640:]
    found = (x.reshape(len(x), 64) @ weights.T + bias).argmax(axis=1)
    return float((found == y).mean())


@pytest.fixture(scope="module")
def in_simulator(
    tmp_path_factory: pytest.TempPathFactory, bundle_path: Path, shards: list[Path]
) -> Outcome:
    return simulated(tmp_path_factory.mktemp("simulated"), bundle_path, shards)


def test_processes_and_simulator_make_the_same_private_model(
    run: Processes, bundle_path: Path, shards: list[Path], in_simulator: Outcome
) -> None:
    pairs = pairs_of(in_simulator)
    assert all(len(pair) == 2 for pair in pairs)
    assert all(not one & other for one, other in pairwise(pairs))
    model = train(run, bundle_path, shards, pairs)
    assert model.tobytes() == in_simulator.model.tobytes()
    before = open_bundle(bundle_path).parameters()
    assert accuracy(model) > accuracy(before) + 0.2


@pytest.mark.parametrize(
    ("point", "turn"),
    [
        ("a round is closed and its commit not begun", 2),
        ("the new model is made but not written", 3),
        ("the new model is in its place but not recorded", 3),
        ("the new model is half recorded", 4),
        ("a round is recorded and nobody told", 3),
    ],
)
def test_a_killed_coordinator_makes_the_same_private_model(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    in_simulator: Outcome,
    point: str,
    turn: int,
) -> None:
    """SIGKILL between a release's noise and its commit, and around it."""
    model = train(run, bundle_path, shards, pairs_of(in_simulator), (point, turn))
    assert model.tobytes() == in_simulator.model.tobytes()
