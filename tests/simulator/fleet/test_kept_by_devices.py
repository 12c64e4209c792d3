"""Fleets whose devices keep something, against the step in numpy: who keeps what, and from when
on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.fleet.round_training import RoundTraining
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import NO_ROW
from line_bundle import INITIAL, INITIAL_STATE, line_data, line_step, write_line_bundle
from virtual import drive, make_fleet, make_scenario, simulate_in_parts

FULL = {"plan__local__batch_size": 0}
"""All examples in one step, so that an epoch takes 10 seconds on each device."""
SLOW_UPLOAD = {"tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 3.2}}}
"""The 4 elements that travel take 5 seconds."""
LR = 0.01


def device_epoch(model: Any, kept: dict[str, Any], device: int) -> tuple[Any, dict[str, Any]]:
    """One full-batch step of a device that keeps h and t: the update of (w, seen), and what it
    keeps then."""
    now = {"w": model[:3], "seen": model[3], "h": kept["h"]}
    state = {"m.w": INITIAL_STATE["m.w"], "t": kept["t"]}
    after, state, _ = line_step(now, state, line_data(10 * (device + 1), seed=device), LR)
    return np.array([*after["w"], after["seen"]]) - model, {"h": after["h"], "t": state["t"]}


def first_kept() -> dict[str, Any]:
    return {"h": float(INITIAL["h"]), "t": float(INITIAL_STATE["t"])}


def kept_by(fleet: Fleet, device: int) -> list[float] | None:
    """What a device keeps: h and t."""
    kept = fleet.coordinator.kept
    assert kept is not None
    assert kept.states is not None
    (row,) = kept.states.of([device])
    return None if row == NO_ROW else [float(value) for value in kept.states.file.read(row)]


def one_round(scenario: Scenario) -> Fleet:
    fleet = make_fleet(scenario)
    while not fleet.history:
        fleet.advance()
    return fleet


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """h is personal, and the state has a count of steps, t, that outlives the task."""
    folder = tmp_path_factory.mktemp("keeping") / "keeping.bundle"
    return write_line_bundle(folder, personal=True, state=True).path


def test_devices_go_on_from_what_they_kept(tmp_path: Path, keeping: Path) -> None:
    """Three rounds of three devices, whose personal h and kept t are in no model that travels."""
    run = drive(
        make_scenario(
            tmp_path, keeping, 3, plan__stop__rounds=3, plan__local__evaluate=True, **FULL
        )
    )
    model = np.array([*INITIAL["w"], INITIAL["seen"]], np.float64)
    kept = {device: first_kept() for device in range(3)}
    for row in run.rounds:
        losses = []
        for device in range(3):
            x, y = line_data(10 * (device + 1), seed=device)
            losses.append(float(((x @ model[:3] + kept[device]["h"] - y) ** 2).mean()))
        made = {device: device_epoch(model, kept[device], device) for device in range(3)}
        model = model + np.average(
            [update for update, _ in made.values()], axis=0, weights=[10, 20, 30]
        )
        kept = {device: after for device, (_, after) in made.items()}
        expected = np.average(losses, weights=[10, 20, 30])
        assert row["evaluation"]["loss"] == pytest.approx(expected, rel=1e-5), (
            "with h as it was before the training"
        )
    np.testing.assert_allclose(run.model, model, rtol=1e-5)
    for device in range(3):
        assert kept_by(run.fleet, device) == pytest.approx(
            [kept[device]["h"], kept[device]["t"]], rel=1e-5
        )


def test_a_device_keeps_what_a_finished_training_left_and_nothing_else(
    tmp_path: Path, keeping: Path
) -> None:
    """Device 0 vanishes during its upload, device 1 during its training; device 2 reports."""
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,12\n1,0,15\n2,0,1000000\n")
    run = drive(
        make_scenario(
            tmp_path,
            keeping,
            3,
            availability={"kind": "trace", "file": "trace.csv"},
            **SLOW_UPLOAD,
            plan__round__deadline=100.0,
        )
    )
    assert run.told("lost", "accepted") == [
        (12.0, "lost", 0, "offline"),
        (15.0, "lost", 1, "offline"),
        (36.25, "accepted", 2, None),
    ]
    first = kept_by(run.fleet, 0)
    assert first is not None
    assert first[1] == INITIAL_STATE["t"] + 1
    assert kept_by(run.fleet, 1) is None
    last = kept_by(run.fleet, 2)
    assert last is not None
    assert last[1] == INITIAL_STATE["t"] + 3


def test_what_is_refused_leaves_the_same_as_what_is_accepted(
    tmp_path: Path,
    keeping: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices that send what no model can take have trained as always."""
    monkeypatch.setattr(exact_mean, "MAX_ELEMENT", 1e6)
    corrupt = [{"share": 1.0, "kind": "scaled", "factor": 1e9}]
    scenario = make_scenario(
        tmp_path,
        keeping,
        2,
        failures={"corrupt": corrupt},
        plan__round__deadline=100.0,
        plan__local__lr=0.2,
    )
    refused = one_round(scenario)
    assert refused.history[0]["causes"] == {"rejected: out-of-range": 2}
    accepted = one_round(make_scenario(tmp_path, keeping, 2, plan__local__lr=0.2))
    for device in range(2):
        assert kept_by(refused, device) == kept_by(accepted, device) is not None


def test_what_is_surplus_keeps_what_it_made(
    tmp_path: Path, keeping: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ends with the report of device 0, at 16.25 s; device 1 is done at 10 s too, and
    uploads."""
    run = drive(
        make_scenario(
            tmp_path,
            keeping,
            2,
            **SLOW_UPLOAD,
            **FULL,
            plan__round__goal=1,
            plan__round__over_selection=2.0,
            compute={"step_seconds": 10.0},
        )
    )
    assert run.told("lost") == [(16.25, "lost", 1, "surplus")]
    kept = [kept_by(run.fleet, device) for device in range(2)]
    for device in range(2):
        _, after = device_epoch(
            np.array([*INITIAL["w"], INITIAL["seen"]], np.float64), first_kept(), device
        )
        assert kept[device] == pytest.approx([after["h"], after["t"]], rel=1e-5)

    # device 1 is not begun when it is lost
    monkeypatch.setattr(RoundTraining, "most", lambda self, room: 1)
    again = drive(
        make_scenario(
            tmp_path,
            keeping,
            2,
            **SLOW_UPLOAD,
            **FULL,
            plan__round__goal=1,
            plan__round__over_selection=2.0,
        )
    )
    assert [kept_by(again.fleet, device) for device in range(2)] == kept


def test_a_training_that_diverged_leaves_what_was_there(tmp_path: Path, keeping: Path) -> None:
    scenario = make_scenario(tmp_path, keeping, 1, plan__round__deadline=100.0)
    huge = (
        "import numpy as np\n\ndef make(device, seed):\n    x = np.full((10, 3), 1e30, "
        "np.float32)\n"
    )
    (tmp_path / "lines.py").write_text(f"{huge}    return x, x[:, 0]\n")
    fleet = one_round(scenario)
    assert fleet.history[0]["causes"] == {"failed: diverged": 1}
    assert kept_by(fleet, 0) is None


def test_a_lost_device_goes_on_from_what_it_kept_in_the_same_round(
    tmp_path: Path, keeping: Path
) -> None:
    """Asynchronously: device 0 is offline during its upload, and has its next task while the buffer
    is filling."""
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,12\n0,13,1000000\n1,0,1000000\n")
    run = drive(
        make_scenario(
            tmp_path,
            keeping,
            2,
            availability={"kind": "trace", "file": "trace.csv"},
            **SLOW_UPLOAD,
            **FULL,
            plan__recipe="fedbuff",
            plan__round={"goal": 3, "concurrency": 2, "deadline": 1000.0},
        )
    )
    device = [row for row in run.told("lost", "accepted") if row[2] == 0]
    assert device[0] == (12.0, "lost", 0, "offline")
    trainings = len(device)
    kept = kept_by(run.fleet, 0)
    assert kept is not None
    assert kept[1] == INITIAL_STATE["t"] + trainings


def test_devices_with_a_task_keep_the_same_after_a_checkpoint(
    tmp_path: Path, keeping: Path
) -> None:
    """Asynchronously: tasks go on from one checkpoint to the next, some of them trained and not
    reported."""
    scenario = make_scenario(
        tmp_path, keeping, 8, **SLOW_UPLOAD, plan__stop__rounds=10, failures={"crash": 0.2},
        availability={"kind": "bernoulli", "share": 0.7, "slot": 50.0},
        plan__recipe="fedbuff", plan__round={"goal": 3, "concurrency": 5, "deadline": 1000.0},
    )  # fmt: skip
    whole = simulate(scenario, tmp_path / "whole.sim", Options(backend="bundle", workers=1))
    assert whole is not None
    again = simulate_in_parts(scenario, tmp_path / "parts.sim")
    for name in (ROUNDS, EVENTS):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert again.model.tobytes() == whole.model.tobytes()


def test_a_device_measures_with_what_it_keeps(tmp_path: Path, keeping: Path) -> None:
    """An evaluation of two devices, after one round."""
    run = drive(
        make_scenario(
            tmp_path, keeping, 2, **FULL, plan__stop__rounds=1,
            plan__evaluation={"every": 1, "devices": 2, "minimum": 2, "deadline": 500.0},
        )
    )  # fmt: skip
    (found,) = run.fleet.evaluations
    losses = []
    for device in range(2):
        kept = kept_by(run.fleet, device)
        assert kept is not None
        x, y = line_data(10 * (device + 1), seed=device)
        losses.append(float(((x @ run.model[:3] + kept[0] - y) ** 2).mean()))
    assert found["metrics"]["loss"] == pytest.approx(np.average(losses, weights=[10, 20]), rel=1e-5)


def test_a_million_devices_of_which_a_hundred_take_part(tmp_path: Path, keeping: Path) -> None:
    """Only those that took part have a row, on disk and in a checkpoint."""
    scenario = make_scenario(
        tmp_path,
        keeping,
        1_000_000,
        population__connected=200,
        plan__round__goal=40,
        plan__stop__rounds=3,
        availability={"kind": "diurnal", "share": 0.25},
        **FULL,
    )
    (tmp_path / "lines.py").write_text(TEN_EXAMPLES)
    run = drive(scenario)
    took_part = {row["device"] for row in run.events if row["event"] == "accepted"}
    assert len(took_part) > 80
    kept = run.fleet.coordinator.kept
    assert kept is not None
    assert kept.states is not None
    saved = kept.states.state()["devices"].tolist()
    assert (
        took_part <= {*saved} <= {row["device"] for row in run.events if row["event"] == "assigned"}
    )
    assert kept.states.file.path.stat().st_size <= 2 * len(saved) * kept.row_bytes


TEN_EXAMPLES = """
from line_bundle import line_data

def examples(device, seed):
    return 10

def make(device, seed):
    return line_data(10, device)
"""
