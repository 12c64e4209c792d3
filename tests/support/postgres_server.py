"""For tests: a PostgreSQL server of their own, in a temporary folder, which may be killed and
started again.

``initdb`` refuses root, so a root runs it as another user. The server ends with the process that
started it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

USER, PASSWORD = "fleet", "a secret of tests"
SETTINGS = {
    "fsync": "off",  # SIGKILL loses nothing that was written: the kernel keeps it
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "log_min_messages": "fatal",
}
ACCESS = """
local all all trust
host all all 127.0.0.1/32 scram-sha-256
"""


class PostgresServer:
    """A server with one database, ``fleet``, whose superuser is called the same."""

    def __init__(
        self,
        programs: Path,
        folder: Path,
        settings: dict[str, str],
        around: Sequence[str] = (),
        access: str = ACCESS,
    ) -> None:
        """``around``: words before each of its programs, such as ``nsenter`` with a namespace.
        ``access``: its pg_hba.conf."""
        self.folder, self._programs, self._settings = folder, programs, settings
        self._data = folder / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        # The server ends with the thread that started it.
        self._starter = ThreadPoolExecutor(max_workers=1)
        user = pwd.getpwnam("postgres" if has_user("postgres") else "nobody")
        self._as = [*around, "setpriv"]
        if os.geteuid() == 0:
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        how = ("--no-sync", "--encoding=UTF8", "--no-locale", "--auth=trust")
        self._run("initdb", "-D", self._data, "-U", USER, f"--pwfile={password}", *how)
        (self._data / "pg_hba.conf").write_text(access)
        for attempt in range(3):
            try:
                self.start()
                break
            except AssertionError:  # another program took the port meanwhile
                if attempt == 2:
                    raise
                self.port = free_port()
        self.make_database("fleet")

    def _run(self, program: str, *args: object) -> None:
        command = [*self._as, str(self._programs / program), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def make_database(self, name: str) -> None:
        """Make an empty database."""
        self._run("createdb", "-h", self.folder, "-p", self.port, "-U", USER, name)

    def url(self, database: str = "fleet") -> str:
        """Return the URL of a database, by the socket that asks for no password."""
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        command = [
            *self._as, "--pdeathsig=KILL", str(self._programs / "postgres"),
            "-D", str(self._data), "-k", str(self.folder), "-p", str(self.port), *settings,
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            begun = self._starter.submit(
                subprocess.Popen[bytes], command, stdout=log, stderr=log, cwd="/"
            )
            self._process = begun.result()
        ready = [str(self._programs / "pg_isready"), "-q", "-h", str(self.folder)]
        until = time.monotonic() + 30
        while subprocess.run([*ready, "-p", str(self.port)], check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL the server and all of its processes."""
        assert self._process is not None
        family = [self._process.pid, *children(self._process.pid)]
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End the server: its sessions are cut off."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)


def children(parent: int) -> list[int]:
    """Return the processes that this one started."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in listed.split()]


def has_user(name: str) -> bool:
    """Return whether the system has a user."""
    return any(user.pw_name == name for user in pwd.getpwall())


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def programs() -> Path:
    """Return the folder of the server's programs. Skips the test where they, or what uses them, are
    missing."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: make .venv/.installed")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not here, which ends the server with the tests")
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: len(path.parts)
    )
    if found:
        return found[-1].parent
    in_path = shutil.which("initdb")
    if in_path is None:
        pytest.skip("PostgreSQL's server is not installed: apt install postgresql")
    return Path(in_path).resolve().parent


@contextmanager
def postgres_server(**settings: str) -> Iterator[PostgresServer]:
    """Start a server, until the block is left. ``settings``: beside those of tests. Skips the test
    where it is not installed."""
    where = programs()
    # A socket's path is short, and the server's user may not read the tests' folders.
    folder = Path(tempfile.mkdtemp(prefix="fleetlearn-pg-", dir="/tmp"))
    folder.chmod(0o755)
    server = None
    try:
        server = PostgresServer(where, folder, SETTINGS | settings)
        yield server
    finally:
        if server is not None:
            with suppress(Exception):
                server.stop()
        shutil.rmtree(folder, ignore_errors=True)
