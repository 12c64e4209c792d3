"""Scenarios whose plans have [secure]: the models are those of clipped updates, up to rounding, and
nothing of a single device is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.staleness import StalenessConstants, polynomial
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.masked_reports import MaskedReports
from fleetlearn_simulator.fleet.simulated_helper import SimulatedHelper
from typer.testing import CliRunner
from virtual import Driven, drive, make_scenario, simulate_in_parts, write_scenario

CLIP = 0.5
SECURE: dict[str, Any] = {
    "mode": "helper",
    "helper": "https://helper.example:8770",
    "key": "a" * 64,
    "certificate": "b" * 64,
    "clip": CLIP,
}
UNHIDDEN: dict[str, Any] = {"plan__aggregation": {"max_norm": CLIP}}
"""The coordinator clips, in the place of the devices."""
HIDDEN: dict[str, Any] = {"plan__secure": SECURE}
USUAL = {"goal": 8, "minimum": 2, "over_selection": 1.0, "deadline": 1000.0}
SLOW_UPLOAD = {"latency": 0.0, "download": 1e12, "upload": 1.0}
"""Bytes a second: an update of 5 words takes 20 seconds."""
DIFFERENT = {"tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 0.5}}}
"""No two devices are ready at the same time."""
WAYS: dict[str, dict[str, Any]] = {
    "uniform": {"plan__round": USUAL | {"weighting": "uniform"}},
    "by examples": {
        "plan__round": USUAL | {"weighting": "examples", "max_weight": 50},
        "failures": {"stragglers": 0.4, "discard": True},
    },
    "carried": {
        "plan__round": USUAL
        | {"goal": 4, "over_selection": 2.0, "late": "carry", "weighting": "uniform"},
        "plan__staleness": {"function": "polynomial", "max": 4},
    },
    "buffered": {
        "plan__recipe": "fedbuff",
        "plan__round": {"goal": 3, "concurrency": 8, "deadline": 1000.0},
    },
    "fedavgm, differences": {
        "plan__round": USUAL | {"weighting": "uniform"},
        "plan__server": {"optimizer": "momentum"},
        "plan__encoding": {"down": "delta"},
    },
}


def run(folder: Path, bundle: Path, **more: Any) -> Driven:
    return drive(make_scenario(folder, bundle, 8, **({"plan__stop": {"rounds": 5}} | more)))


@pytest.mark.parametrize("way", WAYS)
def test_the_models_are_those_of_clipped_updates(
    tmp_path: Path, private_line: Path, way: str
) -> None:
    """Uploads take no time, so that staleness is the same where it is told before them. With
    [secure] a device counts once in a round of three."""
    hidden = run(tmp_path, private_line, **HIDDEN, **WAYS[way], **DIFFERENT)
    once = {"max_share": 0.34} if way == "buffered" else {}
    alike = WAYS[way] | DIFFERENT | {"plan__round": WAYS[way]["plan__round"] | once}
    shown = run(tmp_path, private_line, **UNHIDDEN, **alike)
    moved = np.abs(shown.model - open_bundle(private_line).parameters()).max()
    assert moved > 0.05
    # one rounding is at most a step of 2 C / 2^20, times a weight of 1 and the server's momentum
    np.testing.assert_allclose(hidden.model, shown.model, atol=1e-4)
    assert [row.get("staleness") for row in hidden.rounds] == [
        row.get("staleness") for row in shown.rounds
    ]
    if way in ("carried", "buffered"):
        assert max(row["staleness"]["max"] for row in hidden.rounds) > 1


PRIVATE = {"noise": 1.0, "delta": 1e-6, "population": 80, "clip": CLIP}


DISTRIBUTED = {"mechanism": "distributed", "population": 8000, "noise": 1.0}
MASKED = WAYS | {
    "private": {
        "plan__recipe": "dp-fedavg",
        "plan__round": USUAL,
        "plan__privacy": PRIVATE,
        "plan__stop": {"rounds": 5},
    },
    "distributed noise": {
        "plan__recipe": "dp-fedavg",
        "plan__round": USUAL | {"minimum": 8},
        "plan__privacy": PRIVATE | DISTRIBUTED,
        "plan__stop": {"rounds": 5},
    },
    "12 bits": {
        "plan__round": USUAL | {"weighting": "uniform"},
        "plan__secure": SECURE | {"bits": 12},
    },
}
QUICK = ("by examples", "carried", "buffered", "12 bits")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in MASKED]
)
def test_with_masks_and_a_helper_the_models_are_the_same(
    tmp_path: Path, private_line: Path, way: str
) -> None:
    """Bit for bit: seeds are sealed and signed, and the helper's own code adds the masks up."""
    without = run(tmp_path, private_line, **HIDDEN | MASKED[way])
    masks = {"coordinator": {"masks": True}}
    masked = run(tmp_path, private_line, **HIDDEN | MASKED[way], **masks)
    assert masked.model.tobytes() == without.model.tobytes()
    assert [row["change"] for row in masked.rounds] == [row["change"] for row in without.rounds]


def test_masked_runs_go_on_after_a_stop_and_after_the_coordinators_death(
    tmp_path: Path, private_line: Path
) -> None:
    masks = {"masks": True, "crashes": [35.0, 131.0], "restart": 3.0}
    usual = HIDDEN | WAYS["buffered"] | DIFFERENT | {"plan__stop": {"rounds": 5}}
    given = make_scenario(tmp_path, private_line, 8, **usual, coordinator=masks)
    whole = drive(given)
    assert whole.when("crash")
    without = drive(
        make_scenario(tmp_path, private_line, 8, **usual, coordinator=masks | {"masks": False})
    )
    assert without.model.tobytes() == whole.model.tobytes()
    parts = simulate_in_parts(given, tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()


@pytest.mark.slow
def test_runs_in_which_devices_and_the_coordinator_die_have_the_same_models_with_masks(
    tmp_path: Path, private_line: Path
) -> None:
    """30 runs of each of four ways. The helper refuses nothing."""
    lost = 0
    for seed in range(30):
        for way in QUICK:
            draw = np.random.default_rng(seed)
            deaths = {"crashes": sorted(draw.uniform(0, 400, 3).tolist()), "restart": 5.0}
            more = MASKED[way] | DIFFERENT | {"failures": {"crash": 0.3, "train": 0.002}}
            more |= {"plan__stop": {"rounds": 4}, "seed": seed}
            runs = [
                run(tmp_path, private_line, **HIDDEN | more, coordinator=deaths | {"masks": masks})
                for masks in (True, False)
            ]
            assert runs[0].model.tobytes() == runs[1].model.tobytes(), (seed, way)
            lost += sum(sum(row["causes"].values()) for row in runs[0].rounds)
    assert lost > 300


def test_what_the_coordinator_adds_is_masked(
    tmp_path: Path, private_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word is far from what the device wrote, and a sum with a mask left in is refused."""
    seen = []
    of = MaskedReports.of

    def noted(self: MaskedReports, *about: Any) -> Any:
        reports = of(self, *about)
        seen.append(reports.parts["update"])
        return reports

    monkeypatch.setattr(MaskedReports, "of", noted)
    masks = {"coordinator": {"masks": True}}
    run(tmp_path, private_line, **HIDDEN, **WAYS["uniform"], **masks)
    words = np.concatenate(seen)
    assert words.shape[1] == 5
    assert (words >= 2**20).mean() > 0.99, "20 bits, and masks of 32"
    monkeypatch.setattr(SimulatedHelper, "sum_of_masks", lambda self: np.zeros(5, np.uint32))
    with pytest.raises(ValueError, match="A mask was not taken off"):
        run(tmp_path, private_line, **HIDDEN, **WAYS["uniform"], **masks)


def test_the_helpers_refusals_end_the_run_by_name(
    tmp_path: Path, private_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = {"coordinator": {"masks": True}}
    with pytest.raises(SimulatorError, match=r"masks = true needs a plan with \[secure\]"):
        make_scenario(tmp_path, private_line, 8, **masks)
    monkeypatch.setattr(SimulatedHelper, "_enrol", lambda self, names: None)
    with pytest.raises(SimulatorError, match=r"\(unknown-device\): 8 devices"):
        run(tmp_path, private_line, **HIDDEN, **WAYS["uniform"], **masks)


def test_nothing_of_single_devices_is_shown(tmp_path: Path, private_line: Path) -> None:
    way = WAYS["by examples"] | {"failures": {"stragglers": 0.4}}
    hidden = run(tmp_path, private_line, **HIDDEN, **way)
    shown = run(tmp_path, private_line, **UNHIDDEN, **way)
    assert any(row["metrics"] for row in shown.rounds)
    assert any(row["partial"] for row in shown.rounds)
    for row in hidden.rounds:
        assert (row["train"], row["metrics"], row["evaluation"]) == ({}, {}, {})
        assert row["partial"] == 0, "a device does not say that it did not do all steps"


@pytest.mark.parametrize("way", ["by examples", "carried", "buffered"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, private_line: Path, way: str
) -> None:
    slow = {"tiers": {"device": SLOW_UPLOAD}, "plan__stop": {"rounds": 4}}
    given = make_scenario(tmp_path, private_line, 8, **HIDDEN, **WAYS[way], **slow)
    whole = drive(given)
    parts = simulate_in_parts(given, tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()


def test_a_device_is_told_its_factor_when_it_has_trained(
    tmp_path: Path, private_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each upload takes 20 seconds, in which models are made: they do not count."""
    told: list[float] = []
    of = MaskedReports.of

    def noted(self: MaskedReports, reports: Any, tasks: Any, rows: slice, factors: Any) -> Any:
        told.extend(factors)
        return of(self, reports, tasks, rows, factors)

    monkeypatch.setattr(MaskedReports, "of", noted)
    buffered = WAYS["buffered"] | {"tiers": {"device": SLOW_UPLOAD}, "plan__stop": {"rounds": 9}}
    found = run(tmp_path, private_line, **HIDDEN, **buffered)
    assigned, expected, late = dict[str, float](), [], 0
    made = found.when("committed")
    for row in found.events:
        if row["event"] == "assigned":
            assigned[row["task"]] = row["time"]
        if row["event"] == "accepted":
            began, trained = assigned[row["task"]], row["time"] - 20.0
            tau = sum(began < time <= trained for time in made)
            late += sum(trained < time < row["time"] for time in made)
            expected.append(polynomial(tau, StalenessConstants(0.5, 0.0)))
    assert late > 3, "models were made during uploads"
    assert told == pytest.approx(expected)


def test_poisson_sampling_is_refused_by_name(tmp_path: Path, private_line: Path) -> None:
    """Whoever is drawn takes part, so that a sum may have few devices, or too many for it."""
    privacy = {"noise": 2.0, "delta": 1e-6, "population": 200, "clip": CLIP, "sampling": "poisson"}
    given = {
        "plan__recipe": "dp-fedavg",
        "plan__privacy": privacy,
        "plan__round": {"goal": 60, "minimum": 2, "over_selection": 1.0, "deadline": 1e5},
    }
    make_scenario(tmp_path, private_line, 200, **given)
    with pytest.raises(SimulatorError, match=r"with \[secure\].*how many are drawn"):
        make_scenario(tmp_path, private_line, 200, **given, **HIDDEN)


@pytest.mark.parametrize("noise", [0.02, 0.04])
def test_devices_add_the_plans_noise_under_their_masks(
    tmp_path: Path, private_line: Path, noise: float
) -> None:
    """One round of eight devices, with noise for four of them: sqrt(8 / 4) times z C on the sum,
    beside what is clipped alone."""
    privacy = {"mechanism": "distributed", "noise": noise, "delta": 1e-6, "population": 8}
    uniform = {"plan__round": USUAL | {"weighting": "uniform", "minimum": 4}}
    more = uniform | {"plan__stop": {"rounds": 1}}
    secure = {key: value for key, value in SECURE.items() if key != "clip"}
    noised = {"plan__privacy": privacy | {"clip": CLIP}, "plan__secure": secure}
    found = run(tmp_path, private_line, **noised, **more)
    assert found.rounds[0]["privacy"]["epsilon"] > 0
    shown = run(tmp_path, private_line, **UNHIDDEN, **more)
    beside = (found.model - shown.model) * 8 / CLIP
    expected = noise * 2**0.5
    assert 0.1 * expected < np.sqrt(np.mean(beside**2)) < 3 * expected
    again = run(tmp_path, private_line, **noised, **more)
    assert again.model.tobytes() == found.model.tobytes(), "a simulation follows from its seed"


def test_pages_and_tables_say_what_is_hidden_and_what_the_helper_is_asked(
    tmp_path: Path, private_line: Path
) -> None:
    given = HIDDEN | WAYS["uniform"] | {"plan__stop": {"rounds": 2}}
    path = write_scenario(tmp_path, private_line, 8, **given)
    wide = {"COLUMNS": "200"}
    words = ["run", str(path), "--workers", "1", "--backend", "bundle"]
    done = CliRunner().invoke(app, words, env=wide)
    assert done.exit_code == 0, done.stderr
    said = (
        "mode helper: sums of at least 2 devices, 20 bits, clip norm 0.5; simulated without masks"
    )
    assert said in " ".join(done.stderr.split())
    folder = tmp_path / "scenario.sim"
    page = (folder / "report.html").read_text("utf-8")
    for part in (
        said,
        "Hidden: every single update",
        "asked 2 times, for the sum of the masks of 8",
    ):
        assert part in page
    output = tmp_path / "c.html"
    words = ["compare", str(folder), "--output", str(output)]
    assert CliRunner().invoke(app, words, env=wide).exit_code == 0
    assert "A run with secure aggregation shows nothing" in output.read_text("utf-8")
