"""100,000 devices that stay connected to one coordinator with gateways.

storm: all devices connect, as fast as they are let in; with --at-once 0 at the same instant.
idle: they stay, and give a sign of life now and then.
rounds: some of them, chosen by the coordinator, take a model and send an update each.
death: a gateway is killed; its devices connect again, to whichever gateway the system chooses.

The devices speak the protocol on raw sockets (_raw_devices.py), from a few processes, each with a
loopback address of its own. They share the processor with the coordinator, so the CPU times say
more than the rates. A process's memory is its private memory after the storm, less before. The
kernel's memory is halved, since both ends of each connection are on this machine.

A process has no more connections than ``ulimit -n`` allows it files: give as many gateways, and as
many processes of devices, as that needs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import _measure as measure
import _process_usage
import _raw_devices
import _servers
from fleetlearn_coordinator.network import process_settings

HEARTBEAT = 600.0
"""Seconds, of the service: more than the storm takes, in which devices give no signs of life."""
SIGN_OF_LIFE = 48.0
"""Seconds after which each device gives a sign of life, while that is measured: 0.8 of a heartbeat
of a minute."""
QUIET = 3.0
"""Seconds of rest between two parts."""


class Devices:
    """A process of devices (_many_devices.py)."""

    def __init__(self, **settings: Any) -> None:
        program = str(Path(__file__).with_name("_many_devices.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told: dict[str, Any] = {}
        """What it said last."""
        self.waits: list[float] | None = None
        """When each device was welcomed, where that was asked for."""
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it is there
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            content = json.loads(line)
            if "welcomed_at" in content:
                self.waits = content["welcomed_at"]
            else:
                self.told = content

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()


class AllDevices:
    """All processes of devices."""

    def __init__(self, processes: Sequence[Devices]) -> None:
        self.processes = processes

    def tell(self, **command: Any) -> None:
        for each in self.processes:
            each.tell(**command)

    def counts(self) -> Counter[str]:
        found = Counter[str]()
        for each in self.processes:
            found.update(each.told.get("counts", {}))
        return found

    def round(self, number: int) -> tuple[float, float, int]:
        """Return when the round's first task was begun and its last update accepted, and how many
        were."""
        rows = [each.told.get("rounds", {}).get(str(number)) for each in self.processes]
        there = [row for row in rows if row is not None]
        if not there:
            return 0.0, 0.0, 0
        first, last, accepted = zip(*there, strict=True)
        return min(first), max(last), sum(accepted)

    def welcomed_at(self) -> list[float]:
        """Return when each welcome came, in order."""
        for each in self.processes:
            each.waits = None
            each.tell(waits=None)
        wait(lambda: all(each.waits is not None for each in self.processes), 30.0, "an answer")
        return sorted(at for each in self.processes for at in each.waits or ())

    def cpu(self) -> float:
        return sum(_process_usage.usage(each.process.pid).cpu for each in self.processes)


@contextmanager
def devices_running(url: str, count: int, processes: int, **settings: Any) -> Iterator[AllDevices]:
    """Yield devices that are to connect, in processes of about the same size."""
    started: list[Devices] = []
    try:
        for number in range(processes):
            first = number * count // processes
            source = f"127.0.{1 + number}"
            started.append(Devices(url=url, first=first, source=source, **settings))
        yield AllDevices(started)
    finally:
        for each in started:
            each.end()


def wait(until: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until this is so. Raises TimeoutError."""
    end = time.perf_counter() + limit
    while not until():
        if time.perf_counter() > end:
            raise TimeoutError(f"{what} did not come within {limit:.0f} s")
        time.sleep(0.05)


class Parts:
    """The processes of a coordinator, by what they are."""

    def __init__(self, pid: int) -> None:
        commands = {
            each: Path(f"/proc/{each}/cmdline").read_text().split("\0")
            for each in _process_usage.family(pid)
        }
        self.engine = next((pid for pid, words in commands.items() if "--engine" in words), pid)
        self.gateways = [pid for pid, words in commands.items() if "gateway" in words]

    def cpu(self) -> dict[str, float]:
        """Return the seconds of CPU that the engine process and all gateways have used."""
        gateways = sum(_process_usage.usage(pid).cpu for pid in self.gateways)
        return {"engine": _process_usage.usage(self.engine).cpu, "gateways": gateways}

    def memory(self) -> dict[str, float]:
        """Return MiB: of the engine process, of all gateways, of the kernel."""
        return {
            "engine": resident(self.engine),
            "gateways": sum(map(resident, self.gateways)),
            "kernel": kernel_memory(),
        }


def resident(pid: int) -> float:
    """Return the MiB of memory that a process has of its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return kib / 1024


def kernel_memory() -> float:
    """Return the MiB that the kernel has for its own objects and for TCP's bytes, of the whole
    machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    slab = next(int(line.split()[1]) for line in lines if line.startswith("Slab:"))
    return slab / 1024 + _raw_devices.kernel_memory()


def differences(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {key: after[key] - before[key] for key in after}


def storm(
    devices: AllDevices, parts: Parts, counts: Sequence[int], limit: float
) -> dict[str, float]:
    """Everybody connects. ``counts``: devices of each process."""
    total, before, cpu, own = sum(counts), parts.memory(), parts.cpu(), devices.cpu()
    began = time.perf_counter()
    for each, count in zip(devices.processes, counts, strict=True):
        each.tell(connect=count)
    wait(lambda: devices.counts()["welcomed"] >= total, limit, "the last welcome")
    waits = [at - began for at in devices.welcomed_at()]
    used, own = differences(parts.cpu(), cpu), devices.cpu() - own
    time.sleep(QUIET)
    grown = differences(parts.memory(), before)
    return {
        "seconds": waits[-1],
        "check_ins_per_s": total / waits[-1],
        "p50_seconds": waits[len(waits) // 2],
        "p99_seconds": waits[int(len(waits) * 0.99)],
        "engine_ms_per_check_in": 1e3 * used["engine"] / total,
        "gateway_ms_per_check_in": 1e3 * used["gateways"] / total,
        "generator_ms_per_check_in": 1e3 * own / total,
        "connections_that_broke": devices.counts()["failed"],
        "told_to_come_back": devices.counts()["told to come back: busy"],
        "gateway_kib_per_connection": 1024 * grown["gateways"] / total,
        "engine_kib_per_connection": 1024 * grown["engine"] / total,
        "kernel_kib_per_connection": 1024 * grown["kernel"] / 2 / total,
    }


def idle(devices: AllDevices, parts: Parts, seconds: float) -> dict[str, float]:
    """Nobody does anything for ``seconds``; then all give signs of life as they must for as
    long."""
    figures = {}
    for name, interval in (("silent", 0.0), ("signs_of_life", SIGN_OF_LIFE)):
        devices.tell(beat=interval)
        time.sleep(1.0)
        before, pings, began = parts.cpu(), devices.counts()["pings"], time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - began
        used = differences(parts.cpu(), before)
        for part, spent in used.items():
            figures[f"{name}_{part}_cpu_ms_per_s"] = 1e3 * spent / took
        if interval:
            sent = devices.counts()["pings"] - pings
            figures["signs_of_life_per_s"] = sent / took
            own = figures[f"{name}_gateways_cpu_ms_per_s"] - figures["silent_gateways_cpu_ms_per_s"]
            figures["gateway_us_per_sign_of_life"] = 1e3 * own * took / sent if sent else 0.0
    return figures


def rounds(
    devices: AllDevices,
    parts: Parts,
    count: int,
    goal: int,
    size: int,
    limit: float,
    silent: float,
) -> dict[str, float]:
    """Rounds of ``goal`` devices. The first one's tasks were held since the storm; the others'
    devices are chosen among all that are there. ``silent``: CPU-ms that gateways use in a second
    for all connections while nothing happens; it is no part of what an update costs."""
    devices.tell(beat=0.0)
    time.sleep(1.0)
    before, own, began = parts.cpu(), devices.cpu(), time.perf_counter()
    devices.tell(release=None)
    wait(lambda: devices.round(count)[2] >= goal, limit, "the last update")
    used, own = differences(parts.cpu(), before), devices.cpu() - own
    gateways = 1e3 * used["gateways"] - silent * (time.perf_counter() - began)
    moments = [devices.round(number) for number in range(1, count + 1)]
    seconds = [last - first for first, last, _ in moments]
    between = [later[0] - earlier[1] for earlier, later in pairwise(moments)]
    return {
        "seconds": sum(seconds) / count,
        "longest_seconds": max(seconds),
        "next_task_after_seconds": max(between, default=0.0),
        "updates_per_s": goal * count / sum(seconds),
        "mb_per_s_each_way": 4e-6 * size * goal * count / sum(seconds),
        "engine_ms_per_update": 1e3 * used["engine"] / (goal * count),
        "gateway_ms_per_update": gateways / (goal * count),
        "generator_ms_per_update": 1e3 * own / (goal * count),
    }


def death(devices: AllDevices, parts: Parts, limit: float) -> dict[str, float]:
    """A gateway dies by SIGKILL. The supervisor starts it again."""
    before = devices.counts()
    engine = _process_usage.usage(parts.engine).cpu
    began = time.perf_counter()
    os.kill(parts.gateways[0], signal.SIGKILL)
    wait(lambda: devices.counts()["lost"] > before["lost"], 10.0, "a lost connection")

    def all_back() -> bool:
        now = devices.counts()
        return now["welcomed"] - before["welcomed"] >= now["lost"] - before["lost"]

    lost = -1
    while lost != (lost := devices.counts()["lost"]):  # all have noticed
        time.sleep(1.0)
    wait(all_back, limit, "the last welcome")
    lost = devices.counts()["lost"] - before["lost"]
    at = devices.welcomed_at()[-lost:]
    engine = _process_usage.usage(parts.engine).cpu - engine
    return {
        "lost": lost,
        "seconds": at[-1] - began,
        "p50_seconds": at[len(at) // 2] - began,
        "engine_ms_per_check_in": 1e3 * engine / lost,
    }


def measure_all(chosen: Any) -> dict[str, dict[str, float]]:
    """Measure one coordinator, one part after the other."""
    total, processes = chosen.devices, chosen.processes
    counts = [
        (number + 1) * total // processes - number * total // processes
        for number in range(processes)
    ]
    goal = chosen.goal or total + 1
    server = _servers.coordinator(
        size=chosen.size,
        devices=goal,
        rounds=chosen.rounds + 1,  # the last one stays open: a finished run sends devices away
        deadline=3600.0,
        tls=chosen.tls,
        gateways=chosen.gateways,
        max_connections=total + 1000,
        heartbeat=HEARTBEAT,
    )
    results: dict[str, dict[str, float]] = {}
    with server as running:
        wait_for_gateways(running, chosen.gateways)
        parts = Parts(running.pid)
        taken = chosen.rounds if chosen.goal else 0
        settings = {"at_once": chosen.at_once, "size": chosen.size, "rounds": taken}
        settings["ca"] = None if running.ca is None else str(running.ca)
        with devices_running(running.url, total, processes, **settings) as devices:
            acts: dict[str, Callable[[], dict[str, float]]] = {
                "storm": lambda: storm(devices, parts, counts, chosen.limit),
                "idle": lambda: idle(devices, parts, chosen.idle),
            }
            if chosen.goal:
                acts["rounds"] = lambda: rounds(
                    devices,
                    parts,
                    taken,
                    chosen.goal,
                    chosen.size,
                    chosen.limit,
                    results["idle"]["silent_gateways_cpu_ms_per_s"],
                )
            if chosen.death:
                acts["death"] = lambda: death(devices, parts, chosen.limit)
            for name, act in acts.items():
                began = time.perf_counter()
                results[name] = act()
                took = time.perf_counter() - began
                said = f"{name}: {took:.1f} s; {dict(devices.counts())}"
                print(said, json.dumps(results[name]), sep="\n", file=sys.stderr)
            log = running.log.read_text(errors="replace")
            problems = [line for line in log.splitlines() if "ERROR" in line or "WARNING" in line]
            for line in problems[:5]:
                print(line, file=sys.stderr)
    return results


def wait_for_gateways(running: _servers.Server, count: int) -> None:
    """Wait until all gateways listen."""
    wait(
        lambda: running.log.read_text(errors="replace").count("is there, with") >= count,
        60.0,
        "the last gateway",
    )


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=100_000)
    options.add_argument("--gateways", type=int, default=6)
    options.add_argument("--processes", type=int, default=6, help="processes of devices")
    options.add_argument(
        "--at-once",
        type=int,
        default=500,
        help="devices of a process that wait for their welcome at a time; 0: all",
    )
    options.add_argument("--goal", type=int, default=10_000, help="of a round; 0: no rounds")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--size", type=int, default=1 << 16, help="parameters of the model")
    options.add_argument("--idle", type=float, default=10.0, help="seconds of each idle part")
    options.add_argument("--tls", action="store_true", help="the devices connect over TLS")
    options.add_argument("--death", action="store_true", help="kill a gateway, too")
    options.add_argument("--limit", type=float, default=300.0, help="seconds of each part")
    chosen = options.parse_args()
    process_settings.raise_file_limit()
    results = measure_all(chosen)
    print(file=sys.stderr)
    rows = [("part", "figure", "value")]
    for name, figures in results.items():
        rows += [(name, key, f"{value:.4g}") for key, value in figures.items()]
    print(measure.table(rows))
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
