"""A comparison of runs: tables for the terminal, and a page with charts.

The runs of a sweep are labelled by what was swept. Runs that differ only in their seeds are one
line, with mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.epsilon_text import spent_text
from rich.table import Table

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results import html_page as page
from fleetlearn_simulator.results.html_page import ABSENT, COLOURS, Chart, PagePart, chart, numbers
from fleetlearn_simulator.results.loaded_run import Floats, LoadedRun, thinned, traffic
from fleetlearn_simulator.results.private_runs import nothing_measured, spent_last
from fleetlearn_simulator.results.run_groups import Group, kinds_of, read_groups
from fleetlearn_simulator.results.run_statistics import (
    Participation,
    Reached,
    Target,
    lost_share,
    median,
    participation,
    reached,
    wasted_share,
)
from fleetlearn_simulator.results.secure_runs import has_secure

UNTIL = (
    "At the end of the first round at the target. Over seeds the median; never is later than any "
    "time."
)
HEARD = (
    "A tier's share of the accepted reports over its share of the population: 1 is even, 0 is not "
    "heard at all."
)
SEEDS = "Mean ± standard deviation over seeds. Lines are means, bands one standard deviation."
DOTTED = {"dash": "dot", "width": 1.5, "color": "#7f7f7f"}
LEVEL = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": DOTTED}
DASHES = ("solid", "dash", "dot", "dashdot")
NOTES = {
    "test": "On the data kept back.",
    "evaluation": "On the devices' training examples, before training.",
    "train": "On the devices' training examples, in training.",
}
PRIVATE = " Of private runs that is the simulator's own: it is not released."


def comparison_tables(folders: Sequence[Path], target: Target | None = None) -> list[Table]:
    """Return tables for the terminal: the runs; if a target is given, when each run reached it; and
    if there are several tiers, how much each is heard. Cells that are the same in all lines are
    written once, under the table.

    Raises SimulatorError if a folder holds no run, or if no run has the target's metric.
    """
    return [_shown(*part) for part in _sections(read_groups(folders), target)]


def _shown(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Table:
    common = [
        len(rows) > 1 and column > 0 and len(set(cells)) == 1
        for column, cells in enumerate(zip(*rows, strict=True))
    ]
    words = [
        f"{header} {cell}"
        for header, cell, same in zip(headers, rows[0], common, strict=True)
        if same
    ]
    captions = [*([f"all: {', '.join(words)}"] if words else []), *([note] if note else [])]
    shown = Table(title=title or None, title_justify="left", caption="\n".join(captions) or None)
    for column, header in enumerate(headers):
        if not common[column]:
            shown.add_column(header, justify="left" if column == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell for cell, same in zip(row, common, strict=True) if not same))
    return shown


def write_comparison(folders: Sequence[Path], output: Path, target: Target | None = None) -> Path:
    """Write the page ``output``. Each folder is a run's, or holds folders of runs, as a sweep's
    does.

    Raises SimulatorError if a folder holds no run, if no run has the target's metric, or if the
    page cannot be written.
    """
    return page.write_page(output, "Comparison · fleetlearn", _parts(read_groups(folders), target))


def _table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    kinds = kinds_of(groups)
    several = any(len(group.runs) > 1 for group in groups)
    headers = ["run", *(["seeds"] if several else []), "rounds", "abandoned", "virtual time"]
    headers += [f"{name} ({kind})" for name, kind in kinds.items()]
    private = _has_private(groups)
    headers += [*(["epsilon"] if private else []), "tasks lost", "time wasted", "bytes sent"]
    headers.append("state")
    rows = []
    for group in groups:
        cells = [group.label, *([str(len(group.runs))] if several else [])]
        cells.append(_mean(group, lambda run: len(run.committed)))
        cells.append(_mean(group, lambda run: len(run.rows) - len(run.committed)))
        cells.append(
            page.span(
                float(np.mean([run.rows[-1].time if run.rows else 0.0 for run in group.runs]))
            )
        )
        for name, kind in kinds.items():
            cells.append(
                _spread(
                    [run[name][kind][1][-1] for run in group.metrics if kind in run.get(name, {})]
                )
            )
        if private:
            cells.append(_most_spent([spent_last(run) for run in group.runs]))
        cells.append(f"{_spread([100 * lost_share(run) for run in group.runs], 3)} %")
        cells.append(f"{_spread([100 * wasted_share(run) for run in group.runs], 3)} %")
        cells.append(
            page.size(
                float(
                    np.mean([run.total(lambda round_: round_.bytes).total() for run in group.runs])
                )
            )
        )
        cells.append(", ".join(dict.fromkeys(run.state for run in group.runs)))
        rows.append(cells)
    return headers, rows


def _has_private(groups: Sequence[Group]) -> bool:
    return any(run.private for group in groups for run in group.runs)


def _mean(group: Group, value: Callable[[LoadedRun], float]) -> str:
    return _count(float(np.mean([value(run) for run in group.runs])))


def _count(mean: float) -> str:
    return f"{mean:,.0f}" if float(mean).is_integer() else f"{mean:,.1f}"


def _spread(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean ± the standard deviation of the sample."""
    values = [value for value in values if not np.isnan(value)]
    if not values:
        return ABSENT
    mean = f"{np.mean(values):.{digits}g}"
    return f"{mean} ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else mean


def _most_spent(values: Sequence[float]) -> str:
    """Return what the run with the largest epsilon has spent: for the others it is less."""
    known = [value for value in values if not np.isnan(value)]
    return spent_text(max(known), digits=4) if known else ABSENT


def _sections(
    groups: Sequence[Group], target: Target | None
) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]], str]]:
    """Yield title, headers, rows and note of each table."""
    kinds = dict.fromkeys(kinds_of(groups).values())
    yield (
        "",
        *_table(groups),
        " ".join(f"({kind}): {NOTES[kind][0].lower()}{NOTES[kind][1:]}" for kind in kinds)
        + (PRIVATE if "test" in kinds and _has_private(groups) else ""),
    )
    if target is not None:
        yield f"Until {target}", *_until(groups, target), UNTIL
    if len(_participation(groups)[0]) > 1:
        yield "Participation by tier", *_tiers(groups), HEARD


def _until(groups: Sequence[Group], target: Target) -> tuple[list[str], list[list[str]]]:
    """Return when the target was reached; over several seeds, how many reached it, and the median.
    Raises SimulatorError."""
    kinds = kinds_of(groups)
    if target.metric not in kinds:
        known = f"the runs have {', '.join(kinds)}" if kinds else "the runs have no metric yet"
        raise SimulatorError(f"target {target}: no run has the metric {target.metric}; {known}")
    several = any(len(group.runs) > 1 for group in groups)
    headers = ["run", *(["reached"] if several else [])]
    headers += ["rounds", "virtual time", "bytes sent", "device time", "of it wasted"]
    rows = []
    for group in groups:
        reached_at = [reached(run, target, kinds[target.metric]) for run in group.runs]
        there = sum(when is not None for when in reached_at)
        cells = [group.label, *([f"{there} of {len(reached_at)}"] if several else [])]
        for value, show in zip(
            Reached._fields, (_count, page.span, page.size, page.span, page.span), strict=True
        ):
            middle = median([None if when is None else getattr(when, value) for when in reached_at])
            cells.append("never" if middle is None else show(middle))
        rows.append(cells)
    return headers, rows


def _participation(groups: Sequence[Group]) -> tuple[list[str], list[list[Participation]]]:
    """Return the names of all tiers, and the participation of each run of each group."""
    parts = [list(map(participation, group.runs)) for group in groups]
    return list(dict.fromkeys(name for rows in parts for row in rows for name in row.tiers)), parts


def _heard(parts: Sequence[Participation], name: str) -> list[float]:
    return [float(part.heard[part.tiers.index(name)]) for part in parts if name in part.tiers]


def _tiers(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Return how much each tier is heard."""
    names, parts = _participation(groups)
    rows = [
        [
            group.label,
            *(_spread(_heard(part, name), 3) for name in names),
            _spread([each.evenness for each in part], 3),
        ]
        for group, part in zip(groups, parts, strict=True)
    ]
    return ["run", *names, "least / most"], rows


def _tier_bars(groups: Sequence[Group]) -> Chart:
    names, parts = _participation(groups)
    data = []
    for number, name in enumerate(names):
        values = [_heard(part, name) for part in parts]
        bars = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [group.label for group in groups],
            "x": numbers(float(np.mean(row)) if row else np.nan for row in values),
            "marker": {"color": COLOURS[number % len(COLOURS)]},
        }
        data.append(bars)
    height = max(320, 100 + (10 + 14 * len(names)) * len(groups))
    even = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1, "line": DOTTED}
    return chart(
        "Participation by tier",
        data,
        x="share of the accepted reports / share of the population",
        yaxis={"autorange": "reversed"},
        hovermode="closest",
        barmode="group",
        height=height,
        shapes=[even],
    )


def _parts(groups: list[Group], target: Target | None) -> Iterator[PagePart]:
    count = sum(len(group.runs) for group in groups)
    yield PagePart("title", "Comparison")
    yield PagePart("note", f"{count:,} runs, {len(groups):,} lines")
    several = any(len(group.runs) > 1 for group in groups)
    for title, headers, rows, note in _sections(groups, target):
        if title:
            yield PagePart("section", title)
        yield page.table(headers, rows)
        if note:
            yield PagePart("note", note)
        if not title and several:
            yield PagePart("note", SEEDS)
    yield PagePart("section", "Metrics")
    if measured := _metrics(groups, target):
        yield PagePart("switch")
        yield PagePart("charts", measured)
    else:
        secure = has_secure(run for group in groups for run in group.runs)
        yield PagePart("text", nothing_measured(_has_private(groups), secure))
    yield PagePart("section", "Work")
    work = [
        _bars(groups, "Tasks lost", lambda run: 100 * lost_share(run), "per cent of the tasks"),
        _bars(
            groups,
            "Device time wasted",
            lambda run: 100 * wasted_share(run),
            "per cent of the time",
        ),
        *_times(groups),
        *([_tier_bars(groups)] if len(_participation(groups)[0]) > 1 else []),
    ]
    yield PagePart("charts", work)


def _metrics(groups: Sequence[Group], target: Target | None) -> list[Chart]:
    runs = [run for group in groups for run in group.runs if run.rows]
    time_unit, time_name = page.time_unit(max((run.rows[-1].time for run in runs), default=0.0))
    byte_unit, byte_name = page.byte_unit(
        max((float(traffic(run)[-1]) for run in runs), default=0.0)
    )
    titles = {
        "rounds": "round",
        "time": f"virtual time ({time_name})",
        "bytes": f"bytes sent ({byte_name})",
    }
    charts = []
    for name, kind in kinds_of(groups).items():
        bands, means = [], []
        for number, group in enumerate(groups):
            lines = []
            for run, metrics in zip(group.runs, group.metrics, strict=True):
                if kind in metrics.get(name, {}):
                    indices, values = metrics[name][kind]
                    rounds, times = (
                        run.column(lambda round_: round_.round),
                        run.column(lambda round_: round_.time),
                    )
                    axes = (rounds, times / time_unit, traffic(run) / byte_unit)
                    lines.append(np.stack([values, *(axis[indices] for axis in axes)]))
            if lines:
                mean, band = _traces(group.label, lines, number)
                means.append(mean)
                bands += [band] if len(lines) > 1 else []
        data = [*bands, *means]  # lines are drawn above bands
        height = min(720, 300 + 28 * len(means))  # the legend takes up to half of the height
        there = (
            [{**LEVEL, "y0": target.value, "y1": target.value}]
            if target and target.metric == name
            else []
        )
        note, looks = NOTES[kind], {"showlegend": True, "height": height, "shapes": there}
        charts.append(chart(name, data, "", name, note, meta=titles, **looks))
    return charts


def _traces(
    label: str, lines: Sequence[Floats], number: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mean of lines, point by point as far as all lines go, and its band. A line is (4,
    points): value, round, time, bytes."""
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
        "meta": {
            name: numbers([*axis, *axis[::-1]]) for name, axis in zip(names, axes, strict=True)
        },
    }
    return mean, band


def _times(groups: Sequence[Group]) -> Iterator[Chart]:
    """Show how long the runs took, and how many bytes they sent."""
    times = [run.rows[-1].time for group in groups for run in group.runs if run.rows]
    unit, name = page.time_unit(max(times, default=0.0))
    yield _bars(
        groups, "Virtual time", lambda run: run.rows[-1].time / unit if run.rows else 0.0, name
    )
    most = max(
        (run.total(lambda round_: round_.bytes).total() for group in groups for run in group.runs),
        default=0,
    )
    scale, word = page.byte_unit(most)
    yield _bars(
        groups,
        "Bytes sent",
        lambda run: run.total(lambda round_: round_.bytes).total() / scale,
        word,
    )


def _bars(
    groups: Sequence[Group], title: str, value: Callable[[LoadedRun], float], unit: str
) -> Chart:
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
    return chart(
        title, [bars], x=unit, yaxis={"autorange": "reversed"}, hovermode="closest", height=height
    )
