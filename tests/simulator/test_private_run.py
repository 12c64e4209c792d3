"""Private scenarios: what a run spends, where it stops, what it shows, and that it goes on to the
same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.privacy.accounting import poisson_epsilon
from fleetlearn_simulator import load_results
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.scenario.scenario import Scenario
from typer.testing import CliRunner
from virtual import Driven, drive, make_scenario, simulate_in_parts, write_scenario

PRIVACY: dict[str, Any] = {"noise": 2.0, "delta": 1e-6, "population": 8, "clip": 0.5}
FIRST = 2.2541
"""Epsilon of one release: an anchor from another accountant."""

ROUND = {"goal": 80, "minimum": 1, "over_selection": 1.0, "deadline": 1000.0}
"""Of 80 devices, of which eight are there: the noise on the count of clipped updates is 4."""


def settings(rounds: int = 3, **privacy: Any) -> dict[str, Any]:
    return {
        "plan__recipe": "dp-fedavg",
        "plan__privacy": PRIVACY | privacy,
        "plan__stop": {"rounds": rounds},
    }


def scenario(folder: Path, bundle: Path, rounds: int = 3, **privacy: Any) -> Scenario:
    return make_scenario(folder, bundle, 8, **settings(rounds, **privacy))


def spent(run: Driven) -> list[float]:
    return [row["privacy"]["epsilon"] for row in run.rounds]


def test_each_round_says_what_the_run_has_spent(tmp_path: Path, private_line: Path) -> None:
    run = drive(scenario(tmp_path, private_line))
    assert spent(run)[0] == pytest.approx(FIRST, abs=1e-4)
    assert spent(run) == sorted(spent(run))
    assert [row["privacy"]["release"] for row in run.rounds] == [1, 2, 3]
    assert {row["privacy"]["clip"] for row in run.rounds} == {0.5}
    assert all(row["metrics"] == {} for row in run.rounds)  # not released


def test_a_run_stops_by_name_before_it_goes_past_its_budget(
    tmp_path: Path, private_line: Path
) -> None:
    run = drive(scenario(tmp_path, private_line, rounds=50, epsilon=4.0))
    assert len(run.rounds) == 2
    assert run.fleet.finished is not None
    assert run.fleet.finished.startswith("the privacy budget is spent: epsilon")
    assert (run.rounds[-1]["privacy"]["of"], run.rounds[-1]["privacy"]["left"]) == (4.0, 0)
    with pytest.raises(PlanError, match="does not allow one release"):
        drive(scenario(tmp_path, private_line, epsilon=0.5))


def test_the_noise_is_that_of_the_plan(tmp_path: Path, private_line: Path) -> None:
    """The clip norm is so small that the model moves by noise alone: 20 rounds of 4 elements have
    the standard deviation z C / goal, within five standard errors."""
    tiny = 1e-6
    run = drive(scenario(tmp_path, private_line, rounds=20, clip=tiny, noise=300.0))
    steps = np.array([row["change"] for row in run.rounds])
    sigma = 300.0 * tiny / 8
    assert (steps**2).sum() / 80 == pytest.approx(sigma**2, rel=5 * np.sqrt(2 / 80))


@pytest.mark.parametrize(
    "privacy",
    [
        {"clip_quantile": 0.5, "population": 80},
        {"mechanism": "dp-ftrl", "separation": 1, "participations": 3, "population": 80},
        {"mechanism": "local", "population": 80},
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, private_line: Path, privacy: dict[str, Any]
) -> None:
    given = make_scenario(tmp_path, private_line, 8, **settings(**privacy), plan__round=ROUND)
    whole = drive(given)
    parts = simulate_in_parts(given, tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()
    assert parts.summary["privacy"]["epsilon"] == spent(whole)[-1]


@pytest.mark.slow
def test_poisson_sampling_costs_less_and_is_told_from_above(
    tmp_path: Path, private_line: Path
) -> None:
    drawn = {
        "population": {"size": 240, "connected": 240},
        "plan__round": {"goal": 60, "minimum": 1, "over_selection": 1.0, "deadline": 1e5},
    }
    common = settings(sampling="poisson", population=240)
    run = drive(make_scenario(tmp_path, private_line, 240, **(common | drawn)))
    expected = [poisson_epsilon(2.0, 0.25, releases, 1e-6) for releases in (1, 2, 3)]
    assert spent(run) == expected
    assert expected[0] < FIRST / 2
    # noise for a budget, and a budget that ends before the rounds do
    limited = settings(rounds=9, sampling="poisson", population=240, epsilon=expected[1] * 1.01)
    run = drive(make_scenario(tmp_path, private_line, 240, **(limited | drawn)))
    assert len(run.rounds) == 2
    assert run.fleet.finished is not None
    assert "privacy budget" in run.fleet.finished


def test_pages_and_tables_show_what_was_spent(tmp_path: Path, private_line: Path) -> None:
    given = settings(clip_quantile=0.5, epsilon=9.0, population=80) | {"plan__round": ROUND}
    path = write_scenario(tmp_path, private_line, 8, **given)
    wide = {"COLUMNS": "200"}
    words = ["run", str(path), "--workers", "1", "--backend", "bundle"]
    done = CliRunner().invoke(app, words, env=wide)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert re.search(r"privacy .*epsilon 4\.15\d of 9 at delta 1e-06 after 3 releases", said)
    folder = tmp_path / "scenario.sim"
    page = (folder / "report.html").read_text("utf-8")
    assert "after 3 releases; clip norm" in page
    for part in ("Epsilon spent", "Clip norm", "Clipped updates", "budget", "of 9, at delta 1e-06"):
        assert part in page
    assert "what devices measure is not released" in page
    rows = load_results(folder).round_rows
    assert [row["privacy/release"] for row in rows] == [1, 2, 3]
    assert rows[0]["privacy/epsilon"] == pytest.approx(FIRST, abs=1e-4)
    assert {"privacy/clip", "privacy/clipped_share"} <= rows[0].keys()
    compared = CliRunner().invoke(
        app, ["compare", str(folder), "--output", str(tmp_path / "c.html")], env=wide
    )
    assert "epsilon" in compared.stdout
    assert re.search(r"4\.15\d", compared.stdout)
