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
    "batches": ("batches and epochs", "round", "models"),
    "losses": ("devices vanish", "minutes", "minutes of virtual time"),
}
"""Part -> title, what the horizontal axis has, and its label. The other parts are tables only."""


def draw(results: Results, folder: Path) -> Path:
    """Write shakespeare.svg: a panel for each part in PANELS that has results."""
    file, shown = folder / "shakespeare.svg", [part for part in PANELS if part in results]
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "shakespeare"}):
        figure = Figure(figsize=(9, 3.2))
        axes = figure.subplots(1, len(shown), squeeze=False).ravel()
        for axis, part in zip(axes, shown, strict=True):
            title, key, label = PANELS[part]
            _lines(axis, results[part], key)
            axis.set_title(f"small LSTM: {title}", fontsize=8)
            axis.set_xlabel(label)
            axis.set_ylabel("characters predicted, %")
            axis.legend(frameon=False, fontsize=6.5)
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
