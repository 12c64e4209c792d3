"""The figure of motion.py, for docs/studies/motion.md. A point is one person, a bar the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, STYLE
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

PAPER = 0.873
"""Burns et al., the first version with ten people: random forest, people on whom nobody trained."""
PANELS = {
    "trained": "people who train: ends of their recordings",
    "newcomer": "a newcomer, at once",
    "newcomer_after": "a newcomer, after training alone",
}


def draw(own: Sequence[float], results: Mapping[str, Sequence[Any]], folder: Path) -> Path:
    """Write motion.svg. own: each person's accuracy with a model trained alone."""
    file = folder / "motion.svg"
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "motion"}):
        figure = Figure(figsize=(10, 3.2))
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
            _points(axis, results, key)
            axis.set_title(title, fontsize=8)
            axis.set_xlabel("windows recognised, %")
        for axis, value, text in (
            (axes[0], float(np.mean(own)), "each person alone"),
            (axes[1], PAPER, "the paper's ten people"),
        ):
            axis.axvline(100 * value, color="#888888", linestyle="--", linewidth=1)
            axis.annotate(text, (100 * value, len(results) - 0.55), fontsize=6.5, ha="right",
                          color="#666666", annotation_clip=False)  # fmt: skip
        axes[0].invert_yaxis()
        figure.tight_layout()
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return file


def _points(axis: Any, results: Mapping[str, Sequence[Any]], key: str) -> None:
    """Plot each person's accuracy; who trains, has the mean over the others who were left out."""
    for row, (_, runs) in enumerate(results.items()):
        values = 100 * np.array([np.mean(getattr(run, key)) for run in runs])
        colour = COLOURS[row % len(COLOURS)]
        axis.plot(values, np.full(len(values), row), "o", color=colour, markersize=3.5, alpha=0.6)
        axis.plot([values.mean()] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2)
    axis.set_yticks(range(len(results)), [*results])
