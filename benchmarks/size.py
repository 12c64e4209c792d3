"""The size of the code: lines, files, functions and their lengths, by room and by sub-package.

A line is one that has code or is part of a docstring; blank lines and lines with a comment alone
are not counted, and code lines are those outside docstrings. A function's length is its code
lines. Give another tree's folder to compare two versions.
"""

from __future__ import annotations

import ast
import io
import tokenize
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import _measure as measure

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "device_sdk", "coordinator", "export", "simulator", "tests", "benchmarks")
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class FileSize(NamedTuple):
    """What is counted of a file."""

    lines: int
    """All lines with code or of a docstring."""
    code: int
    functions: list[int]
    """The code lines of each function."""


def size_of(text: str) -> FileSize:
    """Count a file's text. Raises SyntaxError."""
    tree = ast.parse(text)
    documented: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            # Strings under names are documentation, too.
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                documented |= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    code = lines - documented
    ordered = sorted(code)
    functions = [
        bisect_right(ordered, node.end_lineno or 0) - bisect_left(ordered, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, DEFINITIONS)
    ]
    return FileSize(len(lines), len(code), functions)


def files_of(room: Path) -> Iterator[tuple[str, Path]]:
    """Yield each Python file of a room with its part: the package's sub-package, if it is in
    one."""
    for file in sorted(room.rglob("*.py")):
        below = file.relative_to(room).parts
        if any(part.startswith(".") or part in ("node_modules", "build") for part in below):
            continue
        inner = below[1:] if below[0].startswith("fleetlearn_") else below
        yield (inner[0] + "/" if len(inner) > 1 else ""), file


def quantile(values: list[int], share: float) -> int:
    """Return the smallest value that at least this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def row_of(sizes: list[FileSize]) -> dict[str, int]:
    """Return what is shown of a part."""
    functions = [length for size in sizes for length in size.functions]
    return {
        "files": len(sizes),
        "lines": sum(size.lines for size in sizes),
        "code": sum(size.code for size in sizes),
        "functions": len(functions),
        "p50": quantile(functions, 0.5),
        "p90": quantile(functions, 0.9),
        "longest file": max((size.lines for size in sizes), default=0),
    }


def measured(root: Path) -> dict[str, dict[str, int]]:
    """Return room, and room and sub-package -> what is shown of it."""
    sizes: dict[str, list[FileSize]] = defaultdict(list)
    for room in ROOMS:
        for part, file in files_of(root / room):
            size = size_of(file.read_text("utf-8"))
            sizes[room].append(size)
            if part and room not in ("tests", "benchmarks"):
                sizes[f"{room}: {part}"].append(size)
    return {name: row_of(each) for name, each in sorted(sizes.items())}


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("root", nargs="?", type=Path, default=ROOT, help="the tree to count")
    chosen = options.parse_args()
    results = measured(chosen.root)
    heads = [*row_of([])]
    rows = [["part", *heads]]
    rows += [[name, *(str(each[head]) for head in heads)] for name, each in results.items()]
    print(measure.table(rows))
    measure.write_json(chosen.json, {}, results)


if __name__ == "__main__":
    main()
