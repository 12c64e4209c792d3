"""For tests: the data directories of ``tests/coordinator/storage/earlier/``, one of each version
that the run's database has had. They were made by the code of that version:

    python tests/support/earlier_schemas.py          # makes those that are not there; needs history

A new SCHEMA_VERSION: add the last commit of the one before.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from processes import ROOT

FOLDER = ROOT / "tests" / "coordinator" / "storage" / "earlier"
LAST_COMMITS = {
    1: "ab1bfe96",
    2: "261c0cb9",
    3: "21b5c9b6",
    4: "4e338fbc",
    5: "6556ce1a",
    6: "9de17c97",
    7: "7d6509a9",
    8: "f795f4fd",
    9: "6da40dc3",
    10: "f7bbed1f",
}
"""Version of the tables -> the last commit that made them."""
ROOMS = ("protocol", "coordinator", "tests/support")


def archive(schema: int) -> Path:
    """Return the path of a version's data directory and bundle, packed."""
    return FOLDER / f"schema-{schema}.tar.xz"


def make(schema: int, commit: str) -> None:
    """Make a data directory by a commit's code, in a process of its own that dies."""
    with tempfile.TemporaryDirectory() as name:
        code, run = Path(name) / "code", Path(name) / "run"
        code.mkdir()
        run.mkdir()
        packed = subprocess.run(
            ["git", "archive", commit, *ROOMS], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "x"], cwd=code, input=packed, check=True)
        path = ":".join(str(code / room) for room in ROOMS)
        script = code / "earlier_run.py"
        script.write_bytes((ROOT / "tests" / "support" / "earlier_run.py").read_bytes())
        words = [sys.executable, str(script), str(run)]
        done = subprocess.run(words, env={"PYTHONPATH": path}, check=False)
        assert done.returncode == 9, done
        with tarfile.open(archive(schema), "w:xz") as packing:
            for file in ("run", "test.bundle"):
                packing.add(run / file, file)


if __name__ == "__main__":
    for schema, commit in LAST_COMMITS.items():
        if not archive(schema).exists():
            make(schema, commit)
