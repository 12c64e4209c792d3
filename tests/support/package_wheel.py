"""For tests: the package examples/own_package as its wheel, in an environment of its own."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

from processes import ROOT

SOURCE = ROOT / "examples" / "own_package"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
NAMES = (
    *("most-examples", "enough-reports", "without-longest", "heavy-ball", "root", "halved"),
    *("shortened", "totals", "mean", "upper-bytes", "at-night", "half-way", "lines", "in-turn"),
)
"""The short names that it gives."""


def copy_package(folder: Path, version: str = "1.0", **changes: tuple[str, str]) -> Path:
    """Write the package's source into a folder that is not there yet. ``changes``: a module of it,
    and a text there with what takes its place."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "1.0"', f'version = "{version}"'))
    for module, (before, after) in changes.items():
        file = folder / "own_package" / f"{module}.py"
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the source's wheel into a folder, as ``pip wheel`` does, without its processes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", command, folder],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return folder / done.stdout.split()[-1]


class Environment:
    """A virtual environment that has all packages of this one, and what a test installs."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        (packages,) = (folder / "lib").glob("python*/site-packages")
        # Not a plain path: the .pth files of ours, which lead to this source, count as well.
        lines = [f"import site; site.addsitedir({each!r})" for each in site.getsitepackages()]
        (packages / "ours.pth").write_text("\n".join(lines) + "\n")
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def install(self, *what: str | Path) -> None:
        """Install wheels, or what else pip takes; no index is asked."""
        self._pip("install", "--no-index", "--no-deps", "--no-build-isolation", *what)

    def uninstall(self) -> None:
        self._pip("uninstall", "--yes", "own-package")

    def _pip(self, *words: str | Path) -> None:
        command = [*PIP, "--python", self.python, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=self.env)
        assert done.returncode == 0, done.stderr

    def run(self, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a module of the environment to its end."""
        return subprocess.run(
            [self.python, "-m", *words],
            cwd=cwd,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
