"""Flower's SuperNode for device.py: a SuperLink, the app and one SuperNode, in an environment of
their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
APP = """
[project]
name = "measured"
version = "1.0.0"
description = "FedAvg of device.py"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fleetlearn"
[tool.flwr.app.components]
serverapp = "_flower_app:server"
clientapp = "_flower_app:client"
[tool.flwr.app.config]
rounds = {rounds}
batch = {batch}
lr = {lr}
model = "{model}"
data = "{data}"
results = "{results}"
"""
CONFIG = """
[superlink]
default = "measured"
[superlink.measured]
address = "127.0.0.1:{port}"
insecure = true
"""


class Flower(NamedTuple):
    """What Flower trains, and in which environment."""

    python: Path
    folder: Path
    """For what it writes."""
    port: int
    """The SuperLink's."""

    @property
    def results(self) -> Path:
        """Where the app writes the mean loss of each round, when all are over."""
        return self.folder / "results.json"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        # it is not to tell its makers of this
        own = {"FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path}
        return {**os.environ, **own}

    def command(self, program: str, *arguments: str) -> list[str]:
        return [str(self.python.with_name(program)), *arguments]

    def supernode(self, port: int) -> list[str]:
        """The command of a SuperNode whose SuperLink is reached at this port."""
        own = ("--host", "127.0.0.1", "--port", str(free_port()))
        return self.command(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", *own
        )

    def superlink(self) -> list[str]:
        own = ("--host", "127.0.0.1", "--port", str(self.port))
        return self.command(
            "flower-superlink", "--insecure", *own, "--disable-runtime-dependency-installation"
        )

    def start_run(self) -> None:
        """Begin the rounds. Raises CalledProcessError."""
        command = self.command("flwr", "run", str(self.folder / "app"), "measured")
        subprocess.run(
            command, env=self.environment, check=True, timeout=120, stdout=subprocess.DEVNULL
        )

    def losses(self) -> list[float] | None:
        """The mean loss of each round; None while they go on."""
        try:
            return list(json.loads(self.results.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None


@contextmanager
def prepared(
    python: str, folder: Path, data: Path, model: str, rounds: int, batch: int, lr: float
) -> Iterator[Flower]:
    """Write the app and Flower's settings into a folder."""
    flower = Flower(Path(python).absolute(), folder / "flower", free_port())
    for name in ("app", "home"):
        (flower.folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "_flower_app.py", flower.folder / "app")
    shutil.copy(HERE.parent / "tests" / "support" / "zoo.py", flower.folder / "app")
    settings = {"rounds": rounds, "batch": batch, "lr": lr, "model": model}
    settings |= {"data": data.absolute(), "results": flower.results}
    (flower.folder / "app" / "pyproject.toml").write_text(APP.format(**settings))
    (flower.folder / "home" / "config.toml").write_text(CONFIG.format(port=flower.port))
    yield flower
    shutil.rmtree(flower.folder)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
