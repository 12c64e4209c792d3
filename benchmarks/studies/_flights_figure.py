"""The figure of flights.py, for docs/studies/flights.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, STYLE
from _flights_data import fleet
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

STRAIGHT, ALWAYS = "-", ":"


def draw(
    file: Path, central: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the figure as SVG: how many are online, and below it the error, by the hour."""
    last = max(curve["hours"][-1] for curve in found.values())
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "flights"}):
        figure = Figure(figsize=(9.0, 4.6))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
        hours = np.arange(0, last, 0.1)
        above.fill_between(hours, online_at(hours * 3600), color="#bbbbbb")
        above.set_ylabel("online")
        names = [name for name in found if not name.endswith("always online")]
        for name, curve in found.items():
            own = name.removesuffix(", always online")
            below.plot(
                curve["hours"],
                curve["rmse"],
                label=name,
                color=COLOURS[names.index(own) % len(COLOURS)],
                linestyle=STRAIGHT if name == own else ALWAYS,
                linewidth=1.2,
            )
        least, most = below.get_ylim()
        least, most = min(least, central["the same network in one place"]["rmse"] - 0.2), most + 0.1
        below.set_ylim(least, most)
        for name, errors in central.items():
            if least < errors["rmse"] < most:
                below.axhline(errors["rmse"], color="#888888", linewidth=0.8, linestyle="--")
                below.text(last, errors["rmse"], name, fontsize=6.5, color="#666666", va="bottom",
                           ha="right")  # fmt: skip
        below.set(xlabel="hour since 1 January 2013, 0:00 UTC", ylabel="RMSE, minutes")
        below.legend(frameon=False, fontsize=7, loc="upper right", bbox_to_anchor=(1, 0.82))
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})


def online_at(seconds: Any) -> Any:
    """Return how many flights have their aircraft online at each time."""
    begins, ends = (np.sort(fleet().online[:, column]) for column in (0, 1))
    return np.searchsorted(begins, seconds, "right") - np.searchsorted(ends, seconds, "right")
