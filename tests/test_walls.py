"""Imports run one way: the protocol is imported by every room, and imports none. pyproject.toml has
the walls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = (
    "import sys; from importlinter.cli import lint_imports;"
    "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
)


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, config], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def test_the_walls_stand() -> None:
    done = lint(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_a_broken_wall_is_seen(tmp_path: Path) -> None:
    """The same check of a wall that does not stand: the protocol does import numpy."""
    config = tmp_path / "walls.toml"
    config.write_text(
        """
        [tool.importlinter]
        root_packages = ["fleetlearn_protocol"]
        include_external_packages = true
        [[tool.importlinter.contracts]]
        name = "no numpy"
        type = "forbidden"
        source_modules = ["fleetlearn_protocol"]
        forbidden_modules = ["numpy"]
        """
    )
    done = lint(config)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fleetlearn_protocol.vector -> numpy" in done.stdout


@pytest.mark.parametrize(
    ("room", "kept_out"),
    [
        ("fleetlearn_protocol", ["torch", "onnx", "onnxruntime", "websockets", "asyncio"]),
        (
            "fleetlearn_device",
            ["torch", "onnx", "onnxscript", "typer", "rich", "fleetlearn_coordinator"],
        ),
        (
            "fleetlearn_coordinator",
            ["torch", "onnx", "onnxruntime", "fleetlearn_device", "fleetlearn_export"],
        ),
        (
            "fleetlearn_coordinator.rounds.engine",
            ["asyncio", "websockets", "sqlite3", "fcntl", "resource"],
        ),
        (
            "fleetlearn_coordinator.conversation.conversation",
            ["asyncio", "websockets", "sqlite3", "fcntl", "resource"],
        ),
    ],
)
def test_importing_a_room_loads_nothing_behind_its_walls(room: str, kept_out: list[str]) -> None:
    program = f"import sys, {room}; print(sorted(set(sys.modules) & set({kept_out})))"
    # Where coverage is measured, it would import sqlite3 itself.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
