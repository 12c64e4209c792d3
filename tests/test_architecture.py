"""docs/internals/architecture.md names files and what is in them: all of it is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / room / package
    for room, package in (
        ("coordinator", "fleetlearn_coordinator"),
        ("device_sdk", "fleetlearn_device"),
        ("protocol", "fleetlearn_protocol"),
        ("simulator", "fleetlearn_simulator"),
        ("export", "fleetlearn_export"),
    )
]
TEXT = (ROOT / "docs" / "internals" / "architecture.md").read_text("utf-8")
NAMED = sorted({*re.findall(r"`([\w/]+\.py(?:::\w+)?)`", TEXT)})


def names_in(file: Path) -> set[str]:
    """Every class, function and table that the file defines."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


@pytest.mark.parametrize("named", NAMED)
def test_what_the_page_names_is_there(named: str) -> None:
    path, _, name = named.partition("::")
    files = [folder / path for folder in (*PACKAGES, ROOT) if (folder / path).exists()]
    assert files, f"no room has {path}"
    assert not name or any(name in names_in(file) for file in files), f"{path} has no {name}"


def test_the_page_names_every_part_of_the_coordinator() -> None:
    parts = {path.parent.name for path in PACKAGES[0].glob("*/__init__.py")}
    assert parts == set(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE))
