"""make-bundle, result, and what the other commands say of a run without a model."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from computing import texts
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.aggregation.computations.statistics import advance_noisy, result
from fleetlearn_coordinator.commands.computations import _between, _show_statistics
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.computations import statistics
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from peers import write_test_bundle
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[3] / "examples"


def typed(*words: str, expected: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == expected, done.output
    return done.output


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's plan, its run begun."""
    monkeypatch.chdir(tmp_path)
    said = typed("make-bundle", str(EXAMPLES / "questions.toml"), "--output", "patients.bundle")
    assert "the computation statistics to patients.bundle: in each round a device" in said
    path = tmp_path / "statistics.toml"
    path.write_text((EXAMPLES / "statistics.toml").read_text())
    loaded = Plan.load(path)
    bundle = open_bundle(loaded.bundle)
    store = open_store(loaded.data_dir, bundle.sha256)
    Run(loaded, bundle, store, Clocks(0.0, 1.0), 15.0)
    store.close()
    return path


def test_before_the_first_round_nothing_is_known(plan: Path) -> None:
    found = json.loads(typed("result", str(plan), "--json"))
    assert (found["run"], found["version"], found["done"]) == ("patients", 0, False)
    assert found["result"]["rows"] == 0
    assert found["result"]["columns"]["weight"]["minimum"]["value"] is None
    assert found["progress"] == "0 rounds so far, of at most 16"
    shown = typed("result", str(plan))
    assert "not known" in shown
    assert "weight: 0 of 0 rows have no value" in shown


def test_the_bundle_s_size_is_said_as_it_is(plan: Path) -> None:
    manifest = open_bundle(plan.parent / "patients.bundle").manifest
    said = typed("make-bundle", str(EXAMPLES / "questions.toml"), "--output", "again.bundle")
    sums = manifest.elements_of("sums")
    up = f"sends {8 * sums} (with [secure]: {12 * sums})"
    assert f"fetches {4 * manifest.size} bytes and {up}" in " ".join(said.split())


def test_a_run_without_a_model_exports_none(plan: Path) -> None:
    said = typed("export-model", str(plan), "--output", "x.onnx", expected=1)
    assert "computes statistics and has no model" in " ".join(said.split())
    assert not Path("x.onnx").exists()


def test_a_run_that_trains_has_no_result(tmp_path: Path) -> None:
    bundle = write_test_bundle(tmp_path / "digits.bundle", 10)
    path = tmp_path / "plan.toml"
    local = "local = { lr = 0.1, mu = 0.0 }"
    path.write_text(f'name = "a"\nbundle = "{bundle}"\n{local}\n[round]\ngoal = 2\n')
    said = typed("result", str(path), expected=1)
    assert "nothing is computed beside it" in " ".join(said.split())


def test_questions_that_make_no_sense_are_named(tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text('name = "a"\nkind = "statistics"\n')
    said = typed("make-bundle", str(tmp_path / "q.toml"), "-o", str(tmp_path / "x"), expected=1)
    assert "q.toml: there is no column" in " ".join(said.split())
    assert not (tmp_path / "x").exists()


def test_init_writes_a_plan_for_it(plan: Path) -> None:
    Path("fleet").mkdir()
    Path("patients.bundle").rename("fleet/patients.bundle")
    typed("init", "fleet")
    made = Plan.load("fleet/plan.toml")
    made.check_against(open_bundle(made.bundle).manifest)
    assert (made.recipe, made.round.minimum) == ("statistics", 4)


def test_numbers_are_shown_in_words() -> None:
    assert _between({"value": 2.0, "least": 2.0, "most": 2.0}) == ("2", "exactly")
    assert _between({"value": 1.5, "least": 1.0, "most": 2.0}) == ("1.5", "1 to 2")
    unknown = _between({"value": 1.5, "least": None, "most": None})
    assert unknown == ("1.5", "below the range to above the range")


def test_noise_is_shown_beside_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a state as a round with noise leaves it; a quantile's end may be outside of the range."""
    asked = Statistics(
        numbers=(NumberColumn("age", range=(0.0, 8.0), quantiles=(0.01, 0.5), bins=2),),
        categories=(CategoryColumn("smoker", values=("yes", "no")),),
        rounds=1,
    )
    columns = {"age": np.array([1.0, 1.0, 7.0, np.nan]), "smoker": texts(["yes", "", "no", "no"])}
    total = sum_up(statistics.first_state(asked), [columns], asked)
    state = advance_noisy(statistics.first_state(asked), total, 3, asked, 0.1)
    _show_statistics(result(state, asked))
    shown = capsys.readouterr().out
    root = 0.1 * sqrt(5)
    assert f"that of the number of rows is {root:.4g}" in shown
    assert "below the range to 4" in shown
    assert f"(noise)   {root:.4g}" in shown
    assert "noise of each count" in shown
