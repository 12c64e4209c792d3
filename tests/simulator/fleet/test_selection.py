"""Rules on selection in virtual time: the plan's file as for the server, with tiers that state what
they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.rounds.selection_rules import Stated
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.statements import statements_of
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import Driven, drive, make_scenario

TIERS: dict[str, Any] = {
    "phone": {"share": 3.0, "speed": 0.1, "memory": 512.0, "charging": 0.5, "unmetered": 1.0},
    "pi": {"share": 1.0, "memory": 4096.0, "tags": ["roof"], "latency": 0.0},
}
FLEET: dict[str, Any] = {
    "tiers": TIERS,
    "plan__round": {"goal": 6, "minimum": 2, "over_selection": 1.0, "deadline": 100_000.0},
    "plan__stop__rounds": 12,
    "failures": {"regions": 2, "crash": 0.1},
}
SELECTIONS: dict[str, Any] = {
    "seldom": {"once_in": 3, "tag_quotas": {"region-0": 0.5}},
    "power-of-choice": {"strategy": "power-of-choice"},
    "oort": {"strategy": "oort", "oort": {"window": 2, "exploration": 0.5}},
}


def assigned(run: Driven) -> dict[int, list[int]]:
    """Round -> the devices that were given its tasks."""
    found: dict[int, list[int]] = {}
    for row in run.events:
        if row["event"] == "assigned":
            found.setdefault(int(row["task"].split("-")[1]), []).append(row["device"])
    return found


def stated_by(folder: Path, line: Path, size: int, **more: Any) -> list[Stated]:
    scenario = make_scenario(folder, line, size, **(FLEET | more))
    return statements_of(scenario, np.arange(size), 10 * np.arange(1, size + 1))


def test_devices_state_what_their_tiers_say(tmp_path: Path, line: Path) -> None:
    stated = stated_by(tmp_path, line, 400)
    tiers = Counter(label for row in stated for label in row.labels)
    assert 260 < tiers["tier:phone"] < 340
    assert tiers["tag:roof"] == tiers["tier:pi"] == 400 - tiers["tier:phone"]
    assert tiers["tag:region-0"] == tiers["tag:region-1"] == 200
    phones = [row for row in stated if "tier:phone" in row.labels]
    assert {row.memory for row in phones} == {512 * 2**20}
    assert 0.4 < sum(bool(row.charging) for row in phones) / len(phones) < 0.6
    assert {row.network for row in phones} == {"unmetered"}
    assert {(row.charging, row.network) for row in stated if row not in phones} == {(None, None)}
    assert [row.examples for row in stated[:3]] == [10, 20, 30]


def test_only_eligible_devices_are_given_tasks(tmp_path: Path, line: Path) -> None:
    rules = {"tiers": ["phone"], "charging": True, "least_examples": 50}
    run = drive(make_scenario(tmp_path, line, 60, **FLEET, plan__selection=rules))
    may = {
        device
        for device, row in enumerate(stated_by(tmp_path, line, 60))
        if "tier:phone" in row.labels and row.charging and row.examples >= 50
    }
    given = {device for devices in assigned(run).values() for device in devices}
    assert given
    assert given <= may
    selection = run.fleet.engine.selection
    assert isinstance(selection, RuledSelection)
    assert selection.live()["ineligible"] == 60 - len(may)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_run_s_scenario_file_has_the_rules(tmp_path: Path, line: Path, name: str) -> None:
    scenario = make_scenario(tmp_path, line, 40, **FLEET, plan__selection=SELECTIONS[name])
    again = Scenario.parse(scenario.to_toml(), tmp_path)
    assert again.plan.selection == scenario.plan.selection
    assert again.tiers == scenario.tiers


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"once_in": 30},
            (
                "population.size = 40 is less than plan.selection.once_in = 30 times "
                "plan.round.minimum = 2"
            ),
        ),
        ({"tiers": ["tablet"]}, "names no tier of the scenario, which has phone, pi"),
    ],
)
def test_rules_that_no_device_could_meet_are_refused(
    tmp_path: Path, line: Path, rules: Any, said: str
) -> None:
    with pytest.raises(SimulatorError) as refused:
        make_scenario(tmp_path, line, 40, **FLEET, plan__selection=rules)
    assert said in refused.value.text


def test_larger_devices_are_chosen_in_proportion(tmp_path: Path, line: Path) -> None:
    """Each device k has 10 (k + 1) examples; in 150 rounds of one task each."""
    more = FLEET | {
        "plan__round": {"goal": 1, "over_selection": 1.0},
        "plan__stop__rounds": 150,
        "failures": {},
    }
    run = drive(make_scenario(tmp_path, line, 5, **more, plan__selection={"weighting": "examples"}))
    counts = Counter(devices[0] for devices in assigned(run).values())
    expected = [150 * (device + 1) / 15 for device in range(5)]
    # 4 df, p = 0.001
    assert sum((counts[device] - mean) ** 2 / mean for device, mean in enumerate(expected)) < 18.5


@pytest.mark.parametrize("name", SELECTIONS)
def test_quotas_and_rest_hold_over_crashes_of_the_coordinator(
    tmp_path: Path, line: Path, name: str
) -> None:
    crashes = {"coordinator": {"crashes": [333.0, 2222.0, 4444.0], "restart": 10.0}}
    run = drive(
        make_scenario(tmp_path, line, 40, **FLEET, **crashes, plan__selection=SELECTIONS[name])
    )
    assert sum(row["how"] == "committed" for row in run.rounds) == 12
    assert [row["event"] for row in run.events].count("crash") >= 1
    given = assigned(run)
    if name == "seldom":
        for number, devices in given.items():
            assert not {*devices} & {*given.get(number - 1, []), *given.get(number - 2, [])}
            assert sum(device % 2 == 0 for device in devices) <= max(6, len(devices)) // 2
    if name == "oort":
        assert all(
            row["selection"]["utility"] > 0 for row in run.rounds if row["how"] == "committed"
        )


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_run_that_was_stopped_chooses_the_same_devices(
    tmp_path: Path, line: Path, name: str
) -> None:
    scenario = make_scenario(tmp_path, line, 40, **FLEET, plan__selection=SELECTIONS[name])
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(scenario, tmp_path / "whole", options)
    assert whole is not None
    stops = iter([False] * 3 + [True] * 2 + [False] * 1000)
    assert simulate(scenario, tmp_path / "parts", options, should_stop=lambda: next(stops)) is None
    parts = simulate(scenario, tmp_path / "parts", options, resume=True)
    assert parts is not None
    for file in (EVENTS, ROUNDS):
        assert (parts.folder / file).read_bytes() == (whole.folder / file).read_bytes()
    assert parts.model.tobytes() == whole.model.tobytes()
