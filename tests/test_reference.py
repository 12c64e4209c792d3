"""docs/api: the reference has every public name of the five packages."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "docs" / "api"
MODULE = re.compile(r"^\.\. currentmodule:: (\w+)$", re.MULTILINE)
ENTRY = re.compile(r"^\.\. auto(?:class|exception|function):: (\w+)$", re.MULTILINE)


@pytest.mark.parametrize("room", ["coordinator", "device", "export", "protocol", "simulator"])
def test_every_public_name_has_one_entry(room: str) -> None:
    package = f"fleetlearn_{room}"
    pages = [page.read_text("utf-8") for page in PAGES.glob("*.md")]
    entries = [
        name for page in pages if package in MODULE.findall(page) for name in ENTRY.findall(page)
    ]
    assert sorted(entries) == sorted(import_module(package).__all__)
