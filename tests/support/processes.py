"""For tests: coordinators and devices as real processes, ended by their ids whatever the test
does."""

from __future__ import annotations

import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import Status, read_status
from warm_processes import PACKAGES, Fork

ROOT = Path(__file__).parents[2]
DIGITS: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "digits.py"))
"""The names of the digits example, which is not in a package."""
SCRIPTS = ROOT / "tests" / "end_to_end"
CHAOS = ROOT / "tests" / "chaos"
DATABASE = "FLEETLEARN_TESTS_DATABASE"
"""The environment's variable with the URL of a database, for tests whose runs keep their ledgers
there (test_kills_postgres.py)."""
PATIENCE = 60.0
"""Seconds after which waiting for something is a failure."""


class Processes:
    """The processes of one test. Each has its output in a log file of its name below ``folder``."""

    def __init__(self, folder: Path, warm: Path | None = None) -> None:
        """``warm``: the socket of a ``warm_server``, if commands of fleetlearn, and scripts of the
        tests' that begin them, are to be forks of its process."""
        self.folder, self.warm = folder, warm
        self.running: dict[str, Any] = {}
        """Name -> subprocess.Popen, or a Fork."""

    def start(
        self,
        name: str,
        *command: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        log = self.folder / f"{name}.log"
        self.running[name] = self._start([str(part) for part in command], log, log, cwd, env)
        return self.running[name]

    def command(
        self, *command: str | Path, cwd: Path | None = None, expected: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """A command of the coordinator's to its end: what it printed, and the status that is
        expected of it."""
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder) / "output", Path(folder) / "errors"
            words = [sys.executable, "-m", "fleetlearn_coordinator", *map(str, command)]
            process = self._start(words, *logs, cwd, None)
            try:
                status = process.wait(PATIENCE)
            finally:
                process.kill()
            done = subprocess.CompletedProcess(words, status, *(log.read_text() for log in logs))
        assert done.returncode == expected, done
        return done

    def _start(
        self,
        words: list[str],
        output: Path,
        errors: Path,
        cwd: Path | None,
        env: Mapping[str, str] | None,
    ) -> Any:
        rest = words[2:] if words[1] == "-m" else words[1:]
        output.touch()
        errors.touch()
        if self.warm is not None and (
            rest[0] in PACKAGES or Path(rest[0]).parent in (SCRIPTS, CHAOS)
        ):
            return Fork(
                self.warm,
                program=rest[0],
                arguments=rest[1:],
                logs=[str(output), str(errors)],
                folder=str(cwd or Path.cwd()),
                env=dict(os.environ if env is None else env),
            )
        with output.open("ab") as out, errors.open("ab") as error:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=error, cwd=cwd, env=env
            )

    def coordinator(
        self, plan: Path, *wrapper: str | Path, env: Mapping[str, str] | None = None
    ) -> Any:
        """``fleetlearn-coordinator serve``, or the same begun by a script of the test's; with its
        ``service_file``."""
        command = wrapper or ("-m", "fleetlearn_coordinator", "serve", plan)
        return self.start(
            "coordinator", sys.executable, *command, "--service", service_file(plan), env=env
        )

    def device(
        self,
        name: str,
        url: str,
        data: Path,
        *wrapper: str | Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """A device, or one begun by a script of the test's. ``options``: more of its command."""
        return self.start(
            name,
            sys.executable,
            *(wrapper or ("-m", "fleetlearn_device")),
            "run",
            "--coordinator",
            url,
            "--data",
            data,
            "--state",
            self.folder / f"{name}.state",
            "--name",
            name,
            "--until-finished",
            *options,
            env=env,
        )

    def kill(self, name: str) -> None:
        process = self.running[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait(self, name: str, seconds: float = PATIENCE) -> int:
        """Wait until a process ends. Returns its exit status. Fails with its output if that takes
        too long."""
        try:
            return self.running[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{name} did not end within {seconds:.0f} s: {self.log(name)}"
            ) from None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
        for process in self.running.values():
            process.wait()


@contextmanager
def processes(folder: Path, warm: Path | None = None) -> Iterator[Processes]:
    running = Processes(folder, warm)
    try:
        yield running
    finally:
        running.end()


def service_file(plan: Path, port: int | None = None) -> Path:
    """The service file beside a plan. It is written if a port is given, or with any free port where
    there is none. With the ledger in the database that DATABASE names."""
    file = plan.with_name("service.toml")
    if port is not None or not file.exists():
        url = os.environ.get(DATABASE)
        ledger = "" if url is None else f'ledger = "{url}"\n'
        file.write_text(f"port = {port or 0}\n{ledger}")
    return file


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds. Fails with ``what`` was waited for."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds:.0f} s for {what}, which did not come")
        time.sleep(0.005)


def status_of(data_dir: Path) -> Status | None:
    """The run's state, or None while there is no data directory yet."""
    try:
        return read_status(data_dir)
    except Exception:
        if (data_dir / "coordinator.sqlite3").exists() and (
            data_dir / "coordinator.sqlite3"
        ).stat().st_size > 100_000:
            raise
        return None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, below those that systems give to outgoing
    connections."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
