"""A simulated family: each device trains the member that fits it, each member's updates are
averaged alone, and neither a second process nor a stop changes a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, SimulatorError, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.population.members import members_of
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, SUMMARY, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.choice import choose_backends
from fleetlearn_simulator.training.run_bundles import run_bundles
from line_bundle import line_data
from safetensors.numpy import load_file
from simulated_family import TIERS, family_scenario, family_tables
from virtual import by_lines, drive, make_scenario

SIZE, LR, STEPS = 12, 0.1, 2
ALL = {"goal": SIZE, "over_selection": 1.0, "minimum": 1, "deadline": 1e5}
LOCAL = {"epochs": STEPS, "batch_size": 0, "lr": LR, "evaluate": False}


def scenario(folder: Path, **more: Any) -> Scenario:
    usual = {"plan__round": ALL, "plan__local": LOCAL, "plan__stop__rounds": 3}
    return family_scenario(folder, SIZE, **(usual | more))


def groups(made: Scenario) -> list[list[int]]:
    """The devices of each member."""
    members = members_of(made, np.arange(SIZE))
    return [np.flatnonzero(members == number).tolist() for number in (0, 1)]


def trained(model: Any, device: int) -> Any:
    """A member's model after a task of the device. ``small`` has no ``seen``, at place 3."""
    if len(model) == 5:
        return by_lines(model, device, STEPS, LR)
    return np.delete(by_lines(np.insert(model, 3, 0.0), device, STEPS, LR), 3)


def test_rounds_by_hand(tmp_path: Path) -> None:
    made = scenario(tmp_path)
    run, devices = drive(made), groups(made)
    assert min(map(len, devices)) >= 2
    models = [
        open_bundle(member.bundle).parameters().astype(np.float64)
        for member in made.plan.family.values()
    ]
    for row in run.rounds:
        for number, name in enumerate(("full", "small")):
            ends = [trained(models[number], device) for device in devices[number]]
            examples = [10 * (device + 1) for device in devices[number]]
            models[number] = np.average(ends, axis=0, weights=examples)
            assert row["members"][name]["reports"] == len(devices[number])
        assert row["reports"] == SIZE
    np.testing.assert_allclose(run.model, np.concatenate(models), rtol=1e-4)


def test_one_member_alone_has_the_bits_of_a_run_of_its_bundle(tmp_path: Path) -> None:
    tables = family_tables(tmp_path)
    more: dict[str, Any] = {
        "plan__round": ALL | {"goal": 5, "over_selection": 1.4},
        "plan__local": {"epochs": 2, "batch_size": 7, "lr": 0.05, "evaluate": True},
        "plan__stop__rounds": 4,
        "failures": {"crash": 0.1, "upload": 0.01, "corrupt": [{"share": 0.3, "kind": "stale"}]},
    }
    alone = {"full": {"bundle": tables["full"]["bundle"]}}
    family = drive(family_scenario(tmp_path, SIZE, plan__family=alone, **more))
    bundle = Path(tables["full"]["bundle"])
    plain = drive(make_scenario(tmp_path, bundle, SIZE, **more, tiers=TIERS))
    assert family.model.tobytes() == plain.model.tobytes()
    assert family.events == plain.events
    for row, expected in zip(family.rounds, plain.rounds, strict=True):
        del row["members"]
        assert row == expected


def test_each_member_moves_its_own_bytes(tmp_path: Path) -> None:
    made = scenario(tmp_path, plan__stop__rounds=2)
    run, sizes = drive(made), [5, 4]
    counts = [*map(len, groups(made))]
    bundles = [open_bundle(member.bundle) for member in made.plan.family.values()]
    first, second = (row["bytes"] for row in run.rounds)
    models = sum(4 * size * count for size, count in zip(sizes, counts, strict=True))
    held = [sum(bundle.manifest.files[f"graphs/{file}.onnx"].size for file in ("train", "eval"))
            for bundle in bundles]  # fmt: skip
    # A report of ``full`` has its buffer as a part of its own.
    assert second == {"down": models, "up": models + 4 * counts[0]}
    assert first["down"] == models + sum(
        size * count for size, count in zip(held, counts, strict=True)
    )


def test_devices_measure_the_member_that_they_train(tmp_path: Path) -> None:
    """In evaluations, and before they train."""
    made = scenario(
        tmp_path,
        plan__local=LOCAL | {"evaluate": True},
        plan__evaluation={"every": 1, "devices": SIZE, "minimum": 1, "deadline": 1e5},
        plan__stop__rounds=2,
    )
    run, devices = drive(made), groups(made)
    first = [open_bundle(member.bundle).parameters() for member in made.plan.family.values()]

    def losses(models: list[Any]) -> list[float]:
        """Each member's mean loss over its devices' examples."""
        found = []
        for model, own in zip(models, devices, strict=True):
            values = model if len(model) == 5 else np.insert(model, 3, 0.0)
            rows = [line_data(10 * (device + 1), seed=device) for device in own]
            errors = [x @ values[:3] + values[4] - y for x, y in rows]
            found.append(float(np.mean(np.concatenate(errors) ** 2)))
        return found

    before = run.rounds[0]["members"]
    assert [before[name]["evaluation"]["loss"] for name in ("full", "small")] == pytest.approx(
        losses(first), rel=1e-4
    )
    last = run.fleet.evaluations[-1]
    models = [*run.fleet.coordinator.family.models_of(run.model).values()]
    assert last["version"] == 2
    assert [last["members"][name]["devices"] for name in ("full", "small")] == [*map(len, devices)]
    found = [last["members"][name]["metrics"]["loss"] for name in ("full", "small")]
    assert found == pytest.approx(losses(models), rel=1e-4)


def test_a_member_without_a_report_stays_as_it_is(tmp_path: Path) -> None:
    tiers = {"little": {"latency": 0.0, "download": 1e12, "upload": 1e12, "tags": ["leaf"]}}
    made = scenario(tmp_path, tiers=tiers, plan__server={"optimizer": "adam", "lr": 0.1})
    run = drive(made)
    full, small = run.fleet.coordinator.family.models_of(run.model).values()
    first = [open_bundle(member.bundle).parameters() for member in made.plan.family.values()]
    assert full.tobytes() == first[0].tobytes()
    assert np.abs(small - first[1]).min() > 0
    assert [row["members"]["full"]["reports"] for row in run.rounds] == [0, 0, 0]


def test_what_a_device_keeps_is_of_its_member_alone(tmp_path: Path) -> None:
    """``small`` has an element of its own on each device, and ``full`` none."""
    made = scenario(tmp_path, own=True, plan__stop__rounds=2)
    run, devices = drive(made), groups(made)
    kept = run.fleet.coordinator.kept
    assert kept is not None
    assert kept.states is not None
    rows = kept.states.of(range(SIZE))
    assert [at for at, row in enumerate(rows) if row != -1] == devices[1]
    model = open_bundle(made.plan.family["small"].bundle).parameters().astype(np.float64)
    own = dict.fromkeys(devices[1], model[3])
    for _ in range(2):
        ends = {at: trained(np.append(model[:3], own[at]), at) for at in devices[1]}
        own = {at: end[3] for at, end in ends.items()}
        weights = [10 * (at + 1) for at in ends]
        model = np.average([end[:3] for end in ends.values()], axis=0, weights=weights)
    for at in devices[1]:
        np.testing.assert_allclose(kept.states.file.read(rows[at])[:1], own[at], rtol=1e-4)


def test_corrupt_devices_spoil_their_member_alone(tmp_path: Path) -> None:
    corrupt = [{"share": 1.0, "kind": "flipped", "factor": 1.0}]
    right, wrong = (
        drive(scenario(tmp_path, plan__stop__rounds=1, failures=failures))
        for failures in ({}, {"corrupt": corrupt})
    )
    first = np.concatenate(
        [open_bundle(each.bundle).parameters() for each in scenario(tmp_path).plan.family.values()]
    )
    np.testing.assert_allclose(wrong.model - first, first - right.model, rtol=1e-3, atol=1e-5)


def test_ray_and_what_the_summary_says(tmp_path: Path) -> None:
    tiers = {
        "large": {"share": 1.0, "memory": 500.0},
        "little": {"share": 1.0, "tags": ["leaf"]},
        "tiny": {"share": 1.0},
    }
    made = scenario(tmp_path, tiers=tiers, plan__round={"goal": 4, "deadline": 1e5}, data=TESTED)
    write_tested(tmp_path)
    with pytest.raises(SimulatorError, match="workers on Ray train one bundle"):
        simulate(made, tmp_path / "ray", Options("bundle", 1, engine="ray"))
    outcome = simulate(made, tmp_path / "run", Options("bundle", 1))
    assert outcome is not None
    summary, rows = outcome.summary, read_rows(outcome.folder, ROUNDS)
    members = members_of(made, np.arange(SIZE)).tolist()
    assert summary["without_member"] == members.count(-1) > 0
    assert summary["backend"] == {"full": "bundle", "small": "bundle"}
    for number, (name, own) in enumerate(summary["members"].items()):
        assert own["devices"] == members.count(number)
        assert own["reports"] == sum(row["members"][name]["reports"] for row in rows)
        assert own["test"] == rows[-1]["members"][name]["test"]
        assert own["test"]["loss"] > 0
    tests = [own["test"]["loss"] for own in summary["members"].values()]
    assert summary["test"]["loss"] == pytest.approx(np.mean(tests))
    assert sorted(load_file(outcome.folder / MODEL)) == [
        "full/h", "full/seen", "full/w", "small/h", "small/w"
    ]  # fmt: skip
    assigned = {row["device"] for row in read_rows(outcome.folder, EVENTS) if "device" in row}
    assert assigned <= {at for at, member in enumerate(members) if member != -1}


TESTED = {"kind": "function", "function": "tested:make"}


def write_tested(folder: Path) -> None:
    """A module of data with test examples."""
    text = "from lines import *\ndef test(seed):\n    return make(99, seed)\n"
    (folder / "tested.py").write_text(text)


def test_steps_are_measured_member_by_member(tmp_path: Path) -> None:
    made = scenario(tmp_path, compute={"step_seconds": "measure"}, plan__stop__rounds=1)
    outcome = simulate(made, tmp_path / "run", Options("bundle", 1))
    assert outcome is not None
    written = Scenario.load_of_run(outcome.folder / "scenario.toml")
    assert isinstance(written.compute.step_seconds, dict)
    assert {*written.compute.step_seconds} == {"full", "small"}
    again = simulate(made, tmp_path / "run", Options("bundle", 1), resume=True)
    assert again is not None
    assert again.summary["time"] == outcome.summary["time"]


HARD: dict[str, Any] = {
    "plan__round": ALL | {"goal": 4, "over_selection": 1.5},
    "plan__local": {"epochs": 2, "batch_size": 8, "lr": 0.02, "evaluate": True},
    "plan__evaluation": {"every": 2, "devices": 6, "minimum": 1, "deadline": 500.0},
    "plan__stop__rounds": 6,
    "failures": {"upload": 0.01, "crash": 0.1, "train": 0.0005},
    "coordinator": {"crashes": [200.0, 900.0], "restart": 5.0},
    "own": True,
}
ASYNCHRONOUS = {
    "plan__recipe": "fedbuff",
    "plan__round": {"goal": 3, "concurrency": 6, "minimum": 1, "deadline": 1e4},
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_two_processes_and_a_stop_change_nothing(tmp_path: Path, more: dict[str, Any]) -> None:
    made = scenario(tmp_path, **(HARD | more))
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(made, tmp_path / "whole", options)
    two = simulate(made, tmp_path / "two", options._replace(workers=2))
    assert whole is not None
    assert two is not None
    stopped, turns = None, 0
    while stopped is None:
        seen: list[Fleet] = []
        stopped = simulate(
            made, tmp_path / "stopped", options, resume=turns > 0, progress=seen.append,
            should_stop=lambda seen=seen: len(seen) > 1,  # type: ignore[misc]
        )  # fmt: skip
        turns += 1
    assert turns > 2
    names = (EVENTS, ROUNDS, MODEL, SUMMARY, "evaluations.jsonl")
    expected = [(whole.folder / name).read_bytes() for name in names]
    for other in (two, stopped):
        assert [(other.folder / name).read_bytes() for name in names] == expected
    rows = read_rows(whole.folder, ROUNDS)
    reports = [[row["members"][name]["reports"] for row in rows] for name in ("full", "small")]
    assert all(sum(row) > 3 for row in reports)


@pytest.mark.slow
def test_many_devices_of_a_member_train_in_a_call(tmp_path: Path, softmax: Path) -> None:
    """The member ``many`` has the graph for blocks of 8 devices; the other has not: of the same
    network, so that both back ends train the same model up to rounding."""
    import shutil

    plain = tmp_path / "plain.bundle"
    shutil.copytree(softmax, plain)
    (plain / "graphs" / "train_many.onnx").unlink()
    family = {
        "many": {"bundle": str(softmax), "memory": 400 * 2**20},
        "single": {"bundle": str(softmax), "tags": ["leaf"]},
    }
    made = scenario(
        tmp_path,
        plan__family=family,
        plan__local={"epochs": 2, "batch_size": 10, "lr": 0.01, "evaluate": False},
        data={"kind": "synthetic", "alpha": 0.5, "beta": 0.5, "examples": 25, "test": 0.2},
    )
    bundles = run_bundles(made)
    assert bundles[0].source is bundles[1].source, "members with the same arrays share them"
    kinds, _ = choose_backends(bundles, "vectorized")
    assert kinds == {"many": "vectorized", "single": "vectorized"}
    found = [
        simulate(made, tmp_path / kind, Options(kind, workers))  # type: ignore[arg-type]
        for kind, workers in (("bundle", 1), ("vectorized", 1), ("vectorized", 2))
    ]
    one, many, apart = (outcome.model for outcome in found if outcome is not None)
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-6)
    assert many.tobytes() == apart.tobytes()


def test_fleets_of_one_bundle_are_not_looked_up(tmp_path: Path, line: Path) -> None:
    """A run without [family] asks nobody which member a device trains."""
    run = drive(make_scenario(tmp_path, line, 3))
    assert isinstance(run.fleet, Fleet)
    assert run.fleet.coordinator.bundles_of is None
