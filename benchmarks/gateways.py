"""Gateways (`serve --gateways N`) beside one process that does everything, without TLS and with it.

check-ins: devices that connect at the same instant, over the time until the last has its welcome.
rounds: whole rounds of all devices, each of which takes the model and sends an update.

``engine_ms_per_update`` is the CPU time of the process that has the run. With a model of 1 MiB or
more (``--size 262144``) and 8 devices for each gateway, gateways add the updates; with fewer
devices it does so itself.

The generator of the load takes a core of its own while it works, so the figures of a machine with
few cores say what is left for the coordinator. Ratios are to no gateways, in the same repeat.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import _measure as measure
import _process_usage
import _raw_devices
import _servers
import _websocket_device
from fleetlearn_coordinator.network import process_settings


def used(pid: int) -> float:
    """Return the CPU seconds of a coordinator and of all that it has started."""
    return sum(_process_usage.usage(each).cpu for each in _process_usage.family(pid))


def used_by_engine(pid: int) -> float:
    """Return the CPU seconds of the process that has the run: the coordinator's only one, or the
    one that its supervisor has started for it."""
    pids = _process_usage.family(pid)
    commands = {each: Path(f"/proc/{each}/cmdline").read_text().split("\0") for each in pids}
    engine = [each for each, words in commands.items() if "--engine" in words]
    return _process_usage.usage(engine[0] if engine else pid).cpu


def measure_one(
    gateways: int, *, tls: bool, devices: int, fleet: int, rounds: int, size: int, limit: float
) -> dict[str, float]:
    """Measure one coordinator. ``devices``: that check in at one instant. ``fleet``: devices of
    the rounds; ``size``: parameters of their model."""
    figures = {}
    storm = _servers.coordinator(size=1, devices=devices + 1, rounds=1, tls=tls, gateways=gateways)
    with storm as server:
        before = used(server.pid)
        update = _websocket_device.make_update(1)
        peers = _raw_devices.Fleet(server.url, update, rounds=0, ca=server.ca)
        begin = time.perf_counter()
        try:
            peers.connect(devices)
            peers.run(lambda: peers.counts["welcomed"] + peers.counts["failed"] >= devices, limit)
            figures["check_ins_per_s"] = devices / (max(peers.welcomed_at) - begin)
            figures["cpu_ms_per_check_in"] = 1e3 * (used(server.pid) - before) / devices
            if peers.counts["failed"]:
                raise RuntimeError(f"{peers.counts['failed']} connections failed")
        finally:
            peers.close()
    served = _servers.coordinator(
        size=size, devices=fleet, rounds=rounds, tls=tls, gateways=gateways
    )
    with served as server:
        before, engine = used(server.pid), used_by_engine(server.pid)
        update = _websocket_device.make_update(size)
        peers = _raw_devices.Fleet(server.url, update, rounds=rounds, ca=server.ca)
        try:
            peers.connect(fleet)
            finished = "told to come back: finished"
            peers.run(lambda: peers.counts[finished] + peers.counts["failed"] >= fleet, limit)
        finally:
            peers.close()
        first, last = min(peers.log), max(peers.log)
        seconds = peers.log[last].last_accepted - peers.log[first].first_task
        figures["rounds_per_s"] = rounds / seconds
        figures["cpu_ms_per_update"] = 1e3 * (used(server.pid) - before) / (rounds * fleet)
        engine = used_by_engine(server.pid) - engine
        figures["engine_ms_per_update"] = 1e3 * engine / (rounds * fleet)
    return figures


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--gateways", type=int, nargs="+", default=[1, 2], help="beside none")
    options.add_argument("--devices", type=int, default=400, help="that check in at one instant")
    options.add_argument("--fleet", type=int, default=40, help="devices of the rounds")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--size", type=int, default=1 << 16, help="parameters of their model")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--limit", type=float, default=60.0, help="seconds of each part")
    chosen = options.parse_args()
    process_settings.raise_file_limit()
    results: dict[str, Any] = {}
    for tls in (False, True):
        runs: dict[int, list[dict[str, float]]] = {each: [] for each in (0, *chosen.gateways)}
        for _ in range(chosen.repeats):
            for gateways, rows in runs.items():
                rows.append(
                    measure_one(
                        gateways,
                        tls=tls,
                        devices=chosen.devices,
                        fleet=chosen.fleet,
                        rounds=chosen.rounds,
                        size=chosen.size,
                        limit=chosen.limit,
                    )
                )
                print(".", end="", flush=True, file=sys.stderr)
        for gateways in chosen.gateways:
            name = f"{gateways} gateways{' over TLS' if tls else ''}"
            results[name] = measure.summary({name: runs[gateways], "none": runs[0]})
        if len(chosen.gateways) > 1:
            names = {each: f"{each} gateways{' over TLS' if tls else ''}" for each in runs}
            fewest, most = min(chosen.gateways), max(chosen.gateways)
            results[f"{names[most]} beside {fewest}"] = measure.summary(
                {names[most]: runs[most], names[fewest]: runs[fewest]}
            )
    print(file=sys.stderr)
    for name, result in results.items():
        print(f"\n{name}\n{measure.side_by_side(result)}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
