"""The figure of peers.py, for docs/studies/peers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, MARKERS, STYLE
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

Results = Mapping[Any, Sequence[Mapping[str, float]]]
Known = Mapping[str, Mapping[str, float]]


def draw(results: Results, known: Known, folder: Path) -> Path:
    """Write peers.svg. A point is the median over seeds."""
    file = folder / "peers.svg"
    kinds = list(dict.fromkeys(cell.data for cell in results))
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "peers"}):
        figure = Figure(figsize=(4.2 + 3.0 * len(kinds), 3.8))
        axes = figure.subplots(1, 1 + len(kinds), width_ratios=[1.15, *(1 for _ in kinds)])
        _errors(axes[0], results, known)
        for axis, data in zip(axes[1:], kinds, strict=True):
            _accuracies(axis, results, data)
        axes[1].set_ylabel("test accuracy, %")
        axes[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return file


def _errors(axis: Any, results: Results, known: Known) -> None:
    """Plot the consensus error against the gap. Topologies without any error are left out."""
    apart = [name for name in known if known[name]["noise"] > 1e-6]
    names = sorted(apart, key=lambda name: known[name]["gap"])
    gaps = [known[name]["gap"] for name in names]
    forms = (
        ("noise", "closed form, another pull each step", "-"),
        ("steady", "closed form, always the same pull", "--"),
    )
    for kind, label, dash in forms:
        values = [known[name][kind] for name in names]
        axis.plot(gaps, values, dash, color="#888888", linewidth=1, label=label, zorder=1)
        tried = [known[name][f"{kind} measured"] for name in names]
        axis.plot(gaps, tried, "x", color="#888888", markersize=5, zorder=1)
    for data, face in (("alike", "full"), ("skewed", "none")):
        for number, name in enumerate(known):
            runs = [
                run
                for cell, found in results.items()
                if cell.data == data and cell.way == name
                for run in found
            ]
            if name in names and runs:
                error = float(np.median([run["consensus"] / run["pull"] for run in runs]))
                look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number]}
                axis.plot(
                    known[name]["gap"], error, linestyle="", fillstyle=face, markersize=6, **look
                )
    for data, face in (("alike", "full"), ("skewed", "none")):
        axis.plot(
            [], [], "o", color="#444444", fillstyle=face, label=f"measured in training, data {data}"
        )
    axis.plot([], [], "x", color="#888888", label="measured, made-up pulls")
    axis.set(xscale="log", yscale="log", xlabel="spectral gap", ylim=(0.03, None))
    axis.set_ylabel("consensus error / pull of a step")
    axis.set_title("how far the models are apart")
    axis.legend(frameon=False, loc="lower left", fontsize=7)


def _accuracies(axis: Any, results: Results, data: str) -> None:
    """Plot the accuracy of own models, from the worst to the best, and of the mean model against
    bytes."""
    axis.set_title(f"data {data}")
    axis.set(xscale="log", xlabel="kB that each sends and receives, a step")
    ways = [cell.way for cell in results if cell.data == data]
    for number, way in enumerate(ways):
        runs = next(found for cell, found in results.items() if cell[:2] == (data, way))
        middle = {key: 100 * float(np.median([run[key] for run in runs])) for key in runs[0]}
        across = middle["bytes"] / 100 / 1000
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        spread = np.array([[middle["own"] - middle["worst"]], [middle["best"] - middle["own"]]])
        bars = np.maximum(spread, 0.0)
        axis.errorbar(
            across,
            middle["own"],
            bars,
            linestyle="",
            markersize=6,
            elinewidth=0.9,
            label=way,
            **look,
        )
        axis.plot(across, middle["accuracy"], linestyle="", fillstyle="none", markersize=9, **look)
