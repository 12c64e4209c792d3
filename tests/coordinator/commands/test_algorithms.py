"""fleetlearn-coordinator algorithms: what packages bring, and what the service file allows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.plan.own_algorithms import POINTS
from package_wheel import NAMES, build_wheel, copy_package
from typer.testing import CliRunner

FOREIGN = "[fleetlearn.data-source]\nsea = marine.buoys:sea\n[other.group]\nno = other:no\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, where a wheel and another package are installed."""
    wheel = build_wheel(copy_package(tmp_path / "source"), tmp_path)
    info = tmp_path / "other" / "marine-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: marine\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(FOREIGN)
    for each in (wheel, info.parent):
        monkeypatch.syspath_prepend(each)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def shown(*words: str, expected: int = 0) -> str:
    done = CliRunner().invoke(app, ["algorithms", *words])
    assert done.exit_code == expected, done.output
    return done.output


def test_what_is_installed_and_what_may_be_named(folder: Path) -> None:
    text = shown()
    lines = text.splitlines()
    for name in NAMES:
        assert any(f" {name} " in line and " own-package 1.0 " in line for line in lines), name
    (line,) = [line for line in lines if "without-longest" in line]
    assert line.split() == [
        *("aggregator", "without-longest", "own_package.server:without_longest"),
        *("own-package", "1.0", "no:", "own_package", "is", "not", "listed"),
    ]
    (line,) = [line for line in lines if "marine 0.3" in line]
    assert "data source" in line
    assert "no: marine is not listed" in line
    assert "by devices: --allow-function shortened" in text
    assert '[plugins] modules = ["marine","own_package"] in the service file' in text
    assert "own_package" not in sys.modules, "nothing is imported"
    (folder / "service.toml").write_text('port = 0\n[plugins]\nmodules = ["own_package.server"]\n')
    text = shown()
    (line,) = [line for line in text.splitlines() if "without-longest" in line]
    assert line.endswith(" yes")
    (line,) = [line for line in text.splitlines() if "most-examples" in line]
    assert line.endswith("no: own_package is not listed")


def test_as_json(folder: Path) -> None:
    file = folder / "other.toml"
    file.write_text('port = 0\n[plugins]\nmodules = ["own_package"]\n')
    found = json.loads(shown(str(file), "--json"))
    assert {each["name"]: each["allowed"] for each in found} == {
        **dict.fromkeys(NAMES, True),
        "sea": False,
    }


def test_where_nothing_is_installed_the_kinds_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown()
    for kind in POINTS:
        assert any(line.split() == [*kind.split(), "none"] for line in text.splitlines()), kind
    assert "to allow them" not in text
    assert "no_such" in shown("no_such.toml", expected=1)
