"""Pace steering in the simulator: check-ins a second over a day, how full the rounds are, and what
it costs.

A fleet that comes and goes with the time of day, in the four time zones of one continent; a tenth
of its tasks is lost. First with pace steering, for a day of virtual time, and asynchronously; then
without it, with as many devices connected and with all that are online. What the devices train does
not matter here: their updates are zeros, so that the CPU is the engine's and the fleet's.
docs/studies/pace.md shows the figures; --figure draws its figure.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import _servers
import numpy as np
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.population.availability import online
from fleetlearn_simulator.population.traits import Ids, Ints
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Job, RoundInputs, local_settings
from fleetlearn_simulator.training.trained_devices import (
    PendingResults,
    ResultReader,
    TrainedDevices,
)

DAY = 86400
EXAMPLES, BATCH = 50, 10
PARAMETERS = 16
ZONES = [{"hours": hours, "share": share} for hours, share in ((-8, 2), (-7, 1), (-6, 3), (-5, 4))]
SETTLED = 3 * 3600
"""Seconds after which the first check-ins of all devices, within an hour, are over."""


class Alike:
    """The data of devices that all have as many examples."""

    def examples(self, devices: Ids) -> Ints:
        return np.full(len(devices), EXAMPLES)


class Nothing:
    """A back end whose devices change nothing."""

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        count = len(jobs)
        steps = np.full(count, EXAMPLES // BATCH)
        zeros = np.zeros(count)
        return TrainedDevices(
            np.zeros((count, len(inputs.model)), np.float32),
            {},
            np.full(count, EXAMPLES),
            steps,
            steps * BATCH,
            np.ones(count, np.bool_),
            zeros,
            zeros,
            np.zeros(count, np.bool_),
        )

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        pending = PendingResults(lambda pending, index: None)
        pending.put(range(len(jobs)), self.train(inputs, jobs))
        return pending.read

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        return []

    evaluate_personal = evaluate

    def close(self) -> None: ...


class Way(NamedTuple):
    """One way to run the day."""

    pace: dict[str, Any]
    connected: int | None = None
    """Without pace steering: ``population.connected``."""
    participation: str = "synchronous"


def scenario(bundle: Path, devices: int, goal: int, way: Way) -> Scenario:
    """Return a day's scenario: tasks of some minutes, on devices of different speeds."""
    asynchronous = way.participation == "asynchronous"
    size = {"concurrency": goal} if asynchronous else {"over_selection": 1.3}
    plan = {
        "bundle": str(bundle),
        "recipe": "fedbuff" if asynchronous else "fedavg",
        "local": {"epochs": 1, "batch_size": BATCH, "evaluate": False},
        "round": {"goal": goal // 10 if asynchronous else goal, "deadline": 1800.0, **size},
        "pace": way.pace,
        "stop": {"rounds": 10**9},
    }
    population = {"size": devices} | ({} if way.connected is None else {"connected": way.connected})
    tables = {
        "name": "pace",
        "seed": 1,
        "plan": plan,
        "population": population,
        "compute": {"step_seconds": 30.0},
        "tiers": {"device": {"spread": 0.5}},
        "availability": {"kind": "diurnal", "zones": ZONES},
        "failures": {"crash": 0.1},
        "service": {
            "max_connections": 20_000 + max(way.connected or 0, way.pace.get("connected", 0))
        },
    }
    return Scenario.read(tables, bundle.parent)


class Day(NamedTuple):
    """What came of a day."""

    check_ins: list[int]
    """In each second."""
    rounds: list[int]
    """Reports of each committed round."""
    seconds: list[float]
    """How long each of them took."""
    most_connected: int
    devices: int
    """Different devices that had a task."""
    cpu: float
    peak_mib: float
    online: list[float]
    """Share of the devices that are online, at each hour, in a sample."""


def simulate(bundle: Path, devices: int, goal: int, way: Way, seconds: int) -> Day:
    """Simulate the day. The peak memory is the whole process's: call this in a new process."""
    run, opened = scenario(bundle, devices, goal, way), open_bundle(bundle)
    begin = time.process_time()
    local = local_settings(run.plan, opened)
    fleet = Fleet(run, [opened], Alike(), Nothing(), local, lambda lines: None)  # type: ignore[arg-type]
    counts, most = np.zeros(seconds + 1, np.int64), 0

    def checked_in(device: int) -> None:
        nonlocal most
        counts[min(int(fleet.now), seconds)] += 1
        most = max(most, len(fleet.connections.connected))

    if fleet.returns is not None:
        fleet.returns.checked_in = checked_in
    while fleet.now < seconds and fleet.advance():
        if fleet.returns is None:
            most = max(most, len(fleet.connections.connected))
    cpu = time.process_time() - begin
    rows = [row for row in fleet.history if row["how"] == "committed"]
    sample = np.arange(min(devices, 10_000))
    return Day(
        counts[:seconds].tolist(),
        [row["reports"] for row in rows],
        [row["seconds"] for row in rows],
        most,
        len(fleet.tasks.has_bundle),
        cpu,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        [float(online(run, sample, 3600.0 * hour).mean()) for hour in range(25)],
    )


WAYS = {
    "pace steering": (Way({"connected": 3}), 24),
    "pace steering, asynchronous": (Way({"connected": 3}, participation="asynchronous"), 4),
    "as many connected, drawn": (Way({}, connected=3), 4),
    "all connected that are online": (Way({}, connected=1000), 1),
}
"""Way -> how it is run, with numbers of devices in thousandths of the population, and the hours
that it is run for."""
COLUMNS = (
    "way",
    "hours",
    "most connected",
    "rounds",
    "full",
    "s a round",
    "devices with a task",
    "check-ins/s",
    "most in a second",
    "CPU-s per hour",
    "peak MiB",
)


def run(bundle: Path, devices: int, name: str, hours: float) -> Day:
    """Simulate one of the ways in a new process."""
    way, _ = WAYS[name]
    count = devices // 1000
    pace = {key: value * count for key, value in way.pace.items()}
    way = way._replace(
        pace=pace, connected=None if way.connected is None else way.connected * count
    )
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(simulate, (bundle, devices, count, way, round(hours * 3600)))


def row(name: str, hours: float, day: Day) -> tuple[str, ...]:
    """Return a row of the table. Check-ins are counted after the first ones of all devices."""
    full = sum(reports == max(day.rounds) for reports in day.rounds) / len(day.rounds)
    counts = np.array(day.check_ins[SETTLED:])
    return (
        name,
        f"{hours:g}",
        f"{day.most_connected:,}",
        f"{len(day.rounds):,}",
        f"{full:.1%}",
        f"{np.mean(day.seconds):.0f}",
        f"{day.devices:,}",
        *((f"{counts.mean():.1f}", f"{counts.max()}") if counts.any() else ("", "")),
        f"{day.cpu / hours:.1f}",
        f"{day.peak_mib:.0f}",
    )


def draw(day: Day, file: Path) -> None:
    """Draw check-ins a second, and how many devices are online."""
    import matplotlib as mpl
    from fleetlearn_simulator.results.html_page import COLOURS
    from matplotlib.figure import Figure

    minutes = np.array(day.check_ins).reshape(-1, 60)
    hours = np.arange(len(minutes)) / 60
    style: Any = {"font.size": 8, "axes.spines.top": False, "axes.grid": True, "grid.alpha": 0.3}
    file_settings: Any = {"svg.hashsalt": "pace", "svg.fonttype": "path"}
    with mpl.rc_context(style | file_settings):
        figure = Figure(figsize=(7, 3))
        axes = figure.subplots()
        axes.fill_between(
            hours,
            minutes.max(axis=1),
            color=COLOURS[0],
            alpha=0.25,
            lw=0,
            label="most in one second",
        )
        axes.plot(hours, minutes.mean(axis=1), color=COLOURS[0], lw=1, label="mean of a minute")
        axes.set(
            xlabel="hours of virtual time",
            ylabel="check-ins a second",
            xlim=(0, hours[-1]),
            ylim=(0, None),
        )
        axes.set_xticks(range(0, 25, 3))
        other = axes.twinx()
        share = 100 * np.array(day.online)
        other.plot(
            range(len(share)), share, color=COLOURS[1], lw=1, ls="--", label="devices online, %"
        )
        other.set(ylabel="devices online, %", ylim=(0, None))
        other.grid(visible=False)
        lines = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        axes.legend(handles=lines, loc="upper right", frameon=False)
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--devices", type=int, default=1_000_000, help="at least 10,000 (default: 1,000,000)"
    )
    options.add_argument("--scale", type=float, default=1.0, help="times the usual hours")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument(
        "--figure", type=Path, help="the SVG file to write, of the first way (whole minutes)"
    )
    chosen = options.parse_args()
    days: dict[str, tuple[float, Day]] = {}
    with measure.scratch() as folder:
        bundle = _servers.write_placeholder_bundle(folder / "bundle", PARAMETERS)
        for name in chosen.ways:
            hours = chosen.scale * WAYS[name][1]
            begin = time.monotonic()
            days[name] = hours, run(bundle, chosen.devices, name, hours)
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
            measure.write_json(
                chosen.json,
                {"devices": chosen.devices, "scale": chosen.scale},
                {name: day._asdict() for name, (_, day) in days.items()},
            )
    print(measure.table([COLUMNS, *(row(name, *found) for name, found in days.items())]))
    if chosen.figure:
        draw(days[chosen.ways[0]][1], chosen.figure)


if __name__ == "__main__":
    main()
