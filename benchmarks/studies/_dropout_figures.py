"""The figures of dropout.py, for docs/studies/dropout.md.

A line or a point is the median over seeds, a bar goes from the least to the greatest. Where the
median run never reached the target, nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from fleetlearn_simulator.results.html_page import COLOURS
from fleetlearn_simulator.results.run_statistics import Target
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

MARKERS = "osD^v*PXph"
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
FILE: Any = {"svg.hashsalt": "dropout", "svg.fonttype": "path"}
"""The same figures give the same bytes."""
Value = Callable[[Any], float | None]


def minutes(row: Any) -> float | None:
    return None if row["to_target"] is None else row["to_target"]["time"] / 60


def device_hours(row: Any) -> float | None:
    return None if row["to_target"] is None else row["to_target"]["device_seconds"] / 3600


def middle(runs: Sequence[Any], value: Value) -> tuple[float, tuple[float, float]] | None:
    """The median, and how far below and above it the others are, as far as they got there."""
    numbers = np.array(sorted(np.inf if (found := value(run)) is None else found for run in runs))
    at = float(np.median(numbers))
    if not np.isfinite(at):
        return None
    there = numbers[np.isfinite(numbers)]
    return at, (at - float(there[0]), float(there[-1]) - at)


def draw(results: Any, folder: Path, target: Target) -> list[Path]:
    """Write dropout-recipes.svg and dropout-plans.svg."""
    with mpl.rc_context(STYLE | FILE):
        figures = {"recipes": recipes(results, target), "plans": plans(results, target)}
        files = [folder / f"dropout-{name}.svg" for name in figures]
        for file, figure in zip(files, figures.values(), strict=True):
            figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return files


def recipes(results: Any, target: Target) -> Figure:
    """Plot against dropout, by recipe and data: the time to the target, and the accuracy of the
    worst served devices."""
    usual = next(iter(results))
    kinds, names, shares = (
        list(dict.fromkeys(getattr(cell, key) for cell in results))
        for key in ("data", "recipe", "dropout")
    )
    figure = Figure(figsize=(3 * len(kinds), 5))
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    rows: tuple[tuple[str, Value], ...] = (
        (f"minutes of virtual time until\n{target}", minutes),
        (
            "own accuracy of the tenth\nof devices worst off, %",
            lambda row: 100 * row["worst_decile"],
        ),
    )
    for column, data in enumerate(kinds):
        axes[0, column].set_title(f"data: {data}")
        axes[1, column].set_xlabel("dropout, %")
        axes[1, column].set_xticks([100 * share for share in shares])
        for line, (label, value) in enumerate(rows):
            for number, recipe in enumerate(names):
                cells = [
                    usual._replace(data=data, recipe=recipe, dropout=share) for share in shares
                ]
                points = [
                    (cell.dropout, middle(results[cell], value))
                    for cell in cells
                    if cell in results
                ]
                shown = [(100 * share + number - 1.5, *point) for share, point in points if point]
                if shown:
                    x, y, bars = zip(*shown, strict=True)
                    look = {
                        "color": COLOURS[number],
                        "marker": MARKERS[number],
                        "markersize": 4,
                        "linewidth": 1.2,
                    }
                    axes[line, column].errorbar(
                        x, y, np.array(bars).T, label=recipe, elinewidth=0.8, **look
                    )
            axes[line, 0].set_ylabel(label)
    axes[0, 0].set_yscale("log")
    axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].legend(frameon=False)
    return figure


def plans(results: Any, target: Target) -> Figure:
    """Plot by deadline and over-selection, a column for each dropout: time to the target against
    work and evenness."""
    usual = next(iter(results))
    kinds = list(dict.fromkeys(cell.data for cell in results))
    rows: list[tuple[str, str, Value]] = [
        (data, f"device-hours until\n{target}\ndata: {data}", device_hours)
        for data in dict.fromkeys((kinds[0], kinds[-1]))
    ]
    rows.append(
        (
            kinds[-1],
            f"evenness: least heard tier /\nmost heard tier\ndata: {kinds[-1]}",
            lambda row: row["evenness"],
        )
    )
    runs_of = {
        cell: runs
        for cell, runs in results.items()
        if (cell.recipe, cell.hazard) == ("fedavg", usual.hazard)
    }
    shares, selections, deadlines = (
        sorted({cell[index] for cell in runs_of}) for index in (3, 4, 5)
    )
    figure = Figure(figsize=(2.6 * len(shares), 2.4 * len(rows)))
    axes = figure.subplots(len(rows), len(shares), squeeze=False, sharex=True, sharey="row")
    for column, share in enumerate(shares):
        axes[0, column].set_title(f"dropout {100 * share:g} %")
        axes[-1, column].set_xlabel(f"minutes until {target}")
        for line, (data, label, value) in enumerate(rows):
            for cell, runs in runs_of.items():
                time, height = middle(runs, minutes), middle(runs, value)
                if (cell.data, cell.dropout) == (data, share) and time and height:
                    look = {
                        "color": COLOURS[deadlines.index(cell.deadline)],
                        "marker": MARKERS[selections.index(cell.over_selection)],
                    }
                    x, y = np.array(time[1])[:, None], np.array(height[1])[:, None]
                    axes[line, column].errorbar(
                        time[0], height[0], y, x, markersize=5, elinewidth=0.6, **look
                    )
            axes[line, 0].set_ylabel(label)
    axes[0, 0].set_xscale("log")
    for row in axes[:-1]:
        row[0].set_yscale("log")
    for axis in (axes[0, 0].xaxis, *(panels[0].yaxis for panels in axes[:-1])):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for number, deadline in enumerate(deadlines):
        axes[0, -1].plot(
            [], [], color=COLOURS[number], linewidth=4, label=f"deadline {deadline:g} s"
        )
    for number, selection in enumerate(selections):
        axes[0, -1].plot(
            [], [], MARKERS[number], color="#444444", label=f"over-selection {selection:g}"
        )
    axes[0, -1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
