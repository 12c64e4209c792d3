"""The command audit, on a plan and on a scenario."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.audit import audit_command, canary_run
from private_mistakes import ClippedAfterAveraging
from statistics_bundle import PLAN as STATISTICS
from statistics_bundle import statistics_bundle
from typer.testing import CliRunner
from virtual import write_scenario

PLAN = """
name = "steps"
bundle = "{bundle}"
recipe = "{recipe}"
local = {{ lr = 0.1 }}
round = {{ goal = 300, minimum = 1 }}
stop = {{ rounds = 3 }}
{privacy}
"""
PRIVACY = "privacy = { noise = 3.4641, delta = 1e-6, population = 1000, clip = 0.5 }"


def write_plan(folder: Path, bundle: Path, privacy: str = PRIVACY) -> Path:
    path, recipe = folder / "plan.toml", "dp-fedavg" if privacy else "fedavg"
    path.write_text(PLAN.format(bundle=bundle, recipe=recipe, privacy=privacy))
    return path


def test_a_sound_plan_is_told_in_a_table(tmp_path: Path, private_line: Path) -> None:
    plan = write_plan(tmp_path, private_line)
    done = CliRunner().invoke(app, ["audit", str(plan)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    said = " ".join(re.sub("[│┃]", " ", done.stdout).split())
    assert "audit of steps: gaussian, noise multiplier 3.464, delta 1e-06, 3 releases" in said
    assert re.search(r"canaries 3 of 300 canaries \d+ guessed, \d+ right epsilon 0", said)
    assert "2.26 below" in said
    assert said.endswith("it is no proof of one.")


def test_a_plan_whose_devices_add_the_noise_is_audited_as_others_are(
    tmp_path: Path, private_line: Path
) -> None:
    """With no more reports than are ever added up."""
    secure = {"mode": "helper", "helper": "https://helper.example:8770", "key": "a" * 64}
    table = ", ".join(f'{key} = "{value}"' for key, value in secure.items())
    privacy = PRIVACY.replace("clip =", 'mechanism = "distributed", clip =')
    privacy += f'\nsecure = {{ {table}, certificate = "{"b" * 64}" }}'
    plan = write_plan(tmp_path, private_line, privacy)
    plan.write_text(plan.read_text().replace("minimum = 1", "minimum = 150"))
    done = CliRunner().invoke(app, ["audit", str(plan), "--reports", "0.5"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    said = " ".join(re.sub("[│┃]", " ", done.stdout).split())
    assert "audit of steps: distributed, noise multiplier 3.464, delta 1e-06, 3 releases" in said
    assert "2.26 below" in said


def test_too_few_canaries_are_told(tmp_path: Path, private_line: Path) -> None:
    plan = write_plan(tmp_path, private_line)
    plan.write_text(plan.read_text().replace("goal = 300", "goal = 4"))
    done = CliRunner().invoke(app, ["audit", str(plan)], env={"COLUMNS": "160"})
    said = " ".join(done.stdout.split())
    assert "4 canaries prove epsilon 0 at most, even if no guess were wrong" in said


def test_a_mistake_ends_with_1_and_says_what_to_do(
    tmp_path: Path, private_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = lambda *given: canary_run.run_canaries(*given, ClippedAfterAveraging)  # noqa: E731
    monkeypatch.setattr(audit_command, "run_canaries", planted)
    plan = write_plan(tmp_path, private_line)
    done = CliRunner().invoke(app, ["audit", str(plan)], env={"COLUMNS": "160"})
    assert done.exit_code == 1
    assert "ABOVE" in done.stdout
    assert "Do not release these models" in " ".join(done.stdout.split())


def test_a_scenario_is_attacked_by_shadow_runs_too(tmp_path: Path, private_line: Path) -> None:
    path = write_scenario(
        tmp_path,
        private_line,
        6,
        plan__recipe="dp-fedavg",
        plan__privacy={"noise": 2.0, "delta": 1e-3, "population": 6, "clip": 1.0},
    )
    words = ["audit", str(path), "--json", "--shadow-runs", "8", "--targets", "3", "--seed", "5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["holds"] is True
    assert [row["attack"] for row in found["attacks"]] == [
        "canaries",
        "membership",
        "membership, rates",
    ]
    assert found["attacks"][1]["shadow_runs"] == 8
    assert found["attacks"][1]["bits"] == 12  # half of the runs, three targets each


@pytest.mark.parametrize(
    ("privacy", "words", "text"),
    [
        ("", [], "this plan has no [privacy]: there is nothing to audit"),
        (PRIVACY, ["--shadow-runs", "9"], "give a scenario, which names this plan"),
        (PRIVACY, ["--train"], "give a scenario, which names this plan"),
        (PRIVACY, ["--reports", "0.001"], "at least one must come"),
        (PRIVACY.replace("clip =", 'mechanism = "local", clip ='), [], "adds its own noise"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    tmp_path: Path, private_line: Path, privacy: str, words: list[str], text: str
) -> None:
    plan = write_plan(tmp_path, private_line, privacy)
    done = CliRunner().invoke(app, ["audit", str(plan), *words])
    assert done.exit_code == 1
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_plan_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("= 3")
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "plan.toml")])
    assert done.exit_code == 1
    assert "this is not TOML" in done.stderr


def test_a_computation_is_not_audited(tmp_path: Path) -> None:
    asked = Statistics(numbers=(NumberColumn("age", range=(0.0, 9.0)),), rounds=1)
    statistics_bundle(tmp_path, asked)
    text = "[stop]\nrounds = 1\n[privacy]\nnoise = 1.0\ndelta = 1e-6\npopulation = 9\nclip = 4\n"
    plan = tmp_path / "plan.toml"
    plan.write_text(STATISTICS + text)
    done = CliRunner().invoke(app, ["audit", str(plan)])
    assert done.exit_code == 1
    assert "canaries are updates of a model" in done.stderr
