"""``fleetlearn-coordinator administrator``, as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.storage.administrators import Administrators
from typer.testing import CliRunner, Result


@pytest.fixture
def service(tmp_path: Path) -> Path:
    file = tmp_path / "service.toml"
    file.write_text('identities = "identities"\n')
    return file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["administrator", *map(str, arguments)], env={"COLUMNS": "200"})


def test_administrators_are_added_listed_and_removed(service: Path) -> None:
    ada = run("add", service, "ada", "--role", "operate")
    assert ada.exit_code == 0
    assert run("add", service, "bob", "--role", "view", "--hours", "2").exit_code == 0
    found = Administrators(service.parent / "identities").find_administrator(
        ada.stdout.strip(), 0.0
    )
    assert found is not None
    assert found.name == "ada"
    assert re.search(r"ada +operate", run("list", service).stdout)
    rows = json.loads(run("list", service, "--json").stdout)
    assert [(row["name"], row["role"], row["until"] is None) for row in rows] == [
        ("ada", "operate", True), ("bob", "view", False)
    ]  # fmt: skip
    assert run("remove", service, "ada").exit_code == 0
    again = run("remove", service, "ada")
    assert again.exit_code == 1
    assert "no administrator is called ada; there is bob" in re.sub(r"\s+", " ", again.stderr)


def test_mistakes_are_named(service: Path, tmp_path: Path) -> None:
    assert "one of view, operate is expected" in re.sub(
        r"[\s│]+", " ", run("add", service, "ada", "--role", "root").stderr
    )
    assert run("add", service, "a b", "--role", "view").exit_code == 2
    assert run("add", service, "ada").exit_code == 2, "there is no default role"
    for hours in ("inf", "1e9", "nan", "0"):
        assert run("add", service, "ada", "--role", "view", "--hours", hours).exit_code == 2, (
            "no list could show it"
        )
    (tmp_path / "plain.toml").write_text("")
    assert "names no identities" in re.sub(r"\s+", " ", run("list", tmp_path / "plain.toml").stderr)
