"""The figure of purchase.py, for docs/studies/purchase.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _purchase_bgnbd as bgnbd
import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, STYLE
from _purchase_data import CALIBRATION, END, bought, calibration, purchases
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

MOST = 7
"""Customers with as many further purchases, or more, are one group, as in the paper's figure."""
Results = Mapping[str, Sequence[Mapping[str, Any]]]


def draw(file: Path, fit: Sequence[float], results: Results) -> None:
    """Write the figure as SVG. fit: the four parameters of the sample."""
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "purchase"}):
        figure = Figure(figsize=(11.0, 3.4))
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 3))
        _expected(left, np.array(fit))
        _losses(middle, {name: runs for name, runs in results.items() if "cohort" not in name})
        _by_epsilon(right, results)
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})


def _expected(axis: Any, fit: bgnbd.Floats) -> None:
    """Purchases of the 39 weeks that nobody was fitted to, by those of the 39 weeks before."""
    known, sample = calibration(sample=True), purchases().sample
    real = bought(purchases(), CALIBRATION, END)[sample]
    expected = bgnbd.expected(fit, *known, weeks=(END - CALIBRATION) / 7)
    groups = np.minimum(known.x, MOST)
    places = np.arange(MOST + 1)
    for values, label, style in ((real, "bought", "o-"), (expected, "expected", "s--")):
        axis.plot(places, [values[groups == each].mean() for each in places], style, label=label,
                  markersize=3.5, linewidth=1.2)  # fmt: skip
    axis.set_xticks(places, [*map(str, places[:-1]), f"{MOST}+"])
    axis.set(xlabel="purchases after the first one, weeks 1 to 39", ylabel="in weeks 40 to 78")
    axis.set_title("the sample's 2,357, BG/NBD", fontsize=8)
    axis.legend(frameon=False, fontsize=7)


def _losses(axis: Any, results: Results) -> None:
    """The log loss of the next thirteen weeks, a row for each way."""
    shown = {name: runs for name, runs in results.items() if "log_loss" in runs[0]["next"]}
    for row, runs in enumerate(shown.values()):
        values = [run["next"]["log_loss"] for run in runs]
        axis.plot(values, [row] * len(values), "o", color=COLOURS[row % len(COLOURS)], markersize=4)
    axis.set_yticks(range(len(shown)), [*shown], fontsize=6.5)
    axis.invert_yaxis()
    axis.set(xlabel="log loss, next 13 weeks")
    axis.set_title("who buys next, 23,570 customers", fontsize=8)


def _by_epsilon(axis: Any, results: Results) -> None:
    """The same by epsilon; what is only clipped is at the right end."""
    curves: dict[str, list[tuple[str, float]]] = {}
    for name, runs in results.items():
        if "cohort" in name:
            curve, _, noise = name.rpartition(", ")
            loss = float(np.median([run["next"]["log_loss"] for run in runs]))
            curves.setdefault(curve, []).append((noise.removeprefix("epsilon "), loss))
    names = {noise for curve in curves.values() for noise, _ in curve} - {"no noise"}
    order = [*sorted(names, key=float), "no noise"]
    for number, (curve, points) in enumerate(curves.items()):
        points.sort(key=lambda point: order.index(point[0]))
        axis.plot(
            [order.index(noise) for noise, _ in points],
            [loss for _, loss in points],
            "o-",
            label=curve,
            color=COLOURS[number % len(COLOURS)],
            markersize=3.5,
            linewidth=1.2,
        )
    axis.set_xticks(range(len(order)), order)
    axis.set(xlabel="epsilon", ylabel="log loss, next 13 weeks")
    axis.set_title("differential privacy of a customer", fontsize=8)
    if curves:
        axis.legend(frameon=False, fontsize=7)
