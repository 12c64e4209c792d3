"""What a fleet takes: processes, memory, bandwidth and money, from measured costs.

The costs are in measured_costs.json, with TLS and without. To measure them on another machine:
many_connections.py --json, with --tls or without, once with updates of 256 KiB and once with larger
ones (--size), and then ``capacity.py --measured SMALL.json LARGE.json --save COSTS.json``.

With --simulate, a day of the fleet runs in the simulator first, with the real engine: how often
devices check in, and how long a round takes, come from there. All else that is not measured is an
option, with a guess as its default: prices above all.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _measure as measure
import _simulated_day

COSTS = Path(__file__).with_name("measured_costs.json")
DAY = 86400.0
MB, MIB = 1e6, 2**20
SIGN_OF_LIFE = 48.0
"""Seconds after which a connected device gives a sign of life, with a heartbeat of a minute."""
PROCESS_MIB = 70.0
"""Memory of a gateway, or of the engine process, without devices."""
PER_GATEWAY = 15_000
"""Connections of a gateway, at most: its event loop then looks at all of them in 25 ms a second."""


class Costs(NamedTuple):
    """What a coordinator's work costs, as it was measured. CPU is in milliseconds."""

    engine_check_in: float
    gateway_check_in: float
    engine_update: float
    """For an update without bytes."""
    engine_mib: float
    """For each MiB of an update, and as much of the model."""
    gateway_update: float
    gateway_mib: float
    sign_of_life: float
    """Of a gateway."""
    idle_second: float
    """Of a gateway, for each connection in each second."""
    connection_kib: float
    """Memory of a gateway and of the kernel for each connection."""
    device_kib: float
    """Memory of the engine process for each connected device."""


class Use(NamedTuple):
    """How a fleet is used."""

    devices: float
    check_ins: float
    """Of a device, in a day."""
    updates: float
    """Of a device, in a day, that count."""
    tasks: float
    """Given for each update that counts."""
    task_seconds: float
    waiting: float
    """Connected devices that wait for a task, for each that has one."""
    down_mb: float
    up_mb: float
    peak: float
    """The busiest minutes' load to the day's mean."""
    load: float
    """Part of a core that may be busy at the peak."""


class Need(NamedTuple):
    """What a fleet takes at its peak, and what it moves in a day."""

    check_ins_per_s: float
    updates_per_s: float
    connected: float
    gateway_cores: float
    gateways: int
    gateway_gib: float
    engine_cores: float
    engines: int
    """More than one: a run has one engine process, so that the devices must be divided among as
    many runs."""
    engine_gib: float
    gbit_down: float
    gbit_up: float
    tb_down: float
    """Of a day."""
    tb_up: float


def needed(costs: Costs, use: Use) -> Need:
    """Return what the fleet takes."""
    check_ins = use.peak * use.devices * use.check_ins / DAY
    updates = use.peak * use.devices * use.updates / DAY
    tasks = updates * use.tasks
    connected = tasks * use.task_seconds * (1 + use.waiting)
    mib = (use.down_mb * use.tasks + use.up_mb) / 2 * MB / MIB
    gateway_ms = (
        check_ins * costs.gateway_check_in
        + updates * (costs.gateway_update + costs.gateway_mib * mib)
        + connected * (costs.sign_of_life / SIGN_OF_LIFE + costs.idle_second)
    )
    engine_ms = check_ins * costs.engine_check_in + updates * (
        costs.engine_update + costs.engine_mib * use.up_mb * MB / MIB
    )
    gateway_cores, engine_cores = 1e-3 * gateway_ms / use.load, 1e-3 * engine_ms / use.load
    gateways = max(math.ceil(gateway_cores), math.ceil(connected / PER_GATEWAY))
    engines = math.ceil(engine_cores)
    down, up = tasks * use.down_mb * MB, updates * use.up_mb * MB
    return Need(
        check_ins,
        updates,
        connected,
        gateway_cores,
        gateways,
        (connected * costs.connection_kib / 1024 + gateways * PROCESS_MIB) / 1024,
        engine_cores,
        engines,
        (connected * costs.device_kib / 1024 + engines * PROCESS_MIB) / 1024,
        8 * down / 1e9,
        8 * up / 1e9,
        down / use.peak * DAY / 1e12,
        up / use.peak * DAY / 1e12,
    )


class Prices(NamedTuple):
    """In dollars. They differ between sellers by a factor of five and more."""

    core_hour: float
    gib_hour: float
    gb_out: float
    """For each GB that leaves for the internet; what comes in is free in most places."""


def monthly(need: Need, prices: Prices) -> dict[str, float]:
    """Return dollars for 30 days. Cores and memory are paid for all the time, for the peak."""
    hours = 30 * 24
    cores = need.gateways + need.engines
    gib = need.gateway_gib + need.engine_gib
    return {
        "processors": hours * cores * prices.core_hour,
        "memory": hours * gib * prices.gib_hour,
        "bytes out": 30 * need.tb_down * 1e3 * prices.gb_out,
    }


def costs_of(small: Mapping[str, Any], large: Mapping[str, Any]) -> Costs:
    """Return the costs from two results of many_connections.py. All but the cost of bytes is the
    first one's."""
    first, second = small["results"], large["results"]
    sizes = [4 * each["settings"]["size"] / MIB for each in (small, large)]

    def line(who: str) -> tuple[float, float]:
        """Return the cost of an update without bytes, and of each MiB."""
        at = [each["rounds"][f"{who}_ms_per_update"] for each in (first, second)]
        slope = (at[1] - at[0]) / (sizes[1] - sizes[0])
        return max(0.0, at[0] - slope * sizes[0]), slope

    storm, idle = first["storm"], first["idle"]
    devices = small["settings"]["devices"]
    return Costs(
        storm["engine_ms_per_check_in"],
        storm["gateway_ms_per_check_in"],
        *line("engine"),
        *line("gateway"),
        1e-3 * idle["gateway_us_per_sign_of_life"],
        idle["silent_gateways_cpu_ms_per_s"] / devices,
        storm["gateway_kib_per_connection"] + storm["kernel_kib_per_connection"],
        storm["engine_kib_per_connection"],
    )


def save(file: Path, measured: Mapping[str, Any], costs: Costs) -> None:
    """Write the costs to a file, which keeps the others: those with TLS, or those without."""
    content = json.loads(file.read_text()) if file.exists() else {}
    part = "tls" if measured["settings"]["tls"] else "plain"
    content[part] = {"machine": measured["machine"], "costs": costs._asdict()}
    file.write_text(json.dumps(content, indent=1) + "\n")


def simulated(devices: int, goal: int, hours: int) -> list[_simulated_day.Hour]:
    """Simulate a day in a process of its own, whose memory is then the simulation's."""
    steering = {"connected": 3 * goal, "check_ins": 1.5 * devices / DAY, "longest": DAY}
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_simulated_day.simulate_day, (devices, goal, steering, hours, show_hour))


def show_hour(hour: _simulated_day.Hour) -> None:
    print(" ".join(f"{key} {value:g}" for key, value in hour._asdict().items()), flush=True)


def use_of(day: Sequence[_simulated_day.Hour], use: Use) -> Use:
    """Return the use, with what a simulated day says of check-ins and rounds."""
    hours, seen = len(day), day[-1].devices
    check_ins = sum(hour.check_ins for hour in day)
    busiest = max(day, key=lambda hour: hour.check_ins)
    later = [hour.round_seconds for hour in day if hour.rounds]
    return use._replace(
        devices=seen,
        check_ins=check_ins / seen * 24 / hours,
        updates=sum(hour.reports for hour in day) / seen * 24 / hours,
        task_seconds=sum(later) / len(later),
        peak=busiest.check_ins / (check_ins / hours),
    )


def rows_of(needs: Mapping[str, tuple[Need, dict[str, float]]]) -> list[list[str]]:
    """Return a table of what fleets take, with a column for each."""
    rows = [["at the peak", *needs]]
    for key in Need._fields:
        found = [f"{getattr(need, key):,.4g}" for need, _ in needs.values()]
        rows += [[key.replace("_", " "), *found]]
    for key in next(iter(needs.values()))[1]:
        rows += [[f"$ a month: {key}", *(f"{money[key]:,.0f}" for _, money in needs.values())]]
    return rows


def parse() -> argparse.Namespace:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    options.add_argument("--check-ins", type=float, default=2.0, help="of a device in a day")
    options.add_argument("--updates", type=float, default=0.3, help="of a device in a day")
    options.add_argument("--tasks", type=float, default=1.3, help="for each update that counts")
    options.add_argument("--task-seconds", type=float, default=260.0)
    options.add_argument("--waiting", type=float, default=1.5, help="devices for each with a task")
    options.add_argument("--down-mb", type=float, default=5.6, help="of the model")
    options.add_argument("--up-mb", type=float, default=1.4, help="of an update")
    options.add_argument("--peak", type=float, default=2.0, help="to the day's mean")
    options.add_argument("--load", type=float, default=0.6, help="of a core, at the peak")
    options.add_argument("--core-hour", type=float, default=0.04, help="$")
    options.add_argument("--gib-hour", type=float, default=0.005, help="$")
    options.add_argument("--gb-out", type=float, default=0.05, help="$")
    options.add_argument("--costs", type=Path, default=COSTS, help="a file that --save wrote")
    options.add_argument("--plain", action="store_true", help="without TLS")
    options.add_argument("--measured", type=Path, nargs=2, metavar=("SMALL", "LARGE"))
    options.add_argument("--save", type=Path, help="write the costs of --measured")
    options.add_argument("--simulate", type=int, default=0, help="hours of the first fleet's day")
    options.add_argument("--goal", type=int, default=10_000, help="of a simulated round")
    chosen = options.parse_args()
    for name, value in vars(chosen).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float) and not 0 <= each < math.inf:
                options.error(f"--{name.replace('_', '-')} {each:g}: 0 or more is expected")
    if not 0 < chosen.load <= 1:
        options.error(f"--load {chosen.load:g}: a share of a core is expected, such as 0.6")
    return chosen


def main() -> None:
    chosen = parse()
    if chosen.measured:
        small, large = (json.loads(file.read_text()) for file in chosen.measured)
        costs = costs_of(small, large)
        if chosen.save:
            save(chosen.save, small, costs)
    else:
        known = json.loads(chosen.costs.read_text())
        costs = Costs(**known["plain" if chosen.plain else "tls"]["costs"])
    use = Use(**{field: getattr(chosen, field) for field in Use._fields} | {"devices": 0.0})
    prices = Prices(chosen.core_hour, chosen.gib_hour, chosen.gb_out)
    uses = {f"{devices:.3g} devices": use._replace(devices=devices) for devices in chosen.devices}
    day: list[_simulated_day.Hour] = []
    if chosen.simulate:
        day = simulated(int(chosen.devices[0]), chosen.goal, chosen.simulate)
        uses = {f"{day[-1].devices:,} devices, simulated": use_of(day, use)} | uses
    needs = {
        name: (need := needed(costs, each), monthly(need, prices)) for name, each in uses.items()
    }
    print(measure.table(rows_of(needs)))
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(chosen).items()
        if key not in {"json", "measured"}
    }
    results: dict[str, Any] = {
        name: {"use": uses[name]._asdict(), "need": need._asdict(), "money": money}
        for name, (need, money) in needs.items()
    }
    if day:
        results["day"] = {"hours": [hour._asdict() for hour in day]}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
