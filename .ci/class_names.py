"""Fail where a public class name of the packages exists twice: a name then says which thing is
meant.

python .ci/class_names.py [FOLDER ...]     without folders: the five packages
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    ROOT / room for room in ("protocol", "device_sdk", "coordinator", "export", "simulator")
]
ALLOWED: Mapping[str, str] = {}
"""Name that may exist twice -> why. The list may only become shorter: one that is not needed fails
too."""


def public_classes(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return each public class name with the places, ``path:line``, where a class of this name is
    defined."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.glob("**/fleetlearn_*/**/*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path}:{node.lineno}")
    return dict(places)


def faults(places: Mapping[str, list[str]], allowed: Mapping[str, str]) -> list[str]:
    """Return what is wrong, a text for each name. Empty: nothing is."""
    twice = {name: where for name, where in sorted(places.items()) if len(where) > 1}
    return [
        f"{len(where)} classes are called {name}: {', '.join(where)}. Rename all but one"
        for name, where in twice.items()
        if name not in allowed
    ] + [
        f"{name} may exist twice, and does not: take it from ALLOWED in .ci/class_names.py"
        for name in allowed
        if name not in twice
    ]


def main(folders: list[str]) -> int:
    found = faults(
        public_classes(map(Path, folders) if folders else PACKAGES), {} if folders else ALLOWED
    )
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
