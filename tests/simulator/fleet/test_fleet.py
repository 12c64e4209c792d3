"""The engine in virtual time: small cases worked out by hand, and what holds whatever happens.

Device k has k + 1 batches, a step takes 10 seconds: an epoch on device k takes 10 (k + 1) seconds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.rounds.random_draws import task_seeds
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.service.observers import ExchangeSummarised, RoundEnded, RunEvent
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet import fleet as fleet_module
from fleetlearn_simulator.fleet import round_training
from fleetlearn_simulator.fleet.connections import MIN_REFILL_SECONDS
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.fleet.events import AcceptedLine
from fleetlearn_simulator.fleet.fleet import MAX_BACK_OFF, Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings
from fleetlearn_simulator.training.choice import first_with_examples
from fleetlearn_simulator.training.run_bundles import run_bundles
from fleetlearn_simulator.training.trained_devices import (
    PendingResults,
    ResultReader,
    TrainedDevices,
)
from fleetlearn_simulator.training.vectorized import Vectorized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from line_bundle import line_data
from virtual import Driven, Row, by_lines, drive, make_fleet, make_scenario, write_scenario

FULL = {"plan__local__batch_size": 0}
"""All examples in one step, so that an epoch takes 10 seconds on each device."""
TASKS = ("assigned", "accepted", "lost")
ON_AND_OFF = {"availability__kind": "trace", "availability__file": "trace.csv"}


def write_trace(folder: Path, *rows: tuple[int, float, float]) -> None:
    text = "".join(f"{device},{on},{off}\n" for device, on, off in rows)
    (folder / "trace.csv").write_text(f"device,on,off\n{text}")


def initial(line: Path) -> Vector:
    return open_bundle(line).parameters()


def test_names_sort_as_numbers_do() -> None:
    assert name_of(7) == "d00000007"
    assert [device_of(name_of(number)) for number in (0, 123, 9_999_999)] == [0, 123, 9_999_999]
    assert sorted(map(name_of, (10, 9, 1_000_000))) == list(map(name_of, (9, 10, 1_000_000)))


def test_over_selection_ends_what_is_too_much(tmp_path: Path, line: Path) -> None:
    """Four tasks for two reports: devices 0 and 1 have reported after 20 seconds, and the work of
    the others is not used."""
    run = drive(
        make_scenario(tmp_path, line, 4, plan__round__goal=2, plan__round__over_selection=2.0)
    )
    assert sorted(run.told(*TASKS), key=lambda row: (row[0], row[2])) == [
        *((0.0, "assigned", device, None) for device in range(4)),
        (10.0, "accepted", 0, None),
        (20.0, "accepted", 1, None),
        (20.0, "lost", 2, "surplus"),
        (20.0, "lost", 3, "surplus"),
    ]
    (row,) = run.rounds
    assert (row["how"], row["reports"], row["dropped"], row["causes"]) == (
        "committed",
        2,
        {"surplus": 2},
        {"surplus": 2},
    )
    assert row["device_seconds"] == pytest.approx({"useful": 30.0, "wasted": 40.0})
    size = open_bundle(line).manifest.size
    assert row["bytes"]["up"] == 2 * 4 * (size + 1), "the update and the value of one buffer"
    assert run.fleet.finished == "1 rounds done"


def test_what_a_metric_cannot_be_is_left_out_of_it(tmp_path: Path, line: Path) -> None:
    """As the coordinator does it. Four devices measure an error; the two largest are beyond the
    bounds, so that the others alone are behind it; where three are the minimum, they do not stop
    the run."""
    bundle, errors = open_bundle(line), []
    for device in range(4):
        x, y = line_data(10 * (device + 1), seed=device)
        w, h = bundle.parameters()[:3], bundle.parameters()[4]
        errors.append((float(np.abs(x @ w + h - y).sum()), len(y)))
    means = sorted((total / count, total, count) for total, count in errors)
    bound = (means[1][0] + means[2][0]) / 2
    stop = {"metric": "error", "direction": "below", "target": bound, "bounds": [0.0, bound]}
    settings: dict[str, Any] = {"plan__local__evaluate": True}
    for minimum, rounds in ((2, 1), (3, 2)):
        settings |= {"plan__round__minimum": minimum, "plan__stop": stop | {"rounds": 2}}
        run = drive(make_scenario(tmp_path, line, 4, **settings))
        assert len(run.rounds) == rounds
        row = run.rounds[0]
        assert row["behind"] == {"loss": 4, "error": 2}
        expected = sum(total for _, total, _ in means[:2]) / sum(count for *_, count in means[:2])
        assert row["evaluation"]["error"] == pytest.approx(expected, rel=1e-5)


def test_an_impossible_evaluation_takes_the_training_with_it(tmp_path: Path, line: Path) -> None:
    """As the coordinator does it: a device whose evaluation is beyond the bounds is not believed
    about its training."""
    settings: dict[str, Any] = {
        "plan__local": {"epochs": 3, "batch_size": 10, "lr": 0.01, "evaluate": True}
    }
    (free,) = drive(make_scenario(tmp_path, line, 1, **settings)).rounds
    assert free["train"]["error"] < free["evaluation"]["error"]
    between = (free["train"]["error"] + free["evaluation"]["error"]) / 2
    stop = {
        "rounds": 1,
        "metric": "error",
        "direction": "below",
        "target": 0.1,
        "bounds": [0.0, between],
    }
    (row,) = drive(make_scenario(tmp_path, line, 1, **settings, plan__stop=stop)).rounds
    assert row["train"] == {"loss": free["train"]["loss"]}
    assert row["evaluation"] == {"loss": free["evaluation"]["loss"]}
    assert row["behind"] == {"loss": 1}


def observe(scenario: Scenario) -> tuple[Fleet, list[RunEvent]]:
    """Run it to its end. Returns also what an observer was told."""
    fleet, told = make_fleet(scenario), list[RunEvent]()
    fleet.observers.append(told.extend)
    while fleet.advance():
        pass
    return fleet, told


def test_observers_are_told_what_those_of_a_coordinators_run_are(
    tmp_path: Path, line: Path
) -> None:
    """Device 0 is asked to measure when it has reported, and device 1 when its report has ended the
    second round."""
    evaluation = {"every": 1, "devices": 2, "minimum": 1, "deadline": 50.0}
    settings: dict[str, Any] = {"plan__stop__rounds": 2, "plan__evaluation": evaluation}
    fleet, told = observe(make_scenario(tmp_path, line, 2, **settings))
    assert [type(event).__name__ for event in told] == [
        *("Opened", "Assign", "Assign", "Commit", "RoundEnded"),
        *("Opened", "Assign", "Assign", "ExchangeOpened", "Ask", "Ask", "Commit", "RoundEnded"),
        *("ExchangeClosed", "ExchangeSummarised", "ExchangeOpened", "Ask", "Ask"),
        *("ExchangeClosed", "ExchangeSummarised", "Finish"),
    ]
    rounds = [event for event in told if isinstance(event, RoundEnded)]
    assert [event[:3] for event in rounds] == [(1, "committed", 1), (2, "committed", 2)]
    assert [event.summary for event in rounds] == fleet.history
    measured = [event for event in told if isinstance(event, ExchangeSummarised)]
    assert [event[:5] for event in measured] == [
        ("evaluation", 1, 1, 1, True),
        ("evaluation", 2, 1, 2, True),
    ]
    assert [event.summary for event in measured] == fleet.evaluations


@pytest.fixture
def month(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation ends after a month without a round: a year of it takes 3 s of CPU."""
    monkeypatch.setattr(fleet_module, "MAX_SECONDS_WITHOUT_ROUND", 30 * 86400.0)


@pytest.mark.usefixtures("month")
def test_observers_are_told_why_a_round_was_abandoned(tmp_path: Path, line: Path) -> None:
    write_trace(tmp_path, (0, 0, 1e6), (1, 0, 1e6), (2, 0, 15), (3, 0, 15))
    plan = {"plan__round__minimum": 3, "plan__round__deadline": 100.0}
    _, told = observe(make_scenario(tmp_path, line, 4, **plan, **ON_AND_OFF))
    last = told[-1]
    assert isinstance(last, RoundEnded)
    assert last[:3] == (1, "abandoned", 0)
    assert last.why == "2 reports at the deadline, 3 are the minimum"
    assert [type(event).__name__ for event in told[-4:-1]] == ["Ended", "Ended", "Abandon"]


def test_an_observer_that_raises_ends_the_simulation(tmp_path: Path, line: Path) -> None:
    """It may be what writes the run's folder."""
    fleet = make_fleet(make_scenario(tmp_path, line, 2))

    def write(events: Sequence[RunEvent]) -> None:
        raise OSError("disk full")

    fleet.observers.append(write)
    with pytest.raises(OSError, match="disk full"):
        fleet.advance()


def test_bytes_are_those_of_the_files_a_device_fetches(tmp_path: Path, line: Path) -> None:
    """The bundle's graphs in the first round only; the model in each."""
    bundle = open_bundle(line)
    files = sum(
        bundle.manifest.files[file].size for file in ("graphs/train.onnx", "graphs/eval.onnx")
    )
    run = drive(make_scenario(tmp_path, line, 3, plan__stop__rounds=3))
    model = 4 * bundle.manifest.size
    up = 3 * (model + 4)  # the update and the value of one buffer
    assert [row["bytes"] for row in run.rounds] == [
        {"down": 3 * (model + files), "up": up},
        {"down": 3 * model, "up": up},
        {"down": 3 * model, "up": up},
    ]


def test_transfers_take_the_bytes_over_the_throughput(tmp_path: Path, line: Path) -> None:
    bundle = open_bundle(line)
    files = sum(
        bundle.manifest.files[file].size for file in ("graphs/train.onnx", "graphs/eval.onnx")
    )
    model = 4 * bundle.manifest.size
    tier = {"latency": 0.5, "download": 1000, "upload": 10}
    run = drive(make_scenario(tmp_path, line, 1, tiers={"device": tier}, plan__stop__rounds=2))
    up = model + 4  # the update and the value of one buffer
    first = 0.5 + (files + model) / 1000 + 10 + 0.5 + up / 10
    second = 0.5 + model / 1000 + 10 + 0.5 + up / 10
    assert [time for time, *_ in run.told("accepted")] == pytest.approx(
        [first, first + second], abs=0.001
    )


def test_a_round_is_the_weighted_mean_of_its_reports(tmp_path: Path, line: Path) -> None:
    """Against the step in numpy, float64; device k weighs its 10 (k + 1) examples."""
    run = drive(
        make_scenario(tmp_path, line, 3, plan__stop__rounds=2, plan__local__epochs=2, **FULL)
    )
    model = initial(line).astype(np.float64)
    for _ in range(2):
        updates = [by_lines(model, device, 2, lr=0.01) - model for device in range(3)]
        model = model + np.average(updates, axis=0, weights=[10, 20, 30])
    np.testing.assert_allclose(run.model, model, rtol=1e-5)


@pytest.mark.usefixtures("month")
def test_too_few_reports_at_the_deadline(tmp_path: Path, line: Path) -> None:
    """Devices 2 and 3 go offline after 15 seconds and never return: two reports of three at
    least."""
    write_trace(tmp_path, (0, 0, 1e6), (1, 0, 1e6), (2, 0, 15), (3, 0, 15))
    run = drive(
        make_scenario(
            tmp_path, line, 4, plan__round__minimum=3, plan__round__deadline=100.0, **ON_AND_OFF
        )
    )
    assert run.told("accepted", "lost", "committed", "abandoned") == [
        (10.0, "accepted", 0, None),
        (15.0, "lost", 2, "offline"),
        (15.0, "lost", 3, "offline"),
        (20.0, "accepted", 1, None),
        (100.0, "abandoned", None, None),
    ]
    (row,) = run.rounds
    assert (row["how"], row["reports"], row["dropped"]) == ("abandoned", 2, {"lost": 2})
    assert row["device_seconds"] == pytest.approx({"useful": 30.0, "wasted": 30.0})
    assert run.model.tobytes() == initial(line).tobytes()
    assert "too few devices are online" in str(run.fleet.finished)


def test_whoever_is_left_when_the_grace_is_over_makes_the_round(tmp_path: Path, line: Path) -> None:
    """Nobody is left to wait for 10 seconds, the grace, after the last device vanished."""
    write_trace(tmp_path, (0, 0, 1e6), (1, 0, 1e6), (2, 0, 25), (3, 0, 28))
    run = drive(
        make_scenario(
            tmp_path, line, 4, plan__round__minimum=2, plan__round__grace=10.0, **ON_AND_OFF
        )
    )
    (row,) = run.rounds
    assert (row["reports"], row["dropped"], row["causes"]) == (2, {"lost": 2}, {"offline": 2})
    assert row["time"] == pytest.approx(38.0, abs=0.001)


def test_the_deadline_cuts_slow_devices_short(tmp_path: Path, line: Path) -> None:
    """Of 25 seconds a tenth is kept for the upload: devices 2 and 3 have done two of their steps,
    and say so."""
    run = drive(make_scenario(tmp_path, line, 4, plan__round__deadline=25.0))
    accepted = [
        (row["device"], row["steps"], round(row["time"], 3))
        for row in run.events
        if row["event"] == "accepted"
    ]
    assert sorted(accepted) == [(0, 1, 10.0), (1, 2, 20.0), (2, 2, 20.0), (3, 2, 20.0)]
    assert run.rounds[0]["partial"] == 2


def test_a_slow_upload_is_late(tmp_path: Path, line: Path) -> None:
    """The report's 24 bytes take 24 seconds to send, after 10 of training; the round is over after
    25."""
    assert 4 * open_bundle(line).manifest.size == 20
    tiers = {"device": {"latency": 0.0, "download": 1e12, "upload": 1.0}}
    run = drive(
        make_scenario(tmp_path, line, 2, tiers=tiers, plan__round__deadline=25.0, **FULL), most=10
    )
    assert run.rounds[0]["how"] == "abandoned"
    assert run.rounds[0]["dropped"] == {"late": 2}
    assert run.told("lost")[:2] == [(25.0, "lost", 0, "late"), (25.0, "lost", 1, "late")]
    assert run.rounds[0]["device_seconds"] == pytest.approx({"useful": 0.0, "wasted": 50.0})


def test_the_deadline_comes_between_reports_that_are_trained_together(
    tmp_path: Path, line: Path
) -> None:
    """Devices 0 and 1 train for 10 and 20 seconds and upload for 24; the round is over after 35."""
    tiers = {"device": {"latency": 0.0, "download": 1e12, "upload": 1.0}}
    run = drive(
        make_scenario(tmp_path, line, 2, tiers=tiers, plan__round__deadline=35.0), backend=AtOnce
    )
    assert run.told("accepted", "lost", "committed") == [
        (34.0, "accepted", 0, None),
        (35.0, "lost", 1, "late"),
        (35.0, "committed", None, None),
    ]


def test_stragglers_hand_in_what_they_have_done(tmp_path: Path, line: Path) -> None:
    """1 to 4 of 5 epochs, each a step: their updates are as after that many steps."""
    scenario = make_scenario(
        tmp_path, line, 6, failures__stragglers=1.0, plan__local__epochs=5, **FULL
    )
    run = drive(scenario)
    steps = {row["device"]: row["steps"] for row in run.events if row["event"] == "accepted"}
    assert sorted(steps) == list(range(6))
    assert set(steps.values()) <= {1, 2, 3, 4}
    assert len(set(steps.values())) > 1
    assert {device: round(time / 10) for time, _, device, _ in run.told("accepted")} == steps
    assert run.rounds[0]["partial"] == 6
    model = initial(line).astype(np.float64)
    updates = [by_lines(model, device, steps[device], lr=0.01) - model for device in range(6)]
    expected = model + np.average(
        updates, axis=0, weights=[10 * (device + 1) for device in range(6)]
    )
    np.testing.assert_allclose(run.model, expected, rtol=1e-5)


def test_discarded_stragglers_report_nothing(tmp_path: Path, line: Path) -> None:
    scenario = make_scenario(
        tmp_path,
        line,
        8,
        failures__stragglers=0.5,
        failures__discard=True,
        plan__local__epochs=5,
        **FULL,
    )
    run = drive(scenario)
    (row,) = run.rounds
    lost = row["causes"]["straggler"]
    assert 0 < lost < 8
    assert row["reports"] == 8 - lost
    assert row["dropped"] == {"failed: straggler": lost}
    assert row["partial"] == 0
    assert row["device_seconds"]["useful"] == pytest.approx(50.0 * row["reports"])


def test_a_small_fleet_s_round_waits_for_a_device_that_failed_as_a_real_one_would(
    tmp_path: Path, line: Path
) -> None:
    """Half of all tasks fail, and a round needs all four devices: those that failed connect again,
    and try again."""
    rules = {"plan__round__minimum": 4, "plan__round__over_selection": 1.0, "plan__round__goal": 4}
    changes = {"failures__stragglers": 0.5, "failures__discard": True, "plan__local__epochs": 5}
    run = drive(make_scenario(tmp_path, line, 4, **changes, **{**FULL, **rules}))
    assert {row["how"] for row in run.rounds} == {"committed"}
    assert sum(row["causes"].get("straggler", 0) for row in run.rounds) > 0
    given = Counter((device, time) for time, _, device, _ in run.told("assigned"))
    assert max(Counter(device for device, _ in given).values()) > len(run.rounds)


def test_a_crash_costs_the_time_until_then(tmp_path: Path, line: Path) -> None:
    """All die in training, and again when they are back and are given their tasks again; the round
    has nobody left, and no report."""
    run = drive(
        make_scenario(tmp_path, line, 4, failures__crash=1.0, plan__round__deadline=2000.0, **FULL),
        most=200,
    )
    row = run.rounds[0]
    times = [time for time, *_ in run.told("lost") if time <= row["time"]]
    assert len(times) == 4 * (1 + SECOND_CHANCES)
    assert (row["how"], row["causes"], row["dropped"]) == (
        "abandoned",
        {"crash": len(times)},
        {"lost": 4},
    )
    assert all(0 <= time <= 10 for time in times[:4])
    began = [time for time, *_ in run.told("assigned")][: len(times)]
    assert row["device_seconds"]["wasted"] == pytest.approx(sum(times) - sum(began), abs=0.01)


def seeds_of(scenario: Scenario, size: int) -> list[tuple[int, int]]:
    """The devices of the first round, with the seeds of their tasks."""
    seeds = task_seeds(scenario.plan.seed, 1, [name_of(device) for device in range(size)])
    return list(zip(range(size), seeds, strict=True))


def corrupted(folder: Path, line: Path, kind: str, factor: float = 1.0, **more: Any) -> Driven:
    rows = [{"share": 1.0, "kind": kind, "factor": factor}]
    return drive(make_scenario(folder, line, 3, failures__corrupt=rows, **more), most=200)


def test_flipped_updates_point_the_other_way(tmp_path: Path, line: Path) -> None:
    right = drive(make_scenario(tmp_path, line, 3)).model - initial(line)
    wrong = corrupted(tmp_path, line, "flipped", 2.0).model - initial(line)
    np.testing.assert_allclose(wrong, -2.0 * right, rtol=1e-5, atol=1e-6)


def test_scaled_updates_are_accepted_while_the_sum_can_hold_them(
    tmp_path: Path, line: Path
) -> None:
    right = drive(make_scenario(tmp_path, line, 3)).model - initial(line)
    scaled = corrupted(tmp_path, line, "scaled", 1000.0).model - initial(line)
    np.testing.assert_allclose(scaled, 1000.0 * right, rtol=1e-4)


def test_conspirators_send_the_mean_of_their_updates_less_a_little(
    tmp_path: Path, line: Path
) -> None:
    """Three devices with 10, 20 and 30 examples, all of them hostile."""
    scenario = make_scenario(tmp_path, line, 3)
    backend = PerDevice(
        open_bundle(line),
        local_settings(scenario.plan, open_bundle(line)),
        source_of(scenario, open_bundle(line)),
    )
    jobs = [Job(device, seed, None) for device, seed in seeds_of(scenario, 3)]
    trained = backend.train(RoundInputs(initial(line)), jobs)
    updates = trained.updates.astype(np.float64)
    updates[:, 3] = trained.vectors["buffers"][:, 0] - initial(line)[3]
    expected = updates.mean(axis=0) - 1.5 * updates.std(axis=0)
    found = corrupted(tmp_path, line, "little", 1.5).model - initial(line)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1e9])
def test_updates_beyond_the_sums_range_are_rejected(
    tmp_path: Path, line: Path, factor: float
) -> None:
    """``w`` moves by 2 * 0.25e6 * 1e6, which is beyond 2^35."""
    (tmp_path / "lines.py").write_text("")
    corrupt = [{"share": 1.0, "kind": "scaled", "factor": factor}]
    rules = {"plan__round__deadline": 100.0, "plan__local__lr": 1.0}
    scenario = make_scenario(tmp_path, line, 3, failures__corrupt=corrupt, **rules)
    made = "    x = np.full((4, 3), 1e6, np.float32)\n    return {'x': x, 'y': x[:, 0]}\n"
    module = f"import numpy as np\n\ndef make(device, seed):\n{made}"
    (tmp_path / "lines.py").write_text(module)
    run = drive(scenario, most=200)
    row = run.rounds[0]
    assert (row["how"], row["reports"]) == ("abandoned", 0)
    assert row["dropped"] == row["causes"] == {"rejected: out-of-range": 3}
    assert row["bytes"]["up"] == 3 * 4 * (open_bundle(line).manifest.size + 1), "they were sent"
    assert run.model.tobytes() == initial(line).tobytes()


def test_updates_that_overflow_are_rejected(tmp_path: Path, line: Path) -> None:
    """float32 has no such number: an update of 2 * 0.25e15 * 1e15, times 1e9."""
    (tmp_path / "lines.py").write_text("")
    scenario = make_scenario(
        tmp_path,
        line,
        1,
        failures__corrupt=[{"share": 1.0, "kind": "scaled", "factor": 1e9}],
        plan__local__lr=1.0,
    )
    module = (
        "import numpy as np\n\ndef make(device, seed):\n    x = np.full((4, 3), 1e15, np.float32)\n"
    )
    (tmp_path / "lines.py").write_text(f"{module}    return {{'x': x, 'y': x[:, 0]}}\n")
    run = drive(scenario, most=10)
    assert list(run.rounds[0]["dropped"]) == ["rejected: not-finite"]


CLASSES = """
import numpy as np

def examples(device, seed):
    return 10 * (device + 1)

def make(device, seed):
    random = np.random.default_rng([seed, device])
    x = random.standard_normal((10 * (device + 1), 60), np.float32)
    if device == DIVERGES:
        x[:] = 1e38
    if device == TOO_LARGE:
        x *= np.float32(1e14)
    return {"x": x, "y": random.integers(10, size=len(x))}
"""


@pytest.mark.parametrize(("diverges", "too_large"), [(2, 5), (0, 1), (7, 6), (15, 8), (14, 15)])
def test_one_that_fails_amid_others_is_lost_alone(
    tmp_path: Path, softmax: Path, diverges: int, too_large: int
) -> None:
    """Blocks of eight devices, whose reports come one after the other with nothing between them.
    Whether eight are there at a time, one, or three, those before and those after are accepted,
    each at its own time."""
    scenario = make_scenario(
        tmp_path, softmax, 16, plan__local={"batch_size": 10, "lr": 0.01, "evaluate": False}
    )
    module = CLASSES.replace("DIVERGES", str(diverges)).replace("TOO_LARGE", str(too_large))
    (tmp_path / "lines.py").write_text(module)
    one = drive(scenario)
    causes = {diverges: "failed: diverged", too_large: "rejected: out-of-range"}
    assert one.told("accepted", "lost") == [
        (
            10.0 * (device + 1),
            "lost" if device in causes else "accepted",
            device,
            causes.get(device),
        )
        for device in range(16)
    ]
    (row,) = one.rounds
    assert (row["how"], row["reports"]) == ("committed", 14)
    assert row["causes"] == row["dropped"] == dict.fromkeys(causes.values(), 1)
    lost = sum(10.0 * (device + 1) for device in causes)
    assert row["device_seconds"] == pytest.approx({"useful": 10 * 136 - lost, "wasted": lost})
    assert row["bytes"]["up"] == 16 * one.model.nbytes, "all were sent"
    check(one)
    assert in_words(drive(scenario, backend=ByThrees)) == in_words(one)
    lengths = []

    class Noted(Vectorized):
        def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
            take = super().begin(inputs, jobs)

            def noted(places: Sequence[int]) -> TrainedDevices:
                found = take(places)
                lengths.append(len(found))
                return found

            return noted

    many = drive(scenario, backend=Noted)
    assert lengths == [8, 8], "as many as there were"
    assert many.told("opened", *TASKS, "committed") == one.told("opened", *TASKS, "committed")
    for key in row.keys() - {"train", "metrics", "change"}:
        assert many.rounds[0][key] == row[key], key
    np.testing.assert_allclose(many.model, one.model, rtol=0, atol=1e-5)


def test_reports_that_come_at_the_same_time_come_as_their_tasks_were_given(
    tmp_path: Path, line: Path
) -> None:
    run = drive(
        make_scenario(
            tmp_path, line, 6, plan__round__goal=5, plan__round__over_selection=1.2, **FULL
        )
    )
    given, accepted = run.told("assigned"), run.told("accepted")
    assert accepted == [(10.0, "accepted", device, None) for _, _, device, _ in given[:5]]
    assert [device for _, _, device, _ in given] != sorted(device for _, _, device, _ in given)


def test_what_was_to_come_at_the_moment_of_a_report_comes_before_it(
    tmp_path: Path, line: Path
) -> None:
    """Also before one that is there together with others: the coordinator dies as device 2's report
    arrives."""
    calm = drive(make_scenario(tmp_path, line, 4))
    (moment,) = (
        row["time"] for row in calm.events if row["event"] == "accepted" and row["device"] == 2
    )
    run = drive(
        make_scenario(tmp_path, line, 4, coordinator={"crashes": [moment], "restart": 100.0})
    )
    assert [row["event"] for row in run.events[:8]] == [
        "opened",
        *["assigned"] * 4,
        *["accepted"] * 2,
        "crash",
    ]
    assert run.events[7]["time"] == moment
    assert all(time > 130 for time, _, device, _ in run.told("accepted") if device >= 2)


def with_one_waiting(
    waits: int,
    folder: Path,
    bundle: Path,
    sizes: Sequence[int],
    backend: type[PerDevice] = PerDevice,
    **more: Any,
) -> Driven:
    """A round of all but one device, which waits for a place that comes free; device 0, or else 1,
    diverges. The others are done after as many seconds as they have examples."""
    module = CLASSES.replace("DIVERGES", "min({0, 1} - {WAITS})").replace("TOO_LARGE", "-1")
    module = module.replace("10 * (device + 1)", "SIZES[device]")
    local = {"batch_size": 10, "lr": 0.01, "evaluate": False}
    for seed in range(100):
        scenario = make_scenario(
            folder,
            bundle,
            len(sizes),
            plan__local=local,
            plan__round__goal=len(sizes) - 1,
            plan__seed=seed,
            **more,
        )
        (folder / "lines.py").write_text(f"SIZES, WAITS = {[*sizes]}, {waits}\n{module}")
        run = drive(scenario, backend=backend)
        if waits not in {device for time, _, device, _ in run.told("assigned") if time == 0}:
            return run
    raise AssertionError("the device is chosen whatever the seed")


def test_who_takes_the_place_of_one_that_failed_may_report_before_others(
    tmp_path: Path, softmax: Path
) -> None:
    """Though the reports of these were there together."""
    run = with_one_waiting(0, tmp_path, softmax, [10, 20, 30, 40])
    assert run.told("accepted", "lost") == [
        (20.0, "lost", 1, "failed: diverged"),
        (30.0, "accepted", 2, None),
        (30.0, "accepted", 0, None),
        (40.0, "accepted", 3, None),
    ]


def test_the_tasks_after_one_that_is_lost_are_not_forgotten(tmp_path: Path, softmax: Path) -> None:
    """Device 2, which takes device 0's place at 10 seconds, reports when device 3, next of the
    first ones, has left."""
    write_trace(tmp_path, *((device, 0, 25 if device == 3 else 1e6) for device in range(5)))
    more = {"plan__round__grace": 5.0, **ON_AND_OFF}
    run = with_one_waiting(2, tmp_path, softmax, [10, 20, 20, 50, 60], **more)
    assert run.told("accepted", "lost") == [
        (10.0, "lost", 0, "failed: diverged"),
        (20.0, "accepted", 1, None),
        (25.0, "lost", 3, "offline"),
        (30.0, "accepted", 2, None),
        (60.0, "accepted", 4, None),
    ]
    assert [row["time"] for row in run.rounds] == pytest.approx([60.0])


def test_those_are_trained_with_who_is_due_that_are_due_next(
    tmp_path: Path, softmax: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time; device 2 takes device 0's place and is done after 60 seconds, devices 3 and 4
    after 50 and 80."""
    together: list[list[int]] = []

    class Noted(PerDevice):
        def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
            together.append([job.device for job in jobs])
            return super().begin(inputs, jobs)

    monkeypatch.setattr(
        round_training, "MAX_BYTES_AHEAD", 2 * open_bundle(softmax).parameters().nbytes
    )
    run = with_one_waiting(2, tmp_path, softmax, [10, 20, 50, 50, 80], Noted)
    assert [device for _, _, device, _ in run.told("accepted")] == [1, 3, 2, 4]
    assert together[-3:] == [[0, 1], [3, 2], [4]]


class ByThrees(PerDevice):
    """Trains as that does, and has what comes of it for three jobs at a time, the last of them
    first."""

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        def produce(pending: PendingResults, place: int) -> None:
            first = place - place % 3
            places = [place for place in range(first, first + 3) if place < len(jobs)][::-1]
            pending.put(places, self.train(inputs, [jobs[row] for row in places]))

        return PendingResults(produce).read


class AtOnce(PerDevice):
    """The same for all that are begun together."""

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        return self.train(inputs, jobs).select


def in_words(run: Driven) -> tuple[Any, ...]:
    """All that a run tells, to the last bit."""
    return run.events, run.rounds, run.model.tobytes(), run.fleet.finished, run.fleet.now


def test_garbage_has_the_length_of_the_update(tmp_path: Path, line: Path) -> None:
    def update(run: Driven) -> Vector:
        return run.model - initial(line)

    right = update(drive(make_scenario(tmp_path, line, 1)))
    garbage = update(
        drive(
            make_scenario(
                tmp_path,
                line,
                1,
                failures__corrupt=[{"share": 1.0, "kind": "garbage", "factor": 3.0}],
            )
        )
    )
    assert np.linalg.norm(garbage) == pytest.approx(3 * np.linalg.norm(right), rel=1e-5)
    cosine = float(garbage @ right / np.linalg.norm(garbage) / np.linalg.norm(right))
    assert abs(cosine) < 0.999


def test_stale_updates_are_of_the_round_before(tmp_path: Path, line: Path) -> None:
    """In the first round there is none before; in the second all train from the initial model
    again."""
    run = corrupted(tmp_path, line, "stale", plan__stop__rounds=2, **FULL)
    first = initial(line).astype(np.float64)
    step = np.average(
        [by_lines(first, device, 1, lr=0.01) - first for device in range(3)],
        axis=0,
        weights=[1, 2, 3],
    )
    expected = first + 2 * step
    expected[3] = first[3] + step[3]  # the mean of what the devices measured, twice the same
    np.testing.assert_allclose(run.model, expected, rtol=1e-5)


def test_an_outage_takes_its_region(tmp_path: Path, line: Path) -> None:
    """Region 0, devices 0, 2 and 4, from the 25th second on: device 0 has reported before. They are
    back later."""
    run = drive(
        make_scenario(
            tmp_path,
            line,
            5,
            failures__regions=2,
            failures__outages=[{"region": 0, "begin": 25.0, "end": 900.0}],
            plan__stop__rounds=2,
            plan__round__minimum=3,
            plan__round__grace=30.0,
            plan__round__gather=2000.0,
        )
    )
    assert sorted(run.told("accepted", "lost")[:5]) == [
        (10.0, "accepted", 0, None),
        (20.0, "accepted", 1, None),
        (25.0, "lost", 2, "outage"),
        (25.0, "lost", 4, "outage"),
        (40.0, "accepted", 3, None),
    ]
    assert [row["reports"] for row in run.rounds] == [3, 5]
    opened = [row["time"] for row in run.events if row["event"] == "opened"]
    assert 900 <= opened[1] < 900 + 900 / 10, (
        "places are filled again after a tenth of the time without a round"
    )


def test_short_outages_are_survived(tmp_path: Path, line: Path) -> None:
    run = drive(
        make_scenario(
            tmp_path,
            line,
            3,
            failures__outages=[{"region": 0, "begin": 5.0, "end": 9.0}],
            plan__round__grace=10.0,
        )
    )
    assert run.rounds[0]["reports"] == 3


@pytest.mark.parametrize("crash", [5.0, 10.25, 15.0, 29.5, 45.0])
def test_the_coordinators_crash_loses_no_accepted_update(
    tmp_path: Path, line: Path, crash: float
) -> None:
    """It is down for 10 seconds; devices are back within MAX_BACK_OFF of its return, and each
    reports once."""
    calm = drive(make_scenario(tmp_path, line, 4, plan__stop__rounds=2))
    run = drive(
        make_scenario(
            tmp_path,
            line,
            4,
            plan__stop__rounds=2,
            coordinator__crashes=[crash],
            coordinator__restart=10.0,
        )
    )
    assert run.model.tobytes() == calm.model.tobytes()
    assert [row["reports"] for row in run.rounds] == [4, 4]
    assert run.told("crash", "restart") == [
        (crash, "crash", None, None),
        (crash + 10, "restart", None, None),
    ]
    assert Counter(device for _, _, device, _ in run.told("accepted")) == dict.fromkeys(range(4), 2)
    assert not run.told("lost")
    before = [row for row in calm.told("accepted") if row[0] <= crash]
    assert run.told("accepted")[: len(before)] == before
    while_down = [time for time, *_ in calm.told("accepted") if crash < time <= crash + 10]
    late = [time for time, *_ in run.told("accepted")[len(before) :]][: len(while_down)]
    assert all(crash + 10 <= time <= crash + 10 + MAX_BACK_OFF for time in late)


def report_times(scenario: Scenario) -> dict[int, float]:
    """When each device reports, none of them while it is not connected again."""
    times: dict[int, float] = {}

    def heard(rows: Sequence[Any]) -> None:
        for row in rows:
            if isinstance(row, AcceptedLine):
                times[row.device] = row.time
                assert fleet.connections.away.get(row.device, 0.0) <= row.time

    fleet = make_fleet(scenario, heard)
    while fleet.advance():
        pass
    return times


def test_nobody_reports_before_being_back(tmp_path: Path, line: Path) -> None:
    """Devices 1 and 2 are done after 20 and 30 seconds, the coordinator is there again after 25:
    device 1 reports as it is back, often before the 30th, with nothing else until then; and device
    2 is often back only later."""
    both = 0
    for seed in range(30):
        crash = {"crashes": [15.0], "restart": 10.0}
        times = report_times(make_scenario(tmp_path, line, 3, seed=seed, coordinator=crash))
        assert sorted(times) == [0, 1, 2]
        both += times[1] < 30 < times[2]
    assert both > 2


def test_a_crash_in_the_midst_of_recovery(tmp_path: Path, line: Path) -> None:
    calm = drive(make_scenario(tmp_path, line, 4, plan__stop__rounds=3))
    crashes = [15.0, 26.0, 28.0, 40.0, 41.0, 100.0, 111.0]
    run = drive(
        make_scenario(
            tmp_path,
            line,
            4,
            plan__stop__rounds=3,
            coordinator__crashes=crashes,
            coordinator__restart=10.0,
        )
    )
    assert run.model.tobytes() == calm.model.tobytes()
    assert not run.told("lost")


def test_a_device_that_leaves_while_the_coordinator_is_down(tmp_path: Path, line: Path) -> None:
    """Its lease is held for it after the restart, then its slot is given up."""
    write_trace(tmp_path, (0, 0, 1e6), (1, 0, 1e6), (2, 0, 18))
    run = drive(
        make_scenario(
            tmp_path, line, 3, coordinator__crashes=[15.0], coordinator__restart=10.0, **ON_AND_OFF
        )
    )
    (row,) = run.rounds
    assert (row["reports"], row["dropped"], row["causes"]) == (2, {"lost": 1}, {"offline": 1})
    assert row["time"] == pytest.approx(25 + 90, abs=0.001), (
        "the grace after a restart is 90 seconds"
    )


def test_free_places_are_filled_when_devices_leave(tmp_path: Path, line: Path) -> None:
    """Four places, eight devices: the first four go after their first round, the others take their
    places."""
    write_trace(
        tmp_path,
        *((device, 0, 45) for device in range(4)),
        *((device, 0, 1e6) for device in range(4, 8)),
    )
    run = drive(
        make_scenario(
            tmp_path,
            line,
            8,
            population__connected=4,
            plan__round__goal=4,
            plan__stop__rounds=2,
            **FULL,
            **ON_AND_OFF,
        )
    )
    rounds = [{row["device"] for row in run.events if row["event"] == "accepted"}]
    assert len(rounds[0]) == 4  # always online: the places never come free
    write_trace(
        tmp_path,
        *((device, 0, 15) for device in range(4)),
        *((device, 12, 1e6) for device in range(4, 8)),
    )
    run = drive(
        make_scenario(
            tmp_path, line, 8, population__connected=4, plan__round__goal=4, plan__stop__rounds=3,
            **FULL, **(ON_AND_OFF | {"availability__file": str(tmp_path / "trace.csv")}),
        )
    )  # fmt: skip
    opened = [row["time"] for row in run.events if row["event"] == "opened"]
    assert len(opened) >= 2
    late = {
        row["device"]
        for row in run.events
        if row["event"] == "accepted" and row["time"] > MIN_REFILL_SECONDS
    }
    assert late == {4, 5, 6, 7}
    assert all(row["connected"] <= 4 for row in run.events if row["event"] == "opened")


def test_a_device_that_vanished_is_not_given_its_task_again(tmp_path: Path, line: Path) -> None:
    """Its slot comes back when its grace is over, though it could connect before: else the round
    waits for nothing."""
    run = drive(
        make_scenario(
            tmp_path,
            line,
            8,
            failures__crash=0.5,
            plan__round__grace=200.0,
            plan__round__deadline=5000.0,
            **FULL,
        )
    )
    (row,) = run.rounds
    assert 0 < row["causes"]["crash"] < 8
    assert row["dropped"] == {"lost": row["causes"]["crash"]}
    assert row["time"] < 10 + 200 + 0.001


def test_every_device_has_its_turn(tmp_path: Path, line: Path) -> None:
    """All are connected unless the scenario says otherwise, and each is as likely to be picked as
    any other."""
    settings = {
        "plan__round": {"goal": 10, "over_selection": 1.0},
        "plan__server__lr": 1e-6,
        **FULL,
    }
    run = drive(
        make_scenario(
            tmp_path, line, 30, population={"size": 30}, plan__stop__rounds=200, **settings
        )
    )
    turns = Counter(device for _, _, device, _ in run.told("assigned"))
    assert sorted(turns) == list(range(30))
    # Hypergeometric: 200 rounds with 1/3 each, within 4.5 standard deviations.
    assert all(abs(turns[device] - 200 / 3) < 4.5 * (200 * 2 / 9) ** 0.5 for device in range(30))
    first = {
        frozenset(
            row[2]
            for row in drive(make_scenario(tmp_path, line, 30, seed=seed, **settings)).told(
                "assigned"
            )
        )
        for seed in range(3)
    }
    assert len(first) == 3, "in the first round too"


def test_places_are_not_the_first_devices(tmp_path: Path, line: Path) -> None:
    """Ten places for nineteen devices that come and go: all of them come to have one."""
    run = drive(
        make_scenario(
            tmp_path,
            line,
            19,
            population__connected=10,
            plan__round={"goal": 5, "minimum": 2, "deadline": 100.0},
            availability={"kind": "markov", "on": 100.0, "off": 30.0},
            plan__stop__rounds=400,
            plan__server__lr=1e-6,
            **FULL,
        )
    )
    turns = Counter(device for _, _, device, _ in run.told("assigned"))
    assert len(turns) == 19
    assert max(turns.values()) < 4 * min(turns.values())


def test_nobody_is_ever_online(tmp_path: Path, line: Path) -> None:
    write_trace(tmp_path, (0, 1e9, 1e9 + 1))
    run = drive(make_scenario(tmp_path, line, 50, **ON_AND_OFF))
    assert "too few devices are online" in str(run.fleet.finished)
    assert run.rounds == []
    assert run.handled < 20_000


@pytest.mark.usefixtures("month")
def test_too_few_are_online_at_a_time(tmp_path: Path, line: Path) -> None:
    """Each device alone, one after the other, and two are needed."""
    write_trace(tmp_path, *((device, 100 * device, 100 * device + 50) for device in range(20)))
    run = drive(make_scenario(tmp_path, line, 20, plan__round__minimum=2, **ON_AND_OFF))
    assert "too few devices are online" in str(run.fleet.finished)
    assert run.handled < 20_000


def test_training_that_never_works_ends(
    tmp_path: Path, line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task dies with its device: rounds without end would come to nothing."""
    monkeypatch.setattr(fleet_module, "MAX_ABANDONED_ROUNDS_IN_A_ROW", 20)  # 1,000 take 6 s of CPU
    run = drive(make_scenario(tmp_path, line, 4, failures__crash=1.0, **FULL))
    assert (
        f"{fleet_module.MAX_ABANDONED_ROUNDS_IN_A_ROW} rounds one after the other were abandoned"
        in str(run.fleet.finished)
    )
    assert str(run.fleet.finished).endswith(" lost")
    assert len(run.rounds) == fleet_module.MAX_ABANDONED_ROUNDS_IN_A_ROW


def test_an_evaluation_that_overflows_ends_nothing(tmp_path: Path, line: Path) -> None:
    """Large updates are accepted, and the model's loss is no number any more: the device says that
    it diverged."""
    run = corrupted(tmp_path, line, "scaled", 4e4, plan__stop__rounds=5, plan__local__evaluate=True)
    assert run.rounds[0]["how"] == "committed"


def test_other_seeds_are_other_runs(tmp_path: Path, line: Path) -> None:
    def luck(seed: int) -> list[tuple[Any, ...]]:
        scenario = make_scenario(
            tmp_path, line, 8, seed=seed, failures__train=0.02, plan__stop__rounds=3
        )
        return drive(scenario).told(*TASKS)

    assert luck(1) == luck(1)
    assert luck(1) != luck(2)


def test_a_rounds_cost_follows_the_cohort_and_not_the_population(
    tmp_path: Path, line: Path
) -> None:
    """The same plan for 10^3 and 10^6 devices with a diurnal rhythm: events and draws, counted."""

    def cost(size: int) -> tuple[int, int, int]:
        scenario = make_scenario(
            tmp_path,
            line,
            size,
            population__connected=40,
            plan__round__goal=20,
            plan__round__over_selection=1.5,
            plan__stop__rounds=6,
            data__examples=None,
            failures__train=0.002,
            availability__kind="diurnal",
            availability__share=0.25,
            **FULL,
        )
        (tmp_path / "lines.py").write_text(
            "from line_bundle import line_data\n\ndef examples(device, seed):\n    return 10\n\n"
            "def make(device, seed):\n    return line_data(10, device)\n"
        )
        run = drive(scenario)
        assert [row["how"] for row in run.rounds] == ["committed"] * 6
        return run.handled, run.fleet.events.serial, run.fleet.connections.arrivals

    small, large = cost(10**3), cost(10**6)
    for few, many in zip(small, large, strict=True):
        assert many < 1.3 * few + 100, f"{small} for 10^3 devices, {large} for 10^6"


HAZARD = st.sampled_from([0.0, 0.001, 0.02, 0.3])
FAILURES = st.fixed_dictionaries(
    {},
    optional={
        "download": HAZARD,
        "train": HAZARD,
        "upload": HAZARD,
        "crash": st.sampled_from([0.0, 0.2, 0.9]),
        "stragglers": st.sampled_from([0.0, 0.5, 1.0]),
        "discard": st.booleans(),
        "regions": st.just(2),
        "outages": st.just([{"region": 0, "begin": 13.0, "end": 150.0}]),
        "corrupt": st.sampled_from(
            [
                [{"share": 0.4, "kind": kind, "factor": factor}]
                for kind, factor in (
                    ("garbage", 1.0),
                    ("stale", 1.0),
                    ("scaled", 1e9),
                    ("flipped", 1.0),
                )
            ]
        ),
    },
)
AVAILABILITY = st.sampled_from(
    [
        {"kind": "always"},
        {"kind": "bernoulli", "share": 0.6, "slot": 30.0},
        {"kind": "markov", "on": 60.0, "off": 30.0},
        {"kind": "diurnal", "share": 0.5, "slot": 60.0},
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


ANYTHING = given(
    size=st.integers(1, 9),
    seed=st.integers(0, 1000),
    failures=FAILURES,
    availability=AVAILABILITY,
    over=st.sampled_from([1.0, 1.5, 3.0]),
    deadline=st.sampled_from([15.0, 60.0, 1000.0]),
    latency=st.sampled_from([0.0, 2.0]),
    crashes=st.lists(st.floats(0, 300), max_size=3),
    limits=st.booleans(),
    backend=st.sampled_from([ByThrees, AtOnce]),
    data=st.data(),
)
SEVERAL = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def whatever_happens(
    line: Path, size: int, seed: int, failures: dict[str, Any], availability: dict[str, Any],
    over: float, deadline: float, latency: float, crashes: list[float], limits: bool,
    backend: type[PerDevice], data: st.DataObject,
) -> None:  # fmt: skip
    goal = data.draw(st.integers(1, size))
    minimum = data.draw(st.integers(1, goal))
    connected = data.draw(st.integers(minimum, size))
    with tempfile.TemporaryDirectory() as place:
        scenario = make_scenario(
            Path(place),
            line,
            size,
            seed=seed,
            failures=failures,
            availability=availability,
            population__connected=connected,
            tiers={"device": {"latency": latency, "upload": 10.0}},
            plan__round={
                "goal": goal,
                "minimum": minimum,
                "over_selection": over,
                "deadline": deadline,
            },
            plan__stop__rounds=4,
            service={"downloads": 2, "uploads": 1},
            coordinator={"crashes": crashes, "restart": 7.0, "limits": limits},
        )
        run = drive(scenario, most=3000)
        check(run)
        if run.handled < 3000:  # reports that are there together are handled together
            assert in_words(drive(scenario, backend=backend)) == in_words(run)


@SEVERAL
@ANYTHING
def test_whatever_happens(line: Path, **drawn: Any) -> None:
    whatever_happens(line, **drawn)


@pytest.mark.slow
@settings(SEVERAL, max_examples=200)
@ANYTHING
def test_whatever_happens_for_long(line: Path, **drawn: Any) -> None:
    whatever_happens(line, **drawn)


def check(run: Driven) -> None:
    """Each task ends once, a device has one at a time, time does not go back, and the rounds' sums
    are their tasks'."""
    out: dict[int, tuple[str, float]] = {}
    began: list[str] = []
    ended: dict[str, Counter[str]] = {"useful": Counter(), "wasted": Counter()}
    seconds: dict[str, list[float]] = {"useful": [], "wasted": []}
    last, number = 0.0, 0
    closed = iter(run.rounds)
    for event in run.events:
        assert event["time"] >= last
        last = event["time"]
        match event["event"]:
            case "opened":
                assert not out
                number, began = event["round"], []
                seconds = {"useful": [], "wasted": []}
                ended = {"useful": Counter(), "wasted": Counter()}
            case "assigned":
                assert event["device"] not in out
                assert event["task"].startswith(f"s-{number}-")
                out[event["device"]] = event["task"], event["time"]
                began.append(event["task"])
            case "accepted" | "lost" as kind:
                task, start = out.pop(event["device"])
                assert task == event["task"]
                use = "useful" if kind == "accepted" else "wasted"
                seconds[use].append(event["time"] - start)
                ended[use][event.get("cause", "")] += 1
            case "committed" | "abandoned" as how:
                row = next(closed)
                assert not out
                assert (row["round"], row["how"]) == (number, how)
                assert (
                    row["reports"] == sum(ended["useful"].values()) == sum(row["accepted"].values())
                )
                assert sum(row["assigned"].values()) == len(began)
                # A device that was lost may have been given its task again.
                assert row["reports"] + sum(row["dropped"].values()) == len({*began})
                assert row["causes"] == dict(ended["wasted"])
                for use, spent in row["device_seconds"].items():
                    assert spent == pytest.approx(fsum(seconds[use]))
    assert next(closed, None) is None
    most = run.fleet.scenario.population.connected
    assert len(run.fleet.connections.connected) <= most


def test_the_checks_see_a_wrong_event(tmp_path: Path, line: Path) -> None:
    """If the checks looked at nothing, the tests above would show nothing."""
    run = drive(make_scenario(tmp_path, line, 3))
    check(run)
    lost = [row for row in run.events if not (row["event"] == "accepted" and row["device"] == 1)]
    with pytest.raises(AssertionError):
        check(run._replace(events=lost))
    with pytest.raises(AssertionError):
        check(run._replace(events=run.events[::-1]))


def test_advancing_a_finished_fleet_does_nothing(tmp_path: Path, line: Path) -> None:
    fleet = make_fleet(make_scenario(tmp_path, line, 2))
    while fleet.advance():
        pass
    before = fleet.now, fleet.model.tobytes(), len(fleet.history)
    assert not fleet.advance()
    assert (fleet.now, fleet.model.tobytes(), len(fleet.history)) == before


WITHOUT = """
import numpy as np
from line_bundle import line_data

{count}

def make(device, seed):
    x, y = line_data(max(1, 10 * (device % 3)), seed=1000 * seed + device)
    return {{"x": x[: 10 * (device % 3)], "y": y[: 10 * (device % 3)]}}
"""
COUNT = "def examples(device, seed):\n    return 10 * (device % 3)"
PACED: Row = {"plan__pace": {"connected": 5}, "population__connected": 9, "plan__round__goal": 3}


@pytest.mark.parametrize("count", [COUNT, ""])
@pytest.mark.parametrize(
    "settings", [{}, {"population__connected": 4, "plan__round__goal": 2}, PACED]
)
def test_devices_without_examples_never_take_part(
    tmp_path: Path, line: Path, count: str, settings: Row
) -> None:
    """Devices 0, 3 and 6 of nine have none: a real one would end with an error at its start."""
    rounds = {"plan__stop__rounds": 4, "plan__round__goal": 6} | settings
    path = write_scenario(tmp_path, line, 9, **rounds)
    (tmp_path / "lines.py").write_text(WITHOUT.format(count=count))
    outcome = simulate(Scenario.load(path), tmp_path / "out", Options("bundle", 1))
    assert outcome is not None
    assert (outcome.summary["rounds"], outcome.summary["abandoned"]) == (4, 0)
    # with fewer connections than devices, not all of those without examples are drawn
    if not settings:
        assert outcome.summary["without_examples"] == 3
    with_tasks = {
        row["device"] for row in read_rows(outcome.folder, EVENTS) if row["event"] == "assigned"
    }
    assert with_tasks
    assert not with_tasks & {0, 3, 6}


def test_a_step_is_measured_on_a_device_with_examples(tmp_path: Path, line: Path) -> None:
    """Device 0 has none: the measurement on it ended the whole simulation."""
    path = write_scenario(
        tmp_path, line, 9, compute={"step_seconds": "measure"}, plan__round__goal=6
    )
    (tmp_path / "lines.py").write_text(WITHOUT.format(count=COUNT))
    scenario = Scenario.load(path)
    (run,) = run_bundles(scenario)
    assert first_with_examples(run, 4) == [1, 2, 4, 5]
    outcome = simulate(scenario, tmp_path / "out", Options("auto", 1))
    assert outcome is not None
    assert outcome.summary["without_examples"] == 3


def test_a_fleet_without_any_examples_ends_and_says_why(tmp_path: Path, line: Path) -> None:
    path = write_scenario(tmp_path, line, 3)
    (tmp_path / "lines.py").write_text(
        WITHOUT.format(count=COUNT).replace("device % 3", "device // 9")
    )
    outcome = simulate(Scenario.load(path), tmp_path / "out", Options("bundle", 1))
    assert outcome is not None
    assert outcome.summary["reason"].endswith(
        "online at a time, and 3 of those that were drawn have no examples"
    )
    path = write_scenario(tmp_path, line, 3, compute={"step_seconds": "measure"})
    (tmp_path / "lines.py").write_text(
        WITHOUT.format(count=COUNT).replace("device % 3", "device // 9")
    )
    with pytest.raises(
        SimulatorError,
        match="none of the first 3 devices has examples: there is nothing to measure",
    ):
        simulate(Scenario.load(path), tmp_path / "out", Options("bundle", 1))
