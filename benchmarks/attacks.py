"""Attacks on a coordinator beside six honest devices: rounds a second before and during each.

The coordinator, the honest devices and the attackers are one process each, on 127.0.0.1. With few cores the attackers'
own work slows the others down too. ``--nice 19`` gives the attackers only the CPU that nobody else uses, and the table
says how much that was; nothing else bounds them. On a busy machine the coordinator's CPU for each round of the honest
devices, which includes its work for the attackers, says more than the clock.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _flood_attacks
import _measure as measure
import _transfer_attacks
import _websocket_device

DEVICES = 6
RUN_ATTACK = Path(__file__).with_name("_run_attack.py")


class Attack(NamedTuple):
    """Where an attack is defined, and the coordinator's plan during it."""

    module: str
    """The module in this folder that defines it."""
    over_selection: float = 8.0
    """Tasks for each report that the round needs: enough that attackers with tasks keep no honest device out of it."""


ATTACKS = {attack.__name__: Attack("_flood_attacks") for attack in _flood_attacks.ATTACKS} | {
    attack.__name__: Attack("_transfer_attacks", 60.0) for attack in _transfer_attacks.ATTACKS
}
"""Name -> attack. The ghosts of _ghost_attacks.py are not among them: the coordinator needs some rounds to find them,
so tests/coordinator/service/test_server_ghosts.py shows what they do."""


class Rounds:
    """When each round began, as the honest devices see it."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self._last = 0

    def __call__(self, round: int) -> None:
        if round > self._last:
            self._last = round
            self.began.append(time.perf_counter())

    def rate(self, begin: float, end: float) -> float:
        return sum(begin <= at < end for at in self.began) / (end - begin)


async def beside(server: measure.Server, name: str, size: int, seconds: float, nice: int) -> dict[str, float]:
    """Rounds a second without and with the attack, and what it cost the coordinator."""
    update, log, rounds = _websocket_device.make_update(size), _websocket_device.Log(), Rounds()
    tasks = [
        asyncio.ensure_future(_websocket_device.take_part(server.url, f"honest-{number}", update, log, rounds))
        for number in range(DEVICES)
    ]
    attacker: subprocess.Popen[bytes] | None = None
    try:
        while len(rounds.began) < 4:
            await _alive(tasks, 0.01)
        begin, idle = time.perf_counter(), measure.usage(server.pid)
        await _alive(tasks, seconds)
        middle = time.perf_counter()
        before, cost = rounds.rate(begin, middle), (measure.usage(server.pid).cpu - idle.cpu) / (middle - begin)
        written = server.log.stat().st_size
        command = [sys.executable, str(RUN_ATTACK), ATTACKS[name].module, name, server.url]
        attacker = subprocess.Popen(command, stderr=subprocess.PIPE)
        os.setpriority(os.PRIO_PROCESS, attacker.pid, nice)
        await _alive(tasks, 1.0)  # it starts
        begin, used, theirs = time.perf_counter(), measure.usage(server.pid), measure.usage(attacker.pid)
        await _alive(tasks, seconds)
        end = time.perf_counter()
        if attacker.poll() is not None:
            raise RuntimeError(f"the attacker ended: {attacker.communicate()[1].decode()[-2000:]}")
        now = measure.usage(server.pid)
        during = rounds.rate(begin, end)
        return {
            "before": before,
            "during": during,
            "ratio": during / before,
            "cpu_ms_per_round_before": 1e3 * cost / before,
            "cpu_ms_per_round": 1e3 * (now.cpu - used.cpu) / (end - begin) / during if during else math.inf,
            "cpu": (now.cpu - used.cpu) / (end - begin),
            "attacker_cpu": (measure.usage(attacker.pid).cpu - theirs.cpu) / (end - begin),
            "idle_rss_mib": idle.peak_rss,
            "peak_rss_mib": now.peak_rss,
            "log_kib_per_second": (server.log.stat().st_size - written) / 1024 / (end - begin),
        }
    finally:
        if attacker is not None:
            attacker.kill()
            attacker.communicate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _alive(tasks: Sequence[asyncio.Future[None]], seconds: float) -> None:
    """Wait; raises what an honest device raises."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
        raise RuntimeError("an honest device was sent away")


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME")
    options.add_argument("--size", type=int, default=250_000, help="parameters of the model, float32")
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement, before and during")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--nice", type=int, default=0, choices=range(20), help="of the attackers")
    chosen = options.parse_args()
    results: dict[str, Any] = {}
    for name in chosen.attacks:
        runs = []
        for _ in range(chosen.repeats):
            with measure.coordinator(
                size=chosen.size,
                devices=DEVICES,
                rounds=10**6,
                over_selection=ATTACKS[name].over_selection,
                heartbeat=15.0,
            ) as server:
                runs.append(asyncio.run(beside(server, name, chosen.size, chosen.seconds, chosen.nice)))
            print(".", end="", flush=True, file=sys.stderr)
        results[name] = {key: measure.middle([row[key] for row in runs]) for key in runs[0]} | {"runs": runs}
    print(file=sys.stderr)
    columns = {
        "before": "rounds/s before",
        "during": "during",
        "ratio": "ratio",
        "cpu_ms_per_round_before": "CPU-ms a round before",
        "cpu_ms_per_round": "during",
        "attacker_cpu": "theirs, CPU",
        "peak_rss_mib": "peak RSS, MiB",
        "idle_rss_mib": "before",
        "log_kib_per_second": "log, KiB/s",
    }
    rows = [(name, *(measure.show(row[key]) for key in columns)) for name, row in results.items()]
    print(measure.table([("attack", *columns.values()), *rows]))
    ratios = [row["ratio"]["median"] for row in results.values()]
    print(f"\nleast ratio {min(ratios):.2f}, median {statistics.median(ratios):.2f}")
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
