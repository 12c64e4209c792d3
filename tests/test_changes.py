"""changes/: each file is one that a release takes into the changelog."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]
KINDS = "|".join(kind["directory"] for kind in SETTINGS["type"])


def mistake(name: str, text: str) -> str | None:
    """Return what is wrong with a change of this name and text, or None."""
    if not re.fullmatch(rf"\+[a-z0-9-]+\.({KINDS})\.md", name):
        return f"{name}: not +WORDS.KIND.md, with KIND one of {KINDS}"
    if not text.strip():
        return f"{name}: empty"
    if "\n\n" in text.strip() or text.lstrip().startswith(("-", "#")):
        return f"{name}: not one paragraph; the list's dash comes with the release"
    return None


def test_each_change_can_be_taken_into_the_changelog() -> None:
    files = [
        file
        for file in (ROOT / SETTINGS["directory"]).iterdir()
        if file.name not in SETTINGS["ignore"]
    ]
    assert not [found for file in files if (found := mistake(file.name, file.read_text("utf-8")))]


def test_mistakes_are_seen() -> None:
    assert (
        mistake("+second-chance.fixed.md", "A device has a second chance.\nIt had none.\n") is None
    )
    for name in (
        "second-chance.fixed.md",
        "+second-chance.md",
        "+second chance.fixed.md",
        "+second-chance.mended.md",
    ):
        assert "KIND one of added|changed|fixed|removed" in str(mistake(name, "Text.")), name
    for text in (" \n", "- A point.", "# Title", "One.\n\nTwo."):
        assert mistake("+a.fixed.md", text), text


def test_the_changelog_has_the_place_where_a_release_goes() -> None:
    assert SETTINGS["start_string"] in (ROOT / SETTINGS["filename"]).read_text("utf-8")
