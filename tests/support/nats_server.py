"""For tests: a NATS server of their own, which may be killed, paused and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from postgres_server import free_port


class NatsServer:
    """Knows nobody, unless the configuration says whom."""

    def __init__(self, program: str, folder: Path, configuration: str) -> None:
        self._program, self._folder = program, folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes]
        self._file = folder / "nats-server.conf"
        self._file.write_text(configuration)
        self.start()

    def url(self, scheme: str = "nats") -> str:
        return f"{scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command = [self._program, "-c", self._file, "-a", "127.0.0.1", "-p", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command], stdout=log, stderr=log
            )
        until = time.monotonic() + 20
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as one:
                if one.recv(4) == b"INFO":
                    return
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def nats_server(configuration: str = "") -> Iterator[NatsServer]:
    """Start a server, until the block is left. Skips the test where it is not installed."""
    pytest.importorskip("nats", reason="nats-py is not installed: make .venv/.installed")
    program = shutil.which("nats-server") or shutil.which("/usr/sbin/nats-server")
    if program is None:
        pytest.skip("NATS's server is not installed: apt install nats-server")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not here, which ends the server with the tests")
    folder = Path(tempfile.mkdtemp(prefix="fleetlearn-nats-"))
    server = None
    try:
        server = NatsServer(program, folder, configuration)
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
