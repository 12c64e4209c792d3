"""The charts of one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import FleetError

from fleetlearn_simulator.population.availability import online
from fleetlearn_simulator.results.html_page import (
    COLOURS,
    Chart,
    byte_unit,
    chart,
    numbers,
    share,
    span,
    time_unit,
)
from fleetlearn_simulator.results.loaded_run import (
    Floats,
    LoadedRun,
    Round,
    binned,
    series,
    thinned,
    traffic,
)
from fleetlearn_simulator.results.run_folder import SCENARIO
from fleetlearn_simulator.scenario.scenario import Scenario

COLOURED_CAUSES = 9
"""Causes that have their own colour. The others are shown as one."""
SAMPLE = 2000
"""Devices from which the availability of the population is estimated."""
WINDOW = 14 * 86400.0
"""Seconds at the end of a run for which their availability is computed. A day is a few points
then."""
KIND_STYLES = {
    "test": ("on the data kept back", COLOURS[3], "solid"),
    "evaluation": ("on the devices' training examples, before training", COLOURS[0], "solid"),
    "train": ("on the devices' training examples, in training", COLOURS[0], "dot"),
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


def metric_charts(run: LoadedRun) -> list[Chart]:
    """Show each metric, and how much each round changed the model, over the axis that the reader
    chooses."""
    times, sent = run.column(lambda round_: round_.time), traffic(run)
    hours, time_name = time_unit(times[-1])
    unit, byte_name = byte_unit(sent[-1])
    rounds = run.column(lambda round_: round_.round)
    titles = {
        "rounds": "round",
        "time": f"virtual time ({time_name})",
        "bytes": f"bytes sent ({byte_name})",
    }

    def lines(
        curves: dict[str, tuple[Any, Floats]], words: dict[str, tuple[str, str, str]]
    ) -> Iterator[dict[str, Any]]:
        for kind, (indices, values) in curves.items():
            chosen = thinned(values)
            at = indices[chosen]
            name, colour, dash = words[kind]
            yield {
                "type": "scatter",
                "mode": "lines" if len(chosen) > 1 else "markers",
                "name": name,
                "y": numbers(values[chosen]),
                "line": {"color": colour, "dash": dash, "width": 2},
                "meta": {
                    "rounds": numbers(rounds[at]),
                    "time": numbers(times[at] / hours),
                    "bytes": numbers(sent[at] / unit),
                },
            }

    charts = [
        chart(name, [*lines(kinds, KIND_STYLES)], y=name, meta=titles)
        for name, kinds in series(run).items()
    ]
    changed = [
        (index, row.change)
        for index, row in enumerate(run.rows)
        if row.how == "committed" and row.change
    ]
    if changed:
        indices, values = (
            np.array([index for index, _ in changed]),
            np.array([value for _, value in changed]),
        )
        data = lines({"change": (indices, values)}, {"change": ("change", COLOURS[7], "solid")})
        charts.append(chart("Change of the model in a round", [*data], y="L2 norm", meta=titles))
    return charts


def _causes(run: LoadedRun) -> list[str]:
    """Return the causes, the most frequent first."""
    return [
        cause
        for cause, _ in sorted(
            run.total(lambda round_: round_.causes).items(), key=lambda item: (-item[1], item[0])
        )
    ]


def lost_chart(run: LoadedRun) -> Chart:
    causes = _causes(run)
    rest = causes[COLOURED_CAUSES:]
    stacks = {
        cause: run.column(partial(_tasks_lost, causes=[cause]))
        for cause in causes[:COLOURED_CAUSES]
    }
    if rest:
        stacks["other"] = run.column(partial(_tasks_lost, causes=rest))
    return _stacked(run, "By round", stacks, "tasks a round", COLOURS)


def _tasks_lost(row: Round, causes: Iterable[str]) -> int:
    """Return how many of the round's tasks were lost by these causes."""
    return sum(row.causes.get(cause, 0) for cause in causes)


def lost_in_all_chart(run: LoadedRun) -> Chart:
    lost, tasks = (
        run.total(lambda round_: round_.causes),
        run.total(lambda round_: round_.assigned).total(),
    )
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
        "marker": {"color": [COLOURS[min(index, COLOURED_CAUSES)] for index in range(len(causes))]},
    }
    note = (
        "What happened to the device, and the share of all tasks."
        if causes
        else "No task was lost."
    )
    return chart(
        "In all", [bars], x="tasks", note=note, yaxis={"autorange": "reversed"}, hovermode="closest"
    )


def device_time_chart(run: LoadedRun) -> Chart:
    unit, name = time_unit(
        max((sum(round_.device_seconds.values()) for round_ in run.rows), default=0.0)
    )
    stacks = {
        "useful": run.column(lambda round_: round_.useful) / unit,
        "wasted": run.column(lambda round_: round_.wasted) / unit,
    }
    return _stacked(
        run,
        "Device time, useful and wasted",
        stacks,
        f"device-{name} a round",
        (COLOURS[2], COLOURS[3]),
    )


def participation_chart(run: LoadedRun) -> Chart:
    """Show the tiers' shares of the population, of the tasks and of the accepted reports."""
    tiers: dict[str, Any] = run.scenario.get("tiers", {})
    assigned, accepted = (
        run.total(lambda round_: round_.assigned),
        run.total(lambda round_: round_.accepted),
    )
    count = max([len(tiers), *(number + 1 for number in (*assigned, *accepted))])
    names = [*tiers, *(f"tier {number}" for number in range(len(tiers), count))]
    weights = [float(tiers[name].get("share", 1.0)) if name in tiers else 0.0 for name in names]
    shown = {
        "of the population": (weights, COLOURS[7]),
        "of the tasks": ([float(assigned[number]) for number in range(count)], COLOURS[5]),
        "of the accepted reports": (
            [float(accepted[number]) for number in range(count)],
            COLOURS[0],
        ),
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


def connected_chart(run: LoadedRun) -> Chart:
    """Show the devices connected at the end of each round, and the devices online, computed from
    the availability."""
    times, connected = (
        run.column(lambda round_: round_.time),
        run.column(lambda round_: round_.connected),
    )
    unit, name = time_unit(times[-1])
    chosen = thinned(connected)
    data = [_line("connected", times[chosen] / unit, connected[chosen], COLOURS[0])]
    note = ""
    try:
        scenario = Scenario.load_of_run(run.folder / SCENARIO)
        population = scenario.population.size
        devices = np.arange(min(SAMPLE, population)) * population // min(SAMPLE, population)
        at = np.linspace(max(0.0, times[-1] - WINDOW), times[-1], 240)
        there = np.array([np.mean(online(scenario, devices, float(moment))) for moment in at])
        data.append(_line("online", at / unit, population * there, COLOURS[5]))
        notes = [f"in the last {span(WINDOW)}"] if times[-1] > WINDOW else []
        if population > SAMPLE:
            error = population / sqrt(SAMPLE) * float(np.sqrt(there * (1 - there)).max())
            notes.append(
                f"from {SAMPLE:,} of the devices, with a standard error of at most {error:,.0f}"
            )
        note = f"Online: {'; '.join(notes)}." if notes else ""
    except FleetError:
        pass  # files that the scenario names are not here, and the logs do not say who was online
    many = len(data) > 1 and max(data[1]["y"]) > 20 * max(1.0, float(connected.max()))
    axis = {"type": "log", "dtick": 1} if many else {"rangemode": "tozero"}
    return chart(
        "Devices online and connected", data, f"virtual time ({name})", "devices", note, yaxis=axis
    )


def reports_chart(run: LoadedRun) -> Chart:
    def counted(row: Round, partial: bool) -> float:
        return (
            0 if row.how != "committed" else row.partial if partial else row.reports - row.partial
        )

    stacks = {
        "complete": run.column(lambda row: counted(row, False)),
        "partial": run.column(lambda row: counted(row, True)),
        "of an abandoned round": run.column(
            lambda round_: round_.reports if round_.how != "committed" else 0
        ),
    }
    return _stacked(run, "Reports", stacks, "reports a round", (COLOURS[0], COLOURS[1], COLOURS[7]))


def lengths_chart(run: LoadedRun) -> Chart:
    lengths = run.column(lambda round_: round_.seconds)
    unit, name = time_unit(float(lengths.max()))
    chosen = thinned(lengths)
    data = [
        _line(
            "length",
            run.column(lambda round_: round_.round)[chosen],
            lengths[chosen] / unit,
            COLOURS[8],
        )
    ]
    return chart("Length of a round", data, "round", name, yaxis={"rangemode": "tozero"})


def _line(name: str, x: Floats, y: Floats, colour: str) -> dict[str, Any]:
    mode = "lines" if len(x) > 1 else "markers"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": numbers(x),
        "y": numbers(y),
        "line": {"color": colour},
    }


def _stacked(
    run: LoadedRun, title: str, stacks: dict[str, Floats], y: str, colours: tuple[str, ...]
) -> Chart:
    """Show stacked bars for each round. If there are many rounds, each bar is a mean over
    several."""
    rounds, width = binned(run.column(lambda round_: round_.round))
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
