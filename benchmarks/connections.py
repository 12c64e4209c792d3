"""Many connections to one coordinator.

round: 1,000 devices take a model of 4 MiB and send an update of 4 MiB in one round.
storm: 10,000 devices connect at the same instant; each is checked in when its `welcome` is there.
idle: many devices stay connected and have no task.

Interleaved with it runs the floor (_connections_floor.py): the same messages and bytes, over
TLS too with --tls, with nothing behind them, and always without credentials. With --nginx, nginx in
front of the coordinator ends TLS; with --plain, one process without TLS runs, too. CPU and memory
are of all processes together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import _measure as measure
import _raw_devices
import _servers
import _websocket_device
from _nginx import behind_nginx
from fleetlearn_coordinator.network import process_settings

Serving = AbstractContextManager[_servers.Server]
IDLE_SECONDS = 10.0
"""For which the CPU of idle connections is measured."""


def whole_round(
    serving: Serving, devices: int, size: int, limit: float, *, credentials: bool = False
) -> dict[str, float]:
    """Measure one round of all devices. ``seconds`` are from the first `task` to the last
    `accepted`, ``whole_seconds`` from the first connection until all devices know that training is
    finished. All other figures are of the whole."""
    with serving as server:
        idle, kernel = server.usage(), _raw_devices.kernel_memory()
        update = _websocket_device.make_update(size)
        fleet = _raw_devices.Fleet(server.url, update, credentials=credentials, ca=server.ca)
        own, begin = time.process_time(), time.perf_counter()
        try:
            fleet.connect(devices)
            fleet.run(
                lambda: (
                    fleet.counts["told to come back: finished"] + fleet.counts["failed"] >= devices
                ),
                limit,
            )
            end, used = time.perf_counter(), server.usage()
        finally:
            fleet.close()
    moments = fleet.log[1]
    if moments.accepted < devices:
        raise RuntimeError(
            f"{moments.accepted} of {devices} updates were accepted: {dict(fleet.counts)}"
        )
    return {
        "seconds": moments.last_accepted - moments.first_task,
        "connect_seconds": moments.first_task - begin,
        "whole_seconds": end - begin,
        "cpu_seconds": used.cpu - idle.cpu,
        "peak_rss_mib": used.peak_rss,
        "idle_rss_mib": idle.peak_rss,
        "kernel_tcp_mib": fleet.peak_kernel - kernel,
        "generator_cpu_seconds": time.process_time() - own,
        "accepted": moments.accepted,
    }


def storm(
    serving: Serving,
    devices: int,
    limit: float,
    *,
    credentials: bool = False,
    idle_seconds: float = 0.0,
) -> dict[str, float]:
    """Everybody connects at once; nobody gets a task, since a round would need one device more.
    ``idle_seconds``: how long all stay connected afterwards."""
    with serving as server:
        idle = server.usage()
        update = _websocket_device.make_update(1)
        fleet = _raw_devices.Fleet(
            server.url, update, rounds=0, credentials=credentials, ca=server.ca
        )
        own, begin = time.process_time(), time.perf_counter()
        figures: dict[str, float] = {}
        try:
            fleet.connect(devices)
            begun = time.perf_counter()
            fleet.run(lambda: fleet.counts["welcomed"] + fleet.counts["failed"] >= devices, limit)
            used, spent = server.usage(), time.process_time() - own
            if idle_seconds:
                time.sleep(idle_seconds)
                figures = {
                    "idle_cpu_ms_per_s": 1e3 * (server.usage().cpu - used.cpu) / idle_seconds
                }
        finally:
            fleet.close()
    for cause, count in fleet.counts.items():
        if cause.startswith("failed: "):
            print(f"storm: {count} {cause}", file=sys.stderr)
    waits = sorted(at - begin for at in fleet.welcomed_at)
    return {
        "seconds": waits[-1],
        "p50_seconds": waits[len(waits) // 2],
        "connect_calls_seconds": begun - begin,
        "cpu_seconds": used.cpu - idle.cpu,
        "peak_rss_mib": used.peak_rss,
        "kib_per_connection": 1024 * (used.peak_rss - idle.peak_rss) / devices,
        "generator_cpu_seconds": spent,
        "welcomed": fleet.counts["welcomed"],
        "failed": fleet.counts["failed"],
        **figures,
    }


def proxied(coordinator: Callable[..., Serving], devices: int) -> Serving:
    """Return a coordinator without TLS, behind nginx with TLS."""
    return behind_nginx(coordinator(proxies=["127.0.0.1"]), devices)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=1000, help="of the round; 0 leaves it out")
    options.add_argument(
        "--size", type=int, default=1 << 20, help="parameters of its model, float32"
    )
    options.add_argument(
        "--storm", type=int, default=10_000, help="devices of the storm; 0 leaves it out"
    )
    options.add_argument(
        "--idle", type=int, default=0, help="devices that stay connected, idle; 0 leaves it out"
    )
    options.add_argument(
        "--credentials", action="store_true", help="the devices are enrolled and show credentials"
    )
    options.add_argument("--tls", action="store_true", help="the devices connect over TLS")
    options.add_argument(
        "--gateways", type=int, default=0, help="of the coordinator that is measured; 0: none"
    )
    options.add_argument(
        "--nginx", action="store_true", help="also measure TLS that nginx ends in front"
    )
    options.add_argument(
        "--plain", action="store_true", help="also measure one process without TLS"
    )
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument(
        "--limit", type=float, default=120.0, help="seconds that each part may take"
    )
    chosen = options.parse_args()
    process_settings.raise_file_limit()
    ways: dict[str, tuple[int, int, int, Callable[..., dict[str, float]]]] = {
        "round": (
            chosen.devices,
            chosen.devices,
            chosen.size,
            partial(whole_round, size=chosen.size),
        ),
        "storm": (chosen.storm, chosen.storm + 1, 1, storm),
        "idle": (chosen.idle, chosen.idle + 1, 1, partial(storm, idle_seconds=IDLE_SECONDS)),
    }
    results: dict[str, Any] = {}
    for name, (count, needed, size, measured) in ways.items():
        coordinator = partial(
            _servers.coordinator,
            size=size,
            devices=needed,
            rounds=1,
            enrolled=count if chosen.credentials else 0,
        )
        contenders: dict[str, Callable[[], Serving]] = {
            "fleetlearn": partial(coordinator, tls=chosen.tls, gateways=chosen.gateways),
            "floor": partial(_servers.floor, "_connections_floor.py", needed, size, tls=chosen.tls),
        }
        if chosen.nginx:
            contenders["nginx"] = partial(proxied, coordinator, count)
        if chosen.plain:
            contenders["plain"] = coordinator
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(chosen.repeats if count else 0):
            for contender, serve in contenders.items():
                shows = chosen.credentials and contender != "floor"
                runs[contender].append(
                    measured(serve(), count, limit=chosen.limit, credentials=shows)
                )
            print(".", end="", flush=True, file=sys.stderr)
        if count:
            results[name] = measure.summary(runs)
    print(file=sys.stderr)
    for name, result in results.items():
        print(f"\n{name}\n{measure.side_by_side(result)}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
