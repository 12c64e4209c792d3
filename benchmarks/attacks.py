"""Attacks on a coordinator beside six honest devices: rounds a second without and with each, in
turns.

The coordinator, the honest devices and the attackers are one process each, on this machine. The
attackers come from another address (``--addresses``: from several), which has the usual
limits; the honest devices' address has none. With few cores the attackers' own work slows the
others down too. ``--nice 19`` gives the attackers only the CPU that nobody else uses, and the table
says how much that was; nothing else bounds them. On a busy machine the coordinator's CPU for each
round of the honest devices, which includes its work for the attackers, says more than the clock,
and so does what of its CPU the attack takes in a second: all that is not the usual CPU of the
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import _connection_attacks
import _flood_attacks
import _measure as measure
import _servers
import _transfer_attacks
import _websocket_device
from fleetlearn_coordinator.storage.identities import Identities

DEVICES = 6
RUN_ATTACK = Path(__file__).with_name("_run_attack.py")


class Attack(NamedTuple):
    """Where an attack is defined, and the coordinator beside which it runs."""

    module: str
    """The module in this folder that defines it."""
    over_selection: float = 8.0
    """Tasks for each report that the round needs: enough that attackers with tasks keep no honest
    device out of it."""
    warm_up: float = 1.0
    """Seconds of the attack that are not measured."""
    identities: bool = False
    """Whether the coordinator takes enrolled devices alone."""


ATTACKS = {
    **{attack.__name__: Attack("_flood_attacks") for attack in _flood_attacks.ATTACKS},
    **{attack.__name__: Attack("_connection_attacks") for attack in _connection_attacks.ATTACKS},
    **{attack.__name__: Attack("_transfer_attacks", 60.0) for attack in _transfer_attacks.ATTACKS},
    "half_open": Attack("_connection_attacks", 60.0),
    "stolen_names": Attack("_connection_attacks", identities=True),
}
"""Name -> attack. The ghosts of _ghost_attacks.py are not among them: the coordinator needs some
rounds to find them, so tests/coordinator/service/test_server_ghosts.py shows what they do."""


class Rounds:
    """When each round began, as the honest devices see it."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self._last = 0

    def __call__(self, round: int) -> None:
        if round > self._last:
            self._last = round
            self.began.append(time.perf_counter())


async def beside(
    server: _servers.Server, name: str, chosen: argparse.Namespace
) -> dict[str, float]:
    """Rounds a second without and with the attack, in turns, and what it cost the coordinator. An
    honest device that is refused something, sent away or cut off is an error."""
    attack, rounds = ATTACKS[name], Rounds()
    update, log = _websocket_device.make_update(chosen.size), _websocket_device.Log()
    tasks = [
        asyncio.ensure_future(
            _websocket_device.take_part(server.url, device, update, log, rounds, **headers)
        )
        for device, headers in honest_devices(server, attack).items()
    ]
    quiet, beset = Part(), Part()
    idle = measure.usage(server.pid).peak_rss
    try:
        while len(rounds.began) < 4:
            await _alive(tasks, 0.01)
        for _ in range(chosen.turns):
            await measured(quiet, rounds, server, tasks, chosen.seconds)
            with attackers(server, name, chosen) as process:
                await _alive(tasks, attack.warm_up)
                begin = measure.usage(process.pid).cpu
                await measured(beset, rounds, server, tasks, chosen.seconds)
                if process.poll() is not None:
                    raise RuntimeError(f"the attackers ended with status {process.returncode}")
                beset.attackers_cpu += measure.usage(process.pid).cpu - begin
            await _alive(tasks, 1.0)  # the coordinator sees that they are gone
        return {
            "before": quiet.rounds / quiet.seconds,
            "during": beset.rounds / beset.seconds,
            "ratio": beset.rounds / quiet.rounds * quiet.seconds / beset.seconds,
            "cpu_ms_per_round_before": 1e3 * quiet.cpu / quiet.rounds,
            "cpu_ms_per_round": 1e3 * beset.cpu / beset.rounds if beset.rounds else math.inf,
            "cost": 1e3 * (beset.cpu - quiet.cpu / quiet.rounds * beset.rounds) / beset.seconds,
            "attacker_cpu": beset.attackers_cpu / beset.seconds,
            "idle_rss_mib": idle,
            "peak_rss_mib": measure.usage(server.pid).peak_rss,
            "log_kib_per_second": server.log.stat().st_size
            / 1024
            / (quiet.seconds + beset.seconds),
        }
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Part:
    """What was measured with, or without, the attack."""

    seconds: float = 0.0
    rounds: int = 0
    cpu: float = 0.0
    """Seconds of the coordinator's."""
    attackers_cpu: float = 0.0


async def measured(
    part: Part,
    rounds: Rounds,
    server: _servers.Server,
    tasks: Sequence[asyncio.Future[None]],
    seconds: float,
) -> None:
    """Let the honest devices go on for some seconds."""
    begin, used, had = time.perf_counter(), measure.usage(server.pid).cpu, len(rounds.began)
    await _alive(tasks, seconds)
    part.seconds += time.perf_counter() - begin
    part.cpu += measure.usage(server.pid).cpu - used
    part.rounds += len(rounds.began) - had


@contextmanager
def attackers(
    server: _servers.Server, name: str, chosen: argparse.Namespace
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the attackers."""
    command = [
        sys.executable,
        str(RUN_ATTACK),
        ATTACKS[name].module,
        name,
        server.url,
        str(chosen.addresses),
    ]
    process = subprocess.Popen(command)
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, chosen.nice)
        yield process
    finally:
        process.kill()
        process.wait()


def honest_devices(server: _servers.Server, attack: Attack) -> dict[str, dict[str, str]]:
    """Return the names of the honest devices and the headers of their handshakes."""
    names = [f"honest-{number}" for number in range(DEVICES)]
    if not attack.identities:
        return {name: {} for name in names}
    with closing(Identities(server.log.parent / "identities")) as identities:
        token = identities.make_token(DEVICES, time.time() + 3600, (), time.time())
    return {
        name: {
            "Authorization": f"Bearer {secrets.token_urlsafe(32)}",
            "Fleetlearn-Device": name,
            "Fleetlearn-Enrolment": token,
        }
        for name in names
    }


async def _alive(tasks: Sequence[asyncio.Future[None]], seconds: float) -> None:
    """Wait; raises what an honest device raises."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
        raise RuntimeError("an honest device was sent away")


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME"
    )
    options.add_argument(
        "--size", type=int, default=250_000, help="parameters of the model, float32"
    )
    options.add_argument(
        "--seconds", type=float, default=5.0, help="of each turn, before and during"
    )
    options.add_argument("--turns", type=int, default=1, help="without and with the attack")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--nice", type=int, default=0, choices=range(20), help="of the attackers")
    options.add_argument(
        "--addresses",
        type=int,
        default=1,
        choices=range(1, 255),
        help="that the attackers come from",
    )
    chosen = options.parse_args()
    results: dict[str, Any] = {}
    for name in chosen.attacks:
        attack, runs = ATTACKS[name], []
        identities: dict[str, Any] = {"identities": '"identities"'} if attack.identities else {}
        for _ in range(chosen.repeats):
            with _servers.coordinator(
                size=chosen.size,
                devices=DEVICES,
                rounds=10**6,
                over_selection=attack.over_selection,
                heartbeat=15.0,
                limits='{exempt = ["127.0.0.1/32"]}',
                **identities,
            ) as server:
                runs.append(asyncio.run(beside(server, name, chosen)))
            print(".", end="", flush=True, file=sys.stderr)
        results[name] = {key: measure.middle([run[key] for run in runs]) for key in runs[0]} | {
            "runs": runs
        }
    print(file=sys.stderr)
    columns = {
        "before": "rounds/s before",
        "during": "during",
        "ratio": "ratio",
        "cpu_ms_per_round_before": "CPU-ms a round before",
        "cpu_ms_per_round": "during",
        "cost": "the attack, CPU-ms a second",
        "attacker_cpu": "theirs, CPU",
        "peak_rss_mib": "peak RSS, MiB",
        "idle_rss_mib": "before",
        "log_kib_per_second": "log, KiB/s",
    }
    rows = [
        (name, *(measure.show(value[key]) for key in columns)) for name, value in results.items()
    ]
    print(measure.table([("attack", *columns.values()), *rows]))
    ratios = [row["ratio"]["median"] for row in results.values()]
    print(f"\nleast ratio {min(ratios):.2f}, median {statistics.median(ratios):.2f}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
