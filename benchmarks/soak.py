"""An hour of coordinators whose devices come and go: whether memory, files and disk stay as they
are.

There are three coordinators: one of synchronous rounds, one that carries late updates, one of
asynchronous rounds. The devices of each enrol, do some tasks, and then leave, vanish in the middle
of something, are slow, or are revoked. A table is printed each minute. At the end another shows how
much each figure grew over the second half, by the straight line through its samples. The exit
status is 1 if one grew by more than its bound.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import _measure as measure
import _servers
import _websocket_device
from _growth import BOUNDS, Row, growths
from _soak_devices import Comings
from fleetlearn_coordinator.storage.identities import DATABASE as IDENTITIES
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE

SAMPLE = 5.0
"""Seconds between two looks at the coordinators, at most."""


def look(server: _servers.Server, comings: Comings) -> dict[str, float]:
    """Return what a coordinator holds now."""
    process = Path(f"/proc/{server.pid}")
    status = (process / "status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    opened = []
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened.append(str(file.readlink()))
    sockets = sum(name.startswith("socket:") for name in opened)
    folder, sizes = server.log.parent, dict[str, float]()
    for path in folder.rglob("*"):
        with suppress(OSError):
            sizes[path.name] = sizes.get(path.name, 0.0) + (
                path.stat().st_size if path.is_file() else 0.0
            )
    logs = sum(size for name, size in sizes.items() if name.endswith("-wal"))
    counted = sizes.get(DATABASE, 0.0) + sizes.get(IDENTITIES, 0.0) + sizes[server.log.name] + logs
    return {
        "rounds": comings.round,
        "accepted": comings.counts["accepted"],
        "connections": comings.counts["connections"],
        "changes": comings.counts["enrolments"] + comings.counts["revocations"],
        "connected": comings.connected,
        "RSS, MiB": int(resident.split()[1]) / 1024,
        "files": len(opened) - sockets,
        "sockets without a device": sockets - comings.connected,
        "database, KiB": sizes.get(DATABASE, 0.0) / 1024,
        "identities, KiB": sizes.get(IDENTITIES, 0.0) / 1024,
        "WALs, MiB": logs / 2**20,
        "other data, MiB": (sum(sizes.values()) - counted) / 2**20,
        "CPU-s": measure.usage(server.pid).cpu,
    }


async def come_and_go(
    servers: Mapping[str, _servers.Server],
    *,
    devices: int,
    size: int,
    heartbeat: float,
    seconds: float,
    every: float,
) -> dict[str, list[Row]]:
    """Let devices come and go at each server for ``seconds``. Print what it holds ``every`` so
    often, in seconds. Returns all samples."""
    update = _websocket_device.make_update(size)
    fleets = {
        name: Comings(
            server.url, server.log.parent / "identities", update, heartbeat, seed, server.ca
        )
        for seed, (name, server) in enumerate(servers.items())
    }
    rows: dict[str, list[Row]] = {name: [] for name in servers}
    async with asyncio.TaskGroup() as group:
        lives = [
            group.create_task(fleet.live(number))
            for fleet in fleets.values()
            for number in range(devices)
        ]
        begin = shown = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            await asyncio.sleep(min(SAMPLE, every))
            for name, server in servers.items():
                rows[name].append(look(server, fleets[name]))
            if now >= shown + every:
                shown = now
                print(
                    f"\n{(now - begin) / 60:.1f} minutes, load "
                    f"{os.getloadavg()[0]:.1f}\n{table(rows)}",
                    flush=True,
                )
        for life in lives:
            life.cancel()
    for name, fleet in fleets.items():
        print(
            f"\n{name}: "
            f"{', '.join(f'{count} {what}' for what, count in sorted(fleet.counts.items()))}"
        )
        fleet.close()
    return rows


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the newest sample of each coordinator."""
    lines = [
        (name, *(f"{value:.4g}" if value % 1 else f"{value:.0f}" for value in of[-1].values()))
        for name, of in rows.items()
    ]
    return measure.table([("rounds are", *next(iter(rows.values()))[-1]), *lines])


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument(
        "--devices", type=int, default=24, help="of each coordinator; a round is of a third"
    )
    options.add_argument(
        "--size", type=int, default=50_000, help="parameters of the model, float32"
    )
    options.add_argument(
        "--heartbeat",
        type=float,
        default=2.0,
        help="the service's; how long things take follows it",
    )
    options.add_argument("--tls", action="store_true", help="the devices connect over TLS")
    options.add_argument("--every", type=float, default=60.0, help="seconds between two tables")
    options.add_argument(
        "--rss", type=float, default=BOUNDS["RSS, MiB"], help="bound on the growth of memory, MiB"
    )
    chosen = options.parse_args()
    goal = max(1, chosen.devices // 3)
    common = {
        "size": chosen.size,
        "devices": goal,
        "minimum": max(1, goal // 2),
        "rounds": 10**6,
        "enrolled": 1,
    }
    times = {"deadline": 5 * chosen.heartbeat, "heartbeat": chosen.heartbeat, "tls": chosen.tls}
    with ExitStack() as stack:
        servers = {
            "synchronous": stack.enter_context(
                _servers.coordinator(**common, **times, over_selection=1.3)
            ),
            "carried": stack.enter_context(
                _servers.coordinator(**common, **times, over_selection=1.3, late="carry")
            ),
            "asynchronous": stack.enter_context(
                _servers.coordinator(**common, **times, asynchronous=True)
            ),
        }
        rows = asyncio.run(
            come_and_go(
                servers,
                devices=chosen.devices,
                size=chosen.size,
                heartbeat=chosen.heartbeat,
                seconds=60 * chosen.minutes,
                every=chosen.every,
            )
        )
    bounds = BOUNDS | {"RSS, MiB": chosen.rss}
    growths_of = {name: growths(samples) for name, samples in rows.items()}
    lines = [
        (name, f"{bound:g}", *(f"{each[name]:.2f}" for each in growths_of.values()))
        for name, bound in bounds.items()
    ]
    print(f"\nadded over the second half\n{measure.table([('', 'at most', *growths_of), *lines])}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, {"growths": growths_of, "samples": rows})
    above = [
        f"{name}: {what}"
        for name, each in growths_of.items()
        for what in bounds
        if each[what] > bounds[what]
    ]
    if above:
        sys.exit(f"these grow by more than their bounds: {'; '.join(above)}")


if __name__ == "__main__":
    main()
