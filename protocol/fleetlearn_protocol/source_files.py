"""Which source files a module's code is in: its own, and those of the modules that it imports."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import all_suffixes
from pathlib import Path

MOST = 500
"""Files; those beyond are left out, so that a large package does not delay a start for long."""


def source_files(
    modules: Iterable[str], known: Mapping[str, Path], folders: Sequence[Path] = ()
) -> dict[str, Path]:
    """Return the files of the modules, and of those that they import, directly or through others:
    a module's name -> its file, or the archive that it is in.

    ``known``: the files of modules that are imported already. Modules of the same top-level
    packages are looked for where these are, and all modules in the ``folders``; others are left
    out. The files are read and not run: a module may do much when it is imported.
    """
    found = dict[str, Path]()
    roots = {name.partition(".")[0]: _root(name, file) for name, file in known.items()}
    seen, files = set[str](), set[Path]()
    waiting = deque(modules)
    while waiting and len(found) < MOST:
        for name in _with_packages(waiting.popleft()):
            if name in seen:
                continue
            seen.add(name)
            file = known.get(name)
            if file is None or not file.is_file():
                root = roots.get(name.partition(".")[0])
                file = _file(name, folders if root is None else [root, *folders])
            if file is None or file in files:  # an archive is one file for all its modules
                continue
            found[name] = file
            files.add(file)
            if file.suffix == ".py":
                with suppress(SyntaxError, ValueError):  # the import says so, with the line
                    waiting += _imported(ast.parse(file.read_bytes()), _package(name, file))
    return found


def _root(module: str, file: Path) -> Path:
    """Return the folder, or the archive, that the module's top-level package is in."""
    inside = module.count(".") + (file.stem == "__init__")
    folder = file.parents[inside] if inside < len(file.parents) else file.parent
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _with_packages(name: str) -> Iterator[str]:
    """Yield the packages that a module is in, whose code runs before its own, and the module."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _package(name: str, file: Path) -> str:
    """Return what the relative imports of a module are relative to."""
    return name if file.stem == "__init__" else name.rpartition(".")[0]


def _file(module: str, folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        if folder.is_file():
            return folder
        path = folder.joinpath(*module.split("."))
        for begin in (path / "__init__", path):  # as Python looks
            for suffix in all_suffixes():
                if (file := begin.with_name(begin.name + suffix)).is_file():
                    return file
    return None


def _imported(code: ast.Module, package: str) -> Iterator[str]:
    """Yield the names of modules that a module may import. Some names are of functions: no file has
    these names, and they are left out later."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
