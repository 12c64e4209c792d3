"""fleetlearn-coordinator init: files that are served as they are, and nothing overwritten."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_protocol import open_bundle
from peers import write_test_bundle
from typer.testing import CliRunner


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_test_bundle(tmp_path / "digits.bundle", 10)
    return tmp_path


def command(*arguments: str, expected: int = 0) -> str:
    done = CliRunner().invoke(app, ["init", *arguments])
    assert done.exit_code == expected, done.output
    return done.output


def uncommented(path: Path) -> str:
    """Return the file with the keys that are commented out, without the lines that are prose."""
    keys = re.compile(r"# ((\[[a-z]+\]|[a-z_]+ = ).*)")
    return "\n".join(keys.sub(r"\1", line) for line in path.read_text().splitlines())


def test_the_files_can_be_served(folder: Path) -> None:
    said = command()
    plan, service = Plan.load("plan.toml"), ServiceSettings.load("service.toml")
    plan.check_against(open_bundle(plan.bundle).manifest)
    plan.check_service(service)
    assert (plan.name, plan.round.goal, plan.round.minimum) == ("digits", 8, 4)
    assert service.identities == folder / "identities"
    assert service.admin is not None
    assert "fleetlearn-coordinator serve plan.toml --service service.toml" in said


def test_each_comment_is_a_key_with_its_default(folder: Path) -> None:
    """Whoever takes the # away has a file that is read, with the same values where there is a
    default."""
    command()
    own, text = Plan.load("plan.toml"), uncommented(folder / "plan.toml")
    assert "seed = 0" in text.splitlines()
    raw = tomllib.loads(text)
    del (
        raw["stop"]["metric"],
        raw["stop"]["target"],
        raw["models"]["best"],
        raw["local"]["time_budget"],
    )
    whole = Plan.read(raw, folder, file=own.file)
    assert whole == own
    raw = tomllib.loads(uncommented(folder / "service.toml"))
    del raw["tls"], raw["runs"], raw["signing_keys"]
    assert ServiceSettings.read(raw, folder) == ServiceSettings.load("service.toml")


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "service.toml").write_text("mine")
    assert "service.toml exist already" in command(expected=1)
    assert not (folder / "plan.toml").exists()
    assert (folder / "service.toml").read_text() == "mine"


def test_which_bundle(folder: Path) -> None:
    write_test_bundle(folder / "other.bundle", 10)
    assert "2 bundles (digits.bundle, other.bundle)" in command(expected=1)
    assert json.loads(command("new", "--bundle", "other.bundle", "--json"))["written"] == [
        "new/plan.toml",
        "new/service.toml",
    ]
    plan = Plan.load("new/plan.toml")
    assert plan.name == "other"
    assert open_bundle(plan.bundle).manifest.size == 10
    assert "has 0 bundles (none)" in command("empty", expected=1)


def test_other_machines_need_tls(folder: Path) -> None:
    said = command("--host", "0.0.0.0", "--goal", "3")
    service = ServiceSettings.load("service.toml")
    assert service.tls is not None
    assert service.tls.key == folder / "tls" / "key.pem"
    assert "fleetlearn-coordinator certificate NAME... --folder tls" in said
    assert Plan.load("plan.toml").round.minimum == 2
