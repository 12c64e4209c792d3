"""Many connections to one coordinator.

round: 1,000 devices take a model of 4 MiB and send an update of 4 MiB in one round.
storm: 10,000 devices connect at the same instant; each is checked in when its `welcome` is there.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import _fleet
import _load
import _measure as measure
from fleetlearn_coordinator import tuning


def whole_round(devices: int, size: int, limit: float) -> dict[str, float]:
    """One round with everybody: seconds, coordinator's CPU-seconds and MiB, from the first `task` to the last
    `accepted`; ``connect``: before that."""
    with measure.coordinator(size=size, devices=devices, rounds=1) as server:
        idle = measure.usage(server.pid)
        kernel = _fleet.kernel_memory()
        fleet = _fleet.Fleet(server.url, _load.make_update(size))
        own = time.process_time()
        begin = time.perf_counter()
        try:
            fleet.connect(devices)
            fleet.run(lambda: fleet.counts["accepted"] + fleet.counts["failed"] >= devices, limit)
            moments = fleet.log[1]
            # The round's end too: the model is made when devices hear that training is finished.
            fleet.run(lambda: fleet.counts["told to come back: finished"] + fleet.counts["failed"] >= devices, limit)
            end = time.perf_counter()
            used = measure.usage(server.pid)
        finally:
            fleet.close()
        return {
            "seconds": moments.last_accepted - moments.first_task,
            "connect_seconds": moments.first_task - begin,
            "whole_seconds": end - begin,
            "cpu_seconds": used.cpu - idle.cpu,
            "cpu_ms_per_device": 1e3 * (used.cpu - idle.cpu) / devices,
            "peak_rss_mib": used.peak_rss,
            "idle_rss_mib": idle.peak_rss,
            "kernel_tcp_mib": fleet.peak_kernel - kernel,
            "generator_cpu_seconds": time.process_time() - own,
            "accepted": moments.accepted,
            "failed": fleet.counts["failed"],
        }


def storm(devices: int, limit: float) -> dict[str, float]:
    """Everybody connects at once; nobody gets a task, since a round would need one device more."""
    with measure.coordinator(size=64, devices=devices + 1, rounds=1) as server:
        idle = measure.usage(server.pid)
        fleet = _fleet.Fleet(server.url, _load.make_update(64), rounds=0)
        own = time.process_time()
        begin = time.perf_counter()
        try:
            fleet.connect(devices)
            begun = time.perf_counter()
            fleet.run(lambda: fleet.counts["welcomed"] + fleet.counts["failed"] >= devices, limit)
            used = measure.usage(server.pid)
        finally:
            fleet.close()
        waits = sorted(at - begin for at in fleet.welcomed_at)
        return {
            "seconds": waits[-1],
            "p50_seconds": waits[len(waits) // 2],
            "p99_seconds": waits[int(0.99 * len(waits))],
            "connect_calls_seconds": begun - begin,
            "cpu_seconds": used.cpu - idle.cpu,
            "cpu_ms_per_device": 1e3 * (used.cpu - idle.cpu) / devices,
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
    tuning.raise_file_limit()
    runs: dict[str, list[dict[str, float]]] = {"round": [], "storm": []}
    for _ in range(chosen.repeats):
        if chosen.devices:
            runs["round"].append(whole_round(chosen.devices, chosen.size, chosen.limit))
            print(".", end="", flush=True, file=sys.stderr)
        if chosen.storm:
            runs["storm"].append(storm(chosen.storm, chosen.limit))
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    results: dict[str, Any] = {
        name: {key: measure.middle([row[key] for row in rows]) for key in rows[0]}
        for name, rows in runs.items()
        if rows
    }
    for name, figures in results.items():
        rows = [("figure", "median [min-max]"), *((key, measure.show(value)) for key, value in figures.items())]
        print(f"\n{name}\n{measure.table(rows)}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results | {"runs": runs})


if __name__ == "__main__":
    main()
