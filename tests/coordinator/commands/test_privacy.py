"""fleetlearn-coordinator privacy: what people read before anything runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest
from commands_typed import check, typed
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.commands.privacy import show_statement
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_statement import privacy_statement
from peers import write_test_bundle
from plans import PRIVATE, SMALL
from typer.testing import CliRunner

PAGE = Path(__file__).parents[3] / "docs/algorithms/privacy-plan.md"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(f"{SMALL}[stop]\nrounds = 4\n{PRIVATE}")
    return file


def words(text: str) -> list[str]:
    """Return what is said, without how lines are broken and tables ruled."""
    return re.sub("─+", " ", text).split()


def test_the_table_says_epsilon_noise_and_what_is_assumed(plan: Path) -> None:
    shown = typed("privacy", plan)
    assert re.search(r"^ 1 +4\.887 +69\.1%$", shown, re.MULTILINE)
    assert re.search(r"^ on the mean that is released +0\.125$", shown, re.MULTILINE)
    for title in ("Assumed", "Not protected", "What else could be had", "Devices that"):
        assert f"\n{title}" in shown
    assert "length of the noise" not in shown, "there is no bundle yet"


def test_with_the_bundle_the_noise_has_a_length(plan: Path) -> None:
    write_test_bundle(plan.parent / "a.bundle", 100)
    assert re.search(
        r"length of the noise on the mean \(\d+ elements\) +\d", typed("privacy", plan)
    )


def test_the_noise_in_what_devices_measure_is_stated(plan: Path) -> None:
    """A multiplier of 4, one value and the goal: 4 x 1/2 / goal of the distance of its bounds."""
    more = "metrics = 'noised'\nmetrics_noise = 4.0\nmetrics_bounds = { accuracy = [0, 1] }"
    plan.write_text(f"{plan.read_text()}{more}")
    shown = " ".join(typed("privacy", plan).split())
    part = 4.0 / 2 / Plan.load(plan).round.goal
    assert f"standard deviation is {part:.3g} times the distance of a value's bounds" in shown
    assert "noise multiplier of the mean alone" in shown


def test_noise_of_the_devices_has_one_multiplier(plan: Path) -> None:
    plan.write_text(f"{plan.read_text()}mechanism = 'local'")
    shown = typed("privacy", plan)
    assert "noise multiplier (privacy.noise)" in shown
    assert "noise multiplier of the mean alone" not in shown


def test_json_is_what_the_schema_says(plan: Path) -> None:
    (found,) = check("privacy", typed("privacy", plan, "--json"))
    assert [row["releases"] for row in found["spending"]] == [1, 4]
    assert found["noise"]["on_mean"] == 0.125


def test_a_budget_that_is_too_small_is_shown_and_remarked(plan: Path) -> None:
    """The table is what somebody needs who must change it. With the bundle too."""
    write_test_bundle(plan.parent / "a.bundle", 100)
    plan.write_text(f"{plan.read_text()}epsilon = 1.0")
    shown = typed("privacy", plan)
    assert "past the budget" in shown
    assert re.search(r"^ this plan .* past the budget$", shown, re.MULTILINE)
    assert "the coordinator refuses to start this run" in shown


def test_noise_that_cannot_be_is_one_line_that_names_the_plan(plan: Path) -> None:
    plan.write_text(f"{plan.read_text()}clip_quantile = 0.5")
    done = CliRunner().invoke(app, ["privacy", str(plan)])
    assert done.exit_code == 1
    assert f"{plan}: privacy.noise = 1 leaves nothing for the mean" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    done = CliRunner().invoke(app, ["privacy", str(plan)])
    assert done.exit_code == 1
    assert "pip install 'fleetlearn[coordinator,privacy]'" in done.stderr


def test_a_plan_without_privacy_is_told_so(plan: Path) -> None:
    plan.write_text(SMALL)
    done = CliRunner().invoke(app, ["privacy", str(plan)])
    assert done.exit_code == 1
    assert "has no [privacy]: nothing limits what the run's models tell" in done.output


def test_every_line_fits_a_terminal_of_80_columns(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich: a terminal
    named = msgspec.structs.replace(Plan.load(plan), file="plan.toml")
    found = privacy_statement(named, 1_000_000)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show_statement(found)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > 40


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    (written,) = [each for each in blocks if "[privacy]" in each and "name =" in each]
    (shown,) = [each for each in blocks if "$ fleetlearn-coordinator privacy" in each]
    file = tmp_path / "wards.toml"
    file.write_text(written.replace("    ", "", 1).replace("\n    ", "\n"))
    printed = typed("privacy", file).replace(str(file), "wards.toml")
    assert words(shown)[4:] == words(printed)
