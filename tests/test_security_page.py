"""docs/operate/security.md, secure-aggregation-cheats.md and docs/privacy.md: each line of what is
protected, assumed, and not protected names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "operate/security.md": ["what is protected", "what is not"],
    "operate/secure-aggregation-cheats.md": [
        "a cheating coordinator",
        "the same without a helper",
        "others",
        "what is not",
    ],
    "privacy.md": [
        "assumed",
        "what is protected",
        "what is not",
        "without a trusted coordinator",
        "noise under masks",
    ],
}
"""Page -> its tables of promises."""
HEADER = re.compile(r"\|[^\n]*\| shown by \|\n\|---\|---\|---\|\n((?:\|[^\n]*\|\n)+)")
NAMES = re.compile(r"`([\w/.:]*test_\w+\.py[\w:]*(?:\[\w+\])?)`")


def tables_of(page: str) -> list[list[list[str]]]:
    """Return the cells of each row of each table."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return [
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        for table in HEADER.findall(text)
    ]


ROWS = [(page, row) for page in PAGES for table in tables_of(page) for row in table]
TESTS = sorted({name for _, row in ROWS for name in NAMES.findall(row[-1])})


@pytest.mark.parametrize("page", PAGES)
def test_each_line_names_a_test_or_says_why_there_is_none(page: str) -> None:
    assert len(tables_of(page)) == len(PAGES[page]), PAGES[page]
    for row in (row for found, row in ROWS if found == page):
        assert len(row) == 3, row
        assert NAMES.search(row[-1]) or row[-1].startswith("none: "), f"{row[0]}: no test is named"


@pytest.mark.parametrize("name", TESTS)
def test_the_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    function, _, case = function.removesuffix("]").partition("[")
    found = [ROOT / file] if "/" in file else [*(ROOT / "tests").rglob(file)]
    assert len(found) == 1, f"{file} is not the name of one file"
    text = found[0].read_text("utf-8")
    assert not function or re.search(rf"^ *(async )?def {function}\(", text, re.MULTILINE), (
        f"{function} is not there"
    )
    assert not case or re.search(rf"\W{case}\W", text), f"{function} has no case {case}"
