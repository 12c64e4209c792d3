"""docs/start/glossary.md: sorted, every word once, and each name of code is one that can be
imported."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "start" / "glossary.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if "|" in line
]
WORDS = {word: (meaning, code.strip("`")) for word, meaning, code in ROWS[2:]}


def test_words_are_sorted_and_there_once() -> None:
    words = [row[0] for row in ROWS[2:]]
    assert words == sorted(set(words))
    assert all(meaning.endswith(".") for meaning, _ in WORDS.values())


@pytest.mark.parametrize("name", sorted({code for _, code in WORDS.values() if code}))
def test_the_code_is_where_the_page_says(name: str) -> None:
    pkgutil.resolve_name(f"fleetlearn_{name}")
