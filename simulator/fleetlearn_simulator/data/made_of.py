"""What a run is made of beside its scenario: files that its results depend on, each with the SHA-256 of its content.

A sweep, or a run that is resumed, would otherwise mix the results of a file before and after somebody changed it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from fleetlearn_protocol import Bundle

from fleetlearn_simulator.scenario.scenario import Scenario

ABSENT = "absent"


def made_of(scenario: Scenario, bundle: Bundle) -> dict[str, str]:
    """Return what the file is for, with its name -> the SHA-256 of its content: the bundle, the data's arrays, the
    trace of availability, the module of the data's function and the modules beside it that it imports."""
    found = {"the bundle": bundle.sha256}
    files = {"data.arrays": scenario.data.arrays, "availability.file": scenario.availability.file}
    for key, file in files.items():
        if file is not None:
            found[f"{key} {file.name}"] = _digest(file)
    if scenario.data.function is not None:
        name = scenario.data.function.partition(":")[0]
        for file in _modules(name, scenario.data.path or scenario.base):
            found[f"data.function's {file.name}"] = _digest(file)
    return found


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose contents differ, or that are there only once."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _modules(name: str, base: Path) -> Iterator[Path]:
    """Yield the file of a module, and of the modules in ``base`` that it imports, directly or through others.

    Their code is read and not run: a user's module may load all of its data when it is imported."""
    waiting, seen = [name], set[Path]()
    while waiting:
        file = _file(waiting.pop(), base)
        if file is None or file in seen:
            continue
        seen.add(file)
        yield file
        with suppress(SyntaxError, ValueError):  # the import says so, with the line
            waiting += _imported(ast.parse(file.read_bytes()))
    if not seen and (spec := find_spec(name)) is not None and spec.origin is not None:
        yield Path(spec.origin)  # an installed module


def _file(module: str, base: Path) -> Path | None:
    path = base.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(code: ast.Module) -> Iterator[str]:
    """Yield the names of what a module may import. Names of functions among them are no files, and do no harm."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (row.name for row in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{row.name}" for row in node.names)


def _digest(file: Path) -> str:
    try:
        state = file.stat()
    except OSError:
        return ABSENT
    return _digest_of_content(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _digest_of_content(file: Path, modified: int, size: int) -> str:
    """Read the file once for all runs of a sweep."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
