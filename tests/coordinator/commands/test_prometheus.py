"""`fleetlearn-coordinator prometheus-rules`: the rules, with a service file's limits."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.monitoring.alert_rules import prometheus_rules
from typer.testing import CliRunner


def command(*arguments: str | Path, expected: int = 0) -> str:
    done = CliRunner().invoke(app, ["prometheus-rules", *map(str, arguments)])
    assert done.exit_code == expected, done.output
    return done.output


def test_rules_have_a_service_files_limits(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[alerts]\ncommand = ["x"]\nno_round = 5.0\n')
    assert command(file) == prometheus_rules(AlertSettings(no_round=5.0))
    assert 'expr: "fleetlearn_round_age_seconds > 300"' in command(file)
    file.write_text("")
    assert command(file) == command() == prometheus_rules(AlertSettings())


def test_a_service_file_with_a_mistake_is_refused(tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text("[alerts]\nno_round = 5.0\n")
    assert "[alerts] tells nobody" in " ".join(
        command(tmp_path / "service.toml", expected=1).split()
    )
