"""The figures of asynchronous.py, for docs/studies/asynchronous.md.

A bar or a point is the median over seeds, a whisker goes from the least to the greatest. Where the
median run never reached the target, nothing is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, MARKERS, STYLE, Value, middle
from fleetlearn_simulator.results.html_page import COLOURS
from fleetlearn_simulator.results.run_statistics import Target
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter


def draw(results: Any, folder: Path, target: Target) -> list[Path]:
    """Write asynchronous-target.svg and asynchronous-tenths.svg."""
    with mpl.rc_context(STYLE | FILE):
        figures = {"target": to_target(results, target), "tenths": tenths(results)}
        files = [folder / f"asynchronous-{name}.svg" for name in figures]
        for file, figure in zip(files, figures.values(), strict=True):
            figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return files


def until(key: str) -> Value:
    """Return the function that takes a figure of a run's way to the target."""

    def value(row: Any) -> float | None:
        return None if row["to_target"] is None else float(row["to_target"][key])

    return value


def to_target(results: Any, target: Target) -> Figure:
    """Plot trips and virtual time to the target against dropout, by method, with the fewest tasks
    at a time."""
    low = min(cell.concurrency for cell in results)
    cells = {cell: runs for cell, runs in results.items() if cell.concurrency == low}
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots(1, 2)
    for axis, key, label, unit in (
        (axes[0], "trips", "trips", 1),
        (axes[1], "time", "minutes of virtual time", 60),
    ):
        for number, method in enumerate(dict.fromkeys(cell.method for cell in cells)):
            points = []
            for cell, runs in cells.items():
                middle_run = middle(runs, until(key))
                if cell.method == method and middle_run is not None:
                    points.append(
                        (
                            100 * cell.dropout + number - 2.5,
                            middle_run[0] / unit,
                            np.array(middle_run[1]) / unit,
                        )
                    )
            if points:
                x, y, bars = zip(*points, strict=True)
                look = {
                    "color": COLOURS[number],
                    "marker": MARKERS[number],
                    "markersize": 4,
                    "linewidth": 1.2,
                }
                axis.errorbar(x, y, np.array(bars).T, label=method, elinewidth=0.8, **look)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks([100 * share for share in dict.fromkeys(cell.dropout for cell in cells)])
        axis.set_xlabel("dropout, %")
        axis.set_ylabel(f"{label} until {target}")
    axes[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.subplots_adjust(wspace=0.3)
    return figure


def tenths(results: Any) -> Figure:
    """Plot the final models' accuracy for the tenths of the devices by speed, by method, with the
    middle dropout."""
    low, shares = (
        min(cell.concurrency for cell in results),
        sorted({cell.dropout for cell in results}),
    )
    figure = Figure(figsize=(6, 3))
    axis = figure.subplots()
    cells = [
        cell
        for cell in results
        if (cell.concurrency, cell.dropout) == (low, shares[len(shares) // 2])
    ]
    for number, cell in enumerate(cells):
        own = 100 * np.median([row["by_tenth"] for row in results[cell]], axis=0)
        axis.plot(
            range(1, 11),
            own,
            label=cell.method,
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=4,
        )
    axis.set_xlabel("tenth of the devices by speed, 1: the slowest")
    axis.set_xticks(range(1, 11))
    axis.set_ylabel("accuracy on the tenth's own digit, %")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
