"""Servers to measure: real coordinators on bundles without graphs, and the simplest servers to
compare them with."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _measure import scratch
from _process_usage import Usage, family, usage
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate
from fleetlearn_coordinator.storage.identities import Identities, hash_of
from fleetlearn_coordinator.storage.store import SPOOL_FILES_HELD
from fleetlearn_protocol import Manifest, write_bundle
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    PARAMETERS,
    TRAIN,
    Hyper,
    Input,
    LocalStep,
    Parameter,
)
from safetensors.numpy import save

START_LIMIT = 60.0
"""Seconds that a server process may take until it listens."""
END_LIMIT = 15.0
"""Seconds that it may take to end after SIGTERM, before it is killed."""

PLAN = """
name = "benchmark"
bundle = "{bundle}"
seed = 1
durable = "{durable}"
[local]
evaluate = false
{local}
[round]
goal = {devices}
minimum = {minimum}
deadline = {deadline}
{participation}
[encoding]
up = "{encoding}"
[stop]
rounds = {rounds}
"""
SYNCHRONOUS = """over_selection = {over_selection}
gather = {deadline}
late = "{late}"
"""
ASYNCHRONOUS = """participation = "asynchronous"
concurrency = {devices}"""

WITH_HELD = """
from fleetlearn_coordinator.__main__ import main
from fleetlearn_coordinator.storage import store

store.SPOOL_FILES_HELD = {held}
main()
"""
"""A coordinator that saves its sum after another number of updates."""


def write_placeholder_bundle(folder: Path, size: int) -> Path:
    """A bundle of ``size`` parameters whose graphs are empty files: enough for a coordinator, which
    never runs them."""
    vector = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.05)
    contents = {TRAIN: b"", EVAL: b"", INFER: b"", PARAMETERS: save({"w": vector})}
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="benchmark",
        parameters=(Parameter("w", (size,), 0),),
        batch=(Input("x", "float32", (1,)),),
        outputs=(Input("output", "float32", (1,)),),
        hyper=(Hyper("lr", 0.1),),
        step=LocalStep("sgd"),
        metrics=(),
        files={},
    )
    return write_bundle(folder, manifest, contents)


@contextmanager
def server_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command; end it with SIGTERM, or kill it if it does not go. Its output is shown when
    something fails. ``environment``: of the process, if not this one's."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process
    except BaseException:
        print(
            f"--- the end of {log.name}:\n" + log.read_text(errors="replace")[-3000:],
            file=sys.stderr,
        )
        raise
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Server(NamedTuple):
    """A process that is listening."""

    pid: int
    url: str
    log: Path
    """What it writes."""
    ca: Path | None = None
    """What certifies it, where it has TLS."""
    others: tuple[int, ...] = ()
    """Processes that work for it, and that it did not start."""

    def usage(self) -> Usage:
        """Return what all of its processes have used: their seconds of CPU, and the sum of their
        peaks of memory."""
        pids = [each for pid in (self.pid, *self.others) for each in family(pid)]
        used = [usage(each) for each in pids]
        return Usage(sum(each.cpu for each in used), sum(each.peak_rss for each in used))


def credential_of(device: str) -> str:
    """Return the credential of a device of a benchmark: its name, as long as a credential must
    be."""
    return device.rjust(43, "-")


def enrol(folder: Path, count: int) -> None:
    """Enrol the devices d0, d1 and so on in a folder of identities, without a transaction for
    each."""
    with (
        closing(Identities(folder)) as identities,
        closing(sqlite3.connect(identities.path)) as database,
        database,
    ):
        names = [f"d{number}" for number in range(count)]
        rows = [(name, hash_of(credential_of(name)), "", 0.0) for name in names]
        database.executemany(
            "INSERT INTO devices(device, hash, tags, enrolled) VALUES(?, ?, ?, ?)", rows
        )


@contextmanager
def coordinator(
    *,
    size: int,
    devices: int,
    rounds: int,
    over_selection: float = 1.0,
    asynchronous: bool = False,
    durable: str = "process",
    encoding: str = "float32",
    held: int = SPOOL_FILES_HELD,
    minimum: int | None = None,
    deadline: float = 600.0,
    late: str = "discard",
    enrolled: int = 0,
    tls: bool = False,
    bundle: Path | None = None,
    local: str = "",
    tables: str = "",
    **service: Any,
) -> Iterator[Server]:
    """A real ``fleetlearn-coordinator serve`` on a bundle of ``size`` parameters: its rounds wait
    for a report of each of the ``devices``, asynchronous ones for as many reports.

    It stays after the last round, so that its peak can be read. ``encoding``: of the updates.
    ``held``: updates after which the sum is saved. ``minimum``: reports that a round needs at its
    ``deadline``, if not of all devices. ``late``: as in the plan, of synchronous rounds.
    ``enrolled``: the devices d0, d1 and so on, which connect with ``credential_of`` them; 0:
    whoever comes. ``bundle``: a real one, if the devices train. ``local``: lines of the plan's
    table of that name. ``tables``: further tables of the plan. ``service``: settings of its
    process, as TOML.
    """
    with scratch() as folder:
        if bundle is None:
            write_placeholder_bundle(folder / "bundle", size)
        plan, settings = folder / "plan.toml", folder / "service.toml"
        participation = (ASYNCHRONOUS if asynchronous else SYNCHRONOUS).format(
            devices=devices, over_selection=over_selection, deadline=deadline, late=late
        )
        values_of_plan = {
            "devices": devices,
            "rounds": rounds,
            "durable": durable,
            "deadline": deadline,
            "bundle": "bundle" if bundle is None else bundle.absolute(),
            "local": local,
        }
        values_of_plan |= {
            "minimum": devices if minimum is None else minimum,
            "participation": participation,
        }
        plan.write_text(PLAN.format(**values_of_plan, encoding=encoding) + tables)
        values = {"port": 0, "heartbeat": 60.0, **service}
        lines = [f"{key} = {value}" for key, value in values.items()]
        if enrolled:
            enrol(folder / "identities", enrolled)
            lines.append('identities = "identities"')
        if tls:
            make_certificate(folder, ["127.0.0.1"], days=30)
            lines += ["[tls]", f'certificate = "{CERTIFICATE}"', f'key = "{KEY}"']
        settings.write_text("\n".join(lines))
        command = [sys.executable, "-m", "fleetlearn_coordinator"]
        if held != SPOOL_FILES_HELD:
            command = [sys.executable, "-c", WITH_HELD.format(held=held)]
        command += ["serve", "--stay", str(plan), "--service", str(settings)]
        log = folder / "coordinator.log"
        with server_process(command, log) as process:
            url = wait_for(r"listening on (wss?://\S+:\d+)", process, log)
            yield Server(process.pid, url, log, folder / CA if tls else None)


def wait_for(pattern: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """The first group of ``pattern`` in what a process that is starting has written. Raises
    RuntimeError."""
    found: list[str] = []

    def look() -> bool:
        found[:] = re.findall(pattern, log.read_text(errors="replace"))[:1]
        return bool(found)

    wait_until(look, process)
    return found[0]


def wait_until(listens: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until a process that is starting listens. Raises RuntimeError."""
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if listens():
            return
        if process.poll() is not None:
            raise RuntimeError(
                f"it ended with status {process.returncode} before it listened: {process.args!r}"
            )
        time.sleep(0.02)
    raise RuntimeError(f"it did not listen within {START_LIMIT:.0f} s: {process.args!r}")


@contextmanager
def floor(file: str, *arguments: int, tls: bool = False) -> Iterator[Server]:
    """A server of this folder to compare with, run as ``file arguments``, or ``file arguments
    certificate key`` where it is to speak TLS; it prints where it listens."""
    with scratch() as folder:
        log = folder / "floor.log"
        command = [sys.executable, str(Path(__file__).with_name(file)), *map(str, arguments)]
        if tls:
            make_certificate(folder, ["127.0.0.1"], days=30)
            command += [str(folder / CERTIFICATE), str(folder / KEY)]
        with server_process(command, log) as process:
            url = wait_for(r"listening on (wss?://\S+:\d+)", process, log)
            yield Server(process.pid, url, log, folder / CA if tls else None)
