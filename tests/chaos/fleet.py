"""The processes of one fleet, and what can be done to them. Whatever ends is started again, as an
init system would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
from postgres_server import SETTINGS, PostgresServer, programs
from processes import CHAOS, SCRIPTS, Processes, free_port

from tests.chaos.fleet_files import BUCKET, FleetFiles
from tests.chaos.machines import Machines
from tests.chaos.scenario import Scenario

MARKED = SCRIPTS / "marked_device.py"
MISTAKEN = CHAOS / "mistakes.py"
OBJECT_SERVER = Path(__file__).parents[1] / "support" / "lasting_object_server.py"
ACCESS = """
local all all trust
host all all 127.0.0.1/32 trust
host all all 10.7.0.0/24 trust
"""
AGAIN = 0.5
"""Seconds until a process that ended by itself is started again."""
STORE = {
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "a secret of tests",
}
"""Environment of the object store's clients."""


class End(msgspec.Struct, frozen=True):
    """How a process ended that the suite did not end."""

    name: str
    at: float
    status: int
    said: str
    """Its last lines."""


@dataclass
class Part:
    """A process that is to be there."""

    name: str
    begin: Callable[[], Any]
    process: Any = None
    due: float | None = 0.0
    """When it is to be started, on the monotonic clock; None: it runs, or is not to."""
    ended_by: signal.Signals | None = None
    """What the suite sent for its end."""
    logged: int = 0
    """Bytes of its log when it was started."""
    starts: int = 0


class Fleet:
    """One fleet, from its files to its processes."""

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        machines: Machines,
        bundle: Path,
        warm: Path,
        mistake: str | None = None,
    ) -> None:
        """``mistake``: one of mistakes.py that is planted."""
        self.folder, self.scenario, self.machines, self.mistake = (
            folder,
            scenario,
            machines,
            mistake,
        )
        self.run = Processes(folder, warm)
        self.files = FleetFiles(folder, scenario, machines, self.run)
        self.data, self.plan = self.files.data, self.files.plan
        self.parts: dict[str, Part] = {}
        self.ends: list[End] = []
        self.began = time.monotonic()
        self._paused: dict[str, list[int]] = {}
        self._stack = ExitStack()
        self._database: PostgresServer | None = None
        self._env = {"OMP_NUM_THREADS": "1"} | STORE
        url = self._begun_database() if scenario.ledger == "postgresql" else None
        self.files.write(bundle, url)

    def _begun_database(self) -> str:
        """Start the database, and return its URL."""
        where = programs()
        folder = self.folder.parent / f"{self.folder.name}-database"
        folder.mkdir(mode=0o755)
        address = self.machines.address("store")
        self._database = PostgresServer(
            where,
            folder,
            SETTINGS | {"listen_addresses": address},
            self.machines.around("store"),
            ACCESS,
        )
        self._stack.callback(self._database.stop)
        return f"postgresql://fleet@{address}:{self._database.port}/fleet"

    # Processes

    def start(self) -> None:
        """Let all processes be started."""
        for name in self.scenario.services:
            begin = {
                "database": self._begin_database,
                "store": self._begin_store,
                "helper": self._begin_helper,
                "bus": self._begin_bus,
            }[name]
            self.parts[name] = Part(name, begin)
        for name in self.scenario.coordinators:
            self.parts[name] = Part(name, lambda name=name: self._begin_coordinator(name))
        for name in self.scenario.gateways_elsewhere:
            self.parts[name] = Part(name, lambda name=name: self._begin_gateway(name))
        for name in self.scenario.names:
            self.parts[name] = Part(name, lambda name=name: self._begin_device(name))

    def _begin_database(self) -> Any:
        assert self._database is not None
        if self._database._process is None or self._database._process.poll() is not None:
            self._database.start()
        return self._database._process

    def _begin_store(self) -> Any:
        address = self.machines.address("store")
        if "AWS_ENDPOINT_URL" not in self._env:
            self._env["AWS_ENDPOINT_URL"] = f"http://{address}:{free_port()}"
            os.environ.update(self._env)  # for what reads the run here
        port = self._env["AWS_ENDPOINT_URL"].rpartition(":")[2]
        words = [*self.machines.around("store"), sys.executable, str(OBJECT_SERVER)]
        return self.run.start("store", *words, self.folder / "objects", address, port, BUCKET)

    def _begin_helper(self) -> Any:
        words = "-m", "fleetlearn_coordinator", "helper", "serve", self.files.helper_file
        env = os.environ | self.machines.env("store")
        return self.run.start("helper", sys.executable, *words, env=env)

    def _begin_bus(self) -> Any:
        address = self.machines.address("store")
        words = [*self.machines.around("store"), "nats-server", "-a", address]
        return self.run.start("bus", *words, "-p", str(self.files.bus_port))

    def _begin_gateway(self, name: str) -> Any:
        words = ["-m", "fleetlearn_coordinator", "serve-gateway", self.folder / f"{name}.toml"]
        env = os.environ | self._env | self.machines.env(name, name)
        return self.run.start(name, sys.executable, *words, env=env)

    def _begin_coordinator(self, name: str) -> Any:
        words: list[str | Path] = ["-m", "fleetlearn_coordinator"]
        if self.mistake is not None:
            words = [MISTAKEN, self.mistake]
        words += ["serve", self.plan, "--service", self.files.service]
        words += ["--standby"] if self.scenario.standby else []
        words += ["--gateways", str(self.scenario.gateways)] if self.scenario.gateways else []
        env = os.environ | self._env | self.machines.env("hub", "hub")
        return self.run.start(name, sys.executable, *words, env=env)

    def _begin_device(self, name: str) -> Any:
        words: list[str | Path] = ["-m", "fleetlearn_device"]
        if self.scenario.is_marked:
            words = [MARKED]
        elif self.mistake is not None:
            words = [MISTAKEN, self.mistake]
        machine, port = "hub", self.files.port
        if elsewhere := self.scenario.gateways_elsewhere:
            machine = elsewhere[self.scenario.names.index(name) % len(elsewhere)]
            port = self.files.gateway_port(machine)
        address = f"ws://{self.machines.address(machine)}:{port}"
        words += ["run", "--coordinator", address, "--insecure"]
        words += ["--data", self.folder / f"{name}.npz", "--state", self.files.state(name)]
        words += ["--name", name, "--log-format", "json"]
        env = os.environ | self.machines.env("fleet", name)
        return self.run.start(name, sys.executable, *words, env=env)

    def now(self) -> float:
        return time.monotonic() - self.began

    def tick(self) -> None:
        """Start what is due, and see what has ended."""
        now = time.monotonic()
        for part in self.parts.values():
            if part.process is not None and part.due is None and part.process.poll() is not None:
                self._ended(part)
            if part.due is not None and part.due <= now:
                part.logged = self._log_size(part.name)
                part.ended_by, part.due = None, None
                part.starts += 1
                part.process = part.begin()

    def _ended(self, part: Part) -> None:
        self._paused.pop(part.name, None)
        part.due = time.monotonic() + AGAIN
        status = part.process.returncode
        if part.ended_by is None or (part.ended_by == signal.SIGTERM and status not in (0, -15)):
            said = self.run.folder / f"{part.name}.log"
            lines = said.read_bytes()[part.logged :].decode(errors="replace").splitlines()
            self.ends.append(End(part.name, self.now(), status, "\n".join(lines[-3:])))

    def _log_size(self, name: str) -> int:
        with suppress(OSError):
            return (self.folder / f"{name}.log").stat().st_size
        return 0

    def pids(self, target: str) -> list[int]:
        """Return the processes of a target: all of the database's, one of the others'."""
        for name in self.scenario.coordinators if target not in self.parts else ():
            part = self.parts[name]
            if part.process is not None and part.process.poll() is None:
                return [each.pid for each in children(part.process.pid) if is_part(each, target)]
        if target not in self.parts:
            return []
        process = self.parts[target].process
        if process is None or process.poll() is not None:
            return []
        if target == "database":
            return [process.pid, *(each.pid for each in children(process.pid))]
        return [process.pid]

    def kill(self, target: str, away: float) -> bool:
        """SIGKILL a process, which stays away for so many seconds. Returns whether it was there."""
        pids = self.pids(target)
        part = self.parts.get(target)
        if not pids or (part is not None and part.due is not None):
            return False
        if part is not None:
            part.ended_by = signal.SIGKILL
            part.due = time.monotonic() + away
        if target == "database":
            assert self._database is not None
            self._database.kill()
        else:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._paused.pop(target, None)
        if part is not None:
            part.process.wait()
        return True

    def lose_power(self, machine: str, away: float) -> bool:
        """Kill all processes of a machine at once; what they did not sync is lost."""
        names = self.scenario.coordinators if machine == "hub" else [machine]
        pids = [pid for name in names for pid in self.pids(name)]
        pids += [each.pid for pid in pids for each in children(pid)]
        if not pids:
            return False
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in (*names, *[name for name in self._paused if name not in self.parts]):
            self._paused.pop(name, None)
        for name in names:
            part = self.parts[name]
            part.ended_by, part.due = signal.SIGKILL, time.monotonic() + away
            if part.process is not None:
                part.process.wait()
        while any(map(lives, pids)):
            time.sleep(0.01)
        self.machines.lose_power(machine)
        return True

    def stop(self, target: str) -> bool:
        """SIGTERM a process."""
        part = self.parts[target]
        if part.due is not None or not self.pids(target) or target in self._paused:
            return False
        part.ended_by = signal.SIGTERM
        part.process.terminate()
        return True

    def replace_gateways(self, target: str) -> bool:
        """Have a coordinator replace its gateways by new ones, as an update does (SIGUSR1)."""
        part = self.parts[target]
        # it takes the signal once it has begun
        if not self.pids(target) or not self.pids("engine") or target in self._paused:
            return False
        part.process.send_signal(signal.SIGUSR1)
        return True

    def pause(self, target: str) -> bool:
        """SIGSTOP a process."""
        pids = self.pids(target)
        if not pids or target in self._paused:
            return False
        self._paused[target] = pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return True

    def go_on(self, target: str) -> None:
        """SIGCONT a process that was paused."""
        for pid in self._paused.pop(target, ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def all_go_on(self) -> None:
        for target in [*self._paused]:
            self.go_on(target)

    # The end

    def end(self, names: Sequence[str], seconds: float) -> dict[str, int | None]:
        """SIGTERM processes and wait for their ends. Returns their exit statuses; None: it did not
        end."""
        found: dict[str, int | None] = {}
        for name in names:
            part = self.parts[name]
            if part.process is not None and part.process.poll() is None:
                part.process.terminate()
        until = time.monotonic() + seconds
        for name in names:
            part = self.parts[name]
            if part.process is None:
                continue
            with suppress(subprocess.TimeoutExpired):
                part.process.wait(max(0.1, until - time.monotonic()))
            found[name] = part.process.poll()
            if found[name] is not None:
                part.process = part.due = None
        return found

    def close(self) -> None:
        """End everything by force."""
        self.all_go_on()
        for part in self.parts.values():
            if part.process is not None and part.process.poll() is None:
                for each in children(part.process.pid):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                part.process.kill()
        self._stack.close()


def children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def lives(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody waits for has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_part(process: psutil.Process, target: str) -> bool:
    """Return whether a supervisor's process is this part."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        words = process.cmdline()
        kind, _, number = target.partition(" ")
        if kind == "engine":
            return "--engine" in words
        return "gateway" in words and words[words.index("--number") + 1] == number
    return False
