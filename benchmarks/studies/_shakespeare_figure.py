"""The figure of shakespeare.py, for docs/studies/shakespeare.md. A line is the first seed's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, STYLE
from _shakespeare_show import Results
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

PANELS = {
    "paper": ("the paper's LSTM, by model", "round", "models"),
    "batches": ("small LSTM: batches and epochs", "round", "models"),
    "servers": ("small LSTM: server optimizer", "round", "models"),
    "losses": ("small LSTM: devices vanish", "minutes", "minutes of virtual time"),
}
"""Part -> title, what the horizontal axis has, and its label."""


def draw(results: Results, folder: Path) -> Path:
    """Write shakespeare.svg."""
    file = folder / "shakespeare.svg"
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "shakespeare"}):
        rows = -(-len(results) // 2)
        figure = Figure(figsize=(9, 3.2 * rows))
        axes = figure.subplots(rows, 2, squeeze=False).ravel()
        for axis, (part, runs) in zip(axes, results.items(), strict=False):
            title, key, label = PANELS[part]
            _lines(axis, runs, key)
            axis.set_title(title, fontsize=8)
            axis.set_xlabel(label)
            axis.set_ylabel("characters predicted, %")
            axis.legend(frameon=False, fontsize=6.5)
        for axis in axes[len(results) :]:
            axis.set_visible(False)
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return file


def _lines(axis: Any, runs: Any, key: str) -> None:
    """Plot each run. Of a pair "NAME" and "NAME, mixed" the second is dashed, in one colour."""
    first = list(dict.fromkeys(name.removesuffix(", mixed") for name in runs))
    for name, seeds in runs.items():
        colour = COLOURS[first.index(name.removesuffix(", mixed")) % len(COLOURS)]
        line = "--" if name.endswith(", mixed") else "-"
        values = 100 * np.array(seeds[0]["accuracy"])
        axis.plot(seeds[0][key], values, line, color=colour, linewidth=1, label=name)
