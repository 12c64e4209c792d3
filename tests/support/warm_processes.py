"""For tests: processes that are forks of one that has imported everything. They start in 20 ms
instead of 2 s.

    python warm_processes.py SOCKET MODULE...

serves a Unix socket. Each connection is one process: it sends the command as a line of JSON, and is
told the process's id and later its exit status. ``Processes`` starts each ``python -m PACKAGE`` of
PACKAGES so, and each script of the tests'; the rest as usual.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

PACKAGES = ("fleetlearn_coordinator", "fleetlearn_device", "few_spool_files")
MODULES = (
    "fleetlearn_coordinator.__main__",
    *(f"fleetlearn_coordinator.commands.{name}" for name in ("serving", "status", "models")),
    "fleetlearn_device.__main__",
    "fleetlearn_device.device",
    "onnxruntime",
)
WIDTH = 16
"""Bytes of a number on the socket."""
NETWORK = "FLEETLEARN_TESTS_NETWORK"
"""The environment's variable with the file of the network namespace that a process is to be in."""
CLONE_NEWNET = 0x4000_0000

# The server's side


def serve(address: str, modules: list[str]) -> None:
    """Fork for each connection, until the standard input is closed."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ``answer``'s processes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                answer(connection)
            connection.close()


def answer(connection: socket.socket) -> NoReturn:
    """Start a process, and wait for its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job = json.loads(connection.makefile("rb").readline())
    pid = os.fork()
    if not pid:
        connection.close()
        become(**job)
    connection.sendall(b"%*d" % (WIDTH, pid))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(b"%*d" % (WIDTH, status))
    os._exit(0)


def become(
    program: str, arguments: list[str], logs: list[str], folder: str, env: dict[str, str]
) -> NoReturn:
    """Do what ``python -m program`` does, or ``python program`` where that is a script's path.

    logs: the files, which exist, that get the standard output and the standard error."""
    for standard, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), standard)
    status = 1
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):
        libc.faults_begin()
    if NETWORK in env and libc.setns(os.open(env[NETWORK], os.O_RDONLY), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"{env[NETWORK]} cannot be entered")
    sys.argv = [program, *arguments]
    try:
        if program in PACKAGES:
            sys.modules.pop(f"{program}.__main__", None)  # it is run again
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# The test's side


class Fork:
    """What tests use of ``subprocess.Popen``."""

    def __init__(self, address: Path, **job: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._socket.sendall(json.dumps(job).encode() + b"\n")
        self.pid = int(self._socket.recv(WIDTH, socket.MSG_WAITALL))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            self.returncode = int(self._socket.recv(WIDTH, socket.MSG_WAITALL))
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@contextmanager
def warm_server(folder: Path, preload: Path | None = None) -> Iterator[Path]:
    """Start the process that is forked from. ``preload``: a library that is loaded before libc.
    Yields its socket."""
    address = folder / "socket"
    env = os.environ | ({} if preload is None else {"LD_PRELOAD": str(preload)})
    command = [sys.executable, __file__, str(address), *MODULES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as server:
        while not address.exists():
            assert server.poll() is None, "the process that is forked from has ended"
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.02)
        yield address  # leaving the block closes its standard input, which ends it


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
