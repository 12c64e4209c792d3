"""Runs side by side: a table, and a page of figures. A sweep's runs are told apart by what was swept, and those that
differ in their seeds alone are one line, with their mean and spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fleetlearn_simulator import page
from fleetlearn_simulator.page import ABSENT, COLOURS, Chart, chart, numbers
from fleetlearn_simulator.results import (
    MEASURED,
    Floats,
    Metrics,
    Run,
    find_runs,
    flat,
    read_run,
    series,
    swept_keys,
    thinned,
    traffic,
)

DASHES = ("solid", "dash", "dot", "dashdot")
NOTES = {
    "test": "On the data kept back.",
    "evaluation": "On the devices, before training.",
    "train": "On the devices, in training.",
}


class Group(NamedTuple):
    """Runs that differ in their seeds alone."""

    label: str
    runs: list[Run]
    metrics: list[Metrics]
    """Of each run."""


def comparison_table(folders: Sequence[Path]) -> Table:
    """The runs as a table for the terminal; what all have in common stands under it, once.

    Raises SimulatorError where a folder holds none.
    """
    headers, rows = _table(read_groups(folders))
    common = [
        len(rows) > 1 and place > 0 and len(set(cells)) == 1 for place, cells in enumerate(zip(*rows, strict=True))
    ]
    words = [f"{header} {cell}" for header, cell, same in zip(headers, rows[0], common, strict=True) if same]
    shown = Table(caption=f"all: {', '.join(words)}" if words else None)
    for place, header in enumerate(headers):
        if not common[place]:
            shown.add_column(header, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(cell for cell, same in zip(row, common, strict=True) if not same))
    return shown


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write the page ``output``. Each folder is a run's, or one that holds runs, as a sweep's does.

    Raises SimulatorError where a folder holds no run, or the page cannot be written.
    """
    return page.write_page(output, "Comparison · fleetlearn", _parts(read_groups(folders)))


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """One group for each run, and of a sweep, for each of its settings."""
    groups: list[tuple[str, list[Run]]] = []
    for folder in folders:
        found = find_runs(folder)
        runs = list(map(read_run, found))
        if found == [folder]:
            groups.append((runs[0].name, runs))
            continue
        keys = swept_keys(runs)
        words = {key: key if _ambiguous(key, keys) else key.rpartition(".")[2] for key in keys}
        prefix = f"{folder.name}: " if len(folders) > 1 else ""
        settings: dict[str, list[Run]] = {}
        for run in runs:
            table = flat(run.scenario)
            label = ", ".join(f"{words[key]} = {_value(table.get(key))}" for key in keys) or runs[0].name
            settings.setdefault(prefix + label, []).append(run)
        groups += settings.items()
    labels = [label for label, _ in groups]
    return [
        Group(f"{label} ({runs[0].folder})" if labels.count(label) > 1 else label, runs, list(map(series, runs)))
        for label, runs in groups
    ]


def kinds_of(groups: Sequence[Group]) -> dict[str, str]:
    """Metric -> the kind that is shown: of those that every run with the metric has, the first, or the first of any."""
    found = [metrics for group in groups for metrics in group.metrics]
    kinds = {}
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        sets = [set(metrics[name]) for metrics in found if name in metrics]
        common = set.intersection(*sets) or set.union(*sets)
        kinds[name] = next(kind for kind in MEASURED if kind in common)
    return kinds


def _ambiguous(key: str, keys: Sequence[str]) -> bool:
    return sum(other.rpartition(".")[2] == key.rpartition(".")[2] for other in keys) > 1


def _value(value: object) -> str:
    return Path(value).name if isinstance(value, str) and "/" in value else ABSENT if value is None else str(value)


def _table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    kinds = kinds_of(groups)
    several = any(len(group.runs) > 1 for group in groups)
    headers = ["run", *(["seeds"] if several else []), "rounds", "abandoned", "virtual time"]
    headers += [f"{name} ({kind})" for name, kind in kinds.items()]
    headers += ["tasks lost", "time wasted", "bytes sent", "state"]
    rows = []
    for group in groups:
        cells = [group.label, *([str(len(group.runs))] if several else [])]
        cells.append(_mean(group, lambda run: len(run.committed)))
        cells.append(_mean(group, lambda run: len(run.rows) - len(run.committed)))
        cells.append(page.span(float(np.mean([run.rows[-1].time if run.rows else 0.0 for run in group.runs]))))
        for name, kind in kinds.items():
            cells.append(_spread([run[name][kind][1][-1] for run in group.metrics if kind in run.get(name, {})]))
        cells.append(f"{_spread([100 * lost_share(run) for run in group.runs], 3)} %")
        cells.append(f"{_spread([100 * wasted_share(run) for run in group.runs], 3)} %")
        cells.append(page.size(float(np.mean([run.total(lambda row: row.bytes).total() for run in group.runs]))))
        cells.append(", ".join(dict.fromkeys(run.state for run in group.runs)))
        rows.append(cells)
    return headers, rows


def _mean(group: Group, value: Callable[[Run], float]) -> str:
    mean = float(np.mean([value(run) for run in group.runs]))
    return f"{mean:,.0f}" if mean.is_integer() else f"{mean:,.1f}"


def _spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation (of the sample)."""
    if not values:
        return ABSENT
    mean = f"{np.mean(values):.{digits}g}"
    return f"{mean} ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else mean


def lost_share(run: Run) -> float:
    """Of the tasks, those that came to nothing."""
    tasks = run.total(lambda row: row.assigned).total()
    return run.total(lambda row: row.causes).total() / tasks if tasks else 0.0


def wasted_share(run: Run) -> float:
    """Of the devices' time on tasks, what came to nothing."""
    seconds = run.total(lambda row: row.device_seconds)
    return float(seconds["wasted"] / seconds.total()) if seconds.total() else 0.0


def _parts(groups: list[Group]) -> Iterator[str | list[Chart]]:
    count = sum(len(group.runs) for group in groups)
    yield f'<h1>Comparison</h1><p class="soft">{count:,} runs, {len(groups):,} lines</p>'
    headers, rows = _table(groups)
    yield page.table(headers, rows)
    if any(len(group.runs) > 1 for group in groups):
        yield '<p class="soft">Mean ± standard deviation over seeds. Lines are means, bands one standard deviation.</p>'
    yield f"<h2>Metrics</h2>{page.SWITCH}"
    yield _metrics(groups)
    yield "<h2>Work</h2>"
    yield [
        _bars(groups, "Tasks lost", lambda run: 100 * lost_share(run), "per cent of the tasks"),
        _bars(groups, "Device time wasted", lambda run: 100 * wasted_share(run), "per cent of the time"),
        *_times(groups),
    ]


def _metrics(groups: Sequence[Group]) -> list[Chart]:
    runs = [run for group in groups for run in group.runs if run.rows]
    time_unit, time_name = page.time_unit(max((run.rows[-1].time for run in runs), default=0.0))
    byte_unit, byte_name = page.byte_unit(max((float(traffic(run)[-1]) for run in runs), default=0.0))
    titles = {"rounds": "round", "time": f"virtual time ({time_name})", "bytes": f"bytes sent ({byte_name})"}
    charts = []
    for name, kind in kinds_of(groups).items():
        bands, means = [], []
        for number, group in enumerate(groups):
            lines = []
            for run, metrics in zip(group.runs, group.metrics, strict=True):
                if kind in metrics.get(name, {}):
                    places, values = metrics[name][kind]
                    rounds, times = run.column(lambda row: row.round), run.column(lambda row: row.time)
                    axes = (rounds, times / time_unit, traffic(run) / byte_unit)
                    lines.append(np.stack([values, *(axis[places] for axis in axes)]))
            if lines:
                mean, band = _traces(group.label, lines, number)
                means.append(mean)
                bands += [band] if len(lines) > 1 else []
        data = [*bands, *means]  # the lines above the bands
        height = min(720, 300 + 28 * len(means))  # the legend takes up to half of it
        charts.append(chart(name, data, y=name, note=NOTES[kind], meta=titles, showlegend=True, height=height))
    return charts


def _traces(label: str, lines: Sequence[Floats], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mean of lines (4, points: value, round, time, bytes), point by point, as far as all go; and the spread."""
    points = np.stack([line[:, : min(line.shape[1] for line in lines)] for line in lines])
    points = points[:, :, thinned(points[:, 0].mean(axis=0), 400)]
    value, *axes = points.mean(axis=0)
    spread = points[:, 0].std(axis=0, ddof=1) if len(lines) > 1 else np.zeros_like(value)
    colour, names = COLOURS[number % len(COLOURS)], ("rounds", "time", "bytes")
    mean = {
        "type": "scatter",
        "mode": "lines" if len(value) > 1 else "markers",
        "name": label,
        "legendgroup": f"g{number}",
        "y": numbers(value),
        "line": {"color": colour, "dash": DASHES[number // len(COLOURS) % len(DASHES)], "width": 2},
        "meta": {name: numbers(axis) for name, axis in zip(names, axes, strict=True)},
    }
    band = {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": f"g{number}",
        "showlegend": False,
        "hoverinfo": "skip",
        "y": numbers([*(value + spread), *(value - spread)[::-1]]),
        "fill": "toself",
        "fillcolor": f"{colour}2e",
        "line": {"width": 0},
        "meta": {name: numbers([*axis, *axis[::-1]]) for name, axis in zip(names, axes, strict=True)},
    }
    return mean, band


def _times(groups: Sequence[Group]) -> Iterator[Chart]:
    """How long the runs took, and what they sent."""
    times = [run.rows[-1].time for group in groups for run in group.runs if run.rows]
    unit, name = page.time_unit(max(times, default=0.0))
    yield _bars(groups, "Virtual time", lambda run: run.rows[-1].time / unit if run.rows else 0.0, name)
    most = max((run.total(lambda row: row.bytes).total() for group in groups for run in group.runs), default=0)
    scale, word = page.byte_unit(most)
    yield _bars(groups, "Bytes sent", lambda run: run.total(lambda row: row.bytes).total() / scale, word)


def _bars(groups: Sequence[Group], title: str, value: Callable[[Run], float], unit: str) -> Chart:
    values = [[value(run) for run in group.runs] for group in groups]
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [group.label for group in groups],
        "x": numbers(float(np.mean(row)) for row in values),
        "marker": {"color": [COLOURS[number % len(COLOURS)] for number in range(len(groups))]},
    }
    if any(len(row) > 1 for row in values):
        spread = (float(np.std(row, ddof=1)) if len(row) > 1 else 0.0 for row in values)
        bars["error_x"] = {"type": "data", "array": numbers(spread), "thickness": 1.2}
    height = max(320, 80 + 22 * len(groups))
    return chart(title, [bars], x=unit, yaxis={"autorange": "reversed"}, hovermode="closest", height=height)
