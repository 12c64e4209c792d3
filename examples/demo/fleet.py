"""The coordinator and the devices of the demo: what they are started with, and what their logs say
they do."""

from __future__ import annotations

import random
import re
import socket
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fleetlearn_coordinator.storage.administrators import Administrators

from examples import digits
from examples.demo.processes import Child, DemoError, end_all, run_command

GRACE = 2.5
"""Seconds that a device's task outlives it, in the demo's plan."""

DAY = 86400.0
"""Seconds for which the devices' token is good."""

ON_ORT_TRAINING = 2
"""Devices that train with ONNX Runtime's own artifacts, where its training build is there."""

PLAN = """\
name = "digits-demo"
bundle = "digits.bundle"
recipe = "fedprox"
seed = {seed}
data_dir = "run"

[local]
epochs = 10
batch_size = 5
lr = 0.05
mu = 0.1

[round]
goal = {goal}
over_selection = 1.1
deadline = 30.0
grace = {grace}
gather = 0.5

[server]
optimizer = "adam"
lr = 0.03
beta1 = 0.5   # a shorter memory than the usual 0.9 suits 30 rounds

[stop]
rounds = {rounds}
"""
SERVICE = """\
port = {port}
heartbeat = 5.0
identities = "identities"

[admin]
port = {page_port}
"""


class Paths(NamedTuple):
    """What the demo writes, below its output directory."""

    output: Path

    @property
    def bundle(self) -> Path:
        return self.output / "digits.bundle"

    @property
    def plan(self) -> Path:
        return self.output / "plan.toml"

    @property
    def service(self) -> Path:
        return self.output / "service.toml"

    @property
    def run(self) -> Path:
        return self.output / "run"

    @property
    def identities(self) -> Path:
        return self.output / "identities"

    @property
    def devices(self) -> Path:
        return self.output / "devices"

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def summary(self) -> Path:
        return self.output / "summary.json"

    @property
    def plot(self) -> Path:
        return self.output / "progress.png"

    @property
    def model(self) -> Path:
        return self.output / "infer.onnx"


class Access(NamedTuple):
    """Who may do what with the demo's coordinator."""

    page_port: int
    """TCP port of the live page, on 127.0.0.1."""
    page_token: str
    """Of the administrator who looks at it."""
    device_token: str
    """Enrols the devices."""

    @property
    def link(self) -> str:
        """The live page's address. The token is behind "#": browsers send that to nobody."""
        return f"http://127.0.0.1:{self.page_port}/#token={self.page_token}"


class Phase(StrEnum):
    """What a device is doing, by its log."""

    STARTING = "starting"
    IDLE = "idle"
    FETCHING = "fetching"
    TRAINING = "training"
    UPLOADING = "uploading"
    """Its update is finished, and not acknowledged yet."""


_BEGINS = (
    (re.compile(r"task (\S+): round \d+,"), Phase.FETCHING),
    (re.compile(r"task (\S+): training$"), Phase.TRAINING),
    (re.compile(r"task (\S+): (?:trained|uploading) "), Phase.UPLOADING),
)
_ENDS = re.compile(r"task (\S+?):? (?:update accepted|is cancelled|is forgotten|is dropped|failed)")
_ACCEPTED = re.compile(r"task (\S+): update accepted")


class Device:
    """One device: its process, its share of the data, and what it is doing."""

    def __init__(self, number: int, examples: int, runtime: str, child: Child) -> None:
        self.number, self.examples, self.runtime, self.child = number, examples, runtime, child
        self.phase = Phase.STARTING
        self.task = ""
        self.accepted: set[str] = set()
        """Tasks whose update the coordinator acknowledged."""

    @property
    def name(self) -> str:
        return self.child.name

    def start(self) -> None:
        self.phase = Phase.STARTING
        self.child.start()

    def read_log(self) -> None:
        """Bring ``phase``, ``task`` and ``accepted`` up to date."""
        for line in self.child.new_lines():
            if "checked in with" in line and self.phase is Phase.STARTING:
                self.phase = Phase.IDLE
            for pattern, phase in _BEGINS:
                if match := pattern.search(line):
                    self.task, self.phase = match[1], phase
            if (match := _ENDS.search(line)) and match[1] == self.task:
                self.phase = Phase.IDLE
            if match := _ACCEPTED.search(line):
                self.accepted.add(match[1])


class Fleet:
    """The coordinator and all devices. Use it as a context: on leaving, nothing runs any more."""

    def __init__(self, paths: Paths, coordinator: Child, devices: list[Device]) -> None:
        self.paths, self.coordinator, self.devices = paths, coordinator, devices
        self.dead: set[str] = set()
        """Names of the children that the demo itself killed and has not started again."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        end_all([*(device.child for device in self.devices), self.coordinator])

    @property
    def alive(self) -> list[Device]:
        return [device for device in self.devices if device.name not in self.dead]

    def kill(self, child: Child) -> None:
        self.dead.add(child.name)
        child.kill()

    def revive(self, device: Device) -> None:
        self.dead.discard(device.name)
        device.start()

    def read_logs(self) -> None:
        for device in self.alive:
            device.read_log()

    def ended(self) -> Device | None:
        """A device that ended though nobody killed it."""
        return next(
            (device for device in self.alive if device.child.starts and not device.child.running),
            None,
        )


def goal_of(devices: int) -> int:
    """Reports that a round wants: three quarters of the fleet."""
    return 3 * devices // 4


def training_build() -> Path | None:
    """The commands of the environment with ONNX Runtime's training build, where `make` could set it
    up."""
    commands = Path(sys.prefix, "ort-training", "bin")
    return commands if (commands / "python").exists() else None


def export(paths: Paths, training: Path | None = None) -> None:
    """Write the bundle, checked against PyTorch. Its own process: this one needs no torch.
    ``training``: the training build's commands; the bundle then holds ONNX Runtime's own training
    artifacts too, checked as well."""
    commands = training or Path(sys.executable).parent
    command = [commands / "python", "-m", "examples.demo.export_digits", paths.bundle]
    run_command("the export", command, paths.logs / "export.log", timeout=170.0)


def give_access(paths: Paths, devices: int) -> Access:
    """Make the tokens of so many devices, and of somebody who looks at the live page."""
    identities, now = Administrators(paths.identities), time.time()
    page_token = identities.add("demo", "operate", None, now)
    return Access(free_port(), page_token, identities.make_token(devices, now + DAY, (), now))


def prepare(
    paths: Paths,
    access: Access,
    *,
    devices: int,
    rounds: int,
    seed: int,
    alpha: float,
    port: int,
    command: str | None,
) -> Fleet:
    """Write the plan and the devices' data; nothing is started yet. ``command`` runs each device;
    None: this environment's own, and the training build's for the first few where that is there."""
    training = training_build() if command is None else None
    port = port or free_port()
    goal = goal_of(devices)
    paths.plan.write_text(PLAN.format(seed=seed, goal=goal, rounds=rounds, grace=GRACE), "utf-8")
    service = SERVICE.format(port=port, page_port=access.page_port)
    paths.service.write_text(service, "utf-8")
    serve = [Path(sys.executable).with_name("fleetlearn-coordinator"), "serve", paths.plan]
    serve += ["--service", paths.service]
    coordinator = Child("the coordinator", serve, paths.logs / "coordinator.log")
    data = digits.data()
    shards = digits.dirichlet_shards(data.y_train, devices, alpha, seed)
    fleet = []
    for number, shard in enumerate(shards, 1):
        name = f"device-{number:02d}"
        folder = paths.devices / f"{number:02d}"
        folder.mkdir(parents=True)
        np.savez(folder / "data.npz", x=data.x_train[shard], y=data.y_train[shard])
        runtime = "ort-training" if training and number <= ON_ORT_TRAINING else "onnx"
        commands = (
            training if training and runtime == "ort-training" else Path(sys.executable).parent
        )
        run = [command or commands / "fleetlearn-device", "run", "--runtime", runtime]
        run += ["--coordinator", f"ws://127.0.0.1:{port}", "--data", folder / "data.npz"]
        run += ["--state", folder / "state", "--name", name, "--until-finished"]
        run += ["--token", access.device_token]
        fleet.append(
            Device(number, len(shard), runtime, Child(name, run, paths.logs / f"{name}.log"))
        )
    return Fleet(paths, coordinator, fleet)


def start_coordinator(fleet: Fleet, timeout: float = 30.0) -> None:
    """Start it and wait until it listens. Raises DemoError where it does not."""
    coordinator = fleet.coordinator
    fleet.dead.discard(coordinator.name)
    coordinator.start()
    deadline = time.monotonic() + timeout
    while not any("listening on" in line for line in coordinator.new_lines()):
        if not coordinator.running or time.monotonic() > deadline:
            raise DemoError(coordinator.last_words())
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port that nothing listens on.

    Not one that the system would pick (Linux: 32768 and above): while the coordinator is dead, a
    device that connects from such a port could be given the coordinator's own, and keep it from
    starting again.
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoError("no free TCP port was found between 20000 and 30000")
