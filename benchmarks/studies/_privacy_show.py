"""What came out of privacy.py: the table and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import _measure as measure
import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, MARKERS, STYLE
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

NAMES = {"gaussian": "independent noise", "dp-ftrl": "BLT", "distributed": "on devices"}
CLIPPED, NEITHER = "clipped", "neither"
WITHOUT_NOISE = CLIPPED, NEITHER
"""Kinds of runs without noise: with the clipping of the others, and without."""
Results = Mapping[Any, Mapping[str, Any]]
"""Cell -> its figures."""


def accuracies(
    results: Results, data: str, cohort: int, epsilon: float, mechanism: str
) -> list[float]:
    """Return the accuracies of these runs in per cent, a seed after the other."""
    return [
        100 * row["accuracy"]
        for cell, row in results.items()
        if (cell.data, cell.cohort, cell.epsilon, cell.mechanism)
        == (data, cohort, epsilon, mechanism)
    ]


def table(results: Results) -> str:
    """Return the accuracies as a Markdown table: mean ± standard deviation over seeds."""
    epsilons = [epsilon for epsilon in _kinds(results, "epsilon") if epsilon < inf]
    named = [f"epsilon {epsilon:g}" for epsilon in epsilons]
    rows: list[Sequence[str]] = [("data", "cohort", "noise", *named, "clipped alone", "neither")]
    for data in _kinds(results, "data"):
        for cohort in _kinds(results, "cohort"):
            free = [accuracies(results, data, cohort, inf, kind) for kind in WITHOUT_NOISE]
            for mechanism, name in NAMES.items():
                cells = [
                    accuracies(results, data, cohort, epsilon, mechanism) for epsilon in epsilons
                ]
                if any(cells):
                    rows.append((data, f"{cohort:,}", name, *map(_spread, [*cells, *free])))
    return measure.table(rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def _kinds(results: Results, key: str) -> list[Any]:
    return list(dict.fromkeys(getattr(cell, key) for cell in results))


def draw(results: Results, file: Path) -> None:
    """Write the figure: accuracy against epsilon, a panel for each data set."""
    sets, epsilons = _kinds(results, "data"), _kinds(results, "epsilon")
    finite = [epsilon for epsilon in epsilons if epsilon < inf]
    with mpl.rc_context(STYLE | FILE):
        figure = Figure(figsize=(4.2 * len(sets), 3.4))
        axes = figure.subplots(1, len(sets), squeeze=False)[0]
        for panel, data in zip(axes, sets, strict=True):
            for number, cohort in enumerate(_kinds(results, "cohort")):
                colour = COLOURS[number]
                for mechanism, name in NAMES.items():
                    every = [
                        (epsilon, accuracies(results, data, cohort, epsilon, mechanism))
                        for epsilon in finite
                    ]
                    points = [(epsilon, row) for epsilon, row in every if row]
                    if not points:
                        continue
                    rows = [row for _, row in points]
                    panel.errorbar(
                        [epsilon for epsilon, _ in points],
                        [np.mean(row) for row in rows],
                        [np.std(row, ddof=1) if len(row) > 1 else 0.0 for row in rows],
                        color=colour,
                        linestyle="-" if mechanism == "dp-ftrl" else "--",
                        marker=MARKERS[number],
                        markersize=4,
                        capsize=2,
                        label=f"{cohort:,}, {name}",
                    )
                free = accuracies(results, data, cohort, inf, CLIPPED)
                if free:
                    panel.axhline(float(np.mean(free)), color=colour, linewidth=0.8, linestyle=":")
            panel.set_xscale("log", base=2)
            panel.set_xticks(finite, [f"{epsilon:g}" for epsilon in finite])
            panel.set_title(data)
            panel.set_xlabel("epsilon at delta 1e-6")
        axes[0].set_ylabel("test accuracy, %")
        # The first panel has every cohort that was run.
        axes[-1].legend(
            *axes[0].get_legend_handles_labels(),
            title="cohort (dotted: clipped alone)",
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1, 1),
        )
        figure.savefig(
            file, facecolor="white", bbox_inches="tight", dpi=130, metadata={"Software": None}
        )
