"""Process settings, in a process of their own where they would stay."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest
from fleetlearn_coordinator.network import process_settings


def test_accepted_connections_inherit_the_listener_s_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process_settings.tune_listener(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            # Linux doubles what it is given, for its own bookkeeping.
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (
                process_settings.SEND_BUFFER,
                2 * process_settings.SEND_BUFFER,
            )
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert timeout == process_settings.USER_TIMEOUT_MS


def in_process(code: str) -> str:
    words = [
        sys.executable,
        "-c",
        f"from fleetlearn_coordinator.network import process_settings\n{code}",
    ]
    return subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_what_exists_at_the_start_is_frozen() -> None:
    code = (
        "import gc; gc.collect(); there = len(gc.get_objects()); "
        "process_settings.collect_garbage_rarely(); print(gc.get_threshold(), "
        "gc.get_freeze_count() > 0.9 * there)"
    )
    assert in_process(code) == "(50000, 20, 100) True"


def test_the_file_limit_is_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard < 512:
        pytest.skip(f"the hard limit of open files is {hard}: nothing to raise")
    code = (
        "import resource as r; hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; "
        "r.setrlimit(r.RLIMIT_NOFILE, (256, hard));process_settings.raise_file_limit(); "
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    assert in_process(code) == str((hard, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_freed_memory_stays_with_the_process() -> None:
    """A freed block of 8 MiB: by default glibc returns it to the kernel at once."""
    code = (
        "import ctypes\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "{setting}\n"
        "block = bytearray(8 << 20)\n"
        "before = resident(); del block\n"
        "print(before - resident() > 4 << 20)"
    )
    assert in_process(code.format(setting="pass")) == "True"
    assert in_process(code.format(setting="process_settings.keep_freed_memory()")) == "False"
