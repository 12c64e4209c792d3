"""The links of all pages lead to files that are there, and to their headings; so does what code
says of pages."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "benchmarks",
    "coordinator",
    "device_sdk",
    "docs",
    "examples",
    "export",
    "protocol",
    "simulator",
    "tests",
)
CODE = re.compile(r"^(```+)[^\n]*\n.*?^\1$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")
MENTION = re.compile(r"\b(?:docs|benchmarks)/[\w./-]*\w\.(?:md|py|svg|png|kt|swift)\b")


def files_in(folders: tuple[str, ...], *suffixes: str) -> list[Path]:
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes
    ]
    return [path for path in files if not {"node_modules", "build", "dist"} & set(path.parts)]


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *files_in(FOLDERS, ".md")])
SOURCES = [
    *files_in(FOLDERS, ".py", ".toml", ".ts", ".kt", ".swift", ".mjs"),
    ROOT / "Makefile",
    *PAGES,
]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names by which a page's headings are linked to, as GitHub and MyST make them."""
    text = CODE.sub(lambda code: "" if code[1] else code[0].strip("`"), page.read_text("utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    )


def dead_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a page's text that lead nowhere."""
    dead = []
    for link in LINK.findall(CODE.sub("", text)):
        if ELSEWHERE.match(link):
            continue
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert not dead_links(page, page.read_text("utf-8"))


def test_dead_links_are_seen() -> None:
    page = ROOT / "README.md"
    assert dead_links(
        page, "[a](docs/nowhere.md) [b](LICENSE)\n[c\nd](docs/also-nowhere.md#x)"
    ) == [
        "docs/nowhere.md",
        "docs/also-nowhere.md#x",
    ]
    assert dead_links(
        page, "[a](#no-such-heading), [b](CONTRIBUTING.md#fuzzing), [c](CONTRIBUTING.md#fuzz)"
    ) == [
        "#no-such-heading",
        "CONTRIBUTING.md#fuzz",
    ]
    assert not dead_links(
        page, "`[a](nowhere.md)`\n```python\nx[0](nowhere)\n```\n[b](https://example.org/x)"
    )


def test_files_that_texts_name_are_there() -> None:
    gone = {}
    for file in SOURCES:
        names = [
            name for name in MENTION.findall(file.read_text("utf-8")) if not (ROOT / name).exists()
        ]
        # This file names pages that are not there, and the changelog those of its time.
        if names and file not in (Path(__file__), ROOT / "CHANGELOG.md"):
            gone[str(file.relative_to(ROOT))] = names
    assert not gone
