"""report.html: one run in charts and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import FleetError

from fleetlearn_simulator.population.availability import online
from fleetlearn_simulator.results import html_page as page
from fleetlearn_simulator.results.html_page import (
    ABSENT,
    COLOURS,
    Chart,
    Part,
    chart,
    listed,
    numbers,
    share,
    size,
    span,
)
from fleetlearn_simulator.results.loaded_run import Floats, Round, Run, binned, read_run, series, thinned, traffic
from fleetlearn_simulator.results.run_folder import ROUNDS, SCENARIO
from fleetlearn_simulator.results.run_statistics import wasted_share
from fleetlearn_simulator.scenario.scenario import Scenario

REPORT = "report.html"
LAST_ROUNDS = 20
"""Rounds in the table."""
COLOURED_CAUSES = 9
"""Causes that have a colour of their own. The others are shown as one."""
SAMPLE = 2000
"""Devices from which the availability of the population is estimated."""
WINDOW = 14 * 86400.0
"""Seconds at the end of a run for which their availability is computed. A day is a few points then."""
KINDS = {
    "test": ("on the data kept back", COLOURS[3], "solid"),
    "evaluation": ("on the devices, before training", COLOURS[0], "solid"),
    "train": ("on the devices, in training", COLOURS[0], "dot"),
}
MEANINGS = {
    "download": "vanished while downloading",
    "train": "vanished while training",
    "upload": "vanished while uploading",
    "crash": "died while training",
    "offline": "went offline",
    "outage": "its region had no network",
    "straggler": "was slow, and its work discarded",
    "out-of-time": "had no time left",
}
"""What the causes on devices mean. Other causes are the coordinator's."""


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write a page about a run that is finished or not. Default for ``file``: ``report.html`` in its folder.

    Raises SimulatorError if there is no run, or if the page cannot be written.
    """
    run = read_run(folder)
    return page.write_page(file or folder / REPORT, f"{run.name} · fleetlearn", _parts(run))


def _parts(run: Run) -> Iterator[Part]:
    yield Part("title", run.name)
    yield from (Part("note", line) for line in _subtitle(run))
    if not run.rows:
        yield Part("text", f"No round has ended yet: {ROUNDS} is empty.")
    else:
        yield Part("tiles", list(_tiles(run)))
        yield Part("section", "Metrics")
        yield Part("switch")
        yield Part("charts", _metrics(run))
        yield Part("section", "Where devices were lost")
        yield Part("note", f"As the coordinator saw it: {listed(run.total(lambda row: row.dropped))}.")
        yield Part("charts", [_lost(run), _lost_in_all(run)])
        yield Part("section", "Device time and participation")
        yield Part("charts", [_device_time(run), _participation(run)])
        yield Part("section", "Rounds")
        yield Part("charts", [_connected(run), _reports(run), _lengths(run)])
        yield Part("section", "The last rounds")
        yield _last(run)
    if run.scenario:
        yield Part("folded", ("The scenario, as it was run", (run.folder / SCENARIO).read_text("utf-8")))


def _subtitle(run: Run) -> Iterator[str]:
    tables = run.scenario
    plan = tables.get("plan", {})
    population = tables.get("population", {}).get("size")
    words = [
        f"seed {tables['seed']}" if "seed" in tables else "",
        f"{population:,} devices" if isinstance(population, int) else "",
        f"tiers {', '.join(tables['tiers'])}" if len(tables.get("tiers", {})) > 1 else "",
        f"data {tables['data']['kind']}" if "data" in tables else "",
        f"availability {tables['availability']['kind']}" if "availability" in tables else "",
        f"recipe {plan['recipe']}" if "recipe" in plan else "",
        f"goal of {plan['round']['goal']:,} reports" if "goal" in plan.get("round", {}) else "",
        f"bundle {Path(plan['bundle']).name}" if "bundle" in plan else "",
    ]
    state = run.state if run.summary else f"not finished: as far as round {run.rows[-1].round if run.rows else 0}"
    backend = f"back end {run.summary['backend']} ({run.summary['why']})" if "why" in run.summary else ""
    yield from filter(None, (" · ".join(filter(None, line)) for line in (words, (state, backend))))


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    committed = run.committed
    yield "rounds", f"{len(committed):,}", f"{len(run.rows) - len(committed):,} abandoned"
    yield "virtual time", span(run.rows[-1].time), f"median round {span(float(np.median(_seconds(run))))}"
    reports = sum(row.reports for row in committed)
    yield "reports", f"{reports:,}", f"{sum(row.partial for row in committed):,} partial"
    tasks, lost = run.total(lambda row: row.assigned).total(), run.total(lambda row: row.causes).total()
    yield "tasks lost", share(lost, tasks), f"{lost:,} of {tasks:,}"
    seconds = run.total(lambda row: row.device_seconds).total()
    yield "device time wasted", f"{100 * wasted_share(run):.3g} %" if seconds else ABSENT, f"of {span(seconds)}"
    sent = run.total(lambda row: row.bytes)
    yield "bytes sent", size(sent.total()), f"{size(sent['down'])} down, {size(sent['up'])} up"
    if "devices" in run.summary:
        population = run.scenario.get("population", {}).get("size", 0)
        yield (
            "devices with a task",
            f"{run.summary['devices']:,}",
            f"{share(run.summary['devices'], population)} of all",
        )
    for name, kinds in series(run).items():
        kind = next(iter(kinds))
        yield name, f"{kinds[kind][1][-1]:.4g}", KINDS[kind][0]


def _metrics(run: Run) -> list[Chart]:
    """Show each metric, and how much each round changed the model, over the axis that the reader chooses."""
    times, sent = run.column(lambda row: row.time), traffic(run)
    hours, time_name = page.time_unit(times[-1])
    unit, byte_name = page.byte_unit(sent[-1])
    rounds = run.column(lambda row: row.round)
    titles = {"rounds": "round", "time": f"virtual time ({time_name})", "bytes": f"bytes sent ({byte_name})"}

    def lines(found: dict[str, tuple[Any, Floats]], words: dict[str, tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
        for kind, (places, values) in found.items():
            kept = thinned(values)
            at = places[kept]
            name, colour, dash = words[kind]
            yield {
                "type": "scatter",
                "mode": "lines" if len(kept) > 1 else "markers",
                "name": name,
                "y": numbers(values[kept]),
                "line": {"color": colour, "dash": dash, "width": 2},
                "meta": {
                    "rounds": numbers(rounds[at]),
                    "time": numbers(times[at] / hours),
                    "bytes": numbers(sent[at] / unit),
                },
            }

    charts = [chart(name, [*lines(kinds, KINDS)], y=name, meta=titles) for name, kinds in series(run).items()]
    changed = [(place, row.change) for place, row in enumerate(run.rows) if row.how == "committed" and row.change]
    if changed:
        places, values = np.array([place for place, _ in changed]), np.array([value for _, value in changed])
        data = lines({"change": (places, values)}, {"change": ("change", COLOURS[7], "solid")})
        charts.append(chart("Change of the model in a round", [*data], y="L2 norm", meta=titles))
    return charts


def _causes(run: Run) -> list[str]:
    """Return the causes, the most frequent first."""
    return [
        cause for cause, _ in sorted(run.total(lambda row: row.causes).items(), key=lambda item: (-item[1], item[0]))
    ]


def _lost(run: Run) -> Chart:
    causes = _causes(run)
    rest = causes[COLOURED_CAUSES:]
    stacks = {cause: run.column(partial(_tasks_lost, causes=[cause])) for cause in causes[:COLOURED_CAUSES]}
    if rest:
        stacks["other"] = run.column(partial(_tasks_lost, causes=rest))
    return _stacked(run, "By round", stacks, "tasks a round", COLOURS)


def _tasks_lost(row: Round, causes: Iterable[str]) -> int:
    """Return how many of the round's tasks were lost by these causes."""
    return sum(row.causes.get(cause, 0) for cause in causes)


def _lost_in_all(run: Run) -> Chart:
    lost, tasks = run.total(lambda row: row.causes), run.total(lambda row: row.assigned).total()
    causes = _causes(run)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": causes,
        "x": [lost[cause] for cause in causes],
        "text": [share(lost[cause], tasks) for cause in causes],
        "hovertext": [MEANINGS.get(cause, "as the coordinator has it") for cause in causes],
        "hoverinfo": "x+text",
        "textposition": "auto",
        "cliponaxis": False,
        "marker": {"color": [COLOURS[min(place, COLOURED_CAUSES)] for place in range(len(causes))]},
    }
    note = "What happened to the device, and the share of all tasks." if causes else "No task was lost."
    return chart("In all", [bars], x="tasks", note=note, yaxis={"autorange": "reversed"}, hovermode="closest")


def _device_time(run: Run) -> Chart:
    unit, name = page.time_unit(max((sum(row.device_seconds.values()) for row in run.rows), default=0.0))
    stacks = {
        "useful": run.column(lambda row: row.useful) / unit,
        "wasted": run.column(lambda row: row.wasted) / unit,
    }
    return _stacked(run, "Device time, useful and wasted", stacks, f"device-{name} a round", (COLOURS[2], COLOURS[3]))


def _participation(run: Run) -> Chart:
    """Show the tiers' shares of the population, of the tasks and of the accepted reports."""
    tiers: dict[str, Any] = run.scenario.get("tiers", {})
    assigned, accepted = run.total(lambda row: row.assigned), run.total(lambda row: row.accepted)
    count = max([len(tiers), *(number + 1 for number in (*assigned, *accepted))])
    names = [*tiers, *(f"tier {number}" for number in range(len(tiers), count))]
    weights = [float(tiers[name].get("share", 1.0)) if name in tiers else 0.0 for name in names]
    shown = {
        "of the population": (weights, COLOURS[7]),
        "of the tasks": ([float(assigned[number]) for number in range(count)], COLOURS[5]),
        "of the accepted reports": ([float(accepted[number]) for number in range(count)], COLOURS[0]),
    }
    data = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": numbers(100 * value / (sum(values) or 1.0) for value in values),
            "marker": {"color": colour},
        }
        for name, (values, colour) in shown.items()
        if any(values)
    ]
    return chart("Participation by tier", data, y="per cent", barmode="group")


def _connected(run: Run) -> Chart:
    """Show the devices connected at the end of each round, and the devices online, computed from the availability."""
    times, connected = run.column(lambda row: row.time), run.column(lambda row: row.connected)
    unit, name = page.time_unit(times[-1])
    kept = thinned(connected)
    data = [_line("connected", times[kept] / unit, connected[kept], COLOURS[0])]
    note = ""
    try:
        scenario = Scenario.load(run.folder / SCENARIO)
        population = scenario.population.size
        devices = np.arange(min(SAMPLE, population)) * population // min(SAMPLE, population)
        at = np.linspace(max(0.0, times[-1] - WINDOW), times[-1], 240)
        there = np.array([np.mean(online(scenario, devices, float(moment))) for moment in at])
        data.append(_line("online", at / unit, population * there, COLOURS[5]))
        notes = [f"in the last {span(WINDOW)}"] if times[-1] > WINDOW else []
        if population > SAMPLE:
            error = population / sqrt(SAMPLE) * float(np.sqrt(there * (1 - there)).max())
            notes.append(f"from {SAMPLE:,} of the devices, with a standard error of at most {error:,.0f}")
        note = f"Online: {'; '.join(notes)}." if notes else ""
    except FleetError:
        pass  # files that the scenario names are not here, and the logs do not say who was online
    many = len(data) > 1 and max(data[1]["y"]) > 20 * max(1.0, float(connected.max()))
    axis = {"type": "log", "dtick": 1} if many else {"rangemode": "tozero"}
    return chart("Devices online and connected", data, f"virtual time ({name})", "devices", note, yaxis=axis)


def _reports(run: Run) -> Chart:
    def counted(row: Round, partial: bool) -> float:
        return 0 if row.how != "committed" else row.partial if partial else row.reports - row.partial

    stacks = {
        "complete": run.column(lambda row: counted(row, False)),
        "partial": run.column(lambda row: counted(row, True)),
        "of an abandoned round": run.column(lambda row: row.reports if row.how != "committed" else 0),
    }
    return _stacked(run, "Reports", stacks, "reports a round", (COLOURS[0], COLOURS[1], COLOURS[7]))


def _lengths(run: Run) -> Chart:
    lengths = _seconds(run)
    unit, name = page.time_unit(float(lengths.max()))
    kept = thinned(lengths)
    data = [_line("length", run.column(lambda row: row.round)[kept], lengths[kept] / unit, COLOURS[8])]
    return chart("Length of a round", data, "round", name, yaxis={"rangemode": "tozero"})


def _seconds(run: Run) -> Floats:
    return run.column(lambda row: row.seconds)


def _line(name: str, x: Floats, y: Floats, colour: str) -> dict[str, Any]:
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": numbers(x), "y": numbers(y), "line": {"color": colour}}


def _stacked(run: Run, title: str, stacks: dict[str, Floats], y: str, colours: tuple[str, ...]) -> Chart:
    """Show stacked bars for each round. If there are many rounds, each bar is a mean over several."""
    rounds, width = binned(run.column(lambda row: row.round))
    data = [
        {
            "type": "bar",
            "name": name,
            "x": numbers(rounds),
            "y": numbers(binned(values)[0]),
            "width": 0.9 if width == 1 and len(rounds) < 60 else width,
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for (name, values), colour in zip(stacks.items(), (*colours, *colours), strict=False)
        if values.any()
    ]
    note = f"Means of {width:,} rounds at a time." if width > 1 else ""
    return chart(title, data, "round", y, note, barmode="stack", showlegend=True)


def _last(run: Run) -> Part:
    """Return a table of the last rounds."""
    columns = [(name, kind) for name, kinds in series(run).items() for kind in kinds]
    columns = [(name, kind) for name, kind in columns if kind != "train" or (name, "evaluation") not in columns]
    headers = ["round", "outcome", "virtual time", "length", "connected", "tasks", "reports", "partial"]
    headers += [f"{name} ({kind})" for name, kind in columns]
    headers += ["change", "wasted", "lost"]
    rows = []
    for row in run.rows[-LAST_ROUNDS:]:
        cells = [str(row.round), row.how, span(row.time), span(row.seconds), f"{row.connected:,}"]
        cells += [f"{sum(row.assigned.values()):,}", f"{row.reports:,}", f"{row.partial:,}"]
        means = [getattr(row, kind).get(name) for name, kind in columns]
        cells += [ABSENT if value is None else f"{value:.4g}" for value in means]
        cells += [ABSENT if row.change is None or row.how != "committed" else f"{row.change:.3g}"]
        cells += [share(row.wasted, row.wasted + row.useful), listed(row.causes)]
        rows.append(cells)
    return page.table(headers, rows)
