"""Exchanges of several phases in virtual time: a roll call of three phases, which only tests have.

A device is asked, and its answer arrives, a second each after it was sent: two seconds in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.rounds import round_state
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.checkpoint import state_of
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.exchanges import EXCHANGES
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, exchanges_file, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from roll_call import ROLL_CALL, RollCall, roll_call
from simulated_roll_call import BYTES, has_roll_calls, simulated_phases
from virtual import drive, make_fleet, make_scenario

SLOW = {"device": {"latency": 1.0, "download": 1e12, "upload": 1e12}}
FILES = (exchanges_file(ROLL_CALL), EVENTS, ROUNDS, MODEL)
ALWAYS = 1e6
NAMES = [name_of(device) for device in range(6)]


def scenario_with(
    folder: Path, line: Path, ends: Sequence[float], returns: float = ALWAYS, **settings: Any
) -> Scenario:
    """Devices that go offline at these times; the last of them is there again after ``returns``. No
    round begins, for lack of one device more that comes much later: each is free to answer."""
    rows = "".join(f"{device},0,{end}\n" for device, end in enumerate(ends))
    rows += f"{len(ends) - 1},{returns},{2 * ALWAYS}\n" if returns < ALWAYS else ""
    rows += f"{len(ends)},{2 * ALWAYS},{3 * ALWAYS}\n"
    (folder / "trace.csv").write_text(f"device,on,off\n{rows}")
    size = len(ends) + 1
    usual: dict[str, Any] = {
        "availability": {"kind": "trace", "file": "trace.csv"},
        "tiers": SLOW,
        "plan__round": {"goal": size, "minimum": size, "grace": 5.0},
    }
    return make_scenario(folder, line, size, **{**usual, **settings})


def begin(scenario: Scenario) -> tuple[Fleet, list[dict[str, Any]]]:
    """A fleet that has checked in and in which a roll call is requested, and its event log."""
    events: list[dict[str, Any]] = []
    fleet = make_fleet(scenario, lambda rows: events.extend(msgspec.to_builtins(rows)))
    assert fleet.advance()
    fleet.carry_out(fleet.engine.request_exchange(ROLL_CALL, fleet.now))
    return fleet, events


def until_over(fleet: Fleet) -> list[tuple[Any, ...]]:
    while fleet.engine.exchanges[ROLL_CALL].is_open:
        assert fleet.advance(), fleet.finished
    return simulated_phases(fleet.exchanges.summaries[ROLL_CALL])


def test_all_devices_answer_in_each_phase(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_roll_calls(monkeypatch, RollCall(devices=3, minimum=3))
    fleet, events = begin(scenario_with(tmp_path, line, [ALWAYS] * 3))
    assert until_over(fleet) == [
        (1, True, dict(zip(NAMES, (0, 1, 2), strict=False)), {}),
        (2, True, dict.fromkeys(NAMES[:3], 3), {}),
        (3, True, dict.fromkeys(NAMES[:3], 9), {}),
    ]
    rows = fleet.exchanges.summaries[ROLL_CALL]
    assert [row["time"] for row in rows] == pytest.approx([2.0, 4.0, 6.0])
    assert [row["seconds"] for row in rows] == pytest.approx([2.0, 2.0, 2.0])
    costs = fleet.coordinator.costs
    assert costs.up == 3 * 3 * BYTES
    assert costs.down == 3 * (0 + 3 + 3) * BYTES, "no model and no bundle travels"
    assert not fleet.tasks.has_bundle
    told = [(round(row["time"]), row["event"], row.get("phase")) for row in events]
    assert [row for row in told if row[1] in (ROLL_CALL, "closed")] == [
        (0, ROLL_CALL, None),
        (2, "closed", None),
        (2, ROLL_CALL, 2),
        (4, "closed", 2),
        (4, ROLL_CALL, 3),
        (6, "closed", 3),
    ]
    assert [row[:2] for row in told if row[1] in ("asked", "answered")] == [
        row for at in (0, 2, 4) for row in [(at, "asked")] * 3 + [(at + 2, "answered")] * 3
    ]


def test_devices_vanish_in_each_phase_and_the_others_go_on(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaves in the middle of a phase, and is lost 5 seconds later."""
    has_roll_calls(monkeypatch, RollCall(devices=4, minimum=2, deadline=30.0))
    fleet, _ = begin(scenario_with(tmp_path, line, [ALWAYS, 13.0, 7.0, 1.0]))
    assert until_over(fleet) == [
        (1, True, {NAMES[0]: 0, NAMES[1]: 1, NAMES[2]: 2}, {"lost": 1}),
        (2, True, {NAMES[0]: 3, NAMES[1]: 3}, {"lost": 1}),
        (3, False, {NAMES[0]: 6}, {"lost": 1}),
    ]
    times = [row["time"] for row in fleet.exchanges.summaries[ROLL_CALL]]
    assert times == pytest.approx([6.0, 12.0, 42.0], abs=0.01), "the last waits for its deadline"
    assert not fleet.exchanges.running


@pytest.mark.parametrize("crash", [1.0, 3.0, 5.0])
def test_the_coordinator_restarts_in_a_phase(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch, crash: float
) -> None:
    has_roll_calls(monkeypatch, RollCall(devices=3, minimum=3, deadline=200.0))
    died = {"crashes": [crash], "restart": 7.0}
    calm, _ = begin(scenario_with(tmp_path, line, [ALWAYS] * 3))
    fleet, events = begin(scenario_with(tmp_path, line, [ALWAYS] * 3, coordinator=died))
    assert until_over(fleet) == until_over(calm)
    assert "restart" in [row["event"] for row in events]


@pytest.mark.parametrize("training_after", [0, 1, 2, 3])
@pytest.mark.parametrize("crash", [None, 1.0, 3.0, 5.0, 23.0, 33.0, 35.0, 37.0])
def test_rounds_have_their_phases_before_and_after_training(
    tmp_path: Path,
    line: Path,
    monkeypatch: pytest.MonkeyPatch,
    training_after: int,
    crash: float | None,
) -> None:
    """Two rounds, whatever the phase in which the coordinator dies."""
    rules = RollCall(devices=3, minimum=3, deadline=200.0, training_after=training_after)
    has_roll_calls(monkeypatch, rules)
    settings: dict[str, Any] = {
        "tiers": SLOW,
        "plan__round": {"goal": 3, "minimum": 3, "grace": 5.0, "deadline": 200.0},
        "plan__stop": {"rounds": 2},
    }
    if crash is not None:
        settings["coordinator"] = {"crashes": [crash], "restart": 2.0}
    run = drive(make_scenario(tmp_path, line, 3, **settings))
    assert len(run.when("restart")) == (crash is not None)
    assert [(row["round"], row["reports"]) for row in run.rounds] == [(1, 3), (2, 3)]
    assert simulated_phases(run.fleet.exchanges.summaries[ROLL_CALL]) == 2 * [
        (1, True, dict(zip(NAMES, (0, 1, 2), strict=False)), {}),
        (2, True, dict.fromkeys(NAMES[:3], 3), {}),
        (3, True, dict.fromkeys(NAMES[:3], 9), {}),
    ]


def test_who_was_lost_before_is_not_asked_after_a_restart(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost in the first phase, and there again at 61, when the others come back to the
    coordinator, which dies in the second phase and is there again at 57."""
    has_roll_calls(monkeypatch, RollCall(devices=4, minimum=3, deadline=500.0))
    died = {"crashes": [7.0], "restart": 50.0}
    ends = [ALWAYS, ALWAYS, ALWAYS, 1.0]
    fleet, _ = begin(scenario_with(tmp_path, line, ends, returns=8.0, coordinator=died))
    assert until_over(fleet) == [
        (1, True, dict(zip(NAMES, (0, 1, 2), strict=False)), {"lost": 1}),
        (2, True, dict.fromkeys(NAMES[:3], 3), {}),
        (3, True, dict.fromkeys(NAMES[:3], 9), {}),
    ]
    assert NAMES[3] in fleet.engine.exchanges[ROLL_CALL].able


def test_ten_thousand_devices_vanish_at_random(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They vanish while they fetch and while they send, and do not come back in time."""
    has_roll_calls(monkeypatch, RollCall(devices=10_000, minimum=2_000, deadline=60.0))
    failures = {"download": 0.1, "upload": 0.1}
    scenario = scenario_with(tmp_path, line, [ALWAYS] * 10_000, failures=failures)
    fleet, _ = begin(scenario)
    phases = until_over(fleet)
    assert [phase for phase, *_ in phases] == [1, 2, 3]
    asked = 10_000
    for (_, valid, answers, dropped), after in zip(phases, [*phases[1:], None], strict=True):
        assert valid
        assert len(answers) + sum(dropped.values()) == asked
        assert dropped.keys() == {"lost"}
        # exp(-.1) of them are there after a second, exp(-.2) after two: within 5 sigma
        assert len(answers) == pytest.approx(0.8187 * asked, abs=5 * (0.15 * asked) ** 0.5)
        if after is not None:
            told = sum(answers.values())
            assert {*after[2].values()} == {told}
            assert answers.keys() > after[2].keys()
        asked = len(answers)


def every_commit(folder: Path, scenario: Scenario) -> list[tuple[int, bool]]:
    """Simulate, and stop and go on at each commit. Returns the phase of the roll call at each, and
    whether it was open."""
    seen: list[tuple[int, bool]] = []
    outcome = None
    while outcome is None:
        ended: list[int] = []

        def look(fleet: Fleet, ended: list[int] = ended) -> None:
            series = fleet.engine.exchanges[ROLL_CALL]
            seen.append((series.phase, series.is_open))
            ended.append(1)

        outcome = simulate(
            scenario,
            folder,
            Options(backend="bundle", workers=1, checkpoint=1),
            resume=bool(seen),
            progress=look,
            should_stop=lambda ended=ended: bool(ended),  # type: ignore[misc]
        )
    return seen


@pytest.mark.parametrize(("recipe", "rounds"), [("fedavg", 16), ("fedbuff", 40)])
def test_a_run_that_is_stopped_in_each_phase_goes_on_to_the_same_bytes(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, rounds: int
) -> None:
    """Devices answer between their tasks, some vanish, evaluations are open beside roll calls."""
    has_roll_calls(monkeypatch, RollCall(devices=6, minimum=2, deadline=300.0, every=3))
    scenario = make_scenario(
        tmp_path,
        line,
        12,
        tiers={"device": {"latency": 4.0, "spread": 0.5}},
        plan__recipe=recipe,
        plan__round={"goal": 2, "minimum": 1, "deadline": 300.0, "grace": 5.0},
        plan__stop__rounds=rounds,
        plan__evaluation={"every": 2, "devices": 4, "minimum": 1, "deadline": 200.0},
        failures={"train": 0.002, "download": 0.01, "upload": 0.01},
        availability={"kind": "always"},
        coordinator={"crashes": [150.0], "restart": 7.0},
    )
    options = Options(backend="bundle", workers=1, checkpoint=1)
    assert simulate(scenario, tmp_path / "whole", options) is not None
    seen = every_commit(tmp_path / "cut", scenario)
    assert {(phase, True) for phase in (1, 2, 3)} <= {*seen}, "a checkpoint in each phase"
    for name in FILES:
        whole, cut = (tmp_path / folder / name for folder in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), name
    rows = read_rows(tmp_path / "whole", exchanges_file(ROLL_CALL))
    assert {row.get("phase", 1) for row in rows} == {1, 2, 3}
    for one, after in pairwise(simulated_phases(rows)):
        if after[0] > 1:
            assert after[2].keys() <= one[2].keys()
            assert {*after[2].values()} <= {sum(one[2].values())}


def test_a_checkpoint_without_open_exchanges_holds_no_model_of_them(
    tmp_path: Path, line: Path
) -> None:
    fleet = make_fleet(make_scenario(tmp_path, line, 3))
    taken: list[Any] = []
    fleet.before_commit = lambda: taken.append(state_of(fleet))
    while fleet.advance():
        pass
    ((tensors, state),) = taken
    assert [name for name in tensors if name.startswith("exchanges.")] == ["exchanges.ends"]
    assert state["exchanges"] == {"running": [], "open": {}}


def test_a_kind_that_devices_cannot_answer_is_refused_by_name(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(round_state.EXCHANGE_POLICIES, ROLL_CALL, roll_call(RollCall()))
    assert ROLL_CALL not in EXCHANGES
    with pytest.raises(SimulatorError, match="kind roll-call, and simulated"):
        simulate(make_scenario(tmp_path, line, 3), tmp_path / "run", Options(backend="bundle"))
