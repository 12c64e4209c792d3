"""Evaluations in virtual time: small cases worked out by hand.

Device k has k + 1 batches. A step takes 10 seconds, so training takes 10 (k + 1) seconds, and
evaluating a third of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.results.run_folder import EVALUATIONS, EVENTS, MODEL, ROUNDS
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings, means
from virtual import drive, make_scenario

EACH: dict[str, Any] = {
    "plan__round__goal": 3,
    "plan__round__minimum": 3,
    "plan__stop__rounds": 2,
    "plan__evaluation": {"every": 1, "devices": 3, "minimum": 3, "deadline": 1000.0},
}


def test_devices_measure_when_their_tasks_are_over_and_the_last_model_at_the_end(
    tmp_path: Path, line: Path
) -> None:
    scenario = make_scenario(tmp_path, line, 3, **EACH)
    run = drive(scenario)
    assert run.told("measured", "evaluated") == [
        (43.333, "measured", 0, None),  # its second report came at 40
        (56.667, "measured", 1, None),
        (70.0, "measured", 2, None),  # its report closed the last round at 60
        (70.0, "evaluated", None, None),
        (73.333, "measured", 0, None),
        (76.667, "measured", 1, None),
        (80.0, "measured", 2, None),
        (80.0, "evaluated", None, None),
    ]
    assert [row["round"] for row in run.rounds] == [1, 2]
    assert run.rounds[1]["time"] == pytest.approx(60.0), "the round did not wait"
    first, second = run.fleet.evaluations
    assert [
        (row["version"], row["outcome"], row["devices"], row["examples"]) for row in (first, second)
    ] == [
        (1, "valid", 3, 60),
        (2, "valid", 3, 60),
    ]
    bundle = open_bundle(line)
    backend = PerDevice(bundle, local_settings(scenario.plan, bundle), source_of(scenario, bundle))
    found = backend.evaluate(RoundInputs(run.model), list(map(Job, range(3))))
    assert second["metrics"] == pytest.approx(means([row for row in found if row is not None]))
    assert second["tiers"] == {"device": {"devices": 3}}
    assert second["quantiles"] == {}, "of so few devices nothing is told"
    assert run.fleet.finished == "2 rounds done"


@pytest.mark.parametrize("crash", [41.0, 58.0, 72.0])
def test_the_coordinator_restarts_in_an_evaluation(
    tmp_path: Path, line: Path, crash: float
) -> None:
    run = drive(
        make_scenario(tmp_path, line, 3, **EACH, coordinator={"crashes": [crash], "restart": 5.0})
    )
    calm = drive(make_scenario(tmp_path, line, 3, **EACH))
    keys = ("version", "outcome", "devices", "metrics", "dropped")
    told = [
        [{key: row[key] for key in keys} for row in each.fleet.evaluations] for each in (run, calm)
    ]
    assert told[0] == told[1]


def test_an_evaluation_that_too_few_devices_answer_is_not_valid(tmp_path: Path, line: Path) -> None:
    few = {"every": 1, "devices": 3, "minimum": 3, "deadline": 15.0}
    run = drive(make_scenario(tmp_path, line, 3, **{**EACH, "plan__evaluation": few}))
    assert run.fleet.evaluations[0]["outcome"] == "invalid"
    assert run.fleet.evaluations[0]["devices"] == 1
    assert run.fleet.evaluations[0]["time"] == pytest.approx(45.0)
    assert run.fleet.evaluations[-1]["outcome"] == "valid"


def test_a_device_that_is_free_at_the_very_deadline_is_asked_too_late(
    tmp_path: Path, line: Path
) -> None:
    """The engine asks it and closes the evaluation in one step."""
    calm = drive(make_scenario(tmp_path, line, 3, **EACH))
    opened, *_ = calm.when("evaluation")
    free = next(time for time in calm.when("accepted") if time > opened)
    wait = free - opened
    assert opened + wait == free
    few = {"every": 1, "devices": 3, "minimum": 3, "deadline": wait}
    run = drive(make_scenario(tmp_path, line, 3, **{**EACH, "plan__evaluation": few}))
    first = run.fleet.evaluations[0]
    assert (first["time"], first["devices"], first["dropped"]) == (free, 0, {"late": 1})
    assert run.when("measure")[0] == free
    assert not [time for time in run.when("measured") if time < free + 5.0]
    assert run.fleet.finished == "2 rounds done"


def test_an_evaluation_stops_the_run(tmp_path: Path, line: Path) -> None:
    stop = {"rounds": 50, "metric": "loss", "target": 1e6, "measured_by": "evaluation"}
    run = drive(make_scenario(tmp_path, line, 3, **{**EACH, "plan__stop": stop}))
    assert run.fleet.finished is not None
    assert run.fleet.finished.startswith("loss of model version 1 is")
    assert run.fleet.evaluations[0]["version"] == 1
    assert len(run.rounds) < 50


@pytest.mark.parametrize("recipe", ["fedavg", "fedbuff"])
def test_evaluations_beside_many_rounds(tmp_path: Path, line: Path, recipe: str) -> None:
    """With devices that vanish, and a sample of some of them."""
    scenario = make_scenario(
        tmp_path,
        line,
        12,
        plan__recipe=recipe,
        plan__round={"goal": 3, "minimum": 1, "deadline": 300.0},
        plan__stop__rounds=12,
        failures={"train": 0.002},
        availability={"kind": "always"},
        plan__evaluation={"every": 4, "devices": 6, "minimum": 2, "deadline": 200.0},
    )
    run, again = drive(scenario), drive(scenario)
    versions = [row["version"] for row in run.fleet.evaluations]
    assert versions == [4, 8, 12] if recipe == "fedavg" else [versions[0], versions[-1]] == [4, 12]
    assert run.fleet.evaluations == again.fleet.evaluations
    assert all(
        2 <= row["devices"] <= 6 for row in run.fleet.evaluations if row["outcome"] == "valid"
    )
    assert not run.fleet.engine.exchanges[EVALUATION].book.tasks


def test_a_stopped_run_goes_on_to_the_same_evaluations(tmp_path: Path, line: Path) -> None:
    scenario = make_scenario(
        tmp_path,
        line,
        4,
        plan__round={"goal": 2, "minimum": 1, "deadline": 300.0},
        plan__stop__rounds=9,
        plan__evaluation={"every": 2, "devices": 3, "minimum": 1, "deadline": 200.0},
    )
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(scenario, tmp_path / "whole", options)
    rounds = 0

    def stop() -> bool:
        return rounds >= 5

    def count(fleet: Any) -> None:
        nonlocal rounds
        rounds += 1

    assert simulate(scenario, tmp_path / "cut", options, progress=count, should_stop=stop) is None
    rest = simulate(scenario, tmp_path / "cut", options, resume=True)
    assert whole is not None
    assert rest is not None
    for name in (EVALUATIONS, ROUNDS, EVENTS, MODEL):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), (
            name
        )


@pytest.mark.parametrize("measured_by", ["round", "evaluation"])
def test_patience_ends_a_simulation_with_the_best_version(
    tmp_path: Path, line: Path, measured_by: str
) -> None:
    """An improvement that is larger than the first loss cannot be: the first measured model is
    followed by three."""
    stop = {"metric": "loss", "patience": 3, "least": 1e6, "measured_by": measured_by}
    settings = {**EACH, "plan__local__evaluate": True, "plan__stop": stop}
    run = drive(make_scenario(tmp_path, line, 3, **settings))
    if measured_by == "round":
        measured = [(row["metrics"]["loss"], at) for at, row in enumerate(run.rounds)]
    else:
        *rows, _ = run.fleet.evaluations  # the last model's comes when the run has stopped
        measured = [(row["metrics"]["loss"], row["version"]) for row in rows]
    assert len(measured) == 4
    loss, version = min(measured)
    assert run.fleet.finished == (
        f"loss on the devices' training examples is best, {loss:.6g}, at model version {version}: "
        "3 measured models have not improved it by more than 1e+06"
    )


def test_a_stopped_simulation_has_the_patience_that_was_left(tmp_path: Path, line: Path) -> None:
    stop = {"metric": "loss", "patience": 6, "least": 1e6, "rounds": 50}
    settings = {**EACH, "plan__local__evaluate": True, "plan__stop": stop}
    scenario = make_scenario(tmp_path, line, 3, **settings)
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(scenario, tmp_path / "whole", options)
    rounds = 0

    def count(fleet: Any) -> None:
        nonlocal rounds
        rounds += 1

    cut = simulate(
        scenario, tmp_path / "cut", options, progress=count, should_stop=lambda: rounds >= 4
    )
    assert cut is None
    rest = simulate(scenario, tmp_path / "cut", options, resume=True)
    assert whole is not None
    assert rest is not None
    assert "at model version" in whole.summary["reason"]
    assert rest.summary["reason"] == whole.summary["reason"]
    for name in (ROUNDS, EVENTS, MODEL):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
