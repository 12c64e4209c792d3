"""The figure of movielens.py, for docs/studies/movielens.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, MARKERS, STYLE
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Method -> what each of its runs gave, as in the JSON."""


def draw(file: Path, central: Mapping[str, Sequence[float]], runs: Runs) -> None:
    """Write the figure as SVG: the error by round, and by what a device sent and fetched. Medians
    over seeds."""
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "movielens"}):
        figure = Figure(figsize=(9.0, 3.8))
        by_round, by_bytes = figure.subplots(1, 2, sharey=True)
        for number, (name, found) in enumerate(runs.items()):
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
                "markersize": 4,
                "markevery": 5,
                "linewidth": 1.2,
            }
            rounds = np.array(found[0]["rounds"])
            errors = np.median([run["rmse"] for run in found], axis=0)
            each = float(np.median([run["down"] + run["up"] for run in found]))
            by_round.plot(rounds, errors, label=name, **look)
            by_bytes.plot(rounds * each / 1e3, errors, label=name, **look)
        for axis in (by_round, by_bytes):
            for name, values in central.items():
                middle = float(np.median(values))
                if middle < 1:
                    axis.axhline(middle, color="#888888", linewidth=0.8, linestyle=":")
                    if axis is by_round:
                        axis.text(0, middle, name, fontsize=6.5, color="#666666", va="bottom")
        by_round.set(xlabel="round", ylabel="RMSE of held-out ratings, stars")
        by_bytes.set(xlabel="kB that a device fetches and sends, if it is in each round")
        by_bytes.set_xscale("log")
        by_bytes.legend(frameon=False, fontsize=7, loc="lower left")
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
