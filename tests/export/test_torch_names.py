"""docs/internals/export.md lists the names of PyTorch that the export uses without a promise that
they stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "export"
PAGE = ROOT / "docs" / "internals" / "export.md"


def names(tree: ast.AST) -> Iterator[str]:
    """All dotted names that begin with torch, from imports and from expressions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(
        re.fullmatch(r"experimental|_[a-zA-Z]\w*", part) for part in parts
    )


def test_private_names_are_listed() -> None:
    section = PAGE.read_text("utf-8").partition("## Versions of PyTorch")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(torch\.[\w.]+)`", section))
    used = {
        name
        for file in ROOM.rglob("*.py")
        for name in names(ast.parse(file.read_text()))
        if is_private(name)
    }
    parents = {name.rpartition(".")[0] for name in used}
    assert "torch._ops.OpOverload" in used, "the search finds nothing"
    assert not used - parents - listed
