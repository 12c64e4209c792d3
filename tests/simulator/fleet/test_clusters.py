"""A simulated fleet with clusters: rounds are those of IFCA's paper, and neither a second process
nor a stop changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.clusters import starting_models
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, SimulatorError, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, SUMMARY, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from quadratics import Quadratic, quadratics_bundle, quadratics_scenario
from safetensors.numpy import load_file
from virtual import drive

MINIMA = ((9.0, 9.0), (-9.0, 4.0), (4.0, -9.0))
DEVICES = tuple(
    Quadratic((1.0 + number / 8, 2.0), MINIMA[number % 3], 1 + number // 6) for number in range(9)
)
STEPS, LR = 4, 0.1
ALL = {"goal": 9, "over_selection": 1.0, "minimum": 1, "deadline": 1e4}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


def scenario(folder: Path, bundle: Path, **more: Any) -> Scenario:
    usual = {
        "seed": 3,
        "plan__recipe": "ifca",
        "plan__clusters": {"count": 3, "spread": 2.0},
        "plan__local": {"epochs": STEPS, "batch_size": 0, "lr": LR},
        "plan__round": ALL,
        "plan__stop__rounds": 4,
    }
    return quadratics_scenario(folder, bundle, DEVICES, **(usual | more))


def loss(device: Quadratic, model: Any) -> float:
    return float(np.array(device.curvature) @ (model - device.minimum) ** 2 / 2)


def test_rounds_by_hand(tmp_path: Path, bundle: Path) -> None:
    run, opened = drive(scenario(tmp_path, bundle)), open_bundle(bundle)
    first = starting_models(opened.parameters(), opened.manifest, 3, 3, 2.0)
    models = [model.astype(np.float64) for model in first]
    assert len(run.rounds) == 4
    fits = run.fleet.exchanges.summaries["fit"]
    for row, fit in zip(run.rounds, fits, strict=True):
        ends: list[list[Any]] = [[] for _ in models]
        losses = []
        for device in DEVICES:
            best = int(np.argmin([loss(device, model) for model in models]))
            losses.append(loss(device, models[best]))
            own = models[best].copy()
            for _ in range(STEPS):
                own -= LR * device.gradient(own)
            ends[best].append(own)
        counts = {f"c{number}": len(rows) for number, rows in enumerate(ends, 1)}
        assert fit["chosen"] == counts
        assert {name: own["reports"] for name, own in row["members"].items()} == counts
        weights = [device.copies for device in DEVICES]
        assert row["evaluation"]["loss"] == pytest.approx(np.average(losses, weights=weights), 1e-4)
        models = [
            np.mean(rows, axis=0) if rows else model
            for rows, model in zip(ends, models, strict=True)
        ]
    np.testing.assert_allclose(run.model, np.concatenate(models), rtol=1e-4)
    found = [int(np.argmin([loss(device, model) for model in models])) for device in DEVICES]
    assert [len({*found[group::3]}) for group in range(3)] == [1, 1, 1]
    assert len({*found}) == 3, "each group has a cluster of its own"


def test_the_models_are_fetched_once(tmp_path: Path, bundle: Path) -> None:
    """Three models for the question, and none for the task."""
    run = drive(scenario(tmp_path, bundle))
    model, files = 4 * 2, open_bundle(bundle).manifest.files
    held = sum(files[name].size for name in ("graphs/train.onnx", "graphs/eval.onnx"))
    down = [row["bytes"]["down"] for row in run.rounds]
    assert down == [9 * (3 * model + held), *[9 * 3 * model] * 3]


@pytest.mark.slow
def test_two_processes_and_a_stop_change_nothing(tmp_path: Path, bundle: Path) -> None:
    """Some devices are drawn, some vanish, and the coordinator dies twice."""
    made = scenario(
        tmp_path,
        bundle,
        plan__round=ALL | {"goal": 4, "over_selection": 1.5},
        plan__stop__rounds=6,
        failures={"upload": 0.1, "crash": 0.1},
        coordinator={"crashes": [30.0, 90.0], "restart": 5.0},
    )
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(made, tmp_path / "whole", options)
    assert whole is not None
    two = simulate(made, tmp_path / "two", options._replace(workers=2))
    assert two is not None
    stopped, turns = None, 0
    while stopped is None:
        seen: list[Fleet] = []
        stopped = simulate(
            made, tmp_path / "stopped", options, resume=turns > 0, progress=seen.append,
            should_stop=lambda seen=seen: len(seen) > 1,  # type: ignore[misc]
        )  # fmt: skip
        turns += 1
    assert turns > 1
    names = (EVENTS, ROUNDS, MODEL, SUMMARY, "fits.jsonl")
    expected = [(whole.folder / name).read_bytes() for name in names]
    for other in (two, stopped):
        assert [(other.folder / name).read_bytes() for name in names] == expected
    assert sorted(load_file(whole.folder / MODEL)) == ["c1/w", "c2/w", "c3/w"]
    rows = read_rows(whole.folder, ROUNDS)
    assert all(set(row["members"]) == {"c1", "c2", "c3"} for row in rows)


def test_what_is_refused(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(SimulatorError, match=r"failures\.corrupt with plan\.clusters"):
        scenario(tmp_path, bundle, failures={"corrupt": [{"share": 0.1, "kind": "flipped"}]})
