"""Fleets that train by SCAFFOLD and FedDyn: where they arrive, and what devices and the coordinator
keep of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_export import TrainMany
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, SUMMARY, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Job, LocalSettings, PerDevice, RoundInputs
from fleetlearn_simulator.training.kept_rows import NO_ROW
from numpy.typing import NDArray
from quadratics import (
    OPTIMUM,
    TWO,
    Quadratic,
    fedavg_fixed_point,
    optimum,
    quadratics_bundle,
    quadratics_scenario,
    write_quadratics,
)
from virtual import drive, make_fleet

DEVICES = (*TWO, Quadratic((2.0, 1.0), (4.0, -3.0), 3), Quadratic((0.5, 3.0), (1.0, 8.0), 2))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


def scenario(folder: Path, bundle: Path, recipe: str, count: int = 2, **more: Any) -> Scenario:
    """``count`` devices with 10 steps each, all of them in each round unless ``more`` says
    otherwise."""
    usual = {
        "plan__local": {"epochs": 10, "batch_size": 0, "lr": 0.05, "evaluate": False},
        "plan__server": {} if recipe == "fedavg" else {"devices": count},
    }
    return quadratics_scenario(
        folder, bundle, DEVICES[:count], **({"plan__recipe": recipe} | usual | more)
    )


UNIFORM = {"goal": 2, "over_selection": 1.0, "minimum": 1, "deadline": 1e4, "weighting": "uniform"}


@pytest.mark.parametrize("recipe", ["scaffold", "scaffold-gradient", "feddyn", "fedavg"])
def test_where_two_quadratics_are_least(tmp_path: Path, bundle: Path, recipe: str) -> None:
    """(-6.6, -10.5 / 1.7), to 1e-5 with ten local steps; FedAvg arrives elsewhere."""
    local = {"epochs": 10, "batch_size": 0, "lr": 0.05, "evaluate": False}
    local |= {"scaffold-gradient": {"algorithm": recipe}, "feddyn": {"mu": 1.0}}.get(recipe, {})
    found = drive(
        scenario(
            tmp_path, bundle, recipe.removesuffix("-gradient"),
            plan__local=local, plan__round=UNIFORM, plan__stop__rounds=200,
        )
    ).model  # fmt: skip
    if recipe == "fedavg":
        np.testing.assert_allclose(found, fedavg_fixed_point(TWO, 0.05, 10), atol=1e-5)
        assert np.abs(found - OPTIMUM).max() > 1
    else:
        np.testing.assert_allclose(found, OPTIMUM, atol=1e-5)


def by_hand(
    rounds: list[list[int]], rates: list[float], steps: int
) -> tuple[Any, Any, dict[int, Any]]:
    """SCAFFOLD's algorithm 1 in float64, option II: the model, c, and each c_k. ``rates``: the
    learning rate of each round."""
    model, control, own = (
        np.array([3.0, 4.0]),
        np.zeros(2),
        {device: np.zeros(2) for device in range(len(DEVICES))},
    )
    for devices, lr in zip(rounds, rates, strict=True):
        updates, changes = [], []
        for device in devices:
            y = model.copy()
            for _ in range(steps):
                y -= lr * (DEVICES[device].gradient(y) + control - own[device])
            change = -control + (model - y) / (steps * lr)
            own[device] = own[device] + change
            updates.append(y - model)
            changes.append(change)
        model = model + np.mean(updates, axis=0)
        control = control + np.sum(changes, axis=0) / len(DEVICES)
    return model, control, own


def kept(fleet: Fleet, device: int) -> NDArray[np.float32]:
    """c_k; zeros if the device has none."""
    rows = fleet.coordinator.kept
    assert rows is not None
    assert rows.tied is not None
    (row,) = rows.tied.of([device])
    return np.zeros(2, np.float32) if row == NO_ROW else rows.tied.file.read(row)


@pytest.mark.parametrize("schedule", [None, {"kind": "exponential", "factor": 0.9, "warm_up": 3}])
def test_partial_participation_by_hand(
    tmp_path: Path, bundle: Path, schedule: dict[str, Any] | None
) -> None:
    """Two of four devices in a round, drawn by the engine: the algorithm in float64, and c is the
    mean of all c_k. Where the learning rate changes, each c_k is divided by the rate of its own
    round, and stays a gradient."""
    local = {} if schedule is None else {"plan__local__schedule": schedule}
    run = drive(
        scenario(
            tmp_path, bundle, "scaffold", 4, plan__round=UNIFORM, plan__stop__rounds=12, **local
        )
    )
    found = run.fleet.scenario.plan.local.schedule
    rates = [0.05 * (1.0 if found is None else found.factor_of(round)) for round in range(12)]
    accepted: dict[str, list[int]] = {}
    for row in run.events:
        if row["event"] == "accepted":
            accepted.setdefault(row["task"].split("-")[1], []).append(row["device"])
    assert len({tuple(sorted(devices)) for devices in accepted.values()}) >= 3
    model, control, own = by_hand([*accepted.values()], rates, 10)
    np.testing.assert_allclose(run.model, model, rtol=1e-4)
    found = run.fleet.coordinator.state.vectors["control"]
    np.testing.assert_allclose(found, control, rtol=1e-3, atol=1e-5)
    for device in range(4):
        np.testing.assert_allclose(kept(run.fleet, device), own[device], rtol=1e-3, atol=1e-4)
    mean = np.mean([kept(run.fleet, device) for device in range(4)], axis=0)
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)


def test_it_converges_with_two_of_four_devices_in_a_round(tmp_path: Path, bundle: Path) -> None:
    run = drive(
        scenario(tmp_path, bundle, "scaffold", 4, plan__round=UNIFORM, plan__stop__rounds=600)
    )
    np.testing.assert_allclose(run.model, optimum(DEVICES), atol=1e-3)


def test_both_vectors_travel_both_ways(tmp_path: Path, bundle: Path) -> None:
    """Bytes of the model of two elements: down the model and c, up the update and the change of
    c_k."""
    runs = [
        drive(scenario(tmp_path, bundle, recipe, plan__round=UNIFORM, plan__stop__rounds=2))
        for recipe in ("fedavg", "scaffold")
    ]
    (plain, _), (scaffold, _) = (run.rounds for run in runs)
    assert (plain["bytes"]["up"], scaffold["bytes"]["up"]) == (2 * 8, 2 * 16)
    assert scaffold["bytes"]["down"] - plain["bytes"]["down"] == 2 * 8


def test_a_round_without_a_model_leaves_all_as_it_was(tmp_path: Path, bundle: Path) -> None:
    """The second round is abandoned: what its one report changed counts neither here nor on its
    device."""
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,1000000\n1,0,150\n")
    fleet = make_fleet(
        scenario(
            tmp_path, bundle, "scaffold", plan__round=UNIFORM | {"minimum": 2, "deadline": 300.0},
            availability={"kind": "trace", "file": "trace.csv"}, plan__stop__rounds=5,
        )
    )  # fmt: skip
    while not fleet.history:
        fleet.advance()
    state = fleet.coordinator.state
    before = [
        fleet.model.tolist(),
        state.vectors["control"].tolist(),
        *(kept(fleet, device).tolist() for device in range(2)),
    ]
    assert all(any(values) for values in before)
    while len(fleet.history) < 2:
        fleet.advance()
    assert [row["how"] for row in fleet.history] == ["committed", "abandoned"]
    assert fleet.history[1]["reports"] == 1
    assert fleet.coordinator.state is state
    after = [
        fleet.model.tolist(),
        state.vectors["control"].tolist(),
        *(kept(fleet, device).tolist() for device in range(2)),
    ]
    assert after == before


def test_a_change_that_no_sum_can_hold_is_refused(tmp_path: Path, bundle: Path) -> None:
    """Minima of 10^12 give gradients that are beyond the exact sum; the updates are small."""
    made = scenario(
        tmp_path, bundle, "scaffold", plan__round=UNIFORM | {"deadline": 300.0},
        plan__local={"epochs": 1, "batch_size": 0, "lr": 1e-12, "evaluate": False},
    )  # fmt: skip
    far = (Quadratic((1.0, 2.0), (1e12, 0.0)), TWO[1])
    write_quadratics(tmp_path, far)
    fleet = make_fleet(made)
    while not fleet.history:
        fleet.advance()
    assert fleet.history[0]["causes"] == {"rejected: out-of-range": 1}
    assert fleet.history[0]["reports"] == 1
    assert not kept(fleet, 0).any()


BUFFERED = {"goal": 3, "concurrency": 4, "deadline": 1e4}
RUNS: dict[str, dict[str, Any]] = {
    "scaffold": {},
    "feddyn": {"plan__local": {"epochs": 3, "batch_size": 0, "lr": 0.05, "mu": 0.5}},
    "ditto": {
        "plan__local": {"epochs": 3, "personal_epochs": 2, "batch_size": 0, "lr": 0.05, "mu": 0.5},
        "plan__server": {},
    },
    "pfedme": {
        "plan__local": {
            "epochs": 3, "batch_size": 0, "lr": 0.05, "mu": 0.5, "hyper": {"outer_lr": 1.0},
        },
        "plan__server": {},
    },
    "apfl": {
        "plan__local": {"epochs": 3, "batch_size": 0, "lr": 0.05},
        "plan__server": {},
    },
    "asynchronous scaffold": {
        "plan__recipe": "fedbuff", "plan__round": BUFFERED,
        "plan__local": {"epochs": 3, "batch_size": 0, "lr": 0.05, "algorithm": "scaffold"},
    },
    "asynchronous ditto": {
        "plan__recipe": "fedbuff", "plan__round": BUFFERED, "plan__server": {},
        "plan__local": {"epochs": 3, "batch_size": 0, "lr": 0.05, "mu": 0.5, "algorithm": "ditto"},
    },
}  # fmt: skip


SLOW = ("pfedme", "apfl")
"""Of RUNS: what they keep is what ditto does, and tests by hand have their numbers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)
def test_two_processes_and_a_stop_change_nothing(tmp_path: Path, bundle: Path, name: str) -> None:
    """Stragglers do a part of their steps, some devices vanish, and all rounds are evaluated."""
    made = scenario(
        tmp_path,
        bundle,
        name.split()[0],
        4,
        **{
            "plan__round": UNIFORM
            | {"goal": 3, "weighting": "examples" if name == "ditto" else "uniform"},
            "plan__stop__rounds": 6,
            "failures": {"stragglers": 0.5, "upload": 0.02, "crash": 0.1},
            "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1.0}},
        }
        | RUNS[name],
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
    names = (EVENTS, ROUNDS, MODEL, SUMMARY)
    expected = [(whole.folder / name).read_bytes() for name in names]
    for other in (two, stopped):
        assert [(other.folder / name).read_bytes() for name in names] == expected
    if name.split()[-1] in ("ditto", "pfedme", "apfl"):
        assert all(
            "personal.loss" in row["evaluation"]
            for row in read_rows(whole.folder, ROUNDS)
            if row["reports"]
        )


@pytest.mark.parametrize("recipe", [pytest.param("scaffold", marks=pytest.mark.slow), "feddyn"])
def test_many_devices_in_a_call_and_on_two_processes(tmp_path: Path, recipe: str) -> None:
    many = quadratics_bundle(tmp_path / "many.bundle", many=TrainMany(2, 3)).path
    local = {"epochs": 3, "batch_size": 0, "lr": 0.05, "evaluate": False} | (
        {"mu": 0.5} if recipe == "feddyn" else {}
    )
    made = scenario(
        tmp_path, many, recipe, 4, plan__round=UNIFORM, plan__stop__rounds=6, plan__local=local
    )
    found = {}
    for backend, workers in (("vectorized", 1), ("vectorized", 2), ("bundle", 1)):
        outcome = simulate(
            made, tmp_path / f"{backend}{workers}", Options(backend=backend, workers=workers)
        )  # type: ignore[arg-type]
        assert outcome is not None
        found[backend, workers] = outcome.model
    assert found["vectorized", 1].tobytes() == found["vectorized", 2].tobytes()
    np.testing.assert_allclose(found["vectorized", 1], found["bundle", 1], rtol=1e-5)


def test_dittos_personal_models_by_hand(tmp_path: Path, bundle: Path) -> None:
    """v_k by gradient steps on f_k(v) + lambda/2 |v - w|^2 from where it was; the round's model by
    FedAvg's."""
    run = drive(
        scenario(
            tmp_path, bundle, "ditto", plan__round=UNIFORM, plan__server={}, plan__stop__rounds=3,
            plan__local={"epochs": 4, "personal_epochs": 2, "batch_size": 0, "lr": 0.05, "mu": 0.5},
        )
    )  # fmt: skip
    model, own = np.array([3.0, 4.0]), [np.array([3.0, 4.0])] * 2
    for row in run.rounds:
        losses = [
            float(np.array(each.curvature) @ (own[k] - each.minimum) ** 2 / 2)
            for k, each in enumerate(TWO)
        ]
        assert row["evaluation"]["personal.loss"] == pytest.approx(np.mean(losses), rel=1e-4)
        ends = []
        for device, each in enumerate(TWO):
            y = model.copy()
            for _ in range(4):
                y -= 0.05 * each.gradient(y)
            ends.append(y)
            for _ in range(2):
                own[device] = own[device] - 0.05 * (
                    each.gradient(own[device]) + 0.5 * (own[device] - model)
                )
        model = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.model, model, rtol=1e-5)
    kept = run.fleet.coordinator.kept
    assert kept is not None
    assert kept.states is not None
    for device, row in enumerate(kept.states.of([0, 1])):
        np.testing.assert_allclose(kept.states.file.read(row), own[device], rtol=1e-5)
    # two devices, a step for each pass, and the evaluation of the round's model
    seconds = 2 * 10 * (4 + 2 + 1 / 3)
    assert [row["device_seconds"]["useful"] for row in run.rounds] == pytest.approx([seconds] * 3)


def test_pfedmes_and_apfls_models_by_hand(tmp_path: Path, bundle: Path) -> None:
    """Three rounds of two devices with whole batches; what each keeps, and what it costs."""
    local = {"epochs": 4, "batch_size": 0, "lr": 0.05}
    moves = {"mu": 0.5, "hyper": {"inner_steps": 3, "outer_lr": 1.2}}
    common = {"plan__round": UNIFORM, "plan__server": {}, "plan__stop__rounds": 3}
    run = drive(scenario(tmp_path, bundle, "pfedme", plan__local=local | moves, **common))
    model, thetas = np.array([3.0, 4.0]), [np.array([3.0, 4.0])] * 2
    for row in run.rounds:
        assert row["evaluation"]["personal.loss"] == pytest.approx(mean_loss(thetas), rel=1e-4)
        ends = []
        for device, each in enumerate(TWO):
            w, theta = model.copy(), model.copy()
            for _ in range(4):
                for _ in range(3):
                    theta = theta - 0.05 * (each.gradient(theta) + 0.5 * (theta - w))
                w = w - 1.2 * 0.5 * (w - theta)
            thetas[device] = theta
            ends.append(w)
        model = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.model, model, rtol=1e-5)
    np.testing.assert_allclose(own_row(run.fleet, 0), thetas[0], rtol=1e-5)
    seconds = [row["device_seconds"]["useful"] for row in run.rounds]
    assert seconds == pytest.approx([2 * 10 * (4 * 3 + 1 / 3)] * 3)

    numbers = {"hyper": {"alpha": 0.25, "adapt_alpha": 0.02}}
    run = drive(scenario(tmp_path, bundle, "apfl", plan__local=local | numbers, **common))
    model = np.array([3.0, 4.0])
    own, alphas = [model, model], [0.25, 0.25]
    for row in run.rounds:
        mixed = [a * v + (1 - a) * model for a, v in zip(alphas, own, strict=True)]
        assert row["evaluation"]["personal.loss"] == pytest.approx(mean_loss(mixed), rel=1e-4)
        ends = []
        for device, each in enumerate(TWO):
            w, v, alpha = model, own[device], alphas[device]
            for _ in range(4):
                gradient = each.gradient(alpha * v + (1 - alpha) * w)
                rise = -0.02 * 0.05 * np.dot(v - w, gradient)
                v, w = v - 0.05 * alpha * gradient, w - 0.05 * each.gradient(w)
                alpha = min(max(alpha + rise, 0.0), 1.0)
            own[device], alphas[device] = v, alpha
            ends.append(w)
            mixed[device] = alpha * v + (1 - alpha) * w
        model = np.mean(ends, axis=0)
    assert alphas != [0.25, 0.25]
    np.testing.assert_allclose(run.model, model, rtol=1e-5)
    np.testing.assert_allclose(own_row(run.fleet, 1), [*mixed[1], *own[1], alphas[1]], rtol=1e-4)
    seconds = [row["device_seconds"]["useful"] for row in run.rounds]
    assert seconds == pytest.approx([2 * 10 * (4 * 2 + 1 / 3)] * 3)


def own_row(fleet: Fleet, device: int) -> NDArray[np.float32]:
    """What a device keeps of its personal model."""
    rows = fleet.coordinator.kept
    assert rows is not None
    assert rows.states is not None
    (row,) = rows.states.of([device])
    return rows.states.file.read(row)


def mean_loss(models: list[NDArray[np.float64]]) -> float:
    """The mean of the two devices' losses, each with its own model."""
    return float(np.mean([
        np.array(each.curvature) @ (model - each.minimum) ** 2 / 2
        for each, model in zip(TWO, models, strict=True)
    ]))  # fmt: skip


def test_the_gradient_of_all_data_takes_a_pass(tmp_path: Path, bundle: Path) -> None:
    local = {"epochs": 3, "batch_size": 0, "lr": 0.05, "evaluate": False}
    for name, passes in (("scaffold", 3), ("scaffold-gradient", 4)):
        settings = {"plan__round": UNIFORM, "plan__local": local | {"algorithm": name}}
        (row,) = drive(scenario(tmp_path, bundle, "scaffold", **settings)).rounds
        assert row["device_seconds"]["useful"] == pytest.approx(2 * 10 * passes)


def test_a_short_time_is_shared_between_both_models(tmp_path: Path, bundle: Path) -> None:
    """Of 12 steps in all a device does 5: 2 of them for the round's model, and 3 for its own."""
    opened = open_bundle(bundle)
    task = LocalSettings({"lr": 0.05, "mu": 0.5}, 2, 1, "ditto")
    source = source_of(scenario(tmp_path, bundle, "ditto", 4, plan__server={}), opened)
    backend = PerDevice(opened, task, source)
    inputs = RoundInputs(opened.parameters())
    found, whole = backend.train(inputs, [Job(2, 1, 5)]), backend.train(inputs, [Job(2, 1)])
    assert (found.steps.tolist(), found.complete.tolist()) == ([2], [False])
    assert (whole.steps.tolist(), whole.complete.tolist()) == ([6], [True])
    own = opened.parameters().astype(np.float64)
    for _ in range(3):
        own -= 0.05 * (DEVICES[2].gradient(own) + 0.5 * (own - opened.parameters()))
    np.testing.assert_allclose(found.vectors["kept_state"][0], own, rtol=1e-5)
