"""docs/operate/security.md: each line of what is protected, and of what is not, names tests, and
they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operate" / "security.md").read_text("utf-8")
HEADER = re.compile(r"\|[^\n]*\| shown by \|\n\|---\|---\|---\|\n((?:\|[^\n]*\|\n)+)")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for table in HEADER.findall(PAGE)
    for line in table.splitlines()
]
TESTS = sorted(
    {name for row in ROWS for name in re.findall(r"`([\w/.:]*test_\w+\.py[\w:]*)`", row[-1])}
)


def test_each_line_names_a_test_or_says_why_there_is_none() -> None:
    assert len(HEADER.findall(PAGE)) == 2, "what is protected, and what is not"
    for row in ROWS:
        assert len(row) == 3, row
        assert re.search(r"`[\w/.:]*test_\w+\.py[\w:]*`|^none: ", row[-1]), (
            f"{row[0]}: no test is named"
        )


@pytest.mark.parametrize("name", TESTS)
def test_the_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    found = [ROOT / file] if "/" in file else [*(ROOT / "tests").rglob(file)]
    assert len(found) == 1, f"{file} is not the name of one file"
    text = found[0].read_text("utf-8")
    assert not function or re.search(rf"^ *(async )?def {function}\(", text, re.MULTILINE), (
        f"{function} is not there"
    )
