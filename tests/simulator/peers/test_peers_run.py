"""Whole runs of peers: the same bytes from the same seed; what they measure; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import SimulatorError
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.peers.peer_measures import consensus_error, mean_model, peers_to_test
from fleetlearn_simulator.peers.peer_rules import PEER_RULES, peer_problems
from fleetlearn_simulator.peers.peers_run import simulate_peers
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, SUMMARY, read_rows
from fleetlearn_simulator.run import Options
from fleetlearn_simulator.scenario.peers_section import PeersSection
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import PEER_MODELS
from line_bundle import write_line_bundle
from peers_support import scenario_of
from typer.testing import CliRunner

ONE = Options(backend="bundle", workers=1)
FILES = (EVENTS, ROUNDS, MODEL, SUMMARY, PEER_MODELS)
MESSY: dict[str, Any] = {
    "availability": {"kind": "markov", "on": 400.0, "off": 100.0},
    "failures": {"train": 0.002, "crash": 0.1, "stragglers": 0.3},
    "plan__local": {"epochs": 2, "batch_size": 10, "lr": 0.002},
    "plan__stop__rounds": 6,
}


def contents(scenario: Scenario, folder: Path, options: Options = ONE) -> dict[str, bytes]:
    assert simulate_peers(scenario, folder, options) is not None
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("mode", ["steps", "gossip"])
def test_the_same_seed_gives_the_same_bytes(line: Path, tmp_path: Path, mode: str) -> None:
    scenario = scenario_of(tmp_path, line, 12, mode=mode, seed=3, **MESSY)
    first = contents(scenario, tmp_path / "first")
    assert contents(scenario, tmp_path / "second") == first
    # A folder that was begun before is replaced.
    assert contents(scenario, tmp_path / "first") == first
    other = scenario_of(tmp_path, line, 12, mode=mode, seed=4, **MESSY)
    assert contents(other, tmp_path / "other") != first
    causes = {cause for row in read_rows(tmp_path / "first", ROUNDS) for cause in row["causes"]}
    assert {"train", "crash"} & causes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bundle", "vectorized"])
@pytest.mark.parametrize("mode", ["steps", "gossip"])
def test_the_number_of_processes_changes_no_byte(
    softmax: Path, tmp_path: Path, mode: str, backend: str
) -> None:
    scenario = scenario_of(tmp_path, softmax, 40, mode=mode, **MESSY)
    alone = contents(scenario, tmp_path / "one", Options(backend=backend, workers=1))
    several = contents(scenario, tmp_path / "three", Options(backend=backend, workers=3))
    assert several == alone


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["steps", "gossip"])
def test_ten_thousand_peers(softmax: Path, tmp_path: Path, mode: str) -> None:
    settings = MESSY | {"topology": "exponential", "local_steps": 1, "plan__stop__rounds": 3}
    scenario = scenario_of(tmp_path, softmax, 10_000, mode=mode, **settings)
    options = Options(backend="vectorized", workers=1, test=0)
    outcome = simulate_peers(scenario, tmp_path / "run", options)
    assert outcome is not None
    found = outcome.summary["peers"]
    assert found["tested"] == 10_000
    assert 0 < found["consensus"] < 1
    first, *_, last = read_rows(tmp_path / "run", ROUNDS)
    assert last["train"]["loss"] < first["train"]["loss"]
    assert {"crash", "train"} & {*outcome.summary["lost"]}


def test_what_is_measured(softmax: Path, tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, softmax, 12, tested=5, plan__stop__rounds=4)
    outcome = simulate_peers(scenario, tmp_path / "run", ONE._replace(test=2))
    assert outcome is not None
    rows = read_rows(tmp_path / "run", ROUNDS)
    assert [row["peers"].get("tested") for row in rows] == [None, 5, None, 12]
    models = np.fromfile(tmp_path / "run" / PEER_MODELS, np.float32).reshape(12, -1)
    found = outcome.summary["peers"]
    assert found["consensus"] == rows[-1]["peers"]["consensus"] == consensus_error(models)
    np.testing.assert_array_equal(outcome.model, mean_model(models))
    assert found["gap"] == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / 12)))
    own, test = found["own"]["accuracy"], outcome.summary["test"]
    assert own["least"] <= own["mean"] <= own["greatest"]
    assert own["least"] < own["greatest"]
    assert 0 < test["accuracy"] <= 1
    # Each of twelve peers sends its model to two neighbours in each of four steps.
    size = 4 * open_bundle(softmax).manifest.size
    assert outcome.summary["bytes"] == {"down": 96 * size, "up": 96 * size}
    assert {row["bytes"]["up"] for row in rows} == {24 * size}


def test_consensus_error_by_hand() -> None:
    models = np.array([[0, 0], [2, 0], [4, 6], [2, 6]], np.float32)
    np.testing.assert_array_equal(mean_model(models), [2, 3])
    assert consensus_error(models) == pytest.approx(np.sqrt((13 + 9 + 13 + 9) / 4))


def test_the_peers_that_are_tested_are_drawn() -> None:
    np.testing.assert_array_equal(peers_to_test(4, 9, seed=1), np.arange(4))
    some = peers_to_test(1000, 10, seed=1)
    assert len({*some.tolist()}) == 10
    assert (np.diff(some) > 0).all()
    assert some.max() > 100
    assert (some != peers_to_test(1000, 10, seed=2)).any()
    assert len(peers_to_test(3, 0, seed=1)) == 0


def test_buffers_are_mixed_too(line: Path, tmp_path: Path) -> None:
    """``seen`` counts the examples of a peer's training, 10 (k + 1), on top of the 7 at first."""
    scenario = scenario_of(tmp_path, line, 4, topology="complete")
    outcome = simulate_peers(scenario, tmp_path / "run", ONE)
    assert outcome is not None
    (place,) = open_bundle(line).manifest.buffers
    assert outcome.model[place].tolist() == [7 + 25]


def test_a_stop_ends_the_run_unfinished(line: Path, tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, line, 3, plan__stop__rounds=5)
    run = tmp_path / "run"
    assert simulate_peers(scenario, run, ONE, should_stop=lambda: True) is None
    assert len(read_rows(run, ROUNDS)) == 1
    assert not (run / SUMMARY).exists()


REFUSED: dict[str, dict[str, Any]] = {
    "[plan.secure]": {},
    "[plan.privacy]": {},
    "[plan.distil]": {},
    'plan.round.participation = "asynchronous"': {
        "plan__recipe": "fedbuff",
        "plan__round": {"goal": 2, "concurrency": 3, "deadline": 100.0},
    },
    "plan.local.algorithm": {"plan__recipe": "ditto", "plan__local__mu": 0.1},
    "plan.initial": {"plan__initial": "weights.safetensors"},
    "plan.local.step_schedule": {"plan__local__step_schedule": {"warm_up": 3}},
    "plan.local.schedule": {"plan__local__schedule": {"warm_up": 3}},
    "plan.local.mu": {"plan__recipe": "fedprox", "plan__local__mu": 0.1},
    "plan.stop.metric": {
        "plan__local__evaluate": True,
        "plan__stop": {"rounds": 2, "metric": "loss", "target": 0.1},
    },
    "plan.encoding.up": {"plan__encoding": {"up": "float16"}},
    "failures.corrupt": {"failures": {"corrupt": [{"share": 0.1, "kind": "flipped"}]}},
    "coordinator.crashes": {"coordinator": {"crashes": [3.0]}},
    'peers.mode = "gossip" with one-peer-exponential': {
        "peers": {"mode": "gossip", "topology": "one-peer-exponential"}
    },
}


def test_each_rule_has_a_case() -> None:
    assert REFUSED.keys() == PEER_RULES.keys()


@pytest.mark.parametrize("key", [*REFUSED])
def test_what_has_no_meaning_among_peers_is_refused(line: Path, tmp_path: Path, key: str) -> None:
    if key.startswith("["):  # sections that take more than a key: that they are there is enough
        plain = scenario_of(tmp_path, line, 4)
        plan = msgspec.structs.replace(plain.plan, **{key[6:-1]: {"a": 1, "b": 2}})
        scenario = msgspec.structs.replace(plain, plan=plan)
    else:
        scenario = scenario_of(tmp_path, line, 4, **REFUSED[key])
    with pytest.raises(SimulatorError) as raised:
        simulate_peers(scenario, tmp_path / "run", ONE)
    assert raised.value.text == f"{scenario.file}: {key} is not for peers: {PEER_RULES[key][1]}"
    assert not (tmp_path / "run").exists()


def test_ray_is_refused(line: Path, tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="on this machine"):
        simulate_peers(scenario_of(tmp_path, line, 4), tmp_path, ONE._replace(engine="ray"))


def test_a_scenario_without_peers_and_one_with_personal_parameters(
    line: Path, tmp_path: Path
) -> None:
    without = msgspec.structs.replace(scenario_of(tmp_path, line, 4), peers=None)
    manifest = open_bundle(line).manifest
    assert next(peer_problems(without, manifest)).startswith("there is no [peers]")
    personal = write_line_bundle(tmp_path / "personal.bundle", personal=True)
    scenario = scenario_of(tmp_path, personal.path, 4)
    (problem,) = peer_problems(scenario, personal.manifest)
    assert "devices keep for themselves" in problem


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ({"topology": "random-regular", "degree": 3}, "must be even"),
        ({"topology": "torus", "rows": 2}, "cannot stand in 2 rows"),
        ({"topology": "file"}, "has no file"),
        ({"topology": "file", "matrix": "w.csv"}, "row 0 adds up to 0.9"),
        ({"topology": "file", "matrix": "none.csv"}, "none.csv"),
    ],
)
def test_an_impossible_topology_says_why(
    line: Path, tmp_path: Path, peers: dict[str, Any], words: str
) -> None:
    (tmp_path / "w.csv").write_text("0.9,0\n0,1\n")
    scenario = scenario_of(tmp_path, line, 5, **peers)
    with pytest.raises(SimulatorError, match=words):
        simulate_peers(scenario, tmp_path / "run", ONE)


def test_a_matrix_from_a_file_beside_the_scenario(line: Path, tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("0.5,0.25,0.25\n0.25,0.5,0.25\n0.25,0.25,0.5\n")
    scenario = scenario_of(tmp_path, line, 3, topology="file", matrix="w.csv")
    outcome = simulate_peers(scenario, tmp_path / "run", ONE)
    assert outcome is not None
    assert outcome.summary["peers"]["gap"] == pytest.approx(0.75)


def test_the_section_is_kept_in_the_runs_scenario_and_left_out_of_others(
    line: Path, tmp_path: Path
) -> None:
    scenario = scenario_of(tmp_path, line, 3, topology="complete", local_steps=2)
    again = Scenario.parse(scenario.to_toml(), tmp_path)
    assert again.peers == PeersSection(topology="complete", local_steps=2)
    without = msgspec.structs.replace(scenario, peers=None)
    assert "peers" not in without.to_toml()


def test_the_command_runs_a_sweep_beside_fedavg(softmax: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"plan__stop__rounds": 2}
    scenario_of(tmp_path, softmax, 9, sweep={"peers.topology": ["ring", "complete"]}, **settings)
    runner, wide, options = CliRunner(), {"COLUMNS": "250"}, ["--backend", "bundle"]
    file = str(tmp_path / "scenario.toml")
    done = runner.invoke(app, ["peers", file, *options, "--workers", "1"], env=wide)
    assert done.exit_code == 0, done.output
    assert "ring" in done.stderr
    assert "accuracy, own models" in done.stderr
    folder = tmp_path / "scenario.peers"
    summaries = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*/summary.json"))]
    assert [found["peers"]["topology"] for found in summaries] == ["complete", "ring"]
    again = runner.invoke(app, ["peers", file])
    assert again.exit_code == 1
    assert "holds a run already" in again.stderr
    # `run` trains the same scenario by its coordinator, and `compare` puts both side by side.
    scenario_of(tmp_path, softmax, 9, **settings)
    assert runner.invoke(app, ["run", file, *options, "--workers", "1"]).exit_code == 0
    beside = runner.invoke(
        app,
        ["compare", str(folder), str(tmp_path / "scenario.sim"), "--output", str(tmp_path / "c")],
        env=wide,
    )
    assert beside.exit_code == 0, beside.output
    assert "topology = complete" in beside.output
    report = runner.invoke(app, ["report", str(next(folder.glob("*complete")))])
    assert report.exit_code == 0, report.output


def test_the_command_says_what_it_lacks(line: Path, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    scenario_of(tmp_path, line, 2)
    file.write_text(file.read_text().replace("[peers]", "[sweep]").replace('topology = "ring"', ""))
    done = CliRunner().invoke(app, ["peers", str(file)])
    assert done.exit_code == 1
    assert "there is no [peers] that says who mixes with whom" in done.stderr
    for option, value in (("--backend", "fast"), ("--provider", "tpu")):
        refused = CliRunner().invoke(app, ["peers", str(file), option, value])
        assert f"{option} {value}: expected" in refused.stderr
