"""Many connections to one coordinator.

round: 1,000 devices take a model of 4 MiB and send an update of 4 MiB in one round.
storm: 10,000 devices connect at the same instant; each is checked in when its `welcome` is there.

Interleaved with it runs the floor (_connections_floor.py): the same messages and bytes, with nothing behind them.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import _measure as measure
import _raw_devices
import _websocket_device
from fleetlearn_coordinator.network import process_settings

Serving = AbstractContextManager[measure.Server]


def whole_round(serving: Serving, devices: int, size: int, limit: float) -> dict[str, float]:
    """Measure one round of all devices. ``seconds`` are from the first `task` to the last `accepted`, ``whole_seconds``
    from the first connection until all devices know that training is finished. All other figures are of the whole."""
    with serving as server:
        idle, kernel = measure.usage(server.pid), _raw_devices.kernel_memory()
        fleet = _raw_devices.Fleet(server.url, _websocket_device.make_update(size))
        own, begin = time.process_time(), time.perf_counter()
        try:
            fleet.connect(devices)
            fleet.run(lambda: fleet.counts["told to come back: finished"] + fleet.counts["failed"] >= devices, limit)
            end, used = time.perf_counter(), measure.usage(server.pid)
        finally:
            fleet.close()
    moments = fleet.log[1]
    if moments.accepted < devices:
        raise RuntimeError(f"{moments.accepted} of {devices} updates were accepted: {dict(fleet.counts)}")
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


def storm(serving: Serving, devices: int, limit: float) -> dict[str, float]:
    """Everybody connects at once; nobody gets a task, since a round would need one device more."""
    with serving as server:
        idle = measure.usage(server.pid)
        fleet = _raw_devices.Fleet(server.url, _websocket_device.make_update(1), rounds=0)
        own, begin = time.process_time(), time.perf_counter()
        try:
            fleet.connect(devices)
            begun = time.perf_counter()
            fleet.run(lambda: fleet.counts["welcomed"] + fleet.counts["failed"] >= devices, limit)
            used = measure.usage(server.pid)
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
        "generator_cpu_seconds": time.process_time() - own,
        "welcomed": fleet.counts["welcomed"],
        "failed": fleet.counts["failed"],
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=1000, help="of the round")
    options.add_argument("--size", type=int, default=1 << 20, help="parameters of its model, float32")
    options.add_argument("--storm", type=int, default=10_000, help="devices of the storm; 0 leaves it out")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--limit", type=float, default=120.0, help="seconds that each part may take")
    chosen = options.parse_args()
    process_settings.raise_file_limit()
    devices, size, limit = chosen.devices, chosen.size, chosen.limit
    results: dict[str, Any] = {}
    for name, count in (("round", devices), ("storm", chosen.storm)):
        runs: dict[str, list[dict[str, float]]] = {"fleetlearn": [], "floor": []}
        for _ in range(chosen.repeats if count else 0):
            if name == "round":
                ours = measure.coordinator(size=size, devices=devices, rounds=1)
                runs["fleetlearn"].append(whole_round(ours, devices, size, limit))
                floor = measure.floor("_connections_floor.py", devices, size)
                runs["floor"].append(whole_round(floor, devices, size, limit))
            else:
                ours = measure.coordinator(size=1, devices=count + 1, rounds=1)
                runs["fleetlearn"].append(storm(ours, count, limit))
                floor = measure.floor("_connections_floor.py", count + 1, 1)
                runs["floor"].append(storm(floor, count, limit))
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
