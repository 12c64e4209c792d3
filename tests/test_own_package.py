"""The package of examples/own_package: its wheel's short names, its tests, and that it has one
algorithm of each kind."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_device import own_code
from fleetlearn_device.own_code import FunctionError, read_functions
from fleetlearn_protocol import extensions
from fleetlearn_protocol.origins import origin
from fleetlearn_simulator.scenario.own_algorithms import POINTS
from package_wheel import NAMES, SOURCE, build_wheel, copy_package
from processes import ROOT

GIVEN = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["entry-points"]
KINDS = {point.group: point for point in POINTS.values()}


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    """The package's wheel, whose modules are not imported yet."""
    made = build_wheel(copy_package(tmp_path / "source"), tmp_path)
    with extensions.apart():
        yield made
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "own_package"]:
        del sys.modules[name]
    sys.path_importer_cache.clear()


def test_it_has_one_of_each_kind() -> None:
    assert {*GIVEN} == {*KINDS}
    assert sorted(name for names in GIVEN.values() for name in names) == sorted(NAMES)


@pytest.mark.parametrize("group", GIVEN)
def test_a_wheel_s_short_names_are_those_of_its_functions(wheel: Path, group: str) -> None:
    point = KINDS[group]
    ((short, target),) = GIVEN[group].items()
    sys.path.insert(0, str(wheel))  # ``apart`` takes it off again
    assert extensions.is_extension(point, short)
    with pytest.raises(extensions.ExtensionError, match=r"own_package.* is not allowed here"):
        extensions.find(point, short, "key")
    extensions.allow(["own_package"])
    assert extensions.find(point, short, "key") is extensions.find(point, target, "key")
    found = origin(point, short, "key")
    assert found.version == "1.0"
    assert re.fullmatch("[0-9a-f]{16}", found.source)


def test_devices_allow_short_names(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FunctionError, match="a short name that an installed package gives"):
        read_functions(["shortened"])
    sys.path.insert(0, str(wheel))
    found = read_functions(["shortened", "totals", "brief=own_package.devices:shortened"])
    assert [*found] == ["shortened", "totals", "brief"]
    assert found["shortened"] is found["brief"]
    monkeypatch.setattr(own_code, "installed", lambda point: {"totals": f"{point.group}:totals"})
    with pytest.raises(FunctionError, match=r"give this name to .* and .*; choose one: totals="):
        read_functions(["totals"])


def test_its_own_tests_pass(wheel: Path) -> None:
    sys.path.insert(0, str(wheel))
    names: dict[str, object] = {}
    exec((SOURCE / "tests" / "test_own_package.py").read_text(), names)
    check = names["test_they_are_what_fleetlearn_expects"]
    assert callable(check)
    check()


def test_the_page_has_its_pyproject() -> None:
    page = (ROOT / "docs" / "start" / "your-own-algorithm.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n# pyproject\.toml\n(.*?)```", page, re.DOTALL)
    shown = tomllib.loads(block)
    whole = tomllib.loads((SOURCE / "pyproject.toml").read_text())
    assert shown["build-system"] == whole["build-system"]
    assert shown["project"]["name"] == whole["project"]["name"]
    points = shown["project"]["entry-points"]
    assert points.items() <= GIVEN.items(), json.dumps(points)
    groups = {*re.findall(r"`(fleetlearn\.[a-z-]+)`", page)}
    assert groups >= {*KINDS}, "the page lists all groups"
